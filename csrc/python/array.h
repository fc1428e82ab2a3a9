/* SPDX-License-Identifier: MIT
 *
 * Arrays of any kind, NumPy's, Tensors and those of other libraries: as tensors, as the kind of a
 * result, and as `out`.
 */
#ifndef CLATTN_PYTHON_ARRAY_H
#define CLATTN_PYTHON_ARRAY_H

#include "python/convert.h"
#include "python/state.h"

/* Reads `object`, argument `name`, as a tensor. *keep is a new reference that owns the memory: the
   array itself, a Tensor of an Array of pyopencl, what its library handed out, or a copy if the elements are misaligned or
   byte-swapped. Returns -1 with a TypeError if `object` is no array of one of the dtypes, with a
   ValueError if its library does not hand it out. */
int ca_py_array(const ca_state *state, PyObject *object, const char *name, ca_py_dtypes dtypes,
                ca_tensor *tensor, PyObject **keep);

/* True for an array of any kind, and for a NumPy scalar that is no Python float (float64 is
   one). */
bool ca_py_is_array(const ca_state *state, PyObject *object);

/* Returns host memory for a result: a NumPy array, which ca_py_give turns into an array of the
   library of `like`. `like` NULL or None: NumPy's. */
PyObject *ca_py_host_result(const ca_state *state, PyObject *like, ca_dtype dtype, int ndim,
                            const int64_t *shape, ca_tensor *tensor);
PyObject *ca_py_give(const ca_state *state, PyObject *like, ca_dtype dtype, PyObject *memory);

/* The caller's `out`. */
typedef struct {
    ca_tensor tensor; /* the memory of `out` itself only if `usable` */
    bool usable;      /* kernels can write to it: native, aligned, and so on */
    bool writeable;
    PyObject *shell;  /* owned: a NumPy array of that memory, `out` itself if it is one */
    PyObject *target; /* owned: takes a copy of the result; a Tensor, or the shell */
} ca_py_out;

void ca_py_out_close(ca_py_out *out);

/* Checks that `object` can take a result of that shape and dtype. `origin` says in messages where
   the dtype comes from: "that of query". out->shell and out->target start as NULL. The caller closes
   `out` in any case. Returns -1 with an exception. */
int ca_py_out_open(const ca_state *state, PyObject *object, ca_dtype dtype, const char *origin,
                   int ndim, const int64_t *shape, ca_py_out *out);

#endif
