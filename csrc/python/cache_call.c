/* SPDX-License-Identifier: MIT */
#include "diagonal/copy.h"
#include "python/cache.h"
#include "python/call.h"
#include "python/error.h"
#include "python/scalars.h"
#include "python/tensor.h"

static void
take_lock(ca_py_cache *self)
{
    if (PyThread_acquire_lock(self->changing, NOWAIT_LOCK) == 0) {
        Py_BEGIN_ALLOW_THREADS
            PyThread_acquire_lock(self->changing, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
}

/* Start a call of the method `name`, on the cache's device. ca_py_call_end follows in
   any case. */
static int
begin(ca_py_cache *self, ca_py_call *call, const char *name, Py_ssize_t given,
      int expected)
{
    if (ca_py_call_begin(call, self->module, name, given, expected) < 0) {
        return -1;
    }
    return ca_py_call_note(call, self->key, "the cache");
}

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

/* Under `changing`: check, copy, and let the positions show. */
static int
append_positions(ca_py_cache *self, ca_py_call *call, const ca_cache_append *append)
{
    ca_error error = {0};
    ca_status status = ca_cache_append_check(&self->cache, append, &error);
    if (status == CA_OK) {
        Py_BEGIN_ALLOW_THREADS
            status = copy_parts(call->device, &self->cache, append, call->name, &error);
        Py_END_ALLOW_THREADS
    }
    if (status == CA_OK) {
        ca_mutex_lock(&self->guard);
        ca_cache_append_done(&self->cache, append, self->lengths);
        ca_mutex_unlock(&self->guard);
    }
    return ca_py_error_check(call->state, status, &error);
}

/* append(key, value, counts, /) */
PyObject *
ca_py_cache_append(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { KEY, VALUE, COUNTS, ARGUMENTS };
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    ca_cache_append append;
    if (begin(self, &call, "KVCache.append", nargs, ARGUMENTS) < 0 ||
        ca_py_call_array(&call, args[KEY], "key", CA_TAKES_FLOATS, &append.key) < 0 ||
        ca_py_call_array(&call, args[VALUE], "value", CA_TAKES_FLOATS, &append.value) <
            0 ||
        parse_numbers(&call, args[COUNTS], "counts", &append.counts, &append.ncounts) <
            0 ||
        set_apart(&call, &self->cache, &append.key, args[KEY]) < 0 ||
        set_apart(&call, &self->cache, &append.value, args[VALUE]) < 0) {
        goto done;
    }
    /* Nothing below runs Python code, which might want the lock too. */
    take_lock(self);
    result = append_positions(self, &call, &append);
    PyThread_release_lock(self->changing);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* attend(query, attn_mask, is_causal, scale, window, softcap, /) */
PyObject *
ca_py_cache_attend(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { QUERY, ATTN_MASK, IS_CAUSAL, SCALE, WINDOW, SOFTCAP, ARGUMENTS };
    ca_py_cache *self = (ca_py_cache *)object;
    PyObject *answer = NULL;
    PyObject *result = NULL;
    int64_t *lengths = NULL;
    ca_py_call call;
    ca_cache cache;
    ca_torch_sdpa sdpa;
    ca_attention attention;
    ca_tensor output;
    ca_error error = {0};
    bool causal;
    int64_t shape[4];
    if (begin(self, &call, "KVCache.attend", nargs, ARGUMENTS) < 0 ||
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
        ca_py_call_ready(&call, Py_None) < 0 ||
        ca_py_cache_look(self, &cache, &lengths) < 0) {
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
    int64_t count = 1;
    for (int64_t index = 0; index < count; index++) {
        count = ca_cache_attend_problem(&cache, &sdpa, &output, index, &attention);
        if (ca_py_call_attention(&call, &attention) < 0) {
            goto done;
        }
    }
    answer = ca_py_call_give(&call, args[QUERY], sdpa.query.dtype, result);
done:
    ca_py_call_end(&call);
    PyMem_RawFree(lengths);
    Py_XDECREF(result);
    return answer;
}

/* truncate(n, /): an int for all, or int64 numbers */
PyObject *
ca_py_cache_truncate(PyObject *object, PyObject *n)
{
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    ca_cache_cut cut = {.numbers = NULL};
    ca_error error = {0};
    if (begin(self, &call, "KVCache.truncate", 1, 1) < 0 ||
        (PyLong_Check(n)
             ? ca_py_int(n, "n", 0, INT64_MAX, &cut.number)
             : parse_numbers(&call, n, "n", &cut.numbers, &cut.count)) < 0) {
        goto done;
    }
    take_lock(self);
    ca_status status = ca_cache_cut_check(&self->cache, &cut, &error);
    if (status == CA_OK) {
        ca_mutex_lock(&self->guard);
        ca_cache_cut_done(&self->cache, &cut, self->lengths);
        ca_mutex_unlock(&self->guard);
    }
    PyThread_release_lock(self->changing);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}
