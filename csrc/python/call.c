/* SPDX-License-Identifier: MIT */
#include "python/call.h"

#include <stdio.h>

#include "attention/run.h"
#include "python/error.h"
#include "python/pyopencl.h"
#include "python/runtime.h"
#include "python/tensor.h"

int
ca_py_check_count(Py_ssize_t given, int expected)
{
    if (given != expected) {
        return ca_py_raise(PyExc_TypeError, "expected %d arguments, got %zd", expected, given);
    }
    return 0;
}

void
ca_py_call_begin(ca_py_call *call, PyObject *module, const char *name)
{
    call->state = ca_state_get(module);
    call->name = name;
    call->device_argument = Py_None;
    call->device = NULL;
    call->holder = NULL;
    call->kept = 0;
}

void
ca_py_call_end(ca_py_call *call)
{
    while (call->kept > 0) {
        Py_DECREF(call->keep[--call->kept]);
    }
}

static int
refuse_devices(const char *name, const ca_device *device, const char *other_name,
               const ca_device *other)
{
    const ca_device_info *info = ca_device_get_info(device);
    const ca_device_info *other_info = ca_device_get_info(other);
    return ca_py_raise(
        PyExc_ValueError, "%s is on device '%s' (%s), %s is '%s' (%s); expected one device: %s",
        name, info->name, info->platform, other_name, other_info->name, other_info->platform,
        ca_device_is_adopted(device) || ca_device_is_adopted(other)
            ? "arrays of pyopencl, Tensors beside them and the argument device "
              "have one queue, see clattn.Device.from_pyopencl"
            : "move a Tensor with .to(device)");
}

int
ca_py_call_note(ca_py_call *call, PyObject *object, const char *name)
{
    ca_device *device = NULL;
    if (ca_py_is_tensor(call->state, object)) {
        device = ca_py_tensor_device(object);
    } else if (object == Py_None || ca_py_is_ndarray(object) || !ca_py_is_pyopencl(object)) {
        return 0;
    } else {
        PyObject *tensor = ca_py_pyopencl_tensor(object, name);
        if (tensor == NULL) {
            return -1;
        }
        device = ca_py_tensor_device(tensor);
        Py_DECREF(tensor);
    }
    if (call->device != NULL && call->device != device) {
        char other[64];
        (void)snprintf(other, sizeof(other), "that of %s", call->holder);
        return refuse_devices(name, device, other, call->device);
    }
    if (call->device == NULL) {
        call->device = device;
        call->holder = name;
    }
    return 0;
}

/* Keeps the memory of an array from being resized until the call's end. */
static int
hold(ca_py_call *call, PyObject *array)
{
    PyObject *held;
    if (ca_py_hold(array, &held) < 0) {
        return -1;
    }
    if (held != NULL) {
        call->keep[call->kept++] = held;
    }
    return 0;
}

int
ca_py_call_note_out(ca_py_call *call, PyObject *object)
{
    return hold(call, object) < 0 ? -1 : ca_py_call_note(call, object, "out");
}

int
ca_py_call_array(ca_py_call *call, PyObject *object, const char *name, ca_py_dtypes dtypes,
                 ca_tensor *tensor)
{
    PyObject *keep = NULL;
    if (ca_py_array(call->state, object, name, dtypes, tensor, &keep) < 0) {
        Py_XDECREF(keep);
        return -1;
    }
    call->keep[call->kept++] = keep;
    return hold(call, keep) < 0 ? -1 : ca_py_call_note(call, keep, name);
}

int
ca_py_call_optional(ca_py_call *call, PyObject *object, const char *name, ca_py_dtypes dtypes,
                    ca_tensor *tensor)
{
    if (object == Py_None) {
        ca_tensor_set_absent(tensor);
        return 0;
    }
    return ca_py_call_array(call, object, name, dtypes, tensor);
}

int
ca_py_call_host_array(ca_py_call *call, PyObject *object, const char *name, ca_py_dtypes dtypes,
                      ca_tensor *tensor)
{
    if (ca_py_is_tensor(call->state, object)) {
        ca_dtype dtype = ((ca_py_tensor *)object)->view.dtype;
        if (ca_py_check_dtype(dtype, dtypes, name) < 0 || ca_py_call_note(call, object, name) < 0) {
            return -1;
        }
        PyObject *elements = ca_py_tensor_fetch(call->state, object, true);
        if (elements == NULL) {
            return -1;
        }
        call->keep[call->kept++] = elements;
        (void)ca_py_array_describe(elements, dtype, tensor);
        return 0;
    }
    if (!ca_py_is_numpy_scalar(object) && !ca_py_is_pyopencl(object)) {
        return ca_py_call_optional(call, object, name, dtypes, tensor);
    }
    if (!ca_py_is_numpy_scalar(object)) {
        PyObject *held = ca_py_pyopencl_tensor(object, name);
        int result = held != NULL ? ca_py_call_host_array(call, held, name, dtypes, tensor) : -1;
        Py_XDECREF(held);
        return result;
    }
    PyObject *array = ca_py_ndarray_from(object);
    int result = array != NULL ? ca_py_call_array(call, array, name, dtypes, tensor) : -1;
    Py_XDECREF(array);
    return result;
}

