/* SPDX-License-Identifier: MIT
 *
 * Arguments that are not arrays. Each returns -1 with a TypeError or ValueError that
 * names the argument.
 */
#ifndef CLATTN_PY_SCALARS_H
#define CLATTN_PY_SCALARS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "doors/torch.h" /* ca_causal */

/* "<name> must be <expected>, got <its type>". Returns -1 with the TypeError. */
int ca_py_wrong_type(const char *name, const char *expected, PyObject *object);

/* repr(object) for a message, a new reference: cut to fit, and there also for numbers
   of more digits than Python prints. NULL with an exception. */
PyObject *ca_py_repr(PyObject *object);

/* A real number: Python's, NumPy's, or anything with __float__ or __index__. */
int ca_py_double(PyObject *object, const char *name, double *value);

/* True or False, Python's or NumPy's. */
int ca_py_flag(PyObject *object, const char *name, bool *value);

/* is_causal: a flag, or "lower_right". */
int ca_py_causal(PyObject *object, ca_causal *causal);

/* window: None, or (left, right), each a whole number or None (CA_BAND_UNBOUNDED). */
int ca_py_window(PyObject *object, int64_t *left, int64_t *right);

/* A whole number from `lowest` to `highest`: Python's, NumPy's, or anything else with
   __index__; bool counts as 0 and 1. */
int ca_py_int(PyObject *object, const char *name, int64_t lowest, int64_t highest,
              int64_t *value);

/* The same of any size; *value is the nearest one of 64 bits. */
int ca_py_any_int(PyObject *object, const char *name, int64_t *value);

/* Any whole numbers `begin` and `end`, as the band lower <= x - y < upper, or as all
   but that band where begin > end. */
int ca_py_band(PyObject *begin, PyObject *end, int64_t *lower, int64_t *upper,
               bool *inverted);

/* A tuple or list of whole numbers of 0 or more, CA_MAX_DIMS - 1 at most. */
int ca_py_shape(PyObject *object, const char *name, int *ndim,
                int64_t shape[CA_MAX_DIMS]);

/* One of `count` words; *index says which. */
int ca_py_word(PyObject *object, const char *name, const char *const *words, int count,
               int *index);

/* seed: a whole number of 64 bits; None: a new one from the operating system, if it is
   `needed`. */
int ca_py_seed(PyObject *object, bool needed, uint64_t *seed);

#endif
