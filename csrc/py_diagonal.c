/* SPDX-License-Identifier: MIT */
#include <string.h>

#include "op_diagonal.h"
#include "py_attention.h" /* ca_py_check_count */
#include "py_convert.h"
#include "py_error.h"
#include "py_ops.h"
#include "py_runtime.h"
#include "py_scalars.h"
#include "py_value.h"
#include "spec_diagonal.h"

/* One call of any of the functions. */
typedef struct {
    ca_state *state;
    ca_diagonal_source source;
    PyObject *input;       /* borrowed; NULL: there is none */
    PyObject *keep;        /* owns the input's memory */
    PyObject *dtype;       /* NumPy's, NULL: not given */
    PyObject *out;         /* borrowed, or None */
    ca_py_sharing sharing; /* of out with the input */
    PyObject *device;      /* borrowed, or None */
    ca_diagonal problem;
} diagonal_call;

static void
call_init(diagonal_call *call, PyObject *module, PyObject *device)
{
    memset(call, 0, sizeof(*call));
    call->state = ca_state_get(module);
    call->out = Py_None;
    call->device = device;
    ca_tensor_set_absent(&call->source.input);
}

static void
call_clear(diagonal_call *call)
{
    Py_CLEAR(call->keep);
    Py_CLEAR(call->dtype);
}

/* ---- arguments ---- */

static int
parse_input(diagonal_call *call, PyObject *input, const char *name)
{
    call->input = input;
    call->source.input_name = name;
    call->source.has_input = true;
    return ca_py_tensor_from_array(input, name, CA_TAKES_NUMBERS, &call->source.input,
                                   &call->keep);
}

static int
parse_shape(diagonal_call *call, PyObject *shape, const char *name)
{
    call->source.shape_name = name;
    call->source.has_shape = true;
    return ca_py_shape(shape, name, &call->source.ndim, call->source.shape);
}

static int
parse_dtype(diagonal_call *call, PyObject *dtype)
{
    call->source.has_dtype = dtype != Py_None;
    return dtype == Py_None
               ? 0
               : ca_py_dtype(dtype, "dtype", &call->source.dtype, &call->dtype);
}

/* The rules of one of the specifications; afterwards shape and dtype are known. */
static int
check_source(diagonal_call *call,
             ca_status (*check)(ca_diagonal_source *source, ca_error *error))
{
    ca_error error = {0};
    ca_status status = check(&call->source, &error);
    return ca_py_error_check(call->state, status, &error);
}

static int
parse_value(diagonal_call *call, PyObject *value)
{
    return ca_py_value(value, "value", call->source.dtype, &call->problem.value);
}

static int
parse_out(diagonal_call *call, PyObject *out)
{
    const ca_diagonal_source *source = &call->source;
    call->out = out;
    const char *origin = source->has_input   ? "that of input_or_shape"
                         : source->has_dtype ? "which dtype says"
                                             : "the default of dtype";
    if (out == Py_None) {
        return 0;
    }
    if (ca_py_check_out(out, source->dtype, origin, source->ndim, source->shape) < 0 ||
        (source->has_input && ca_py_sharing_of(out, call->input, &call->sharing) < 0)) {
        return -1;
    }
    if (call->sharing == CA_PY_OVERLAPPING) {
        PyErr_SetString(PyExc_ValueError,
                        "out shares memory with input_or_shape; expected one that does "
                        "not, or the same view of it");
        return -1;
    }
    return 0;
}

/* ---- the result ---- */

static bool
is_empty(const ca_diagonal_source *source)
{
    for (int d = 0; d < source->ndim; d++) {
        if (source->shape[d] == 0) {
            return true;
        }
    }
    return false;
}

/* A new array, of memory that suits the problem; `device` NULL: an empty one. */
static PyObject *
new_result(diagonal_call *call, ca_device *device)
{
    const ca_diagonal_source *source = &call->source;
    ca_tensor *output = &call->problem.output;
    ca_pages pages = CA_PAGES_ANY;
    if (device != NULL) {
        output->dtype = source->dtype;
        output->ndim = source->ndim;
        output->data = NULL;
        for (int64_t d = source->ndim - 1, stride = 1; d >= 0; d--) {
            output->shape[d] = source->shape[d];
            output->strides[d] = stride;
            stride *= source->shape[d];
        }
        pages = ca_diagonal_choose_pages(ca_device_get_info(device), &call->problem);
    }
    call->problem.memory = pages == CA_PAGES_ANY ? CA_OUTPUT_NEW : CA_OUTPUT_ZERO;
    return ca_py_array_new_of(pages, call->input != NULL ? call->input : call->dtype,
                              source->dtype, source->ndim, source->shape, output);
}

