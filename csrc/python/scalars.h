/* SPDX-License-Identifier: MIT
 *
 * Python objects that are not arrays: arguments, and tuples of numbers. A function that returns an
 * int returns -1 with a TypeError or ValueError that names the argument.
 */
#ifndef CLATTN_PYTHON_SCALARS_H
#define CLATTN_PYTHON_SCALARS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "doors/torch.h" /* ca_causal */

/* Raises the TypeError "<name> must be <expected>, got <its type>". Returns -1. */
int ca_py_wrong_type(const char *name, const char *expected, PyObject *object);

/* Returns a tuple of numbers[i] * unit. NULL with an exception. */
PyObject *ca_py_tuple(int64_t count, const int64_t *numbers, int64_t unit);

/* True for NumPy's bool, which is no subclass of Python's. */
bool ca_py_is_numpy_bool(PyObject *object);

/* Reads a real number: Python's, NumPy's, or anything with __float__ or __index__. A bool is 0 or
   1. */
int ca_py_double(PyObject *object, const char *name, double *value);

/* Reads scale: a real number, or None. */
int ca_py_scale(PyObject *object, bool *given, double *scale);

/* Reads True or False, Python's or NumPy's. */
int ca_py_flag(PyObject *object, const char *name, bool *value);

/* Reads is_causal: a flag, or "lower_right". */
int ca_py_causal(PyObject *object, ca_causal *causal);

/* Reads window: None, or (left, right), each a whole number or None (CA_BAND_UNBOUNDED). */
int ca_py_window(PyObject *object, int64_t *left, int64_t *right);

/* Returns a whole number as an int, a new reference: Python's, NumPy's, or anything else with
   __index__, but no bool. NULL with a TypeError "<name> must be <expected>". */
PyObject *ca_py_whole(PyObject *object, const char *name, const char *expected);

/* Reads a whole number from `lowest` to `highest`. */
int ca_py_int(PyObject *object, const char *name, int64_t lowest, int64_t highest, int64_t *value);

/* Reads a whole number of any size; *value is the nearest number of 64 bits. */
int ca_py_any_int(PyObject *object, const char *name, int64_t *value);

/* Reads whole numbers `begin` and `end` of any size as the band lower <= x - y < upper. If begin >
   end, `inverted` is set, and the result is all but the band. */
int ca_py_band(PyObject *begin, PyObject *end, int64_t *lower, int64_t *upper, bool *inverted);

/* Reads a tuple or list of whole numbers of 0 or more, CA_MAX_DIMS - 1 at most. */
int ca_py_shape(PyObject *object, const char *name, int *ndim, int64_t shape[CA_MAX_DIMS]);

/* Reads one of `count` words; *index says which. */
int ca_py_word(PyObject *object, const char *name, const char *const *words, int count, int *index);

/* Reads seed: a whole number of 64 bits, or None: then a new seed is made if one is `needed`. */
int ca_py_seed(PyObject *object, bool needed, uint64_t *seed);

#endif
