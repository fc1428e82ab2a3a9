/* SPDX-License-Identifier: MIT
 *
 * What clattn.KVCache does with its tensors; it keeps the lengths itself.
 */
#include "op_copy.h"
#include "py_call.h"
#include "py_error.h"
#include "py_ops.h"
#include "py_scalars.h"
#include "py_tensor.h"
#include "spec_cache.h"

/* The first arguments of both functions. */
enum { CACHE_KEY, CACHE_VALUE, LENGTH, LENGTHS, CACHE_ARGUMENTS };

/* int64 numbers of one dimension, NULL for None. */
static int
parse_numbers(ca_py_call *call, PyObject *object, const char *name,
              const int64_t **numbers, int64_t *count)
{
    ca_tensor tensor;
    *numbers = NULL;
    *count = 0;
    if (object == Py_None) {
        return 0;
    }
    if (ca_py_call_array(call, object, name, CA_TAKES_NUMBERS, &tensor) < 0) {
        return -1;
    }
    bool fits = tensor.dtype == CA_INT64 && tensor.block == NULL && tensor.ndim == 1 &&
                (tensor.shape[0] < 2 || tensor.strides[0] == 1);
    if (!fits) {
        PyErr_Format(PyExc_TypeError, "%s must be contiguous int64 of one dimension",
                     name);
        return -1;
    }
    *numbers = tensor.data;
    *count = tensor.shape[0];
    return 0;
}

/* The cache itself, whose tensors KVCache made. */
static int
parse_cache(PyObject *const *args, ca_py_call *call, ca_cache *cache)
{
    int64_t count;
    if (ca_py_call_array(call, args[CACHE_KEY], "the cache", CA_TAKES_FLOATS,
                         &cache->key) < 0 ||
        ca_py_call_array(call, args[CACHE_VALUE], "the cache", CA_TAKES_FLOATS,
                         &cache->value) < 0) {
        return -1;
    }
    if (cache->key.ndim != 4 || cache->value.ndim != 4) {
        PyErr_SetString(PyExc_ValueError, "a cache has four dimensions");
        return -1;
    }
    if (ca_py_int(args[LENGTH], "length", 0, cache->key.shape[2], &cache->length) < 0 ||
        parse_numbers(call, args[LENGTHS], "lengths", &cache->lengths, &count) < 0) {
        return -1;
    }
    if (cache->lengths != NULL && count != cache->key.shape[0]) {
        PyErr_SetString(PyExc_ValueError, "lengths has another size than the batch");
        return -1;
    }
    return 0;
}

/* Positions that come from the cache itself may lie where they go to. */
static int
set_apart(ca_py_call *call, const ca_cache *cache, ca_tensor *tensor, PyObject *owner)
{
    const ca_extent from = ca_tensor_extent(tensor);
    const ca_extent keys = ca_tensor_extent(&cache->key);
    const ca_extent values = ca_tensor_extent(&cache->value);
    if (!ca_extents_overlap(&from, &keys) && !ca_extents_overlap(&from, &values)) {
        return 0;
    }
    PyObject *copy =
        ca_py_tensor_copy(call->state, call->device, tensor, owner, call->name);
    if (copy == NULL) {
        return -1;
    }
    *tensor = ((ca_py_tensor *)copy)->view;
    call->keep[call->kept++] = copy;
    return 0;
}

static ca_status
copy_parts(ca_device *device, const ca_cache *cache, const ca_cache_append *append,
           const char *name, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t parts = ca_cache_append_parts(cache, append);
    for (int64_t part = 0; part < parts; part++) {
        ca_tensor from;
        ca_tensor to;
        ca_cache_append_part(cache, append, part, &from, &to);
        CA_TRY(ca_copy_run(device, &from, &to, name, error));
    }
done:
    return status;
}

/* cache_append(cache_key, cache_value, length, lengths, key, value, counts, /) -> n: see
   cache.py */