/* Where the kernel writes: `out` itself, in place where it is the input, or a new array
   that is copied there if `out` is of no form for that. */
static PyObject *
prepare_result(diagonal_call *call, ca_device *device)
{
    ca_tensor *output = &call->problem.output;
    if (call->out != Py_None && call->sharing != CA_PY_INTERLEAVED && device != NULL &&
        ca_py_array_describe(call->out, call->source.dtype, output) &&
        ca_diagonal_can_write(ca_device_get_info(device), output)) {
        call->problem.memory = CA_OUTPUT_GIVEN;
        return Py_NewRef(call->out);
    }
    return new_result(call, device);
}

/* The checked call's result, NULL with an exception. */
static PyObject *
run(diagonal_call *call)
{
    ca_device *device = NULL;
    PyObject *answer = NULL;
    PyObject *result = NULL;
    bool empty = is_empty(&call->source);
    if (ca_py_check_device_and_kernel(call->state, call->device,
                                      &call->problem.variant) < 0 ||
        (!empty && ca_py_find_device(call->state, call->device, &device) < 0)) {
        return NULL;
    }
    call->problem.input = call->source.input;
    if (call->source.has_input && empty) {
        ca_tensor_set_absent(&call->problem.input);
    }
    result = prepare_result(call, device);
    if (result == NULL) {
        goto done;
    }
    if (!empty) {
        ca_error error = {0};
        ca_status status;
        Py_BEGIN_ALLOW_THREADS
            status = ca_diagonal_run(device, &call->problem, &error);
        Py_END_ALLOW_THREADS
        if (ca_py_error_check(call->state, status, &error) < 0) {
            goto done;
        }
    }
    if (call->out != Py_None && result != call->out) {
        if (ca_py_copy_into(call->out, result) < 0) {
            goto done;
        }
        Py_SETREF(result, Py_NewRef(call->out));
    }
    answer = Py_NewRef(result);
done:
    Py_XDECREF(result);
    return answer;
}

/* ---- module functions ---- */

/* diagonal_matrix(input_or_shape, value, begin, end, dtype, out, device, /): see
   matrices.py */
static PyObject *
diagonal_matrix(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { INPUT_OR_SHAPE, VALUE, BEGIN, END, DTYPE, OUT, DEVICE, ARGUMENTS };
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    diagonal_call call;
    call_init(&call, module, args[DEVICE]);
    ca_diagonal *problem = &call.problem;
    PyObject *result = NULL;
    bool is_shape =
        PyTuple_Check(args[INPUT_OR_SHAPE]) || PyList_Check(args[INPUT_OR_SHAPE]);
    int parsed = is_shape ? parse_shape(&call, args[INPUT_OR_SHAPE], "input_or_shape")
                          : parse_input(&call, args[INPUT_OR_SHAPE], "input_or_shape");
    if (parsed == 0 && parse_dtype(&call, args[DTYPE]) == 0 &&
        check_source(&call, ca_torch_diagonal_check) == 0 &&
        parse_value(&call, args[VALUE]) == 0 &&
        ca_py_band(args[BEGIN], args[END], &problem->lower, &problem->upper,
                   &problem->inverted) == 0 &&
        parse_out(&call, args[OUT]) == 0) {
        result = run(&call);
    }
    call_clear(&call);
    return result;
}

/* eye(n, m, dtype, device, /) */
static PyObject *
eye(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { N, M, DTYPE, DEVICE, ARGUMENTS };
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    diagonal_call call;
    call_init(&call, module, args[DEVICE]);
    ca_diagonal_source *source = &call.source;
    PyObject *m = args[M] != Py_None ? args[M] : args[N];
    PyObject *one = PyLong_FromLong(1);
    PyObject *result = NULL;
    source->shape_name = "the result";
    source->has_shape = true;
    source->ndim = 2;
    call.problem.upper = 1;
    if (one != NULL && ca_py_int(args[N], "n", 0, INT64_MAX, &source->shape[0]) == 0 &&
        ca_py_int(m, "m", 0, INT64_MAX, &source->shape[1]) == 0 &&
        parse_dtype(&call, args[DTYPE]) == 0 &&
        check_source(&call, ca_torch_diagonal_check) == 0 &&
        parse_value(&call, one) == 0) {
        result = run(&call);
    }
    Py_XDECREF(one);
    call_clear(&call);
    return result;
}

