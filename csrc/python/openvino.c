/* SPDX-License-Identifier: MIT */
#include "doors/openvino.h"
#include "attention/problem.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"

/* The arguments that openvino.py explains. */
#define SDPA(ROW, STAR)                                                                            \
    ROW(QUERY, "query")                                                                            \
    ROW(KEY, "key")                                                                                \
    ROW(VALUE, "value")                                                                            \
    STAR()                                                                                         \
    ROW(ATTENTION_MASK, "attention_mask")                                                          \
    ROW(SCALE, "scale")                                                                            \
    ROW(CAUSAL, "causal")                                                                          \
    ROW(DEVICE, "device")
enum { CA_PY_SLOTS(SDPA) ARGUMENTS };
const char *const ca_py_openvino_arguments[] = CA_PY_TEXTS(SDPA);

/* Reads attention_mask, which causal=True ignores. The host reads a mask without dimensions. */
static int
parse_mask(PyObject *const *args, ca_openvino_sdpa *sdpa, ca_py_call *call)
{
    const ca_py_dtypes dtypes = CA_TAKES_BOOL_AND_FLOATS;
    PyObject *mask = sdpa->causal ? Py_None : args[ATTENTION_MASK];
    ca_tensor *tensor = &sdpa->attention_mask;
    bool number = ca_py_is_numpy_scalar(mask);
    sdpa->mask_value = 0;
    if (!number) {
        if (ca_py_call_optional(call, mask, "attention_mask", dtypes, tensor) < 0) {
            return -1;
        }
        number = tensor->data != NULL && tensor->ndim == 0;
    }
    if (number) {
        if (ca_py_call_host_array(call, mask, "attention_mask", dtypes, tensor) < 0) {
            return -1;
        }
        sdpa->mask_value = ca_tensor_first_number(tensor);
    }
    return 0;
}

/* Reads scale: None, a number, or an array or NumPy scalar. */
static int
parse_scale(PyObject *const *args, ca_openvino_sdpa *sdpa, ca_py_call *call)
{
    ca_tensor_set_absent(&sdpa->scale_array);
    sdpa->has_scale = args[SCALE] != Py_None;
    if (!sdpa->has_scale) {
        return 0;
    }
    if (!ca_py_is_array(call->state, args[SCALE])) {
        return ca_py_double(args[SCALE], "scale", &sdpa->scale);
    }
    if (ca_py_call_host_array(call, args[SCALE], "scale", CA_TAKES_FLOATS, &sdpa->scale_array) <
        0) {
        return -1;
    }
    sdpa->scale = ca_tensor_first_number(&sdpa->scale_array);
    return 0;
}

static int
parse(PyObject *const *args, ca_openvino_sdpa *sdpa, ca_py_call *call)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    if (ca_py_call_array(call, args[QUERY], "query", floats, &sdpa->query) < 0 ||
        ca_py_call_array(call, args[KEY], "key", floats, &sdpa->key) < 0 ||
        ca_py_call_array(call, args[VALUE], "value", floats, &sdpa->value) < 0 ||
        ca_py_flag(args[CAUSAL], "causal", &sdpa->causal) < 0) {
        return -1;
    }
    return parse_mask(args, sdpa, call) < 0 ? -1 : parse_scale(args, sdpa, call);
}

static PyObject *
scaled_dot_product_attention(PyObject *module, PyObject *const *given, Py_ssize_t count,
                             PyObject *names)
{
    PyObject *args[ARGUMENTS];
    PyObject *answer = NULL;
    PyObject *result = NULL;
    ca_py_call call;
    ca_openvino_sdpa sdpa;
    ca_attention attention;
    ca_tensor views[CA_ATTENTION_OPERANDS];
    ca_tensor output;
    CA_NEW_ERROR(error);
    int ndim;
    int64_t shape[CA_MAX_DIMS];

    ca_py_call_begin(&call, module, "openvino.scaled_dot_product_attention");
    if (ca_py_arguments(call.state, CA_PY_OPENVINO, given, count, names, args) < 0 ||
        parse(args, &sdpa, &call) < 0 || ca_py_call_ready(&call, args[DEVICE]) < 0 ||
        ca_py_error_check(call.state, ca_openvino_sdpa_check(&sdpa, &ndim, shape, &error), &error) <
            0) {
        goto done;
    }
    result = ca_py_call_result(&call, args[QUERY], sdpa.query.dtype, ndim, shape, &output);
    if (result == NULL) {
        goto done;
    }
    int64_t parts = ca_tensor_extent(&output).bytes != 0;
    for (int64_t index = 0; index < parts; index++) {
        parts = ca_openvino_sdpa_views(&sdpa, &output, index, &attention, views);
        if (ca_py_call_attention(&call, &attention, views) < 0) {
            goto done;
        }
    }
    answer = ca_py_call_give(&call, args[QUERY], sdpa.query.dtype, result);
done:
    ca_py_call_end(&call);
    Py_XDECREF(result);
    return answer;
}

PyMethodDef ca_py_openvino_methods[] = {
    {"openvino_scaled_dot_product_attention", CA_PY_NAMED(scaled_dot_product_attention),
     CA_PY_SIGNATURE("openvino_scaled_dot_product_attention", "$module", SDPA)},
    {NULL, NULL, 0, NULL},
};
