/* SPDX-License-Identifier: MIT
 *
 * Arrays that results are written to: new ones, and the caller's.
 */
#define NPY_NO_DEPRECATED_API  NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION     NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL clattn_numpy_api
#define NO_IMPORT_ARRAY        /* py_convert.c does */
#include "py_convert.h"

#include <numpy/arrayobject.h>
#include <stdlib.h>

/* `pages`: how many bytes of pages it is; 0: allocated memory. */
static void
free_of(void *memory, size_t pages)
{
    if (pages > 0) {
        ca_pages_free(memory, pages);
    } else {
        free(memory);
    }
}

static void
free_memory(PyObject *capsule)
{
    free_of(PyCapsule_GetPointer(capsule, NULL), (size_t)PyCapsule_GetContext(capsule));
}

/* New memory and what owns it; NULL with an exception. */
static PyObject *
allocate(size_t bytes, ca_pages pages, void **memory)
{
    size_t context = pages != CA_PAGES_ANY ? bytes : 0;
    *memory = pages != CA_PAGES_ANY ? ca_pages_allocate(bytes, pages)
                                    : ca_memory_allocate(bytes);
    if (*memory == NULL) {
        return PyErr_Format(PyExc_MemoryError, "no memory for a result of %zu bytes",
                            bytes);
    }
    PyObject *owner = PyCapsule_New(*memory, NULL, free_memory);
    if (owner == NULL) {
        free_of(*memory, context);
        return NULL;
    }
    (void)PyCapsule_SetContext(owner, (void *)context); /* fails for no capsule only */
    return owner;
}

static PyArray_Descr *
result_descr(PyObject *like, ca_dtype dtype)
{
    if (like == NULL) {
        return PyArray_DescrFromType(dtype == CA_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT);
    }
    if (PyArray_DescrCheck(like)) {
        return (PyArray_Descr *)Py_NewRef(like);
    }
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)like);
    if (PyArray_ISNOTSWAPPED((PyArrayObject *)like)) {
        Py_INCREF(descr);
        return descr;
    }
    return PyArray_DescrNewByteorder(descr, NPY_NATIVE);
}

PyObject *
ca_py_array_new(PyObject *like, ca_dtype dtype, int ndim, const int64_t *shape,
                ca_tensor *tensor)
{
    return ca_py_array_new_of(CA_PAGES_ANY, like, dtype, ndim, shape, tensor);
}

PyObject *
ca_py_array_new_of(ca_pages pages, PyObject *like, ca_dtype dtype, int ndim,
                   const int64_t *shape, ca_tensor *tensor)
{
    npy_intp dims[CA_MAX_DIMS];
    bool empty = false;
    for (int d = 0; d < ndim; d++) {
        dims[d] = (npy_intp)shape[d];
        empty = empty || shape[d] == 0;
    }
    size_t bytes = ca_dtype_size(dtype); /* of an empty array too, which has memory */
    for (int d = 0; d < ndim && !empty; d++) {
        if (bytes > PTRDIFF_MAX / (size_t)shape[d]) {
            return PyErr_Format(PyExc_MemoryError,
                                "no memory for a result of more bytes than 63 bits "
                                "count");
        }
        bytes *= (size_t)shape[d];
    }
    void *memory;
    PyObject *owner = allocate(bytes, pages, &memory);
    if (owner == NULL) {
        return NULL;
    }
    PyArray_Descr *descr = result_descr(like, dtype);
    if (descr == NULL) {
        Py_DECREF(owner);
        return NULL;
    }
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, dims, NULL,
                                           memory, NPY_ARRAY_CARRAY, NULL);
    if (array == NULL) {
        Py_DECREF(owner);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, owner) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    ca_py_array_describe(array, dtype, tensor);
    return array;
}

int
ca_py_check_out(PyObject *out, ca_dtype dtype, const char *origin, int ndim,
                const int64_t *shape)
{
    if (ca_py_check_is_array(out, "out") < 0) {
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)out;
    if (!ca_py_array_has_dtype(out, dtype)) {
        PyErr_Format(PyExc_TypeError, "out has dtype %S; expected %s, %s",
                     (PyObject *)PyArray_DESCR(array), ca_dtype_name(dtype), origin);
        return -1;
    }
    bool same = PyArray_NDIM(array) == ndim;
    int64_t given[CA_MAX_DIMS];
    for (int d = 0; d < PyArray_NDIM(array); d++) {
        given[d] = PyArray_DIM(array, d);
        same = same && given[d] == shape[d];
    }
    if (!same) {
        char text[2][160];
        PyErr_Format(
            PyExc_ValueError, "out has shape %s; expected %s",
            ca_shape_format(PyArray_NDIM(array), given, text[0], sizeof(text[0])),
            ca_shape_format(ndim, shape, text[1], sizeof(text[1])));
        return -1;
    }
    if (!PyArray_ISWRITEABLE(array)) {
        PyErr_SetString(PyExc_ValueError,
                        "out is read-only; expected a writeable array");
        return -1;
    }
    return 0;
}

bool
ca_py_out_is_direct(PyObject *out, ca_dtype dtype, ca_tensor *tensor)
{
    return ca_py_array_describe(out, dtype, tensor) && ca_tensor_is_nested(tensor) &&
           ca_tensor_fills_extent(tensor);
}

int
ca_py_copy_into(PyObject *out, PyObject *result)
{
    return PyArray_CopyInto((PyArrayObject *)out, (PyArrayObject *)result);
}

/* Arrays of one dtype and shape: the same elements in the same places? */
static bool
is_same_view(PyArrayObject *a, PyArrayObject *b)
{
    bool same = PyArray_DATA(a) == PyArray_DATA(b) &&
                PyArray_NDIM(a) == PyArray_NDIM(b) &&
                PyArray_ISNOTSWAPPED(a) == PyArray_ISNOTSWAPPED(b);
    for (int d = 0; same && d < PyArray_NDIM(a); d++) {
        same = same &&
               (PyArray_DIM(a, d) == 1 || PyArray_STRIDE(a, d) == PyArray_STRIDE(b, d));
    }
    return same;
}

/* Of numpy.shares_memory, whose worst case is exponential. */
#define SHARING_WORK 100000

int
ca_py_sharing_of(PyObject *out, PyObject *input, ca_py_sharing *sharing)
{
    *sharing = CA_PY_APART;
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) {
        return -1;
    }
    int result = -1;
    PyObject *answer = PyObject_CallMethod(numpy, "may_share_memory", "OO", out, input);
    if (answer == NULL || answer == Py_False) {
        result = answer != NULL ? 0 : -1;
        goto done;
    }
    if (is_same_view((PyArrayObject *)out, (PyArrayObject *)input)) {
        *sharing = CA_PY_SAME;
        result = 0;
        goto done;
    }
    Py_SETREF(answer, PyObject_CallMethod(numpy, "shares_memory", "OOi", out, input,
                                          SHARING_WORK));
    /* numpy.exceptions.TooHardError is a RuntimeError */
    if (answer == NULL && !PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        goto done;
    }
    PyErr_Clear();
    *sharing = answer == Py_False ? CA_PY_INTERLEAVED : CA_PY_OVERLAPPING;
    result = 0;
done:
    Py_XDECREF(answer);
    Py_DECREF(numpy);
    return result;
}
