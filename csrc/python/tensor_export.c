/* SPDX-License-Identifier: MIT
 *
 * The methods of clattn.Tensor that give its elements to the host.
 */
#include "python/convert.h"
#include "python/device.h"
#include "python/dlpack.h"
#include "python/error.h"
#include "python/tensor.h"

static ca_state *
state_of(PyObject *self)
{
    return ca_state_get(((ca_py_tensor *)self)->module);
}

static const ca_dlpack_device the_host = {CA_DLPACK_CPU, 0};

/* ---- copies and views for the host ---- */

/* Wait for the calls that use it. */
static int
wait_for(const ca_state *state, ca_storage *storage)
{
    ca_error error = {0};
    ca_status status;
    Py_BEGIN_ALLOW_THREADS
        status = ca_storage_wait(storage, &error);
    Py_END_ALLOW_THREADS
    return ca_py_error_check(state, status, &error);
}

/* The memory from its first element to its last, in a new array of one dimension. */
static PyObject *
read_extent(const ca_state *state, ca_storage *storage, const ca_tensor *view,
            PyObject *descr, ca_tensor *flat)
{
    ca_extent extent = ca_tensor_extent(view);
    int64_t count = (int64_t)(extent.bytes / ca_dtype_size(view->dtype));
    PyObject *array =
        ca_py_array_new(CA_PAGES_ANY, descr, view->dtype, 1, &count, flat);
    if (array == NULL) {
        return NULL;
    }
    size_t offset = (size_t)((char *)extent.data - (char *)view->block->address);
    ca_error error = {0};
    ca_status status;
    Py_BEGIN_ALLOW_THREADS
        status = ca_storage_read(storage, offset, flat->data, extent.bytes, &error);
    Py_END_ALLOW_THREADS
    if (ca_py_error_check(state, status, &error) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

PyObject *
ca_py_tensor_fetch(const ca_state *state, PyObject *object, bool opaque)
{
    ca_py_tensor *self = (ca_py_tensor *)object;
    ca_dtype dtype = self->view.dtype;
    PyObject *descr = opaque ? ca_py_moving_descr(dtype) : ca_py_descr(dtype);
    PyObject *memory = NULL;
    PyObject *array = NULL;
    ca_tensor view = self->view;
    if (descr == NULL) {
        return NULL;
    }
    if (ca_storage_is_host(self->storage)) {
        memory = wait_for(state, self->storage) < 0 ? NULL : Py_NewRef(object);
    } else {
        ca_tensor flat;
        memory = read_extent(state, self->storage, &view, descr, &flat);
        if (memory != NULL) {
            int64_t first = ca_tensor_extent(&view).offset;
            view.data = (char *)flat.data + (size_t)first * ca_dtype_size(view.dtype);
        }
    }
    PyObject *seen =
        memory != NULL ? ca_py_array_over(&view, descr, false, memory) : NULL;
    if (seen != NULL) {
        array = ca_py_array_copy(seen);
    }
    Py_XDECREF(seen);
    Py_XDECREF(memory);
    Py_DECREF(descr);
    return array;
}

/* Its memory, which the host has too, as a NumPy array. */
static PyObject *
view_memory(const ca_state *state, ca_py_tensor *self)
{
    PyObject *descr = ca_py_descr(self->view.dtype);
    PyObject *array = NULL;
    if (descr != NULL && wait_for(state, self->storage) == 0) {
        array = ca_py_array_over(&self->view, descr, true, (PyObject *)self);
    }
    Py_XDECREF(descr);
    return array;
}

PyObject *
ca_py_tensor_look(const ca_state *state, PyObject *object)
{
    ca_py_tensor *self = (ca_py_tensor *)object;
    return ca_storage_is_host(self->storage) ? view_memory(state, self)
                                             : ca_py_tensor_fetch(state, object, false);
}

PyObject *
ca_py_tensor_numpy(const ca_state *state, PyObject *object)
{
    ca_py_tensor *self = (ca_py_tensor *)object;
    if (ca_storage_is_host(self->storage)) {
        ca_storage_share(self->storage);
    }
    return ca_py_tensor_look(state, object);
}

PyObject *
ca_py_tensor_method_numpy(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return ca_py_tensor_numpy(state_of(self), self);
}

/* __array__(dtype=None, copy=None) */
PyObject *
ca_py_tensor_method_array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None;
    PyObject *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", names, &dtype,
                                     &copy)) {
        return NULL;
    }
    bool shares = ca_storage_is_host(((ca_py_tensor *)self)->storage);
    if (copy == Py_False && !shares) {
        PyErr_SetString(PyExc_ValueError,
                        "copy is False, but the Tensor is in memory that only its "
                        "device has");
        return NULL;
    }
    PyObject *elements = copy == Py_True
                             ? ca_py_tensor_fetch(state_of(self), self, false)
                             : ca_py_tensor_numpy(state_of(self), self);
    if (elements == NULL || dtype == Py_None) {
        return elements;
    }
    PyObject *cast = ca_py_array_cast(elements, dtype, copy == Py_False);
    Py_DECREF(elements);
    return cast;
}