/* Zero on one side of a diagonal: value 0, and one bound. */
static PyObject *
triangle(PyObject *module, PyObject *const *args, Py_ssize_t nargs, bool lower)
{
    enum { INPUT, DIAGONAL, ARGUMENTS };
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    diagonal_call call;
    call_init(&call, module, Py_None);
    int64_t diagonal;
    PyObject *result = NULL;
    if (parse_input(&call, args[INPUT], "input") == 0 &&
        check_source(&call, ca_torch_diagonal_check) == 0 &&
        ca_py_any_int(args[DIAGONAL], "diagonal", &diagonal) == 0) {
        call.problem.lower = !lower                  ? INT64_MIN
                             : diagonal == INT64_MAX ? diagonal
                                                     : diagonal + 1;
        call.problem.upper = lower ? INT64_MAX : diagonal;
        result = run(&call);
    }
    call_clear(&call);
    return result;
}

/* tril(input, diagonal, /) */
static PyObject *
tril(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return triangle(module, args, nargs, true);
}

/* triu(input, diagonal, /) */
static PyObject *
triu(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return triangle(module, args, nargs, false);
}

/* The arguments before the band, which DirectML's operators share. */
enum { DML_INPUT, DML_SIZES, DML_DTYPE, DML_VALUE, DML_BAND };

static int
parse_directml(diagonal_call *call, PyObject *const *args)
{
    call->source.shape_name = "sizes";
    if ((args[DML_INPUT] != Py_None &&
         parse_input(call, args[DML_INPUT], "input") < 0) ||
        (args[DML_SIZES] != Py_None &&
         parse_shape(call, args[DML_SIZES], "sizes") < 0) ||
        parse_dtype(call, args[DML_DTYPE]) < 0 ||
        check_source(call, ca_directml_diagonal_check) < 0) {
        return -1;
    }
    return parse_value(call, args[DML_VALUE]);
}

static int
parse_int32(PyObject *object, const char *name, int64_t *value)
{
    return ca_py_int(object, name, INT32_MIN, INT32_MAX, value);
}

/* directml_diagonal_matrix1(input, sizes, dtype, value, diagonal_fill_begin,
   diagonal_fill_end, device, /): see directml.py */
static PyObject *
directml_diagonal_matrix1(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { BEGIN = DML_BAND, END, DEVICE, ARGUMENTS };
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    diagonal_call call;
    call_init(&call, module, args[DEVICE]);
    int64_t begin;
    int64_t end;
    PyObject *result = NULL;
    if (parse_directml(&call, args) == 0 &&
        parse_int32(args[BEGIN], "diagonal_fill_begin", &begin) == 0 &&
        parse_int32(args[END], "diagonal_fill_end", &end) == 0) {
        call.problem.inverted = begin > end;
        call.problem.lower = begin < end ? begin : end;
        call.problem.upper = begin < end ? end : begin;
        result = run(&call);
    }
    call_clear(&call);
    return result;
}

/* directml_diagonal_matrix(input, sizes, dtype, value, offset, device, /) */
static PyObject *
directml_diagonal_matrix(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { OFFSET = DML_BAND, DEVICE, ARGUMENTS };
    if (ca_py_check_count(nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    diagonal_call call;
    call_init(&call, module, args[DEVICE]);
    PyObject *result = NULL;
    if (parse_directml(&call, args) == 0 &&
        parse_int32(args[OFFSET], "offset", &call.problem.lower) == 0) {
        call.problem.upper = call.problem.lower + 1;
        result = run(&call);
    }
    call_clear(&call);
    return result;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

PyMethodDef ca_py_diagonal_methods[] = {
    METHOD(diagonal_matrix),
    METHOD(eye),
    METHOD(tril),
    METHOD(triu),
    METHOD(directml_diagonal_matrix1),
    METHOD(directml_diagonal_matrix),
    {NULL, NULL, 0, NULL},
};
