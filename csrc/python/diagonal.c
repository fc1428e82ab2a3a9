/* SPDX-License-Identifier: MIT
 *
 * The functions that fill diagonals: their arguments, their output and their call.
 */
#include <stdio.h>
#include <string.h>

#include "diagonal/run.h"
#include "doors/diagonal.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"
#include "python/tensor.h"
#include "python/value.h"

typedef struct {
    ca_py_call call;
    ca_diagonal_source source;
    PyObject *input; /* borrowed; NULL: there is none */
    PyObject *dtype; /* NumPy's; NULL: not given */
    PyObject *out;   /* borrowed; NULL: there is none */
    ca_py_out opened;
    ca_py_sharing sharing; /* of out with the input */
    ca_diagonal problem;
} diagonal_call;

/* ---- arguments ---- */

static int
parse_input(diagonal_call *call, PyObject *input, const char *name)
{
    call->input = input;
    call->source.input_name = name;
    call->source.has_input = true;
    return ca_py_call_array(&call->call, input, name, CA_TAKES_NUMBERS, &call->source.input);
}

static int
parse_shape(diagonal_call *call, PyObject *shape, const char *name)
{
    call->source.shape_name = name;
    call->source.has_shape = true;
    return ca_py_shape(shape, name, &call->source.ndim, call->source.shape);
}

static int
parse_input_or_shape(diagonal_call *call, PyObject *object)
{
    return PyTuple_Check(object) || PyList_Check(object)
               ? parse_shape(call, object, "input_or_shape")
               : parse_input(call, object, "input_or_shape");
}

static int
parse_band(diagonal_call *call, PyObject *begin, PyObject *end)
{
    ca_diagonal *problem = &call->problem;
    return ca_py_band(begin, end, &problem->lower, &problem->upper, &problem->inverted);
}

static int
parse_dtype(diagonal_call *call, PyObject *dtype)
{
    call->source.has_dtype = dtype != Py_None;
    return dtype == Py_None ? 0 : ca_py_dtype(dtype, "dtype", &call->source.dtype, &call->dtype);
}

/* Applies the rules of a specification, which decide shape and dtype. */
static int
check_source(diagonal_call *call, ca_status (*check)(ca_diagonal_source *source, ca_error *error))
{
    CA_NEW_ERROR(error);
    ca_status status = check(&call->source, &error);
    return ca_py_error_check(call->call.state, status, &error);
}

static int
parse_value(diagonal_call *call, PyObject *value)
{
    return ca_py_value(value, "value", call->source.dtype, &call->problem.value);
}

/* Finds how `out`, which is checked, shares memory with the input. */
static int
find_sharing(diagonal_call *call)
{
    PyObject *input = ca_py_is_ndarray(call->input)
                          ? Py_NewRef(call->input)
                          : ca_py_array_over(&call->source.input, NULL, false, call->call.keep[0]);
    int result = input == NULL ? -1 : ca_py_sharing_of(call->opened.shell, input, &call->sharing);
    Py_XDECREF(input);
    return result;
}

static int
parse_out(diagonal_call *call, PyObject *out)
{
    const ca_diagonal_source *source = &call->source;
    char origin[64] = "the default of dtype";
    if (out == Py_None) {
        return 0;
    }
    if (source->has_input) {
        (void)snprintf(origin, sizeof(origin), "that of %s", source->input_name);
    } else if (source->has_dtype) {
        (void)snprintf(origin, sizeof(origin), "which dtype says");
    }
    call->out = out;
    if (ca_py_call_note_out(&call->call, out) < 0 ||
        ca_py_out_open(call->call.state, out, source->dtype, origin, source->ndim, source->shape,
                       &call->opened) < 0 ||
        (source->has_input && find_sharing(call) < 0)) {
        return -1;
    }
    if (call->sharing == CA_PY_OVERLAPPING) {
        return ca_py_raise(PyExc_ValueError,
                           "out shares memory with %s; expected one that does not, or the same "
                           "view of it",
                           source->input_name);
    }
    return 0;
}

/* ---- the output ---- */

/* Returns a new NumPy array, of memory that suits the problem. `device` NULL: it is empty. */
static PyObject *
new_array(diagonal_call *call, ca_device *device)
{
    const ca_diagonal_source *source = &call->source;
    ca_pages pages = CA_PAGES_ANY;
    if (device != NULL) {
        int64_t bytes = source->count * (int64_t)ca_dtype_size(source->dtype);
        pages = ca_diagonal_choose_pages(ca_device_get_info(device), &call->problem, bytes);
    }
    if (pages == CA_PAGES_ZERO) {
        call->problem.memory = CA_OUTPUT_ZERO;
    }
    PyObject *descr = call->input != NULL && ca_py_is_ndarray(call->input)
                          ? ca_py_native_descr(call->input)
                      : call->dtype != NULL ? Py_NewRef(call->dtype)
                                            : ca_py_descr(source->dtype);
    PyObject *array = descr == NULL ? NULL
                                    : ca_py_array_new(pages, descr, source->dtype, source->ndim,
                                                      source->shape, &call->problem.output);
    Py_XDECREF(descr);
    return array;
}

