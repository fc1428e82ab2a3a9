/* SPDX-License-Identifier: MIT
 *
 * Views of a Tensor's memory, with NumPy's rules. Each function that returns an int returns -1 with
 * an exception.
 */
#ifndef CLATTN_PYTHON_TENSOR_VIEW_H
#define CLATTN_PYTHON_TENSOR_VIEW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/tensor.h"

/* tensor[key] */
int ca_py_view_index(const ca_tensor *tensor, PyObject *key, ca_tensor *view);

/* tensor.transpose(*args); without arguments, or with `args` NULL, all dimensions in reverse. */
int ca_py_view_transpose(const ca_tensor *tensor, PyObject *args, ca_tensor *view);

/* Reads the arguments of tensor.reshape(*args), and fills in a size of -1. */
int ca_py_shape_argument(const ca_tensor *tensor, PyObject *args, int *ndim,
                         int64_t shape[CA_MAX_DIMS]);

/* Makes a view of that shape, which has as many elements as the tensor. Returns false, without an
   exception, if the strides allow no such view. */
bool ca_py_view_reshape(const ca_tensor *tensor, int ndim, const int64_t *shape, ca_tensor *view);

#endif
