/* SPDX-License-Identifier: MIT */
#include "doors/torch_backward.h"

#include "attention/fill.h"
#include "attention/problem.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/mods.h"
#include "python/scalars.h"
#include "python/torch.h"

/* The arguments of _core.pyi. gradients.py explains each. */
#define CA_PY_CAPTURED 16 /* captured arrays, at most: as in python/clattn/flex/backward.py */

#define BACKWARD(ROW, STAR)                                                                        \
    CA_PY_SDPA_TAKEN(ROW, STAR)                                                                    \
    ROW(GRAD_OUTPUT, "grad_output=None")                                                           \
    ROW(OUTPUT, "output=None")                                                                     \
    ROW(LSE, "lse=None")                                                                           \
    ROW(GRAD_LSE, "grad_lse=None")                                                                 \
    ROW(NEEDS, "needs=None")                                                                       \
    ROW(CAPTURED, "captured=None")
enum { CA_PY_SLOTS(BACKWARD) ARGUMENTS };
const char *const ca_py_backward_arguments[] = CA_PY_TEXTS(BACKWARD);

/* What each gradient belongs to: its name, and its slot. */
static const struct {
    const char *name;
    const char *origin; /* of its dtype, for messages */
    int slot;
} gradients[CA_GRADIENTS] = {
    [CA_GRADIENT_QUERY] = {"query", "that of query", QUERY},
    [CA_GRADIENT_KEY] = {"key", "that of query", KEY},
    [CA_GRADIENT_VALUE] = {"value", "that of query", VALUE},
    [CA_GRADIENT_MASK] = {"attn_mask", "that of attn_mask", ATTN_MASK},
    [CA_GRADIENT_SINKS] = {"sinks", "that of sinks", SINKS},
};

/* The gradients of arrays that a score_mod reads. */
typedef struct {
    PyObject *likes[CA_PY_CAPTURED]; /* borrowed: the arrays */
    int64_t shapes[CA_PY_CAPTURED][CA_TABLE_DIMS];
    ca_captured arrays[CA_PY_CAPTURED];
    int count;
} captured_arrays;

/* The arrays of a call beside those of the forward pass, and what it gives. */
typedef struct {
    ca_torch_backward arrays;
    bool needs[CA_GRADIENTS];
    PyObject *out[CA_GRADIENTS];   /* borrowed; NULL: a new array */
    ca_tensor likes[CA_GRADIENTS]; /* what the gradients belong to, as the caller gave it */
    captured_arrays captured;
} backward_call;

static int
parse_results(PyObject *const *args, ca_py_call *call, backward_call *backward)
{
    const ca_py_dtypes floats = CA_TAKES_FLOATS;
    ca_torch_backward *arrays = &backward->arrays;
    ca_tensor_set_absent(&arrays->grad_lse);
    return ca_py_call_array(call, args[GRAD_OUTPUT], "grad_output", floats, &arrays->grad_output) <
                       0 ||
                   ca_py_call_array(call, args[OUTPUT], "output", floats, &arrays->output) < 0 ||
                   ca_py_call_array(call, args[LSE], "lse", floats, &arrays->lse) < 0 ||
                   ca_py_call_optional(call, args[GRAD_LSE], "grad_lse", floats,
                                       &arrays->grad_lse) < 0
               ? -1
               : 0;
}

/* Reads `needs`, a tuple of truth values that gradients.py makes, and checks that what needs a gradient is
   there. */