int
ca_py_call_int64s(ca_py_call *call, PyObject *object, const char *name, ca_tensor *tensor)
{
    if (ca_py_call_array(call, object, name, CA_TAKES_NUMBERS, tensor) < 0) {
        return -1;
    }
    bool fits = tensor->dtype == CA_INT64 && tensor->block == NULL && tensor->ndim == 1 &&
                (tensor->shape[0] < 2 || tensor->strides[0] == 1);
    return fits
               ? 0
               : ca_py_raise(PyExc_TypeError, "%s must be contiguous int64 of one dimension", name);
}

int
ca_py_call_ready(ca_py_call *call, PyObject *device_argument)
{
    if (ca_py_check_device(call->state, device_argument) < 0) {
        return -1;
    }
    call->device_argument = device_argument;
    if (call->device == NULL || device_argument == Py_None) {
        return 0;
    }
    ca_device *wanted;
    if (ca_py_find_device(call->state, device_argument, &wanted) < 0) {
        return -1;
    }
    return wanted == call->device
               ? 0
               : refuse_devices(call->holder, call->device, "the argument device", wanted);
}

int
ca_py_call_device(const ca_py_call *call, ca_device **device)
{
    *device = call->device;
    return *device != NULL ? 0 : ca_py_find_device(call->state, call->device_argument, device);
}

PyObject *
ca_py_call_result(const ca_py_call *call, PyObject *like, ca_dtype dtype, int ndim,
                  const int64_t *shape, ca_tensor *tensor)
{
    PyObject *result = NULL;
    if (like != NULL && ca_py_is_tensor(call->state, like)) {
        result = ca_py_tensor_empty(call->state, call->device, dtype, ndim, shape);
    } else if (like != NULL && !ca_py_is_ndarray(like) && ca_py_is_pyopencl(like)) {
        result = ca_py_pyopencl_empty(like, dtype, ndim, shape);
    } else {
        return ca_py_host_result(call->state, like, dtype, ndim, shape, tensor);
    }
    if (result != NULL) {
        *tensor = ((ca_py_tensor *)result)->view;
    }
    return result;
}

PyObject *
ca_py_call_give(const ca_py_call *call, PyObject *like, ca_dtype dtype, PyObject *result)
{
    if (ca_py_is_tensor(call->state, result)) {
        PyObject *owner = ((ca_py_tensor *)result)->owner;
        return Py_NewRef(owner != NULL ? owner : result);
    }
    return result == Py_None ? Py_NewRef(result) : ca_py_give(call->state, like, dtype, result);
}

int
ca_py_call_outputs(const ca_py_call *call, ca_py_output *outputs, int count)
{
    for (int i = 0; i < count; i++) {
        ca_py_output *row = &outputs[i];
        if (row->wanted) {
            row->result =
                ca_py_call_result(call, row->like, row->dtype, row->ndim, row->shape, row->tensor);
        } else {
            row->result = Py_NewRef(Py_None);
            ca_tensor_set_absent(row->tensor);
        }
        if (row->result == NULL) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
give_row(const ca_py_call *call, const ca_py_output *row)
{
    return row->out != NULL ? Py_NewRef(row->out)
                            : ca_py_call_give(call, row->like, row->dtype, row->result);
}

PyObject *
ca_py_call_give_all(const ca_py_call *call, const ca_py_output *outputs, int count)
{
    if (count == 1) {
        return give_row(call, outputs);
    }
    PyObject *answer = PyTuple_New(count);
    for (int i = 0; answer != NULL && i < count; i++) {
        PyObject *given = give_row(call, &outputs[i]);
        if (given == NULL) {
            Py_CLEAR(answer);
        } else {
            PyTuple_SET_ITEM(answer, i, given);
        }
    }
    return answer;
}

void
ca_py_call_clear(ca_py_output *outputs, int count)
{
    for (int i = 0; i < count; i++) {
        Py_CLEAR(outputs[i].result);
    }
}

/* Warns of each kernel that the device has left out since the last call. */
static int
tell_notices(ca_device *device)
{
    int result = 0;
    char *notice;
    while (result == 0 && (notice = ca_device_take_notice(device)) != NULL) {
        result = PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "%s", notice);
        free(notice);
    }
    return result;
}

/* Runs one problem, on the call's device or, if it is trivial, without one. */
static int
run_problem(const ca_py_call *call, ca_attention *attention)
{
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status;
    bool trivial = ca_attention_is_trivial(attention);
    ca_device *device = NULL;
    if (!trivial && ca_py_call_device(call, &device) < 0) {
        return -1;
    }
    ca_py_work_begin(&work, call->state, &error);
    status = trivial ? ca_attention_fill(attention, &error)
                     : ca_attention_run(device, &call->state->forced, attention, &error);
    ca_py_work_end(&work);
    if (ca_py_error_check(call->state, status, &error) < 0) {
        return -1;
    }
    return device == NULL ? 0 : tell_notices(device);
}

int
ca_py_call_attention(const ca_py_call *call, ca_attention *attention,
                     const ca_tensor views[CA_ATTENTION_OPERANDS])
{
    int64_t count = 1;
    int result = 0;
    attention->call = call->name;
    for (int64_t index = 0; index < count && result == 0; index++) {
        count = ca_attention_fold(attention, views, index);
        result = run_problem(call, attention);
    }
    return result;
}

int
ca_py_call_copy(const ca_py_call *call, PyObject *out, PyObject *result)
{
    if (!ca_py_is_tensor(call->state, out)) {
        return ca_py_copy_into(out, result);
    }
    return ca_py_tensor_assign(call->state, out, &((ca_py_tensor *)result)->view, call->name);
}
