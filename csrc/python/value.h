/* SPDX-License-Identifier: MIT
 *
 * Turns a number into an element of an array.
 */
#ifndef CLATTN_PYTHON_VALUE_H
#define CLATTN_PYTHON_VALUE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "base/tensor.h" /* ca_dtype */

/* Writes the bits of `object`, argument `name`, as an element of dtype. Rounds to a float type as
   NumPy does: to nearest even, beyond the range to infinity. Bool and integer types have to hold
   the number exactly. -1 with a TypeError if `object` is no real number, with a ValueError if the
   dtype does not hold it. */
int ca_py_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits);

#endif