static PyObject *
cache_append(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { KEY = CACHE_ARGUMENTS, VALUE, COUNTS, ARGUMENTS };
    PyObject *answer = NULL;
    ca_py_call call;
    ca_cache cache;
    ca_cache_append append;
    ca_error error = {0};
    ca_status status;
    if (ca_py_call_begin(&call, module, "KVCache.append", nargs, ARGUMENTS) < 0 ||
        parse_cache(args, &call, &cache) < 0 ||
        ca_py_call_array(&call, args[KEY], "key", CA_TAKES_FLOATS, &append.key) < 0 ||
        ca_py_call_array(&call, args[VALUE], "value", CA_TAKES_FLOATS, &append.value) <
            0 ||
        parse_numbers(&call, args[COUNTS], "counts", &append.counts, &append.ncounts) <
            0) {
        goto done;
    }
    status = ca_cache_append_check(&cache, &append, &error);
    if (ca_py_error_check(call.state, status, &error) < 0 ||
        set_apart(&call, &cache, &append.key, args[KEY]) < 0 ||
        set_apart(&call, &cache, &append.value, args[VALUE]) < 0) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
        status = copy_parts(call.device, &cache, &append, call.name, &error);
    Py_END_ALLOW_THREADS
    if (ca_py_error_check(call.state, status, &error) == 0) {
        answer = PyLong_FromLongLong(append.key.shape[2]);
    }
done:
    ca_py_call_end(&call);
    return answer;
}

/* cache_attend(cache_key, cache_value, length, lengths, query, attn_mask, is_causal,
   scale, window, softcap, /): see cache.py */
static PyObject *
cache_attend(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum {
        QUERY = CACHE_ARGUMENTS,
        ATTN_MASK,
        IS_CAUSAL,
        SCALE,
        WINDOW,
        SOFTCAP,
        ARGUMENTS
    };
    PyObject *answer = NULL;
    PyObject *result = NULL;
    ca_py_call call;
    ca_cache cache;
    ca_torch_sdpa sdpa;
    ca_attention attention;
    ca_tensor output;
    ca_error error = {0};
    bool causal;
    int64_t shape[4];
    if (ca_py_call_begin(&call, module, "KVCache.attend", nargs, ARGUMENTS) < 0 ||
        parse_cache(args, &call, &cache) < 0 ||
        ca_py_call_array(&call, args[QUERY], "query", CA_TAKES_FLOATS, &sdpa.query) <
            0 ||
        ca_py_call_optional(&call, args[ATTN_MASK], "attn_mask",
                            CA_TAKES_BOOL_AND_FLOATS, &sdpa.attn_mask) < 0) {
        goto done;
    }
    sdpa.dropout = 0;
    sdpa.seed = 0;
    sdpa.has_mask = args[ATTN_MASK] != Py_None;
    sdpa.has_scale = args[SCALE] != Py_None;
    if (ca_py_flag(args[IS_CAUSAL], "is_causal", &causal) < 0 ||
        (sdpa.has_scale && ca_py_double(args[SCALE], "scale", &sdpa.scale) < 0) ||
        ca_py_window(args[WINDOW], &sdpa.window_left, &sdpa.window_right) < 0 ||
        ca_py_double(args[SOFTCAP], "softcap", &sdpa.softcap) < 0 ||
        ca_py_call_ready(&call, Py_None) < 0) {
        goto done;
    }
    sdpa.causal = causal ? CA_CAUSAL_LOWER_RIGHT : CA_CAUSAL_NONE;
    ca_status status = ca_cache_attend_check(&cache, &sdpa, shape, &error);
    if (ca_py_error_check(call.state, status, &error) < 0) {
        goto done;
    }
    result = ca_py_call_result(&call, args[QUERY], sdpa.query.dtype, 4, shape, &output);
    if (result == NULL) {
        goto done;
    }
    ca_cache_attend_problem(&cache, &sdpa, &output, &attention);
    if (ca_py_call_attention(&call, &attention) == 0) {
        answer = ca_py_call_give(&call, args[QUERY], sdpa.query.dtype, result);
    }
done:
    ca_py_call_end(&call);
    Py_XDECREF(result);
    return answer;
}

PyMethodDef ca_py_cache_methods[] = {
    {"cache_append", (PyCFunction)(void (*)(void))cache_append, METH_FASTCALL, NULL},
    {"cache_attend", (PyCFunction)(void (*)(void))cache_attend, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
