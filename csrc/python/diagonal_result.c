/* SPDX-License-Identifier: MIT
 *
 * Where the functions that fill diagonals write to.
 */
#include "python/diagonal.h"
#include "python/error.h"
#include "python/tensor.h"

/* NumPy's dtype of a new array, a new reference. */
static PyObject *
descr_of(const ca_py_diagonal *call)
{
    if (call->input != NULL && ca_py_is_ndarray(call->input)) {
        return ca_py_native_descr(call->input);
    }
    return call->dtype != NULL ? Py_NewRef(call->dtype)
                               : ca_py_descr(call->source.dtype);
}

/* A new NumPy array, of memory that suits the problem; `device` NULL: an empty one. */
static PyObject *
new_array(ca_py_diagonal *call, ca_device *device)
{
    const ca_diagonal_source *source = &call->source;
    ca_pages pages = CA_PAGES_ANY;
    if (device != NULL) {
        int64_t bytes = source->count * (int64_t)ca_dtype_size(source->dtype);
        pages =
            ca_diagonal_choose_pages(ca_device_get_info(device), &call->problem, bytes);
    }
    call->problem.memory = pages == CA_PAGES_ANY ? CA_OUTPUT_NEW : CA_OUTPUT_ZERO;
    PyObject *descr = descr_of(call);
    PyObject *array = descr == NULL
                          ? NULL
                          : ca_py_array_new(pages, descr, source->dtype, source->ndim,
                                            source->shape, &call->problem.output);
    Py_XDECREF(descr);
    return array;
}

/* What a result is like: what it is copied to, or the input. */
static PyObject *
like_of(const ca_py_diagonal *call)
{
    return call->out != Py_None ? call->out : call->input;
}

static PyObject *
new_result(ca_py_diagonal *call, ca_device *device)
{
    const ca_diagonal_source *source = &call->source;
    PyObject *like = like_of(call);
    if (like == NULL || ca_py_is_ndarray(like)) {
        return new_array(call, device);
    }
    call->problem.memory = CA_OUTPUT_NEW;
    return ca_py_call_result(&call->call, like, source->dtype, source->ndim,
                             source->shape, &call->problem.output);
}

/* Can the kernel write to `out` itself, in place where it is the input? Else the result
   is copied there. */
static bool
is_direct(const ca_py_diagonal *call, const ca_device *device)
{
    return call->out != Py_None && call->sharing != CA_PY_INTERLEAVED &&
           device != NULL && call->opened.usable &&
           ca_diagonal_can_write(ca_device_get_info(device), &call->opened.tensor);
}

/* Fill the output; -1 with an exception. */
static int
fill_output(ca_py_diagonal *call, ca_device *device)
{
    ca_error error = {0};
    ca_status status;
    if (device == NULL) {
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
        status = ca_diagonal_run(device, &call->problem, &error);
    Py_END_ALLOW_THREADS
    return ca_py_error_check(call->call.state, status, &error);
}

PyObject *
ca_py_diagonal_run(ca_py_diagonal *call)
{
    const ca_py_call *kept = &call->call;
    PyObject *out = call->out != Py_None ? call->out : NULL;
    PyObject *answer = NULL;
    PyObject *result = NULL;
    ca_device *device = NULL;
    bool empty = call->source.count == 0;
    if (ca_py_call_ready(&call->call, call->device) < 0 ||
        (!empty && ca_py_call_device(kept, &device) < 0)) {
        return NULL;
    }
    call->problem.variant = kept->variant;
    call->problem.call = kept->name;
    call->problem.input = call->source.input;
    if (call->source.has_input && empty) {
        ca_tensor_set_absent(&call->problem.input);
    }
    bool direct = is_direct(call, device);
    if (direct) {
        call->problem.output = call->opened.tensor;
        call->problem.memory = CA_OUTPUT_GIVEN;
    } else {
        result = new_result(call, device);
        if (result == NULL) {
            return NULL;
        }
    }
    if (fill_output(call, device) == 0 &&
        (out == NULL || direct || empty ||
         ca_py_call_copy(kept,
                         ca_py_is_tensor(kept->state, out) ? out : call->opened.shell,
                         result) == 0)) {
        answer = out != NULL
                     ? Py_NewRef(out)
                     : ca_py_call_give(kept, call->input, call->source.dtype, result);
    }
    Py_XDECREF(result);
    return answer;
}
