/* SPDX-License-Identifier: MIT */
#include "python/diagonal.h"

#include <string.h>

#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"
#include "python/value.h"

static int
call_begin(ca_py_diagonal *call, PyObject *module, const char *name, Py_ssize_t given,
           int expected)
{
    memset(call, 0, sizeof(*call));
    call->out = Py_None;
    call->device = Py_None;
    ca_tensor_set_absent(&call->source.input);
    return ca_py_call_begin(&call->call, module, name, given, expected);
}

static void
call_end(ca_py_diagonal *call)
{
    ca_py_call_end(&call->call);
    Py_CLEAR(call->dtype);
    Py_CLEAR(call->opened.shell);
}

static int
parse_input(ca_py_diagonal *call, PyObject *input, const char *name)
{
    call->input = input;
    call->source.input_name = name;
    call->source.has_input = true;
    return ca_py_call_array(&call->call, input, name, CA_TAKES_NUMBERS,
                            &call->source.input);
}

static int
parse_shape(ca_py_diagonal *call, PyObject *shape, const char *name)
{
    call->source.shape_name = name;
    call->source.has_shape = true;
    return ca_py_shape(shape, name, &call->source.ndim, call->source.shape);
}

static int
parse_dtype(ca_py_diagonal *call, PyObject *dtype)
{
    call->source.has_dtype = dtype != Py_None;
    return dtype == Py_None
               ? 0
               : ca_py_dtype(dtype, "dtype", &call->source.dtype, &call->dtype);
}

/* The rules of one of the specifications; afterwards shape and dtype are known. */
static int
check_source(ca_py_diagonal *call,
             ca_status (*check)(ca_diagonal_source *source, ca_error *error))
{
    ca_error error = {0};
    ca_status status = check(&call->source, &error);
    return ca_py_error_check(call->call.state, status, &error);
}

static int
parse_value(ca_py_diagonal *call, PyObject *value)
{
    return ca_py_value(value, "value", call->source.dtype, &call->problem.value);
}

/* How the checked out shares memory with the input. */
static int
find_sharing(ca_py_diagonal *call)
{
    const ca_py_call *kept = &call->call;
    PyObject *input = call->input;
    if (!ca_py_is_ndarray(input)) {
        input = ca_py_array_over(&call->source.input, NULL, false, kept->keep[0]);
    } else {
        Py_INCREF(input);
    }
    int result = input == NULL
                     ? -1
                     : ca_py_sharing_of(call->opened.shell, input, &call->sharing);
    Py_XDECREF(input);
    return result;
}

static int
parse_out(ca_py_diagonal *call, PyObject *out)
{
    const ca_diagonal_source *source = &call->source;
    call->out = out;
    const char *origin = source->has_input   ? "that of input_or_shape"
                         : source->has_dtype ? "which dtype says"
                                             : "the default of dtype";
    if (out == Py_None) {
        return 0;
    }
    if (ca_py_call_note(&call->call, out, "out") < 0 ||
        ca_py_out_open(call->call.state, out, source->dtype, origin, source->ndim,
                       source->shape, &call->opened) < 0 ||
        (source->has_input && find_sharing(call) < 0)) {
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

/* ---- module functions ---- */

/* diagonal_matrix(input_or_shape, value, begin, end, dtype, out, device, /): see
   matrices.py */
static PyObject *
diagonal_matrix(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { INPUT_OR_SHAPE, VALUE, BEGIN, END, DTYPE, OUT, DEVICE, ARGUMENTS };
    ca_py_diagonal call;
    if (call_begin(&call, module, "diagonal_matrix", nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    call.device = args[DEVICE];
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
        result = ca_py_diagonal_run(&call);
    }
    call_end(&call);
    return result;
}

/* eye(n, m, dtype, device, /) */
static PyObject *
eye(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { N, M, DTYPE, DEVICE, ARGUMENTS };
    ca_py_diagonal call;
    if (call_begin(&call, module, "eye", nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    call.device = args[DEVICE];
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
        result = ca_py_diagonal_run(&call);
    }
    Py_XDECREF(one);
    call_end(&call);
    return result;
}

/* Zero on one side of a diagonal: value 0, and one bound. */
static PyObject *
triangle(PyObject *module, PyObject *const *args, Py_ssize_t nargs, bool lower)
{
    enum { INPUT, DIAGONAL, ARGUMENTS };
    ca_py_diagonal call;
    if (call_begin(&call, module, lower ? "tril" : "triu", nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    int64_t diagonal;
    PyObject *result = NULL;
    if (parse_input(&call, args[INPUT], "input") == 0 &&
        check_source(&call, ca_torch_diagonal_check) == 0 &&
        ca_py_any_int(args[DIAGONAL], "diagonal", &diagonal) == 0) {
        call.problem.lower = !lower                  ? INT64_MIN
                             : diagonal == INT64_MAX ? diagonal
                                                     : diagonal + 1;
        call.problem.upper = lower ? INT64_MAX : diagonal;
        result = ca_py_diagonal_run(&call);
    }
    call_end(&call);
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
parse_directml(ca_py_diagonal *call, PyObject *const *args)
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
    ca_py_diagonal call;
    if (call_begin(&call, module, "directml.diagonal_matrix1", nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    call.device = args[DEVICE];
    int64_t begin;
    int64_t end;
    PyObject *result = NULL;
    if (parse_directml(&call, args) == 0 &&
        parse_int32(args[BEGIN], "diagonal_fill_begin", &begin) == 0 &&
        parse_int32(args[END], "diagonal_fill_end", &end) == 0) {
        call.problem.inverted = begin > end;
        call.problem.lower = begin < end ? begin : end;
        call.problem.upper = begin < end ? end : begin;
        result = ca_py_diagonal_run(&call);
    }
    call_end(&call);
    return result;
}

/* directml_diagonal_matrix(input, sizes, dtype, value, offset, device, /) */
static PyObject *
directml_diagonal_matrix(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { OFFSET = DML_BAND, DEVICE, ARGUMENTS };
    ca_py_diagonal call;
    if (call_begin(&call, module, "directml.diagonal_matrix", nargs, ARGUMENTS) < 0) {
        return NULL;
    }
    call.device = args[DEVICE];
    PyObject *result = NULL;
    if (parse_directml(&call, args) == 0 &&
        parse_int32(args[OFFSET], "offset", &call.problem.lower) == 0) {
        call.problem.upper = call.problem.lower + 1;
        result = ca_py_diagonal_run(&call);
    }
    call_end(&call);
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
