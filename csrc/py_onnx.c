/* SPDX-License-Identifier: MIT */
#include "op_attention.h"
#include "py_attention.h"
#include "py_convert.h"
#include "py_error.h"
#include "py_ops.h"
#include "py_scalars.h"
#include "spec_onnx.h"

/* The positional arguments, in onnx.py's order. */
enum {
    Q,
    K,
    V,
    ATTN_MASK,
    PAST_KEY,
    PAST_VALUE,
    NONPAD_KV_SEQLEN,
    INPUTS,
    IS_CAUSAL = INPUTS,
    KV_NUM_HEADS,
    Q_NUM_HEADS,
    QK_MATMUL_OUTPUT_MODE,
    SCALE,
    SOFTCAP,
    SOFTMAX_PRECISION,
    LEFT_WINDOW_SIZE,
    RIGHT_WINDOW_SIZE,
    OPSET,
    PRE_ERRATA,
    RETURN_QK,
    DEVICE,
    ARGUMENTS,
};

enum { Y, PRESENT_KEY, PRESENT_VALUE, QK_MATMUL_OUTPUT, OUTPUTS };

/* keep[] own the inputs' memory. */
static int
parse_inputs(PyObject *const *args, ca_onnx_attention *call, PyObject **keep)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    const ca_py_dtypes numbers = CA_TAKES_NUMBERS;
    if (ca_py_tensor_from_array(args[Q], "Q", floats, &call->Q, &keep[Q]) < 0 ||
        ca_py_tensor_from_array(args[K], "K", floats, &call->K, &keep[K]) < 0 ||
        ca_py_tensor_from_array(args[V], "V", floats, &call->V, &keep[V]) < 0 ||
        ca_py_tensor_from_optional(args[ATTN_MASK], "attn_mask", numbers,
                                   &call->attn_mask, &keep[ATTN_MASK]) < 0 ||
        ca_py_tensor_from_optional(args[PAST_KEY], "past_key", floats, &call->past_key,
                                   &keep[PAST_KEY]) < 0 ||
        ca_py_tensor_from_optional(args[PAST_VALUE], "past_value", floats,
                                   &call->past_value, &keep[PAST_VALUE]) < 0 ||
        ca_py_tensor_from_optional(args[NONPAD_KV_SEQLEN], "nonpad_kv_seqlen", numbers,
                                   &call->nonpad_kv_seqlen,
                                   &keep[NONPAD_KV_SEQLEN]) < 0) {
        return -1;
    }
    return 0;
}

/* None: 0, which no number of heads is. */
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
        PyErr_Format(PyExc_ValueError,
                     "softmax_precision is %R; expected 1 (float32), 10 (float16), 11 "
                     "(float64), 16 (bfloat16) or None",
                     object);
        return -1;
    }
    return 0;
}

static int
parse_attributes(PyObject *const *args, ca_onnx_attention *call, bool *return_qk)
{
    int64_t is_causal;
    call->has_scale = args[SCALE] != Py_None;
    if (ca_py_int(args[IS_CAUSAL], "is_causal", 0, 1, &is_causal) < 0 ||
        parse_heads(args[KV_NUM_HEADS], "kv_num_heads", &call->kv_num_heads) < 0 ||
        parse_heads(args[Q_NUM_HEADS], "q_num_heads", &call->q_num_heads) < 0 ||
        ca_py_int(args[QK_MATMUL_OUTPUT_MODE], "qk_matmul_output_mode", 0, 3,
                  &call->qk_matmul_output_mode) < 0 ||
        (call->has_scale && ca_py_double(args[SCALE], "scale", &call->scale) < 0) ||
        ca_py_double(args[SOFTCAP], "softcap", &call->softcap) < 0 ||
        parse_softmax_precision(args[SOFTMAX_PRECISION], &call->softmax_precision) <
            0 ||
        ca_py_int(args[LEFT_WINDOW_SIZE], "left_window_size", -1, INT64_MAX,
                  &call->left_window_size) < 0 ||
        ca_py_int(args[RIGHT_WINDOW_SIZE], "right_window_size", -1, INT64_MAX,
                  &call->right_window_size) < 0 ||
        ca_py_int(args[OPSET], "opset", 23, 25, &call->opset) < 0 ||
        ca_py_flag(args[PRE_ERRATA], "pre_errata", &call->pre_errata) < 0 ||
        ca_py_flag(args[RETURN_QK], "return_qk", return_qk) < 0) {
        return -1;
    }
    call->is_causal = is_causal == 1;
    return 0;
}

