/* SPDX-License-Identifier: MIT */
#include "py_ops.h"

#include "op_attention.h"
#include "py_attention.h"
#include "py_convert.h"
#include "py_error.h"
#include "py_scalars.h"
#include "spec_torch.h"

/* The positional arguments, in functional.py's order. */
enum {
    QUERY,
    KEY,
    VALUE,
    ATTN_MASK,
    DROPOUT_P,
    IS_CAUSAL,
    SCALE,
    ENABLE_GQA,
    WINDOW,
    SOFTCAP,
    SEED,
    RETURN_LSE,
    OUT,
    DEVICE,
    ARGUMENTS,
};

static int
parse_dropout(PyObject *const *args, ca_torch_sdpa *call)
{
    if (ca_py_double(args[DROPOUT_P], "dropout_p", &call->dropout) < 0) {
        return -1;
    }
    if (!(call->dropout >= 0 && call->dropout <= 1)) {
        PyErr_Format(PyExc_ValueError, "dropout_p is %R; expected 0 to 1",
                     args[DROPOUT_P]);
        return -1;
    }
    return ca_py_seed(args[SEED], call->dropout > 0, &call->seed);
}

/* Everything but the arrays. */
static int
parse_options(PyObject *const *args, ca_torch_sdpa *call, bool *return_lse)
{
    call->has_scale = args[SCALE] != Py_None;
    if (parse_dropout(args, call) < 0 ||
        ca_py_causal(args[IS_CAUSAL], &call->causal) < 0 ||
        (call->has_scale && ca_py_double(args[SCALE], "scale", &call->scale) < 0) ||
        ca_py_flag(args[ENABLE_GQA], "enable_gqa", &call->enable_gqa) < 0 ||
        ca_py_window(args[WINDOW], &call->window_left, &call->window_right) < 0 ||
        ca_py_double(args[SOFTCAP], "softcap", &call->softcap) < 0 ||
        ca_py_flag(args[RETURN_LSE], "return_lse", return_lse) < 0) {
        return -1;
    }
    return 0;
}

/* The arrays; keep[QUERY … ATTN_MASK] own their memory. */
static int
parse_arrays(PyObject *const *args, ca_torch_sdpa *call, PyObject **keep)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    call->has_mask = args[ATTN_MASK] != Py_None;
    if (ca_py_tensor_from_array(args[QUERY], "query", floats, &call->query,
                                &keep[QUERY]) < 0 ||
        ca_py_tensor_from_array(args[KEY], "key", floats, &call->key, &keep[KEY]) < 0 ||
        ca_py_tensor_from_array(args[VALUE], "value", floats, &call->value,
                                &keep[VALUE]) < 0) {
        return -1;
    }
    return ca_py_tensor_from_optional(args[ATTN_MASK], "attn_mask",
                                      CA_TAKES_BOOL_AND_FLOATS, &call->attn_mask,
                                      &keep[ATTN_MASK]);
}

static bool
overlaps(const ca_tensor *output, const ca_tensor *input)
{
    ca_extent a = ca_tensor_extent(output);
    ca_extent b = ca_tensor_extent(input);
    return ca_extents_overlap(&a, &b);
}

/* Where the kernel writes: `out` itself, or a new array that is copied there if `out`
   is spread out, swapped, misaligned or shares memory with an input. */
static PyObject *
prepare_result(const ca_torch_sdpa *call, PyObject *query, PyObject *out, int ndim,
               const int64_t *shape, ca_tensor *tensor)
{
    if (out != Py_None && ca_py_out_is_direct(out, call->query.dtype, tensor) &&
        !overlaps(tensor, &call->query) && !overlaps(tensor, &call->key) &&
        !overlaps(tensor, &call->value) &&
        !(call->has_mask && overlaps(tensor, &call->attn_mask))) {
        return Py_NewRef(out);
    }
    return ca_py_array_new(query, call->query.dtype, ndim, shape, tensor);
}

/* scaled_dot_product_attention(query, key, …, device, /): see functional.py */
static PyObject *
scaled_dot_product_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    ca_state *state = ca_state_get(module);
    PyObject *answer = NULL;
    PyObject *keep[ATTN_MASK + 1] = {NULL};
    PyObject *result = NULL;
    PyObject *lse = NULL;
    ca_torch_sdpa call;
    ca_attention attention;
    ca_variant variant;
    ca_tensor output_tensor;
    ca_tensor lse_tensor;
    ca_error error = {0};
    bool return_lse;
    int ndim;
    int64_t shape[CA_MAX_DIMS];

    if (parse_arrays(args, &call, keep) < 0 ||
        parse_options(args, &call, &return_lse) < 0 ||
        ca_py_check_device_and_kernel(state, args[DEVICE], &variant) < 0) {
        goto done;
    }
    ca_status status = ca_torch_sdpa_check(&call, &ndim, shape, &error);
    if (ca_py_error_check(state, status, &error) < 0) {
        goto done;
    }
    PyObject *out = args[OUT];
    if (out != Py_None &&
        ca_py_check_out(out, call.query.dtype, "that of query", ndim, shape) < 0) {
        goto done;
    }
    result = prepare_result(&call, args[QUERY], out, ndim, shape, &output_tensor);
    if (result == NULL) {
        goto done;
    }
    ca_tensor_set_absent(&lse_tensor);
    if (return_lse) {
        ca_dtype dtype = call.query.dtype == CA_FLOAT64 ? CA_FLOAT64 : CA_FLOAT32;
        lse = ca_py_array_new(NULL, dtype, ndim - 1, shape, &lse_tensor);
        if (lse == NULL) {
            goto done;
        }
    }
    ca_torch_sdpa_problem(&call, &output_tensor, &lse_tensor, &attention);
    if (ca_py_run_attention(state, args[DEVICE], variant, &attention) < 0) {
        goto done;
    }
    if (out != Py_None && result != out) {
        if (ca_py_copy_into(out, result) < 0) {
            goto done;
        }
        Py_SETREF(result, Py_NewRef(out));
    }
    answer = return_lse ? PyTuple_Pack(2, result, lse) : Py_NewRef(result);
done:
    for (int i = 0; i <= ATTN_MASK; i++) {
        Py_XDECREF(keep[i]);
    }
    Py_XDECREF(result);
    Py_XDECREF(lse);
    return answer;
}

PyMethodDef ca_py_ops_methods[] = {
    {"scaled_dot_product_attention",
     (PyCFunction)(void (*)(void))scaled_dot_product_attention, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
