/* SPDX-License-Identifier: MIT
 *
 * The type clattn.Tensor: an array in a device's memory.
 */
#ifndef CLATTN_PY_TENSOR_H
#define CLATTN_PY_TENSOR_H

#include "base/tensor.h"
#include "opencl/storage.h"
#include "python/state.h"

typedef struct {
    PyObject_HEAD
    PyObject *module; /* keeps the runtime, and so the device */
    ca_storage *storage;
    ca_tensor view;
} ca_py_tensor;

/* Create the type and add it to the module. -1 with an exception set. */
int ca_py_tensor_init(PyObject *module);

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

/* A view of `storage`, of which it takes another reference. */
PyObject *ca_py_tensor_new(const ca_state *state, ca_storage *storage,
                           const ca_tensor *view);

/* A new C-contiguous one, not initialised. */
PyObject *ca_py_tensor_empty(const ca_state *state, ca_device *device, ca_dtype dtype,
                             int ndim, const int64_t *shape);

/* A new C-contiguous one on `device` with the elements of `tensor`, which `owner`
   keeps and which may be any device's or the host's; for the function `call`. */
PyObject *ca_py_tensor_copy(const ca_state *state, ca_device *device,
                            const ca_tensor *tensor, PyObject *owner, const char *call);

/* object[...] = tensor, on the device that both are on, for the function `call`. -1 with
   an exception. */
int ca_py_tensor_assign(const ca_state *state, PyObject *object,
                        const ca_tensor *tensor, const char *call);

/* Its elements in a new NumPy array, once the calls that use it are done. With
   `opaque` they are to be moved only, and bfloat16 needs no ml_dtypes. */
PyObject *ca_py_tensor_fetch(const ca_state *state, PyObject *object, bool opaque);

/* The same, but of its memory where the host has that too: to be looked at now. */
PyObject *ca_py_tensor_look(const ca_state *state, PyObject *object);

/* A NumPy array of its memory where the host has that too, else a copy. From now on calls
   that use the memory are waited for. */
PyObject *ca_py_tensor_numpy(const ca_state *state, PyObject *object);

/* The methods numpy, __array__, __dlpack__ and __dlpack_device__. */
PyObject *ca_py_tensor_method_numpy(PyObject *self, PyObject *ignored);
PyObject *ca_py_tensor_method_array(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *ca_py_tensor_method_dlpack(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *ca_py_tensor_method_dlpack_device(PyObject *self, PyObject *ignored);

/* tensor[key], tensor.reshape(…), tensor.transpose(…): views of the same memory.
   reshape is false, without an exception, where there is no such view. */
int ca_py_view_index(const ca_tensor *tensor, PyObject *key, ca_tensor *view);
int ca_py_view_transpose(const ca_tensor *tensor, PyObject *axes, ca_tensor *view);
int ca_py_shape_argument(const ca_tensor *tensor, PyObject *args, int *ndim,
                         int64_t shape[CA_MAX_DIMS]);
bool ca_py_view_reshape(const ca_tensor *tensor, int ndim, const int64_t *shape,
                        ca_tensor *view);

#endif
