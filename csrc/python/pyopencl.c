/* SPDX-License-Identifier: MIT */
#include "python/pyopencl.h"

#include "python/convert.h"
#include "python/device.h"
#include "python/error.h"
#include "python/imports.h"
#include "python/methods.h"
#include "python/scalars.h"
#include "python/tensor.h"

bool
ca_py_is_pyopencl(PyObject *object)
{
    PyObject *name = PyUnicode_FromString("pyopencl.array");
    PyObject *module = name != NULL ? PyImport_GetModule(name) : NULL;
    PyObject *type = module != NULL ? PyObject_GetAttrString(module, "Array") : NULL;
    bool is = type != NULL && PyObject_IsInstance(object, type) == 1;
    Py_XDECREF(type);
    Py_XDECREF(module);
    Py_XDECREF(name);
    PyErr_Clear();
    return is;
}

PyObject *
ca_py_pyopencl_tensor(PyObject *array, const char *name)
{
    return ca_py_call_from("clattn._host.pyopencl", "as_tensor", "(Os)", array, name);
}

PyObject *
ca_py_pyopencl_empty(PyObject *like, ca_dtype dtype, int ndim, const int64_t *shape)
{
    PyObject *tensor = NULL;
    PyObject *descr = ca_py_descr(dtype);
    PyObject *sizes = descr != NULL ? PyTuple_New(ndim) : NULL;
    for (int d = 0; d < ndim && sizes != NULL; d++) {
        PyObject *size = PyLong_FromLongLong(shape[d]);
        if (size == NULL) {
            Py_CLEAR(sizes);
        } else {
            PyTuple_SET_ITEM(sizes, d, size);
        }
    }
    if (sizes != NULL) {
        tensor = ca_py_call_from("clattn._host.pyopencl", "empty", "(OOO)", like, sizes, descr);
    }
    Py_XDECREF(sizes);
    Py_XDECREF(descr);
    return tensor;
}

/* Returns a Tensor of the adopted buffer. `view` has shape, and strides in elements. */
static PyObject *
adopt(const ca_state *state, ca_device *device, void *buffer, int64_t start, const char *name,
      ca_tensor *view)
{
    CA_NEW_ERROR(error);
    ca_storage *storage = NULL;
    size_t offset;
    ca_status status = ca_storage_adopt(device, buffer, name, &storage, &offset, &error);
    if (ca_py_error_check(state, status, &error) < 0) {
        return NULL;
    }
    view->block = ca_storage_block(storage);
    view->data = (char *)view->block->address + offset + start;
    PyObject *tensor = ca_py_tensor_new(state, storage, view);
    ca_storage_release(storage);
    return tensor;
}

/* adopt_buffer(device, buffer, start, shape, strides, dtype, owner, name, /) -> Tensor: of a cl_mem
   and a first byte, which clattn/_host/pyopencl.py has checked; with buffer 0, empty */
static PyObject *
adopt_buffer(PyObject *module, PyObject *args)
{
    ca_state *state = ca_state_get(module);
    PyObject *device;
    unsigned long long buffer;
    long long start;
    PyObject *shape;
    PyObject *strides;
    PyObject *dtype;
    PyObject *owner;
    const char *name;
    PyObject *native = NULL;
    PyObject *tensor = NULL;
    ca_tensor view;
    int ndim;
    if (!PyArg_ParseTuple(args, "O!KLO!O!OOs", state->device_type, &device, &buffer, &start,
                          &PyTuple_Type, &shape, &PyTuple_Type, &strides, &dtype, &owner, &name) ||
        ca_py_dtype(dtype, name, &view.dtype, &native) < 0 ||
        ca_py_shape(shape, name, &ndim, view.shape) < 0) {
        goto done;
    }
    view.ndim = ndim;
    for (int d = 0; d < ndim; d++) {
        view.strides[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, d));
        if (view.strides[d] == -1 && PyErr_Occurred()) {
            goto done;
        }
    }
    tensor =
        buffer == 0
            ? ca_py_tensor_empty(state, ca_py_device_get(device), view.dtype, ndim, view.shape)
            : adopt(state, ca_py_device_get(device), (void *)(uintptr_t)buffer, start, name, &view);
    if (tensor != NULL) {
        ((ca_py_tensor *)tensor)->owner = Py_NewRef(owner);
    }
done:
    Py_XDECREF(native);
    return tensor;
}

PyMethodDef ca_py_pyopencl_methods[] = {
    {"adopt_buffer", adopt_buffer, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
