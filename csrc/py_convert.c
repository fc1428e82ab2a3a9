/* SPDX-License-Identifier: MIT */
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION    NPY_2_0_API_VERSION
#include "py_convert.h"

#include <numpy/arrayobject.h>
#include <stdlib.h>
#include <string.h>

#include "platform.h"

int
ca_py_convert_init(void)
{
    return PyArray_ImportNumPyAPI();
}

/* ml_dtypes registers bfloat16 with NumPy at import, under a number of its own. */
static bool
is_bfloat16(PyArray_Descr *descr)
{
    const char *name = descr->typeobj->tp_name;
    const char *dot = strrchr(name, '.');
    return PyTypeNum_ISUSERDEF(descr->type_num) && PyDataType_ELSIZE(descr) == 2 &&
           strcmp(dot != NULL ? dot + 1 : name, "bfloat16") == 0;
}

/* An integer type by its size: int64 is long here, and long long there. */
static bool
integer_dtype(PyArray_Descr *descr, ca_dtype *dtype)
{
    static const ca_dtype signed_dtypes[] = {
        [1] = CA_INT8, [2] = CA_INT16, [4] = CA_INT32, [8] = CA_INT64};
    static const ca_dtype unsigned_dtypes[] = {
        [1] = CA_UINT8, [2] = CA_UINT16, [4] = CA_UINT32, [8] = CA_UINT64};
    npy_intp size = PyDataType_ELSIZE(descr);
    if (!PyTypeNum_ISINTEGER(descr->type_num) || size > 8) {
        return false;
    }
    *dtype = PyTypeNum_ISUNSIGNED(descr->type_num) ? unsigned_dtypes[size]
                                                   : signed_dtypes[size];
    return true;
}

static bool
dtype_from_descr(PyArray_Descr *descr, ca_dtype *dtype)
{
    switch (descr->type_num) {
    case NPY_BOOL:
        *dtype = CA_BOOL;
        return true;
    case NPY_HALF:
        *dtype = CA_FLOAT16;
        return true;
    case NPY_FLOAT:
        *dtype = CA_FLOAT32;
        return true;
    case NPY_DOUBLE:
        *dtype = CA_FLOAT64;
        return true;
    default:
        *dtype = CA_BFLOAT16;
        return is_bfloat16(descr) || integer_dtype(descr, dtype);
    }
}

static bool
takes(ca_py_dtypes dtypes, ca_dtype dtype)
{
    switch (dtypes) {
    case CA_TAKES_FLOATS:
        return ca_dtype_is_float(dtype);
    case CA_TAKES_BOOL_AND_FLOATS:
        return dtype == CA_BOOL || ca_dtype_is_float(dtype);
    case CA_TAKES_HALF_AND_SINGLE:
        return dtype == CA_FLOAT16 || dtype == CA_FLOAT32;
    case CA_TAKES_INT32:
        return dtype == CA_INT32;
    case CA_TAKES_NUMBERS:
        break;
    }
    return true;
}

/* isinstance(object, numpy.ma.MaskedArray) */
static int
is_masked_array(PyObject *object)
{
    PyObject *module = PyImport_ImportModule("numpy.ma");
    if (module == NULL) {
        return -1;
    }
    PyObject *type = PyObject_GetAttrString(module, "MaskedArray");
    Py_DECREF(module);
    if (type == NULL) {
        return -1;
    }
    int result = PyObject_IsInstance(object, type);
    Py_DECREF(type);
    return result;
}

static int
check_is_array(PyObject *object, const char *name)
{
    if (PyArray_CheckExact(object)) {
        return 0;
    }
    int masked = 0;
    if (PyArray_Check(object)) {
        masked = is_masked_array(object);
        if (masked <= 0) {
            return masked;
        }
    }
    PyErr_Format(PyExc_TypeError, "%s must be a NumPy array, got %.200s%s", name,
                 Py_TYPE(object)->tp_name,
                 masked ? ", whose mask would be ignored" : "");
    return -1;
}

static bool
is_native(PyArrayObject *array)
{
    return PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array);
}

/* Strides of dimensions of size 1, and of empty arrays, mean nothing and may be
   anything. False when an element does not lie a whole number of elements from the
   first. */
static bool
describe(PyArrayObject *array, ca_dtype dtype, ca_tensor *tensor)
{
    npy_intp size = PyArray_ITEMSIZE(array);
    bool empty = PyArray_SIZE(array) == 0;
    tensor->dtype = dtype;
    tensor->ndim = PyArray_NDIM(array);
    tensor->data = PyArray_DATA(array); /* not NULL, even of an empty array */
    for (int d = 0; d < tensor->ndim; d++) {
        npy_intp length = PyArray_DIM(array, d);
        npy_intp stride = length > 1 && !empty ? PyArray_STRIDE(array, d) : 0;
        if (stride % size != 0) {
            return false;
        }
        tensor->shape[d] = length;
        tensor->strides[d] = stride / size;
    }
    return true;
}

