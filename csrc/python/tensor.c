/* SPDX-License-Identifier: MIT */
#include "python/tensor.h"

#include "diagonal/copy.h"
#include "opencl/prepare.h"
#include "python/convert.h"
#include "python/error.h"

/* ---- new ones ---- */

PyObject *
ca_py_tensor_new(const ca_state *state, ca_storage *storage, const ca_tensor *view)
{
    ca_py_tensor *self = PyObject_GC_New(ca_py_tensor, state->tensor_type);
    if (self != NULL) {
        ca_storage_retain(storage);
        self->module = Py_NewRef(PyType_GetModule(state->tensor_type));
        self->weak_references = NULL;
        self->owner = NULL;
        self->storage = storage;
        self->view = *view;
        PyObject_GC_Track(self);
    }
    return (PyObject *)self;
}

PyObject *
ca_py_tensor_empty(const ca_state *state, ca_device *device, ca_dtype dtype, int ndim,
                   const int64_t *shape)
{
    CA_NEW_ERROR(error);
    ca_storage *storage = NULL;
    ca_tensor view = {.dtype = dtype, .ndim = ndim};
    size_t bytes = ca_dtype_size(dtype);
    for (int d = ndim - 1; d >= 0; d--) {
        view.shape[d] = shape[d];
        view.strides[d] = (int64_t)(bytes / ca_dtype_size(dtype));
        if (shape[d] > 0 && bytes > PTRDIFF_MAX / (size_t)shape[d]) {
            return PyErr_Format(PyExc_MemoryError,
                                "no memory for a Tensor of shape %s and dtype %s",
                                CA_SHAPE_WORDS(ndim, shape), ca_dtype_name(dtype));
        }
        bytes *= shape[d] > 0 ? (size_t)shape[d] : 1;
    }
    bytes = ca_tensor_count(&view) > 0 ? bytes : ca_dtype_size(dtype);
    ca_py_work work;
    ca_py_work_begin(&work, state, &error);
    ca_status status = ca_device_prepare(device, &error);
    if (status == CA_OK) {
        status = ca_storage_new(device, bytes, "a Tensor", &storage, &error);
    }
    ca_py_work_end(&work);
    if (ca_py_error_check(state, status, &error) < 0) {
        return NULL;
    }
    view.block = ca_storage_block(storage);
    view.data = view.block->address;
    PyObject *tensor = ca_py_tensor_new(state, storage, &view);
    ca_storage_release(storage);
    return tensor;
}

/* ---- to the host ---- */

int
ca_py_tensor_wait(const ca_state *state, PyObject *object)
{
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status;
    ca_py_work_begin(&work, state, &error);
    status = ca_storage_wait(((ca_py_tensor *)object)->storage, &error);
    ca_py_work_end(&work);
    return ca_py_error_check(state, status, &error);
}

/* Reads the extent of `view` into a new array of one dimension, and moves `view` there. */
static PyObject *
read_extent(const ca_state *state, ca_storage *storage, PyObject *descr, ca_tensor *view)
{
    ca_extent extent = ca_tensor_extent(view);
    size_t size = ca_dtype_size(view->dtype);
    int64_t count = (int64_t)(extent.bytes / size);
    ca_tensor flat;
    PyObject *array = ca_py_array_new(CA_PAGES_ANY, descr, view->dtype, 1, &count, &flat);
    if (array == NULL) {
        return NULL;
    }
    size_t offset = (size_t)((char *)extent.data - (char *)view->block->address);
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status;
    ca_py_work_begin(&work, state, &error);
    status = ca_storage_read(storage, offset, flat.data, extent.bytes, &error);
    ca_py_work_end(&work);
    if (ca_py_error_check(state, status, &error) < 0) {
        Py_CLEAR(array);
    }
    view->data = (char *)flat.data + (size_t)extent.offset * size;
    return array;
}

PyObject *
ca_py_tensor_fetch(const ca_state *state, PyObject *object, bool opaque)
{
    ca_py_tensor *self = (ca_py_tensor *)object;
    ca_tensor view = self->view;
    PyObject *descr = opaque ? ca_py_moving_descr(view.dtype) : ca_py_descr(view.dtype);
    PyObject *memory = NULL;
    PyObject *seen = NULL;
    PyObject *array = NULL;
    bool here = ca_storage_is_host(self->storage);
    if (descr == NULL) {
        return NULL;
    }
    if (!here) {
        memory = read_extent(state, self->storage, descr, &view);
    } else if (ca_py_tensor_wait(state, object) == 0) {
        memory = Py_NewRef(object);
    }
    if (memory != NULL) {
        seen = ca_py_array_over(&view, descr, !here, memory);
    }
    if (seen != NULL) { /* what was read from a device is new already */
        array = here ? ca_py_array_copy(seen) : ca_py_contiguous(seen);
    }
    Py_XDECREF(seen);
    Py_XDECREF(memory);
    Py_DECREF(descr);
    return array;
}

/* ---- to a device ---- */

int
ca_py_tensor_assign(const ca_state *state, PyObject *object, const ca_tensor *tensor,
                    const char *call)
{
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status;
    ca_py_work_begin(&work, state, &error);
    status = ca_copy_run(ca_py_tensor_device(object), tensor, &((ca_py_tensor *)object)->view, call,
                         &error);
    ca_py_work_end(&work);
    return ca_py_error_check(state, status, &error);
}

/* Copies a NumPy array to a new Tensor: directly if the host has the Tensor's memory. */
static int
write_array(const ca_state *state, ca_py_tensor *tensor, PyObject *array)
{
    const ca_tensor *view = &tensor->view;
    int result = -1;
    if (ca_storage_is_host(tensor->storage)) {
        PyObject *target = ca_py_array_over(view, NULL, true, (PyObject *)tensor);
        result = target != NULL ? ca_py_copy_into(target, array) : -1;
        Py_XDECREF(target);
        return result;
    }
    PyObject *contiguous = ca_py_contiguous(array);
    if (contiguous == NULL) {
        return -1;
    }
    ca_tensor source;
    (void)ca_py_array_describe(contiguous, view->dtype, &source);
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_status status;
    ca_py_work_begin(&work, state, &error);
    status =
        ca_storage_write(tensor->storage, 0, source.data, ca_tensor_extent(&source).bytes, &error);
    ca_py_work_end(&work);
    result = ca_py_error_check(state, status, &error);
    Py_DECREF(contiguous);
    return result;
}

PyObject *
ca_py_tensor_copy(const ca_state *state, ca_device *device, const ca_tensor *tensor,
                  PyObject *owner, const char *call)
{
    bool held = tensor->block != NULL;
    bool here = held && ca_storage_device(ca_storage_of(tensor->block)) == device;
    PyObject *copy = ca_py_tensor_empty(state, device, tensor->dtype, tensor->ndim, tensor->shape);
    if (copy == NULL) {
        return NULL;
    }
    int copied = -1;
    if (here) {
        copied = ca_py_tensor_assign(state, copy, tensor, call);
    } else {
        PyObject *array = held ? ca_py_tensor_fetch(state, owner, true)
                               : ca_py_array_over(tensor, NULL, false, owner);
        copied = array != NULL ? write_array(state, (ca_py_tensor *)copy, array) : -1;
        Py_XDECREF(array);
    }
    if (copied < 0) {
        Py_CLEAR(copy);
    }
    return copy;
}