static int
parse_needs(PyObject *const *args, const ca_torch_sdpa *sdpa, ca_py_call *call,
            backward_call *backward)
{
    ca_tensor *likes = backward->likes;
    for (int n = 0; n < CA_GRADIENTS; n++) {
        backward->needs[n] = PyTuple_GET_ITEM(args[NEEDS], n) == Py_True;
        if (backward->needs[n] && args[gradients[n].slot] == Py_None) {
            return ca_py_raise(PyExc_ValueError,
                               "needs has \"%s\", but %s is None; expected an array",
                               gradients[n].name, gradients[n].name);
        }
    }
    if (backward->needs[CA_GRADIENT_MASK] && sdpa->attn_mask.dtype == CA_BOOL) {
        return ca_py_raise(PyExc_TypeError, "needs has \"attn_mask\", which is of dtype bool; "
                                            "expected one of floats, which has a gradient");
    }
    likes[CA_GRADIENT_QUERY] = sdpa->query;
    likes[CA_GRADIENT_KEY] = sdpa->key;
    likes[CA_GRADIENT_VALUE] = sdpa->value;
    likes[CA_GRADIENT_MASK] = sdpa->attn_mask;
    likes[CA_GRADIENT_SINKS] = sdpa->sinks;
    return !backward->needs[CA_GRADIENT_SINKS]
               ? 0
               : ca_py_call_host_array(call, args[SINKS], "sinks", CA_TAKES_FLOATS,
                                       &likes[CA_GRADIENT_SINKS]);
}

/* Reads `captured`: None, or a tuple of (array, dtype, shape, apart) that flex/backward.py makes. Array n of the tuple is
   captured array n in the text of the mods. */
static int
parse_captured(PyObject *const *args, ca_py_call *call, captured_arrays *captured)
{
    captured->count = 0;
    if (args[CAPTURED] == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(args[CAPTURED]) || PyTuple_GET_SIZE(args[CAPTURED]) > CA_PY_CAPTURED) {
        return ca_py_wrong_type("captured", "a tuple of few arrays", args[CAPTURED]);
    }
    for (int n = 0; n < (int)PyTuple_GET_SIZE(args[CAPTURED]); n++) {
        ca_captured *array = &captured->arrays[n];
        PyObject *shape;
        int dtype;
        unsigned apart;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(args[CAPTURED], n), "OiO!I", &captured->likes[n],
                              &dtype, &PyTuple_Type, &shape, &apart)) {
            return -1;
        }
        if (ca_py_call_note(call, captured->likes[n], "captured") < 0) {
            return -1;
        }
        if (PyTuple_GET_SIZE(shape) > CA_TABLE_DIMS) {
            return ca_py_wrong_type("captured", "arrays of few dimensions", shape);
        }
        *array = (ca_captured){.number = (uint32_t)n, .apart = apart};
        array->gradient.dtype = (ca_dtype)dtype;
        array->gradient.ndim = (int)PyTuple_GET_SIZE(shape);
        for (int d = 0; d < array->gradient.ndim; d++) {
            captured->shapes[n][d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
        }
        if (PyErr_Occurred() != NULL) {
            return -1;
        }
        captured->count++;
    }
    return 0;
}

/* Reads `out`: None, or a sequence of an array or None for each gradient. */
static int
parse_out(PyObject *const *args, ca_py_call *call, backward_call *backward)
{
    PyObject *out = args[OUT];
    for (int n = 0; n < CA_GRADIENTS; n++) {
        backward->out[n] = NULL;
    }
    if (out == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(out) || PyTuple_GET_SIZE(out) != CA_GRADIENTS) {
        return ca_py_wrong_type("out", "an AttentionGradients or a tuple of five", out);
    }
    for (int n = 0; n < CA_GRADIENTS; n++) {
        PyObject *one = PyTuple_GET_ITEM(out, n);
        if (one == Py_None) {
            continue;
        }
        if (!backward->needs[n]) {
            return ca_py_raise(PyExc_ValueError,
                               "out has an array for %s, which needs does not name; expected None",
                               gradients[n].name);
        }
        if (ca_py_call_note_out(call, one) < 0) {
            return -1;
        }
        backward->out[n] = one;
    }
    return 0;
}

static bool
overlap(const ca_tensor *a, const ca_tensor *b)
{
    ca_extent first = ca_tensor_extent(a);
    ca_extent second = ca_tensor_extent(b);
    return ca_extents_overlap(&first, &second);
}