/* New arrays for the outputs that are wanted, None for the others. */
static int
allocate_outputs(PyObject *const *args, const ca_onnx_attention *call,
                 const ca_onnx_sizes *sizes, bool return_qk, ca_onnx_outputs *outputs,
                 PyObject **results)
{
    bool flat = call->Q.ndim == 3;
    bool has_past = call->past_key.data != NULL;
    const int64_t flat_shape[] = {sizes->B, sizes->L, sizes->Hq * sizes->Ev};
    const int64_t shape[] = {sizes->B, sizes->Hq, sizes->L, sizes->Ev};
    const int64_t key_shape[] = {sizes->B, sizes->Hk, sizes->T, sizes->E};
    const int64_t value_shape[] = {sizes->B, sizes->Hk, sizes->T, sizes->Ev};
    const int64_t qk_shape[] = {sizes->B, sizes->Hq, sizes->L, sizes->T};
    const struct {
        bool wanted;
        PyObject *like;
        ca_dtype dtype;
        int ndim;
        const int64_t *shape;
        ca_tensor *tensor;
    } rows[OUTPUTS] = {
        [Y] = {true, args[Q], call->Q.dtype, flat ? 3 : 4, flat ? flat_shape : shape,
               &outputs->Y},
        [PRESENT_KEY] = {has_past, args[Q], call->Q.dtype, 4, key_shape,
                         &outputs->present_key},
        [PRESENT_VALUE] = {has_past, args[V], call->V.dtype, 4, value_shape,
                           &outputs->present_value},
        [QK_MATMUL_OUTPUT] = {return_qk, args[Q], call->Q.dtype, 4, qk_shape,
                              &outputs->qk},
    };
    for (int i = 0; i < OUTPUTS; i++) {
        if (rows[i].wanted) {
            results[i] = ca_py_array_new(rows[i].like, rows[i].dtype, rows[i].ndim,
                                         rows[i].shape, rows[i].tensor);
        } else {
            results[i] = Py_NewRef(Py_None);
            ca_tensor_set_absent(rows[i].tensor);
        }
        if (results[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* onnx_attention(Q, K, …, device, /) -> (Y, present_key, present_value, qk): see
   onnx.py */
static PyObject *
onnx_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    ca_state *state = ca_state_get(module);
    PyObject *answer = NULL;
    PyObject *keep[INPUTS] = {NULL};
    PyObject *results[OUTPUTS] = {NULL};
    ca_onnx_attention call;
    ca_onnx_sizes sizes;
    ca_onnx_outputs outputs;
    ca_attention attention;
    ca_variant variant;
    ca_error error = {0};
    bool return_qk;

    if (parse_inputs(args, &call, keep) < 0 ||
        parse_attributes(args, &call, &return_qk) < 0 ||
        ca_py_check_device_and_kernel(state, args[DEVICE], &variant) < 0) {
        goto done;
    }
    ca_status status = ca_onnx_attention_check(&call, &sizes, &error);
    if (ca_py_error_check(state, status, &error) < 0 ||
        allocate_outputs(args, &call, &sizes, return_qk, &outputs, results) < 0) {
        goto done;
    }
    ca_onnx_attention_problem(&call, &sizes, &outputs, &attention);
    if (ca_py_run_attention(state, args[DEVICE], variant, &attention) == 0) {
        answer = PyTuple_Pack(OUTPUTS, results[Y], results[PRESENT_KEY],
                              results[PRESENT_VALUE], results[QK_MATMUL_OUTPUT]);
    }
done:
    for (int i = 0; i < INPUTS; i++) {
        Py_XDECREF(keep[i]);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        Py_XDECREF(results[i]);
    }
    return answer;
}

PyMethodDef ca_py_onnx_methods[] = {
    {"onnx_attention", (PyCFunction)(void (*)(void))onnx_attention, METH_FASTCALL,
     NULL},
    {NULL, NULL, 0, NULL},
};