int
ca_py_tensor_from_array(PyObject *object, const char *name, ca_py_dtypes dtypes,
                        ca_tensor *tensor, PyObject **keep)
{
    static const char *const expected[] = {
        [CA_TAKES_FLOATS] = "float16, bfloat16, float32 or float64",
        [CA_TAKES_BOOL_AND_FLOATS] = "bool, float16, bfloat16, float32 or float64",
        [CA_TAKES_NUMBERS] =
            "bool, an integer type, float16, bfloat16, float32 or float64",
        [CA_TAKES_HALF_AND_SINGLE] = "float16 or float32",
        [CA_TAKES_INT32] = "int32",
    };
    if (check_is_array(object, name) < 0) {
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    ca_dtype dtype;
    if (!dtype_from_descr(PyArray_DESCR(array), &dtype) || !takes(dtypes, dtype)) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %S; expected %s", name,
                     (PyObject *)PyArray_DESCR(array), expected[dtypes]);
        return -1;
    }
    if (is_native(array) && describe(array, dtype, tensor)) {
        *keep = Py_NewRef(object);
        return 0;
    }
    PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(array), NPY_NATIVE);
    if (native == NULL) {
        return -1;
    }
    *keep = PyArray_FromArray(array, native, NPY_ARRAY_CARRAY_RO);
    if (*keep == NULL) {
        return -1;
    }
    describe((PyArrayObject *)*keep, dtype, tensor);
    return 0;
}

int
ca_py_tensor_from_optional(PyObject *object, const char *name, ca_py_dtypes dtypes,
                           ca_tensor *tensor, PyObject **keep)
{
    if (object == Py_None) {
        ca_tensor_set_absent(tensor);
        return 0;
    }
    return ca_py_tensor_from_array(object, name, dtypes, tensor, keep);
}

bool
ca_py_is_numpy(PyObject *object)
{
    return PyArray_Check(object) ||
           (PyArray_IsScalar(object, Generic) && !PyFloat_Check(object));
}

int
ca_py_tensor_from_scalar(PyObject *object, const char *name, ca_py_dtypes dtypes,
                         ca_tensor *tensor, PyObject **keep)
{
    if (!PyArray_IsScalar(object, Generic)) {
        return ca_py_tensor_from_optional(object, name, dtypes, tensor, keep);
    }
    PyObject *array = PyArray_FROM_O(object);
    if (array == NULL) {
        return -1;
    }
    int result = ca_py_tensor_from_array(array, name, dtypes, tensor, keep);
    Py_DECREF(array);
    return result;
}

int
ca_py_first_number(PyObject *array, double *value)
{
    *value = 0;
    PyArrayObject *elements = (PyArrayObject *)array;
    if (PyArray_SIZE(elements) == 0) {
        return 0;
    }
    PyObject *first = PyArray_ToScalar(PyArray_DATA(elements), elements);
    if (first == NULL) {
        return -1;
    }
    *value = PyFloat_AsDouble(first);
    Py_DECREF(first);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static void
free_memory(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, NULL));
}

static PyArray_Descr *
result_descr(PyObject *like, ca_dtype dtype)
{
    if (like == NULL) {
        return PyArray_DescrFromType(dtype == CA_FLOAT64 ? NPY_DOUBLE : NPY_FLOAT);
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
    size_t bytes = ca_dtype_size(dtype); /* not 0: an empty array has memory too */
    npy_intp dims[CA_MAX_DIMS];
    for (int d = 0; d < ndim; d++) {
        dims[d] = (npy_intp)shape[d];
        if (shape[d] > 0 && bytes > PTRDIFF_MAX / (size_t)shape[d]) {
            return PyErr_NoMemory();
        }
        bytes *= shape[d] > 0 ? (size_t)shape[d] : 1;
    }
    void *memory = ca_memory_allocate(bytes);
    if (memory == NULL) {
        PyErr_Format(PyExc_MemoryError, "no memory for a result of %zu bytes", bytes);
        return NULL;
    }
    PyObject *owner = PyCapsule_New(memory, NULL, free_memory);
    if (owner == NULL) {
        free(memory);
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
    describe((PyArrayObject *)array, dtype, tensor);
    return array;
}

int
ca_py_check_out(PyObject *out, PyObject *like, int ndim, const int64_t *shape)
{
    if (check_is_array(out, "out") < 0) {
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)out;
    PyArray_Descr *expected = PyArray_DESCR((PyArrayObject *)like);
    if (PyArray_DESCR(array)->type_num != expected->type_num) {
        PyErr_Format(PyExc_TypeError, "out has dtype %S; expected %S, that of query",
                     (PyObject *)PyArray_DESCR(array), (PyObject *)expected);
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
    PyArrayObject *array = (PyArrayObject *)out;
    if (!is_native(array) || !describe(array, dtype, tensor)) {
        return false;
    }
    /* Dense in some order of its dimensions: from the smallest on, each stride is the
       number of elements covered so far. */
    int64_t covered = 1;
    while (covered < PyArray_SIZE(array)) {
        int next = -1;
        for (int d = 0; d < tensor->ndim; d++) {
            int64_t stride = tensor->strides[d];
            if (tensor->shape[d] > 1 && (stride == covered || stride == -covered)) {
                next = d;
                break;
            }
        }
        if (next < 0) {
            return false;
        }
        covered *= tensor->shape[next];
    }
    return true;
}

int
ca_py_copy_into(PyObject *out, PyObject *result)
{
    return PyArray_CopyInto((PyArrayObject *)out, (PyArrayObject *)result);
}
