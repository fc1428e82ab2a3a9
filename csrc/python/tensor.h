/* SPDX-License-Identifier: MIT
 *
 * An array in a device's memory, clattn.Tensor: its struct, new ones, and copies to and from other
 * memory. python/tensor_type.c has the type and its methods.
 */
#ifndef CLATTN_PYTHON_TENSOR_H
#define CLATTN_PYTHON_TENSOR_H

#include "base/tensor.h"
#include "opencl/storage.h"
#include "python/state.h"

typedef struct {
    PyObject_HEAD
    PyObject *module; /* keeps the runtime, and so the device */
    PyObject *weak_references;
    PyObject *owner; /* the array of pyopencl whose buffer `storage` is; else NULL */
    ca_storage *storage;
    ca_tensor view;
} ca_py_tensor;

static inline bool
ca_py_is_tensor(const ca_state *state, PyObject *object)
{
    return Py_IS_TYPE(object, state->tensor_type);
}

static inline ca_device *
ca_py_tensor_device(PyObject *object)
{
    return ca_storage_device(((ca_py_tensor *)object)->storage);
}

/* Returns a Tensor that shows `view` of `storage` and holds a reference to it. */
PyObject *ca_py_tensor_new(const ca_state *state, ca_storage *storage, const ca_tensor *view);

/* Returns a new C-contiguous Tensor. Its elements are not initialised. */
PyObject *ca_py_tensor_empty(const ca_state *state, ca_device *device, ca_dtype dtype, int ndim,
                             const int64_t *shape);

/* Returns a new C-contiguous Tensor on `device` with the elements of `tensor`, which is on the host
   or on any device. `owner` keeps the memory of `tensor`. Messages name the function `call`. */
PyObject *ca_py_tensor_copy(const ca_state *state, ca_device *device, const ca_tensor *tensor,
                            PyObject *owner, const char *call);

/* object[...] = tensor, on one device, for the function `call`. Returns -1 with an exception. */
int ca_py_tensor_assign(const ca_state *state, PyObject *object, const ca_tensor *tensor,
                        const char *call);

/* Waits for the calls that use the Tensor's memory. Returns -1 with an exception. */
int ca_py_tensor_wait(const ca_state *state, PyObject *object);

/* Waits for the calls that use the Tensor, and returns its elements in a new NumPy array. With
   `opaque`, bfloat16 elements have the dtype uint16, as in ca_py_moving_descr. */
PyObject *ca_py_tensor_fetch(const ca_state *state, PyObject *object, bool opaque);

#endif
