/* SPDX-License-Identifier: MIT */
#include "doors/onnx.h"
#include "attention/problem.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"

/* The arguments that onnx.py explains. */
#define ATTENTION(ROW, STAR)                                                                       \
    ROW(Q, "Q")                                                                                    \
    ROW(K, "K")                                                                                    \
    ROW(V, "V")                                                                                    \
    ROW(ATTN_MASK, "attn_mask")                                                                    \
    ROW(PAST_KEY, "past_key")                                                                      \
    ROW(PAST_VALUE, "past_value")                                                                  \
    ROW(NONPAD_KV_SEQLEN, "nonpad_kv_seqlen")                                                      \
    ROW(IS_CAUSAL, "is_causal")                                                                    \
    ROW(KV_NUM_HEADS, "kv_num_heads")                                                              \
    ROW(Q_NUM_HEADS, "q_num_heads")                                                                \
    STAR()                                                                                         \
    ROW(QK_MATMUL_OUTPUT_MODE, "qk_matmul_output_mode")                                            \
    ROW(SCALE, "scale")                                                                            \
    ROW(SOFTCAP, "softcap")                                                                        \
    ROW(SOFTMAX_PRECISION, "softmax_precision")                                                    \
    ROW(LEFT_WINDOW_SIZE, "left_window_size")                                                      \
    ROW(RIGHT_WINDOW_SIZE, "right_window_size")                                                    \
    ROW(OPSET, "opset")                                                                            \
    ROW(PRE_ERRATA, "pre_errata")                                                                  \
    ROW(RETURN_QK, "return_qk")                                                                    \
    ROW(DEVICE, "device")
enum { CA_PY_SLOTS(ATTENTION) ARGUMENTS };
const char *const ca_py_onnx_arguments[] = CA_PY_TEXTS(ATTENTION);

enum { Y, PRESENT_KEY, PRESENT_VALUE, QK_MATMUL_OUTPUT, OUTPUTS };

/* Reads the arrays. The host reads the elements of nonpad_kv_seqlen. */
static int
parse_inputs(PyObject *const *args, ca_onnx_attention *onnx, ca_py_call *call)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    const ca_py_dtypes numbers = CA_TAKES_NUMBERS;
    if (ca_py_call_array(call, args[Q], "Q", floats, &onnx->Q) < 0 ||
        ca_py_call_array(call, args[K], "K", floats, &onnx->K) < 0 ||
        ca_py_call_array(call, args[V], "V", floats, &onnx->V) < 0 ||
        ca_py_call_optional(call, args[ATTN_MASK], "attn_mask", numbers, &onnx->attn_mask) < 0 ||
        ca_py_call_optional(call, args[PAST_KEY], "past_key", floats, &onnx->past_key) < 0 ||
        ca_py_call_optional(call, args[PAST_VALUE], "past_value", floats, &onnx->past_value) < 0) {
        return -1;
    }
    return ca_py_call_host_array(call, args[NONPAD_KV_SEQLEN], "nonpad_kv_seqlen", numbers,
                                 &onnx->nonpad_kv_seqlen);
}

/* Reads a number of heads; 0 for None. */
static int
parse_heads(PyObject *object, const char *name, int64_t *heads)
{
    *heads = 0;
    return object == Py_None ? 0 : ca_py_int(object, name, 1, INT64_MAX, heads);
}

static int
parse_softmax_precision(PyObject *object, int64_t *precision)
{
    *precision = 0;
    if (object == Py_None) {
        return 0;
    }
    if (ca_py_int(object, "softmax_precision", INT64_MIN, INT64_MAX, precision) < 0) {
        return -1;
    }
    if (*precision != CA_ONNX_FLOAT && *precision != CA_ONNX_FLOAT16 &&
        *precision != CA_ONNX_DOUBLE && *precision != CA_ONNX_BFLOAT16) {
        return ca_py_raise(PyExc_ValueError,
                           "softmax_precision is %R; expected 1 (float32), 10 (float16), 11 "
                           "(float64), 16 (bfloat16) or None",
                           object);
    }
    return 0;
}

/* Reads the attribute is_causal, 0 or 1, for which a bool may stand. */
static int
parse_causal(PyObject *object, bool *causal)
{
    int64_t number = 0;
    if (PyBool_Check(object) || ca_py_is_numpy_bool(object)) {
        return ca_py_flag(object, "is_causal", causal);
    }
    int result = ca_py_int(object, "is_causal", 0, 1, &number);
    *causal = number == 1;
    return result;
}

