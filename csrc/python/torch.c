/* SPDX-License-Identifier: MIT */
#include "python/methods.h"

#include "attention/problem.h"
#include "doors/torch.h"
#include "python/call.h"
#include "python/error.h"
#include "python/scalars.h"
#include "python/tensor.h"

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
parse_dropout(PyObject *const *args, ca_torch_sdpa *sdpa)
{
    if (ca_py_double(args[DROPOUT_P], "dropout_p", &sdpa->dropout) < 0) {
        return -1;
    }
    if (!(sdpa->dropout >= 0 && sdpa->dropout <= 1)) {
        PyErr_Format(PyExc_ValueError, "dropout_p is %R; expected 0 to 1",
                     args[DROPOUT_P]);
        return -1;
    }
    return ca_py_seed(args[SEED], sdpa->dropout > 0, &sdpa->seed);
}

/* Everything but the arrays. */
static int
parse_options(PyObject *const *args, ca_torch_sdpa *sdpa, bool *return_lse)
{
    sdpa->has_scale = args[SCALE] != Py_None;
    if (parse_dropout(args, sdpa) < 0 ||
        ca_py_causal(args[IS_CAUSAL], &sdpa->causal) < 0 ||
        (sdpa->has_scale && ca_py_double(args[SCALE], "scale", &sdpa->scale) < 0) ||
        ca_py_flag(args[ENABLE_GQA], "enable_gqa", &sdpa->enable_gqa) < 0 ||
        ca_py_window(args[WINDOW], &sdpa->window_left, &sdpa->window_right) < 0 ||
        ca_py_double(args[SOFTCAP], "softcap", &sdpa->softcap) < 0 ||
        ca_py_flag(args[RETURN_LSE], "return_lse", return_lse) < 0) {
        return -1;
    }
    return 0;
}

static int
parse_arrays(PyObject *const *args, ca_torch_sdpa *sdpa, ca_py_call *call)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    sdpa->has_mask = args[ATTN_MASK] != Py_None;
    if (ca_py_call_array(call, args[QUERY], "query", floats, &sdpa->query) < 0 ||
        ca_py_call_array(call, args[KEY], "key", floats, &sdpa->key) < 0 ||
        ca_py_call_array(call, args[VALUE], "value", floats, &sdpa->value) < 0 ||
        ca_py_call_note(call, args[OUT], "out") < 0) {
        return -1;
    }
    return ca_py_call_optional(call, args[ATTN_MASK], "attn_mask",
                               CA_TAKES_BOOL_AND_FLOATS, &sdpa->attn_mask);
}

static bool
overlaps(const ca_tensor *output, const ca_tensor *input)
{
    ca_extent a = ca_tensor_extent(output);
    ca_extent b = ca_tensor_extent(input);
    return ca_extents_overlap(&a, &b);
}

/* Can the kernel write to `out` itself? Not if it is spread out, swapped, misaligned or
   shares memory with an input: then the result is copied there. */
static bool
is_direct(const ca_torch_sdpa *sdpa, const ca_py_out *out)
{
    const ca_tensor *tensor = &out->tensor;
    return out->usable && ca_tensor_is_nested(tensor) &&
           ca_tensor_fills_extent(tensor) && !overlaps(tensor, &sdpa->query) &&
           !overlaps(tensor, &sdpa->key) && !overlaps(tensor, &sdpa->value) &&
           !(sdpa->has_mask && overlaps(tensor, &sdpa->attn_mask));
}

/* The checked call's output and log-sum-exp, as the caller gets them. -1 with an
   exception. */
static int
run(const ca_py_call *call, const ca_torch_sdpa *sdpa, PyObject *const *args, int ndim,
    const int64_t *shape, PyObject **output, PyObject **lse)
{
    PyObject *out = args[OUT] != Py_None ? args[OUT] : NULL;
    PyObject *like = out != NULL ? out : args[QUERY];
    PyObject *result = NULL;
    PyObject *lse_result = NULL;
    ca_py_out opened = {.shell = NULL};
    ca_tensor output_tensor;
    ca_tensor lse_tensor;
    ca_attention attention;
    ca_dtype dtype = sdpa->query.dtype;
    ca_dtype lse_dtype = dtype == CA_FLOAT64 ? CA_FLOAT64 : CA_FLOAT32;
    int done = -1;
    if (out != NULL && ca_py_out_open(call->state, out, dtype, "that of query", ndim,
                                      shape, &opened) < 0) {
        goto done;
    }
    bool direct = out != NULL && is_direct(sdpa, &opened);
    if (direct) {
        output_tensor = opened.tensor;
    } else {
        result = ca_py_call_result(call, like, dtype, ndim, shape, &output_tensor);
        if (result == NULL) {
            goto done;
        }
    }
    ca_tensor_set_absent(&lse_tensor);
    if (lse != NULL) {
        lse_result = ca_py_call_result(call, args[QUERY], lse_dtype, ndim - 1, shape,
                                       &lse_tensor);
        if (lse_result == NULL) {
            goto done;
        }
    }
    int64_t count = 1;
    for (int64_t index = 0; index < count; index++) {
        count =
            ca_torch_sdpa_problem(sdpa, &output_tensor, &lse_tensor, index, &attention);
        if (ca_py_call_attention(call, &attention) < 0) {
            goto done;
        }
    }
    if (out != NULL && !direct &&
        ca_py_call_copy(call, ca_py_is_tensor(call->state, out) ? out : opened.shell,
                        result) < 0) {
        goto done;
    }
    *output = out != NULL ? Py_NewRef(out)
                          : ca_py_call_give(call, args[QUERY], dtype, result);
    if (lse != NULL && *output != NULL) {
        *lse = ca_py_call_give(call, args[QUERY], lse_dtype, lse_result);
    }
    done = *output == NULL || (lse != NULL && *lse == NULL) ? -1 : 0;
done:
    Py_XDECREF(opened.shell);
    Py_XDECREF(result);
    Py_XDECREF(lse_result);
    return done;
}

/* scaled_dot_product_attention(query, key, …, device, /): see functional.py */
static PyObject *
scaled_dot_product_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *answer = NULL;
    PyObject *output = NULL;
    PyObject *lse = NULL;
    ca_py_call call;
    ca_torch_sdpa sdpa;
    ca_error error = {0};
    bool return_lse;
    int ndim;
    int64_t shape[CA_MAX_DIMS];

    if (ca_py_call_begin(&call, module, "scaled_dot_product_attention", nargs,
                         ARGUMENTS) < 0 ||
        parse_arrays(args, &sdpa, &call) < 0 ||
        parse_options(args, &sdpa, &return_lse) < 0 ||
        ca_py_call_ready(&call, args[DEVICE]) < 0) {
        goto done;
    }
    ca_status status = ca_torch_sdpa_check(&sdpa, &ndim, shape, &error);
    if (ca_py_error_check(call.state, status, &error) == 0 &&
        run(&call, &sdpa, args, ndim, shape, &output, return_lse ? &lse : NULL) == 0) {
        answer = return_lse ? PyTuple_Pack(2, output, lse) : Py_NewRef(output);
    }
done:
    ca_py_call_end(&call);
    Py_XDECREF(output);
    Py_XDECREF(lse);
    return answer;
}

PyMethodDef ca_py_ops_methods[] = {
    {"scaled_dot_product_attention",
     (PyCFunction)(void (*)(void))scaled_dot_product_attention, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
