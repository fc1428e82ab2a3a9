/* SPDX-License-Identifier: MIT
 *
 * Arrays that results are written to: new ones, and the caller's.
 */
#define NPY_NO_DEPRECATED_API  NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION     NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL clattn_numpy_api
#define NO_IMPORT_ARRAY        /* python/convert.c does */
#include "python/convert.h"

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
    *memory =
        pages != CA_PAGES_ANY ? ca_pages_allocate(bytes) : ca_memory_allocate(bytes);
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

PyObject *
ca_py_native_descr(PyObject *array)
{
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)array);
    if (PyArray_ISNOTSWAPPED((PyArrayObject *)array)) {
        return Py_NewRef(descr);
    }
    return (PyObject *)PyArray_DescrNewByteorder(descr, NPY_NATIVE);
}

PyObject *
ca_py_array_new(ca_pages pages, PyObject *descr, ca_dtype dtype, int ndim,
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
    Py_INCREF(descr); /* the array takes one */
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)descr, ndim,
                                           dims, NULL, memory, NPY_ARRAY_CARRAY, NULL);
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

PyObject *
ca_py_array_over(const ca_tensor *tensor, PyObject *descr, bool writeable,
                 PyObject *owner)
{
    size_t size = ca_dtype_size(tensor->dtype);
    npy_intp dims[CA_MAX_DIMS];
    npy_intp strides[CA_MAX_DIMS];
    for (int d = 0; d < tensor->ndim; d++) {
        dims[d] = (npy_intp)tensor->shape[d];
        strides[d] = (npy_intp)tensor->strides[d] * (npy_intp)size;
    }
    PyArray_Descr *taken =
        (PyArray_Descr *)(descr != NULL ? Py_NewRef(descr)
                                        : ca_py_moving_descr(tensor->dtype));
    if (taken == NULL) {
        return NULL;
    }
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, taken, tensor->ndim, dims, strides,
                             tensor->data, writeable ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

void
ca_py_array_shape(PyObject *array, int *ndim, int64_t shape[CA_MAX_DIMS])
{
    *ndim = PyArray_NDIM((PyArrayObject *)array);
    for (int d = 0; d < *ndim; d++) {
        shape[d] = PyArray_DIM((PyArrayObject *)array, d);
    }
}

bool
ca_py_array_is_writeable(PyObject *array)
{
    return PyArray_ISWRITEABLE((PyArrayObject *)array);
}

PyObject *
ca_py_array_copy(PyObject *array)
{
    return PyArray_NewCopy((PyArrayObject *)array, NPY_CORDER);
}

PyObject *
ca_py_array_cast(PyObject *array, PyObject *dtype, bool as_is)
{
    PyArray_Descr *descr = NULL;
    if (!PyArray_DescrConverter(dtype, &descr)) {
        return NULL;
    }
    if (PyArray_EquivTypes(descr, PyArray_DESCR((PyArrayObject *)array))) {
        Py_DECREF(descr);
        return Py_NewRef(array);
    }
    if (as_is) {
        PyErr_Format(PyExc_ValueError,
                     "copy is False, but dtype is %S and the array's "
                     "%S",
                     (PyObject *)descr,
                     (PyObject *)PyArray_DESCR((PyArrayObject *)array));
        Py_DECREF(descr);
        return NULL;
    }
    return PyArray_CastToType((PyArrayObject *)array, descr, 0);
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