/* Returns a new result of the kind of `out` or, without one, of the input. */
static PyObject *
new_result(diagonal_call *call, ca_device *device)
{
    const ca_diagonal_source *source = &call->source;
    PyObject *like = call->out != NULL ? call->out : call->input;
    call->problem.memory = CA_OUTPUT_NEW;
    return like == NULL || ca_py_is_ndarray(like)
               ? new_array(call, device)
               : ca_py_call_result(&call->call, like, source->dtype, source->ndim, source->shape,
                                   &call->problem.output);
}

/* True if the kernel can write to `out` itself, which may be the input. Else `out` gets a copy. */
static bool
is_direct(const diagonal_call *call, const ca_device *device)
{
    return call->out != NULL && call->sharing != CA_PY_INTERLEAVED && device != NULL &&
           call->opened.usable &&
           ca_diagonal_can_write(ca_device_get_info(device), &call->opened.tensor);
}

/* ---- the call ---- */

/* Fills the output and gives it, or `out`. `result` NULL: `out` is the output. */
static PyObject *
fill(const diagonal_call *call, ca_device *device, PyObject *result)
{
    const ca_py_call *kept = &call->call;
    PyObject *out = call->out;
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status = CA_OK;
    if (device != NULL) {
        ca_py_work_begin(&work, kept->state, &error);
        status = ca_diagonal_run(device, &call->call.state->forced, &call->problem, &error);
        ca_py_work_end(&work);
    }
    if (ca_py_error_check(kept->state, status, &error) < 0) {
        return NULL;
    }
    if (out == NULL) {
        return ca_py_call_give(kept, call->input, call->source.dtype, result);
    }
    bool copies = result != NULL && device != NULL;
    return copies && ca_py_call_copy(kept, call->opened.target, result) < 0 ? NULL : Py_NewRef(out);
}

/* Returns the result of a call whose arguments are checked. */
static PyObject *
run(diagonal_call *call)
{
    ca_device *device = NULL; /* an empty result needs none */
    if (call->source.count > 0 && ca_py_call_device(&call->call, &device) < 0) {
        return NULL;
    }
    call->problem.call = call->call.name;
    call->problem.input = call->source.input;
    if (is_direct(call, device)) {
        call->problem.output = call->opened.tensor;
        call->problem.memory = CA_OUTPUT_GIVEN;
        return fill(call, device, NULL);
    }
    PyObject *result = new_result(call, device);
    PyObject *answer = result != NULL ? fill(call, device, result) : NULL;
    Py_XDECREF(result);
    return answer;
}

static void
begin(diagonal_call *call, PyObject *module, const char *name)
{
    memset(call, 0, sizeof(*call));
    ca_tensor_set_absent(&call->source.input);
    ca_py_call_begin(&call->call, module, name);
}

/* Runs the call if its arguments are `parsed`, and releases what it keeps. */
static PyObject *
finish(diagonal_call *call, bool parsed)
{
    PyObject *result = parsed ? run(call) : NULL;
    ca_py_call_end(&call->call);
    Py_CLEAR(call->dtype);
    ca_py_out_close(&call->opened);
    return result;
}

/* ---- module functions ---- */

/* The arguments that diagonal.py explains. */
#define DIAGONAL(ROW, STAR)                                                                        \
    ROW(INPUT_OR_SHAPE, "input_or_shape")                                                          \
    STAR()                                                                                         \
    ROW(VALUE, "value")                                                                            \
    ROW(BEGIN, "begin")                                                                            \
    ROW(END, "end")                                                                                \
    ROW(DTYPE, "dtype=None")                                                                       \
    ROW(OUT, "out=None")                                                                           \
    ROW(DEVICE, "device=None")
const char *const ca_py_diagonal_arguments[] = CA_PY_TEXTS(DIAGONAL);

static PyObject *
diagonal_matrix(PyObject *module, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    enum { CA_PY_SLOTS(DIAGONAL) ARGUMENTS };
    PyObject *args[ARGUMENTS];
    diagonal_call call;
    begin(&call, module, "diagonal_matrix");
    bool parsed =
        ca_py_arguments(call.call.state, CA_PY_DIAGONAL, given, count, names, args) == 0 &&
        parse_input_or_shape(&call, args[INPUT_OR_SHAPE]) == 0 &&
        parse_dtype(&call, args[DTYPE]) == 0 && check_source(&call, ca_torch_diagonal_check) == 0 &&
        parse_value(&call, args[VALUE]) == 0 && parse_band(&call, args[BEGIN], args[END]) == 0 &&
        parse_out(&call, args[OUT]) == 0 && ca_py_call_ready(&call.call, args[DEVICE]) == 0;
    return finish(&call, parsed);
}

