/* SPDX-License-Identifier: MIT
 *
 * NumPy arrays as tensors and back. Only py_convert*.c call NumPy's C API; python/array.h
 * has what takes arrays of any kind.
 */
#ifndef CLATTN_PY_CONVERT_H
#define CLATTN_PY_CONVERT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "base/platform.h" /* ca_pages */
#include "base/tensor.h"

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

/* The dtypes in words, for messages. */
const char *ca_py_dtypes_text(ca_py_dtypes dtypes);

/* -1 with a TypeError where argument `name` may not have that dtype. */
int ca_py_check_dtype(ca_dtype dtype, ca_py_dtypes dtypes, const char *name);

bool ca_py_is_ndarray(PyObject *object);

/* A NumPy scalar; float64's is Python's float too. */
bool ca_py_is_numpy_scalar(PyObject *object);

/* A NumPy array, argument `name`, as a tensor. *keep is a new reference that owns the
   memory: the array itself, or a copy where its elements are misaligned or
   byte-swapped. -1 with a TypeError for another dtype or a masked array. */
int ca_py_tensor_from_ndarray(PyObject *object, const char *name, ca_py_dtypes dtypes,
                              ca_tensor *tensor, PyObject **keep);

/* What NumPy makes of an object with a buffer or __array__, or of a scalar. */
PyObject *ca_py_ndarray_from(PyObject *object);

/* A NumPy array, or a copy of it, that is contiguous, native and aligned. */
PyObject *ca_py_contiguous(PyObject *array);

/* An array of that dtype as a tensor. False where kernels cannot use it as it lies:
   misaligned, byte-swapped, an element not a whole number of elements from the
   first. */
bool ca_py_array_describe(PyObject *array, ca_dtype dtype, ca_tensor *tensor);

/* NumPy's dtype, a new reference; that of bfloat16 is ml_dtypes'. NULL with an
   exception. */
PyObject *ca_py_descr(ca_dtype dtype);

/* The same for arrays whose elements are moved, not read: bfloat16 is uint16's bits, and
   needs no ml_dtypes. */
PyObject *ca_py_moving_descr(ca_dtype dtype);

/* Is the array of that dtype, in any byte order? */
bool ca_py_array_has_dtype(PyObject *array, ca_dtype dtype);

/* What NumPy takes as a dtype, of those of CA_TAKES_NUMBERS; *native is a new reference
   to NumPy's dtype in native byte order. -1 with a TypeError. */
int ca_py_dtype(PyObject *object, const char *name, ca_dtype *dtype, PyObject **native);

/* Is it a complex number, or NumPy's date or duration? These have __float__ or __int__
   too. */
bool ca_py_is_other_scalar(PyObject *object);

/* A new C-contiguous array of NumPy's dtype `descr`, which is that `dtype`, and of pages
   of that kind, 128-byte aligned and not initialised. */
PyObject *ca_py_array_new(ca_pages pages, PyObject *descr, ca_dtype dtype, int ndim,
                          const int64_t *shape, ca_tensor *tensor);

/* The native form of an array's dtype, a new reference. */
PyObject *ca_py_native_descr(PyObject *array);

/* An array over a tensor's memory, which `owner` keeps. `descr` NULL: that of
   ca_py_moving_descr. */
PyObject *ca_py_array_over(const ca_tensor *tensor, PyObject *descr, bool writeable,
                           PyObject *owner);

/* Shape and flags of a NumPy array that results are to be written to. */
void ca_py_array_shape(PyObject *array, int *ndim, int64_t shape[CA_MAX_DIMS]);
bool ca_py_array_is_writeable(PyObject *array);

/* A contiguous copy. */
PyObject *ca_py_array_copy(PyObject *array);

/* The array in another dtype: NumPy's, or what it takes as one. `as_is`: a ValueError
   where that is a copy. */
PyObject *ca_py_array_cast(PyObject *array, PyObject *dtype, bool as_is);

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