/* Checks that an array of `out` shares no memory with an input, or with one before it. */
static int
check_overlap(const ca_torch_sdpa *sdpa, const backward_call *backward, const ca_py_out *opened,
              int n)
{
    const ca_torch_backward *arrays = &backward->arrays;
    const struct {
        const char *name;
        const ca_tensor *tensor;
    } inputs[] = {
        {"query", &sdpa->query},
        {"key", &sdpa->key},
        {"value", &sdpa->value},
        {"attn_mask", &sdpa->attn_mask},
        {"sinks", &backward->likes[CA_GRADIENT_SINKS]},
        {"grad_output", &arrays->grad_output},
        {"output", &arrays->output},
        {"lse", &arrays->lse},
        {"grad_lse", &arrays->grad_lse},
    };
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) {
        if (overlap(&opened[n].tensor, inputs[i].tensor)) {
            return ca_py_raise(PyExc_ValueError,
                               "out for %s shares memory with %s; expected memory of its own",
                               gradients[n].name, inputs[i].name);
        }
    }
    for (int before = 0; before < n; before++) {
        if (backward->out[before] != NULL && overlap(&opened[n].tensor, &opened[before].tensor)) {
            return ca_py_raise(PyExc_ValueError,
                               "out for %s shares memory with that for %s; expected memory of its "
                               "own",
                               gradients[n].name, gradients[before].name);
        }
    }
    return 0;
}