static int
parse_size(PyObject *object, const char *name, int64_t *size)
{
    return ca_py_int(object, name, 0, INT64_MAX, size);
}

/* eye(n, m, dtype, device, /) */
static PyObject *
eye(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { N, M, DTYPE, DEVICE, ARGUMENTS };
    diagonal_call call;
    begin(&call, module, "eye");
    ca_diagonal_source *source = &call.source;
    source->shape_name = "the result";
    source->has_shape = true;
    source->ndim = 2;
    call.problem.upper = 1;
    bool parsed =
        ca_py_check_count(nargs, ARGUMENTS) == 0 &&
        parse_size(args[N], "n", &source->shape[0]) == 0 &&
        parse_size(args[M] != Py_None ? args[M] : args[N], "m", &source->shape[1]) == 0 &&
        parse_dtype(&call, args[DTYPE]) == 0 && check_source(&call, ca_torch_diagonal_check) == 0 &&
        parse_value(&call, Py_True) == 0 && ca_py_call_ready(&call.call, args[DEVICE]) == 0;
    return finish(&call, parsed);
}

/* Fills one side of a diagonal with zeros. */
static PyObject *
triangle(PyObject *module, PyObject *const *args, Py_ssize_t nargs, bool lower)
{
    enum { INPUT, DIAGONAL, OUT, ARGUMENTS };
    diagonal_call call;
    int64_t diagonal = 0;
    begin(&call, module, lower ? "tril" : "triu");
    bool parsed = ca_py_check_count(nargs, ARGUMENTS) == 0 &&
                  parse_input(&call, args[INPUT], "input") == 0 &&
                  check_source(&call, ca_torch_diagonal_check) == 0 &&
                  ca_py_any_int(args[DIAGONAL], "diagonal", &diagonal) == 0 &&
                  parse_out(&call, args[OUT]) == 0;
    int64_t next = diagonal == INT64_MAX ? diagonal : diagonal + 1;
    call.problem.lower = lower ? next : INT64_MIN;
    call.problem.upper = lower ? INT64_MAX : diagonal;
    return finish(&call, parsed);
}

/* tril(input, diagonal, out, /) */
static PyObject *
tril(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return triangle(module, args, nargs, true);
}

/* triu(input, diagonal, out, /) */
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
    if ((args[DML_INPUT] != Py_None && parse_input(call, args[DML_INPUT], "input") < 0) ||
        (args[DML_SIZES] != Py_None && parse_shape(call, args[DML_SIZES], "sizes") < 0) ||
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

/* directml_diagonal_matrix1(input, sizes, dtype, value, diagonal_fill_begin, diagonal_fill_end,
   device, /): see directml.py */
static PyObject *
directml_diagonal_matrix1(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { BEGIN = DML_BAND, END, DEVICE, ARGUMENTS };
    diagonal_call call;
    int64_t first = 0;
    int64_t last = 0;
    begin(&call, module, "directml.diagonal_matrix1");
    bool parsed = ca_py_check_count(nargs, ARGUMENTS) == 0 && parse_directml(&call, args) == 0 &&
                  parse_int32(args[BEGIN], "diagonal_fill_begin", &first) == 0 &&
                  parse_int32(args[END], "diagonal_fill_end", &last) == 0 &&
                  ca_py_call_ready(&call.call, args[DEVICE]) == 0;
    call.problem.inverted = first > last;
    call.problem.lower = first < last ? first : last;
    call.problem.upper = first < last ? last : first;
    return finish(&call, parsed);
}

/* directml_diagonal_matrix(input, sizes, dtype, value, offset, device, /) */
static PyObject *
directml_diagonal_matrix(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { OFFSET = DML_BAND, DEVICE, ARGUMENTS };
    diagonal_call call;
    begin(&call, module, "directml.diagonal_matrix");
    bool parsed = ca_py_check_count(nargs, ARGUMENTS) == 0 && parse_directml(&call, args) == 0 &&
                  parse_int32(args[OFFSET], "offset", &call.problem.lower) == 0 &&
                  ca_py_call_ready(&call.call, args[DEVICE]) == 0;
    if (parsed) {
        call.problem.upper = call.problem.lower + 1;
    }
    return finish(&call, parsed);
}

PyMethodDef ca_py_diagonal_methods[] = {
    {"diagonal_matrix", CA_PY_NAMED(diagonal_matrix),
     CA_PY_SIGNATURE("diagonal_matrix", "$module", DIAGONAL)},
    {"eye", CA_PY_FASTCALL(eye), NULL},
    {"tril", CA_PY_FASTCALL(tril), NULL},
    {"triu", CA_PY_FASTCALL(triu), NULL},
    {"directml_diagonal_matrix1", CA_PY_FASTCALL(directml_diagonal_matrix1), NULL},
    {"directml_diagonal_matrix", CA_PY_FASTCALL(directml_diagonal_matrix), NULL},
    {NULL, NULL, 0, NULL},
};
