/* SPDX-License-Identifier: MIT
 *
 * A number as an element of an array.
 */
#ifndef CLATTN_PY_VALUE_H
#define CLATTN_PY_VALUE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "base/tensor.h" /* ca_dtype */

/* The bits of `object`, argument `name`, as an element of dtype: rounded to a float
   type as NumPy does (to nearest even, beyond the range to infinity), but exact in
   bool and integer types. -1 with a TypeError for what is no real number, a ValueError
   for one that the dtype does not hold. */
int ca_py_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits);

#endif