/* Opens the arrays of `out`. */
static int
open_outs(const ca_py_call *call, const ca_torch_sdpa *sdpa, const backward_call *backward,
          ca_py_out opened[CA_GRADIENTS])
{
    for (int n = 0; n < CA_GRADIENTS; n++) {
        const ca_tensor *like = &backward->likes[n];
        if (backward->out[n] != NULL &&
            (ca_py_out_open(call->state, backward->out[n], like->dtype, gradients[n].origin,
                            like->ndim, like->shape, &opened[n]) < 0 ||
             check_overlap(sdpa, backward, opened, n) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* Clears the gradients if there is no query or no key: they broadcast to problems without elements, in which
   nothing is computed. */
static int
clear(const ca_py_call *call, const ca_torch_sdpa *sdpa, const backward_call *backward,
      const ca_tensor written[CA_GRADIENTS])
{
    CA_NEW_ERROR(error);
    ca_status status = CA_OK;
    bool none = ca_tensor_count(&backward->arrays.lse) == 0 || ca_tensor_size(&sdpa->key, 2) == 0;
    for (int n = 0; none && status == CA_OK && n < CA_GRADIENTS; n++) {
        const ca_tensor *gradient = &written[n];
        const ca_extent extent = ca_tensor_extent(gradient);
        status = ca_fill_extent(&extent, gradient->block, gradient->dtype, 0, &error);
    }
    return ca_py_error_check(call->state, status, &error);
}

static bool
any_needed(const backward_call *backward)
{
    bool any = backward->captured.count > 0;
    for (int n = 0; n < CA_GRADIENTS; n++) {
        any = any || backward->needs[n];
    }
    return any;
}

/* Runs a checked call. Returns a tuple of gradients, None for those that are not needed; those of captured arrays
   come last. */
static PyObject *
run(const ca_py_call *call, const ca_torch_sdpa *sdpa, backward_call *backward, bool rows_first,
    PyObject *const *args)
{
    PyObject *answer = NULL;
    ca_attention attention;
    ca_tensor views[CA_ATTENTION_OPERANDS];
    ca_tensor written[CA_GRADIENTS];
    captured_arrays *captured = &backward->captured;
    ca_py_output results[CA_GRADIENTS + CA_PY_CAPTURED];
    const int count = CA_GRADIENTS + captured->count;
    ca_py_out opened[CA_GRADIENTS];
    for (int n = 0; n < CA_GRADIENTS; n++) {
        const ca_tensor *like = &backward->likes[n];
        PyObject *out = backward->out[n];
        opened[n].shell = opened[n].target = NULL;
        ca_tensor_set_absent(&written[n]);
        /* What is copied to `out` lies where `out` does, in whatever library the operand is. */
        results[n] =
            ca_py_output_of(backward->needs[n], out != NULL ? out : args[gradients[n].slot],
                            like->dtype, like->ndim, like->shape, &written[n]);
        results[n].out = out;
    }
    for (int n = 0; n < captured->count; n++) {
        ca_tensor *gradient = &captured->arrays[n].gradient;
        results[CA_GRADIENTS + n] = ca_py_output_of(true, captured->likes[n], gradient->dtype,
                                                    gradient->ndim, captured->shapes[n], gradient);
    }
    if (open_outs(call, sdpa, backward, opened) < 0 ||
        ca_py_call_outputs(call, results, count) < 0 || clear(call, sdpa, backward, written) < 0) {
        goto done;
    }
    for (int n = 0; rows_first && n <= CA_GRADIENT_VALUE; n++) {
        if (written[n].data != NULL) {
            ca_py_swap_heads(&written[n]);
        }
    }
    const ca_tensor sinks = written[CA_GRADIENT_SINKS];
    ca_py_flatten_sinks(&sinks, &written[CA_GRADIENT_SINKS]);
    ca_torch_backward_views(sdpa, &backward->arrays, written, &attention, views);
    /* A problem without gradients is a forward pass, which would write to the caller's output. */
    if (any_needed(backward) && ca_py_call_attention(call, &attention, views) < 0) {
        goto done;
    }
    for (int n = 0; n < CA_GRADIENTS; n++) {
        if (backward->out[n] != NULL &&
            ca_py_call_copy(call, opened[n].target, results[n].result) < 0) {
            goto done;
        }
    }
    answer = ca_py_call_give_all(call, results, count);
done:
    for (int n = 0; n < CA_GRADIENTS; n++) {
        ca_py_out_close(&opened[n]);
    }
    ca_py_call_clear(results, count);
    return answer;
}

/* Checks the call, and its shapes and dtypes against what the forward pass gives. */
static ca_status
check(ca_torch_sdpa *sdpa, backward_call *backward, bool rows_first, ca_error *error)
{
    int ndim = 0;
    int64_t shape[CA_MAX_DIMS] = {0};
    ca_torch_backward *arrays = &backward->arrays;
    ca_status status = ca_py_sdpa_check(sdpa, rows_first, true, &ndim, shape, error);
    if (status != CA_OK) {
        return status;
    }
    if (rows_first && arrays->output.ndim >= 3 && arrays->grad_output.ndim >= 3) {
        ca_py_swap_heads(&arrays->output);
        ca_py_swap_heads(&arrays->grad_output);
    }
    return ca_torch_backward_check(sdpa, arrays, ndim, shape, error);
}

static PyObject *
scaled_dot_product_attention_backward(PyObject *module, PyObject *const *given, Py_ssize_t count,
                                      PyObject *names)
{
    PyObject *args[ARGUMENTS];
    PyObject *answer = NULL;
    ca_py_call call;
    ca_torch_sdpa sdpa;
    ca_mods mods;
    mods.numbers = NULL;
    bool rows_first = false;
    backward_call backward;
    CA_NEW_ERROR(error);
    ca_py_call_begin(&call, module, "scaled_dot_product_attention_backward");
    ca_torch_sdpa_init(&sdpa);
    if (ca_py_arguments(call.state, CA_PY_SDPA_BACKWARD, given, count, names, args) == 0 &&
        ca_py_sdpa_parse(args, &call, CA_TAKES_FLOATS, &sdpa, &mods, &rows_first) == 0 &&
        parse_results(args, &call, &backward) == 0 &&
        parse_needs(args, &sdpa, &call, &backward) == 0 && parse_out(args, &call, &backward) == 0 &&
        parse_captured(args, &call, &backward.captured) == 0 &&
        ca_py_call_ready(&call, args[DEVICE]) == 0 &&
        ca_py_error_check(call.state, check(&sdpa, &backward, rows_first, &error), &error) == 0) {
        if (sdpa.mods != NULL) {
            mods.captured = backward.captured.arrays;
            mods.captured_count = backward.captured.count;
        }
        answer = run(&call, &sdpa, &backward, rows_first, args);
    }
    ca_py_mods_free(&mods);
    ca_py_call_end(&call);
    return answer;
}

PyMethodDef ca_py_backward_methods[] = {
    {"scaled_dot_product_attention_backward", CA_PY_NAMED(scaled_dot_product_attention_backward),
     CA_PY_SIGNATURE("scaled_dot_product_attention_backward", "$module", BACKWARD)},
    {NULL, NULL, 0, NULL},
};