static int
parse_attributes(PyObject *const *args, ca_onnx_attention *onnx, bool *return_qk)
{
    if (parse_causal(args[IS_CAUSAL], &onnx->is_causal) < 0 ||
        parse_heads(args[KV_NUM_HEADS], "kv_num_heads", &onnx->kv_num_heads) < 0 ||
        parse_heads(args[Q_NUM_HEADS], "q_num_heads", &onnx->q_num_heads) < 0 ||
        ca_py_int(args[QK_MATMUL_OUTPUT_MODE], "qk_matmul_output_mode", 0, 3,
                  &onnx->qk_matmul_output_mode) < 0 ||
        ca_py_scale(args[SCALE], &onnx->has_scale, &onnx->scale) < 0 ||
        ca_py_double(args[SOFTCAP], "softcap", &onnx->softcap) < 0 ||
        parse_softmax_precision(args[SOFTMAX_PRECISION], &onnx->softmax_precision) < 0 ||
        ca_py_int(args[LEFT_WINDOW_SIZE], "left_window_size", -1, INT64_MAX,
                  &onnx->left_window_size) < 0 ||
        ca_py_int(args[RIGHT_WINDOW_SIZE], "right_window_size", -1, INT64_MAX,
                  &onnx->right_window_size) < 0 ||
        ca_py_int(args[OPSET], "opset", 23, 25, &onnx->opset) < 0 ||
        ca_py_flag(args[PRE_ERRATA], "pre_errata", &onnx->pre_errata) < 0 ||
        ca_py_flag(args[RETURN_QK], "return_qk", return_qk) < 0) {
        return -1;
    }
    if (onnx->qk_matmul_output_mode != 0 && !*return_qk) {
        return ca_py_raise(PyExc_ValueError,
                           "qk_matmul_output_mode is %lld without return_qk; expected "
                           "return_qk=True, which asks for this output",
                           (long long)onnx->qk_matmul_output_mode);
    }
    return 0;
}

/* Returns (Y, present_key, present_value, qk). */
static PyObject *
onnx_attention(PyObject *module, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    PyObject *args[ARGUMENTS];
    PyObject *answer = NULL;
    ca_py_output results[OUTPUTS] = {{.result = NULL}};
    ca_py_call call;
    ca_onnx_attention onnx;
    ca_onnx_sizes sizes;
    ca_onnx_outputs outputs;
    ca_attention attention;
    ca_tensor views[CA_ATTENTION_OPERANDS];
    CA_NEW_ERROR(error);
    bool return_qk;

    ca_py_call_begin(&call, module, "onnx.attention");
    if (ca_py_arguments(call.state, CA_PY_ONNX, given, count, names, args) < 0 ||
        parse_inputs(args, &onnx, &call) < 0 || parse_attributes(args, &onnx, &return_qk) < 0 ||
        ca_py_call_ready(&call, args[DEVICE]) < 0 ||
        ca_py_error_check(call.state, ca_onnx_attention_check(&onnx, &sizes, &error), &error) < 0) {
        goto done;
    }
    bool flat = onnx.Q.ndim == 3;
    bool has_past = onnx.past_key.data != NULL;
    ca_dtype dtype = onnx.Q.dtype;
    const int64_t flat_shape[] = {sizes.B, sizes.L, sizes.Hq * sizes.Ev};
    const int64_t shape[] = {sizes.B, sizes.Hq, sizes.L, sizes.Ev};
    const int64_t key_shape[] = {sizes.B, sizes.Hk, sizes.T, sizes.E};
    const int64_t value_shape[] = {sizes.B, sizes.Hk, sizes.T, sizes.Ev};
    const int64_t qk_shape[] = {sizes.B, sizes.Hq, sizes.L, sizes.T};
    results[Y] =
        ca_py_output_of(true, args[Q], dtype, flat ? 3 : 4, flat ? flat_shape : shape, &outputs.Y);
    results[PRESENT_KEY] =
        ca_py_output_of(has_past, args[Q], dtype, 4, key_shape, &outputs.present_key);
    results[PRESENT_VALUE] =
        ca_py_output_of(has_past, args[V], onnx.V.dtype, 4, value_shape, &outputs.present_value);
    results[QK_MATMUL_OUTPUT] =
        ca_py_output_of(return_qk, args[Q], dtype, 4, qk_shape, &outputs.qk);
    if (ca_py_call_outputs(&call, results, OUTPUTS) < 0) {
        goto done;
    }
    ca_onnx_attention_views(&onnx, &sizes, &outputs, &attention, views);
    if (ca_py_call_attention(&call, &attention, views) < 0) {
        goto done;
    }
    answer = ca_py_call_give_all(&call, results, OUTPUTS);
done:
    ca_py_call_end(&call);
    ca_py_call_clear(results, OUTPUTS);
    return answer;
}

PyMethodDef ca_py_onnx_methods[] = {
    {"onnx_attention", CA_PY_NAMED(onnx_attention),
     CA_PY_SIGNATURE("onnx_attention", "$module", ATTENTION)},
    {NULL, NULL, 0, NULL},
};