/* ---- DLPack ---- */

static ca_dlpack_device
device_of(PyObject *self)
{
    ca_py_tensor *tensor = (ca_py_tensor *)self;
    if (ca_storage_is_host(tensor->storage)) {
        return the_host;
    }
    return (ca_dlpack_device){
        CA_DLPACK_OPENCL,
        ca_py_device_index(tensor->module, ca_storage_device(tensor->storage))};
}

PyObject *
ca_py_tensor_method_dlpack_device(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    ca_dlpack_device device = device_of(self);
    return Py_BuildValue("(ii)", device.type, device.id);
}

/* A copy of its elements, in new memory of the host. */
static PyObject *
export_copy(PyObject *self, bool versioned)
{
    ca_dtype dtype = ((ca_py_tensor *)self)->view.dtype;
    PyObject *copy = ca_py_tensor_fetch(state_of(self), self, true);
    if (copy == NULL) {
        return NULL;
    }
    ca_tensor tensor;
    (void)ca_py_array_describe(copy, dtype, &tensor);
    PyObject *capsule =
        ca_py_dlpack_export(&tensor, copy, the_host, tensor.data, 0, versioned, true);
    Py_DECREF(copy);
    return capsule;
}

/* Its own memory. */
static PyObject *
export_memory(PyObject *self, bool versioned, bool copied)
{
    ca_py_tensor *tensor = (ca_py_tensor *)self;
    const ca_tensor *view = &tensor->view;
    ca_storage_share(tensor->storage);
    if (wait_for(state_of(self), tensor->storage) < 0) {
        return NULL;
    }
    void *data = view->data;
    uint64_t offset = 0;
    if (!ca_storage_is_host(tensor->storage)) {
        data = ca_storage_buffer(tensor->storage);
        offset = (uint64_t)((char *)view->data - (char *)view->block->address);
    }
    return ca_py_dlpack_export(view, self, device_of(self), data, offset, versioned,
                               copied);
}

/* __dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None) */
PyObject *
ca_py_tensor_method_dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
    ca_py_dlpack_request request;
    if (ca_py_dlpack_parse(args, kwargs, &request) < 0) {
        return NULL;
    }
    ca_py_tensor *tensor = (ca_py_tensor *)self;
    ca_dlpack_device here = device_of(self);
    bool moves = request.wants_host && here.type != CA_DLPACK_CPU;
    if (request.wants_other && (request.type != here.type || request.id != here.id)) {
        return PyErr_Format(PyExc_BufferError,
                            "dl_device is (%lld, %lld); expected None, the host (1, 0) "
                            "or the Tensor's own (%d, %d)",
                            (long long)request.type, (long long)request.id, here.type,
                            here.id);
    }
    if (moves && request.copy == Py_False) {
        return PyErr_Format(PyExc_BufferError, "copy is False, but the host does not "
                                               "have the Tensor's memory");
    }
    if (moves || (request.copy == Py_True && here.type == CA_DLPACK_CPU)) {
        return export_copy(self, request.versioned);
    }
    if (request.copy != Py_True) {
        return export_memory(self, request.versioned, false);
    }
    PyObject *copy = ca_py_tensor_copy(state_of(self), ca_py_tensor_device(self),
                                       &tensor->view, self, "Tensor.__dlpack__");
    PyObject *capsule =
        copy != NULL ? export_memory(copy, request.versioned, true) : NULL;
    Py_XDECREF(copy);
    return capsule;
}
