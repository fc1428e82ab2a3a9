/* SPDX-License-Identifier: MIT
 *
 * NumPy arrays as tensors and back, and all calls of NumPy's C API. python/array.h has arrays of
 * any kind.
 */
#ifndef CLATTN_PYTHON_CONVERT_H
#define CLATTN_PYTHON_CONVERT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "base/platform.h" /* ca_pages */
#include "base/tensor.h"

/* Loads NumPy's C API. Returns -1 with an exception. */
int ca_py_convert_init(void);

/* The dtypes that an argument may have. */
typedef enum {
    CA_TAKES_FLOATS,
    CA_TAKES_BOOL_AND_FLOATS,
    CA_TAKES_NUMBERS, /* bool, integers, floats */
    CA_TAKES_HALF_AND_SINGLE,
    CA_TAKES_INT32,
} ca_py_dtypes;

/* Returns -1 with a TypeError if argument `name` may not have that dtype. */
int ca_py_check_dtype(ca_dtype dtype, ca_py_dtypes dtypes, const char *name);

bool ca_py_is_ndarray(PyObject *object);

/* True for a NumPy scalar. NumPy's float64 is one, and a Python float, too. */
bool ca_py_is_numpy_scalar(PyObject *object);

/* Reads a NumPy array, argument `name`, as a tensor. *keep is a new reference that owns the memory:
   the array itself, or a copy if the elements are misaligned or byte-swapped. Returns -1 with a
   TypeError for another dtype or a masked array. */
int ca_py_tensor_from_ndarray(PyObject *object, const char *name, ca_py_dtypes dtypes,
                              ca_tensor *tensor, PyObject **keep);

/* Keeps the memory of a NumPy array from being resized: NumPy refuses to resize an array that has a
   weak reference, even with refcheck=False. *hold is a new reference that keeps it so, or NULL if
   the memory cannot be resized at all: it is no NumPy array's, or exported as a buffer. Returns -1
   with an exception. */
int ca_py_hold(PyObject *array, PyObject **hold);

/* Returns the array that NumPy makes of a scalar or of an object with a buffer or __array__. */
PyObject *ca_py_ndarray_from(PyObject *object);

/* Returns the NumPy array, or a copy, that is contiguous, native and aligned. */
PyObject *ca_py_contiguous(PyObject *array);

/* Describes an array of that dtype as a tensor. Returns false if kernels cannot use its memory: it
   is misaligned or byte-swapped, or a stride is no whole number of elements. */
bool ca_py_array_describe(PyObject *array, ca_dtype dtype, ca_tensor *tensor);

/* Returns NumPy's dtype, a new reference; ml_dtypes' for bfloat16. NULL with an exception. */
PyObject *ca_py_descr(ca_dtype dtype);

/* The same for arrays that are only copied: uint16 stands for bfloat16, without ml_dtypes. */
PyObject *ca_py_moving_descr(ca_dtype dtype);

/* True if the array has that dtype, in any byte order. */
bool ca_py_array_has_dtype(PyObject *array, ca_dtype dtype);

/* Reads a dtype, of CA_TAKES_NUMBERS, from anything that NumPy takes as one. *native is a new
   reference to NumPy's dtype in native byte order. Returns -1 with a TypeError, or for "bfloat16"
   with a ModuleNotFoundError where ml_dtypes is not installed. */
int ca_py_dtype(PyObject *object, const char *name, ca_dtype *dtype, PyObject **native);

/* True for a complex number, and for NumPy's dates and durations. Some have __float__ or
   __int__. */
bool ca_py_is_other_scalar(PyObject *object);

/* Returns a new C-contiguous array in pages of that kind, 128-byte aligned and not initialised.
   `descr` is NumPy's dtype of `dtype`. */
PyObject *ca_py_array_new(ca_pages pages, PyObject *descr, ca_dtype dtype, int ndim,
                          const int64_t *shape, ca_tensor *tensor);

/* Returns an array's dtype in native byte order, a new reference. */
PyObject *ca_py_native_descr(PyObject *array);

/* Returns an array of a tensor's memory, which `owner` keeps. `descr` NULL:
   ca_py_moving_descr's. */
PyObject *ca_py_array_over(const ca_tensor *tensor, PyObject *descr, bool writeable,
                           PyObject *owner);

/* Describes the bytes of an array as a tensor of one more dimension. */
void ca_py_array_describe_bytes(PyObject *array, ca_tensor *bytes);

bool ca_py_array_is_writeable(PyObject *array);

/* Returns a C-contiguous copy. */
PyObject *ca_py_array_copy(PyObject *array);

/* Returns the array in another dtype: NumPy's, or anything that NumPy takes as one. With `as_is`,
   raises a ValueError if that needs a copy. */
PyObject *ca_py_array_cast(PyObject *array, PyObject *dtype, bool as_is);

/* out[...] = result. Returns -1 with an exception. */
int ca_py_copy_into(PyObject *out, PyObject *result);

/* How two arrays of one dtype and shape share memory. */
typedef enum {
    CA_PY_APART,
    CA_PY_INTERLEAVED, /* no element is shared, but the extents overlap */
    CA_PY_SAME,        /* each element with the same one */
    CA_PY_OVERLAPPING,
} ca_py_sharing;

/* Returns -1 with an exception. */
int ca_py_sharing_of(PyObject *out, PyObject *input, ca_py_sharing *sharing);

#endif
