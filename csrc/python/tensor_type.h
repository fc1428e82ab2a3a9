/* SPDX-License-Identifier: MIT
 *
 * The type clattn.Tensor: attributes and methods of python/tensor.h's struct.
 */
#ifndef CLATTN_PYTHON_TENSOR_TYPE_H
#define CLATTN_PYTHON_TENSOR_TYPE_H

#include "python/state.h"

/* Creates the type and adds it to the module. Returns -1 with an exception. */
int ca_py_tensor_init(PyObject *module);

#endif
