/* SPDX-License-Identifier: MIT */
#include "op_attention.h"
#include "py_attention.h"
#include "py_convert.h"
#include "py_error.h"
#include "py_ops.h"
#include "py_scalars.h"
#include "spec_openvino.h"

/* The positional arguments, in openvino.py's order. */
enum {
    QUERY,
    KEY,
    VALUE,
    ATTENTION_MASK,
    SCALE,
    CAUSAL,
    DEVICE,
    ARGUMENTS,
};

/* attention_mask, which causal=True leaves without a look; keep[ATTENTION_MASK] owns
   its memory. */
static int
parse_mask(PyObject *const *args, ca_openvino_sdpa *call, PyObject **keep)
{
    PyObject *mask = call->causal ? Py_None : args[ATTENTION_MASK];
    call->mask_value = 0;
    if (ca_py_tensor_from_scalar(mask, "attention_mask", CA_TAKES_BOOL_AND_FLOATS,
                                 &call->attention_mask, &keep[ATTENTION_MASK]) < 0) {
        return -1;
    }
    bool is_scalar = mask != Py_None && call->attention_mask.ndim == 0;
    return is_scalar ? ca_py_first_number(keep[ATTENTION_MASK], &call->mask_value) : 0;
}

/* scale: None, a number, or an array or NumPy scalar, which keep[SCALE] owns. */
static int
parse_scale(PyObject *const *args, ca_openvino_sdpa *call, PyObject **keep)
{
    ca_tensor_set_absent(&call->scale_array);
    call->has_scale = args[SCALE] != Py_None;
    if (!call->has_scale) {
        return 0;
    }
    if (!ca_py_is_numpy(args[SCALE])) {
        return ca_py_double(args[SCALE], "scale", &call->scale);
    }
    if (ca_py_tensor_from_scalar(args[SCALE], "scale", CA_TAKES_FLOATS,
                                 &call->scale_array, &keep[SCALE]) < 0) {
        return -1;
    }
    return ca_py_first_number(keep[SCALE], &call->scale);
}

static int
parse(PyObject *const *args, ca_openvino_sdpa *call, PyObject **keep)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    if (ca_py_tensor_from_array(args[QUERY], "query", floats, &call->query,
                                &keep[QUERY]) < 0 ||
        ca_py_tensor_from_array(args[KEY], "key", floats, &call->key, &keep[KEY]) < 0 ||
        ca_py_tensor_from_array(args[VALUE], "value", floats, &call->value,
                                &keep[VALUE]) < 0 ||
        ca_py_flag(args[CAUSAL], "causal", &call->causal) < 0) {
        return -1;
    }
    return parse_mask(args, call, keep) < 0 ? -1 : parse_scale(args, call, keep);
}

/* openvino_scaled_dot_product_attention(query, key, …, device, /): see openvino.py */
static PyObject *
scaled_dot_product_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    ca_state *state = ca_state_get(module);
    PyObject *answer = NULL;
    PyObject *keep[SCALE + 1] = {NULL};
    PyObject *result = NULL;
    ca_openvino_sdpa call;
    ca_attention attention;
    ca_variant variant;
    ca_tensor output;
    ca_error error = {0};
    int ndim;
    int64_t shape[CA_MAX_DIMS];

    if (parse(args, &call, keep) < 0 ||
        ca_py_check_device_and_kernel(state, args[DEVICE], &variant) < 0) {
        goto done;
    }
    ca_status status = ca_openvino_sdpa_check(&call, &ndim, shape, &error);
    if (ca_py_error_check(state, status, &error) < 0) {
        goto done;
    }
    result = ca_py_array_new(args[QUERY], call.query.dtype, ndim, shape, &output);
    if (result == NULL) {
        goto done;
    }
    int64_t count = ca_openvino_sdpa_count(&call, &output);
    for (int64_t i = 0; i < count; i++) {
        ca_openvino_sdpa_problem(&call, &output, i, &attention);
        if (ca_py_run_attention(state, args[DEVICE], variant, &attention) < 0) {
            goto done;
        }
    }
    answer = Py_NewRef(result);
done:
    for (int i = 0; i <= SCALE; i++) {
        Py_XDECREF(keep[i]);
    }
    Py_XDECREF(result);
    return answer;
}

PyMethodDef ca_py_openvino_methods[] = {
    {"openvino_scaled_dot_product_attention",
     (PyCFunction)(void (*)(void))scaled_dot_product_attention, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
