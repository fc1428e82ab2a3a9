/* SPDX-License-Identifier: MIT
 *
 * NumPy arrays as tensors and back. Only py_convert*.c call NumPy's C API.
 */
#ifndef CLATTN_PY_CONVERT_H
#define CLATTN_PY_CONVERT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "platform.h" /* ca_pages */
#include "tensor.h"

/* Load NumPy's C API. -1 with an exception set. */
int ca_py_convert_init(void);

/* The dtypes an argument may have. */
typedef enum {
    CA_TAKES_FLOATS,
    CA_TAKES_BOOL_AND_FLOATS,
    CA_TAKES_NUMBERS, /* bool, integers, floats */
    CA_TAKES_HALF_AND_SINGLE,
    CA_TAKES_INT32,
} ca_py_dtypes;

/* `object`, argument `name`, as a tensor. *keep is a new reference that owns the
   memory: the array itself, or a copy where its elements are misaligned or
   byte-swapped. -1 with a TypeError for anything but an array of such a dtype. */
int ca_py_tensor_from_array(PyObject *object, const char *name, ca_py_dtypes dtypes,
                            ca_tensor *tensor, PyObject **keep);

/* The same, or an absent tensor and no reference for None. */
int ca_py_tensor_from_optional(PyObject *object, const char *name, ca_py_dtypes dtypes,
                               ca_tensor *tensor, PyObject **keep);

/* Is it an array, or a NumPy scalar other than float64, which is Python's float too? */
bool ca_py_is_numpy(PyObject *object);

/* As from_optional; a NumPy scalar is taken as an array without dimensions. */
int ca_py_tensor_from_scalar(PyObject *object, const char *name, ca_py_dtypes dtypes,
                             ca_tensor *tensor, PyObject **keep);

/* The first element of an array as a number, 0 for an empty one. -1 with an exception
   set. */
int ca_py_first_number(PyObject *array, double *value);

/* -1 with a TypeError for anything but a NumPy array. */
int ca_py_check_is_array(PyObject *object, const char *name);

/* An array of that dtype as a tensor. False where kernels cannot use it as it lies:
   misaligned, byte-swapped, an element not a whole number of elements from the
   first. */
bool ca_py_array_describe(PyObject *array, ca_dtype dtype, ca_tensor *tensor);

/* Is the array of that dtype, in any byte order? */
bool ca_py_array_has_dtype(PyObject *array, ca_dtype dtype);

/* What NumPy takes as a dtype, of those of CA_TAKES_NUMBERS; *native is a new reference
   to NumPy's dtype in native byte order. -1 with a TypeError. */
int ca_py_dtype(PyObject *object, const char *name, ca_dtype *dtype, PyObject **native);

/* Is it a complex number, or NumPy's date or duration? These have __float__ or __int__
   too. */
bool ca_py_is_other_scalar(PyObject *object);

/* A new C-contiguous array, its memory 128-byte aligned and not initialised: of the
   native form of `like`'s dtype, which is an array or a native dtype, or of `dtype`
   where `like` is NULL. */
PyObject *ca_py_array_new(PyObject *like, ca_dtype dtype, int ndim,
                          const int64_t *shape, ca_tensor *tensor);

/* The same of pages of that kind. */
PyObject *ca_py_array_new_of(ca_pages pages, PyObject *like, ca_dtype dtype, int ndim,
                             const int64_t *shape, ca_tensor *tensor);

/* Check that `out` can take a result of that shape and dtype, whose `origin` is told:
   "that of query". -1 with an exception. */
int ca_py_check_out(PyObject *out, ca_dtype dtype, const char *origin, int ndim,
                    const int64_t *shape);

/* Can a kernel write straight into the checked `out`: native, aligned, its elements
   covering its memory once and without gaps? Then *tensor describes it. */
bool ca_py_out_is_direct(PyObject *out, ca_dtype dtype, ca_tensor *tensor);

/* out[...] = result. -1 with an exception. */
int ca_py_copy_into(PyObject *out, PyObject *result);

/* How two arrays of one dtype and shape share memory. */
typedef enum {
    CA_PY_APART,
    CA_PY_INTERLEAVED, /* no element, but their extents overlap */
    CA_PY_SAME,        /* element by element */
    CA_PY_OVERLAPPING,
} ca_py_sharing;

/* -1 with an exception. */
int ca_py_sharing_of(PyObject *out, PyObject *input, ca_py_sharing *sharing);

#endif
