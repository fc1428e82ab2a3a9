/* SPDX-License-Identifier: MIT
 *
 * Arrays of any kind as tensors, and results of their kind: NumPy's, Tensors, and those
 * of other libraries.
 */
#ifndef CLATTN_PY_ARRAY_H
#define CLATTN_PY_ARRAY_H

#include "python/convert.h"
#include "python/state.h"

/* `object`, argument `name`, as a tensor. *keep is a new reference that owns the
   memory: the array itself, what its library handed out, or a copy where its elements
   are misaligned or byte-swapped. -1 with a TypeError for what is no array of such a
   dtype, with a ValueError where its library does not hand it out. */
int ca_py_array(const ca_state *state, PyObject *object, const char *name,
                ca_py_dtypes dtypes, ca_tensor *tensor, PyObject **keep);

/* Is it an array of any kind, a NumPy scalar other than float64 among them, which is
   Python's float too? */
bool ca_py_is_array(const ca_state *state, PyObject *object);

/* Memory for a result on the host, a NumPy array, which ca_py_give turns into an array
   of `like`'s library. `like` NULL or None: NumPy's. */
PyObject *ca_py_host_result(PyObject *like, ca_dtype dtype, int ndim,
                            const int64_t *shape, ca_tensor *tensor);
PyObject *ca_py_give(const ca_state *state, PyObject *like, ca_dtype dtype,
                     PyObject *memory);

/* The caller's `out`. */
typedef struct {
    ca_tensor tensor; /* as it lies, if it is usable */
    bool usable;      /* by kernels: native, aligned, and so on */
    bool writeable;
    PyObject
        *shell; /* a NumPy array of that memory, `out` itself if it is one; owned */
} ca_py_out;

/* Check that `out` can take a result of that shape and dtype, whose `origin` is told:
   "that of query". -1 with an exception. `out` starts as zeros, and its shell is the
   caller's to release in any case. */
int ca_py_out_open(const ca_state *state, PyObject *object, ca_dtype dtype,
                   const char *origin, int ndim, const int64_t *shape, ca_py_out *out);

#endif
