/* SPDX-License-Identifier: MIT
 *
 * Arrays of pyopencl as Tensors of their buffers. clattn._host.pyopencl reads and makes them.
 */
#ifndef CLATTN_PYTHON_PYOPENCL_H
#define CLATTN_PYTHON_PYOPENCL_H

#include "base/tensor.h"
#include "python/state.h"

/* True for a pyopencl.array.Array. */
bool ca_py_is_pyopencl(PyObject *object);

/* Returns a Tensor of the Array's buffer, argument `name`. NULL with an exception. */
PyObject *ca_py_pyopencl_tensor(PyObject *array, const char *name);

/* Returns a Tensor of a new Array, in the queue and by the allocator of the Array `like`. Its owner
   is the new Array. */
PyObject *ca_py_pyopencl_empty(PyObject *like, ca_dtype dtype, int ndim, const int64_t *shape);

#endif
