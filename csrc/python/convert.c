/* SPDX-License-Identifier: MIT */
#define NPY_NO_DEPRECATED_API  NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION     NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL clattn_numpy_api /* python/convert_result.c's too */
#include "python/convert.h"

#include <numpy/arrayobject.h>
#include <string.h>

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

bool
ca_py_is_ndarray(PyObject *object)
{
    return PyArray_Check(object);
}

bool
ca_py_is_numpy_scalar(PyObject *object)
{
    return PyArray_IsScalar(object, Generic);
}

static int
refuse_masked(PyObject *object, const char *name)
{
    int masked = PyArray_CheckExact(object) ? 0 : is_masked_array(object);
    if (masked > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be an array, got %.200s, whose mask would be ignored",
                     name, Py_TYPE(object)->tp_name);
    }
    return masked != 0 ? -1 : 0;
}

/* Strides of dimensions of size 1, and of empty arrays, mean nothing and may be
   anything. */
bool
ca_py_array_describe(PyObject *object, ca_dtype dtype, ca_tensor *tensor)
{
    PyArrayObject *array = (PyArrayObject *)object;
    npy_intp size = PyArray_ITEMSIZE(array);
    bool empty = PyArray_SIZE(array) == 0;
    tensor->dtype = dtype;
    tensor->ndim = PyArray_NDIM(array);
    tensor->data = PyArray_DATA(array); /* not NULL, even of an empty array */
    tensor->block = NULL;
    for (int d = 0; d < tensor->ndim; d++) {
        npy_intp length = PyArray_DIM(array, d);
        npy_intp stride = length > 1 && !empty ? PyArray_STRIDE(array, d) : 0;
        if (stride % size != 0) {
            return false;
        }
        tensor->shape[d] = length;
        tensor->strides[d] = stride / size;
    }
    return PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array);
}

int
ca_py_check_dtype(ca_dtype dtype, ca_py_dtypes dtypes, const char *name)
{
    if (takes(dtypes, dtype)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s has dtype %s; expected %s", name,
                 ca_dtype_name(dtype), ca_py_dtypes_text(dtypes));
    return -1;
}

const char *
ca_py_dtypes_text(ca_py_dtypes dtypes)
{
    static const char *const expected[] = {
        [CA_TAKES_FLOATS] = "float16, bfloat16, float32 or float64",
        [CA_TAKES_BOOL_AND_FLOATS] = "bool, float16, bfloat16, float32 or float64",
        [CA_TAKES_NUMBERS] =
            "bool, an integer type, float16, bfloat16, float32 or float64",
        [CA_TAKES_HALF_AND_SINGLE] = "float16 or float32",
        [CA_TAKES_INT32] = "int32",
    };
    return expected[dtypes];
}

int
ca_py_tensor_from_ndarray(PyObject *object, const char *name, ca_py_dtypes dtypes,
                          ca_tensor *tensor, PyObject **keep)
{
    PyArrayObject *array = (PyArrayObject *)object;
    ca_dtype dtype;
    if (refuse_masked(object, name) < 0) {
        return -1;
    }
    if (!dtype_from_descr(PyArray_DESCR(array), &dtype) || !takes(dtypes, dtype)) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %S; expected %s", name,
                     (PyObject *)PyArray_DESCR(array), ca_py_dtypes_text(dtypes));
        return -1;
    }
    if (ca_py_array_describe(object, dtype, tensor)) {
        *keep = Py_NewRef(object);
        return 0;
    }
    *keep = ca_py_contiguous(object);
    if (*keep == NULL) {
        return -1;
    }
    ca_py_array_describe(*keep, dtype, tensor);
    return 0;
}

PyObject *
ca_py_contiguous(PyObject *object)
{
    PyArrayObject *array = (PyArrayObject *)object;
    PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(array), NPY_NATIVE);
    return native == NULL ? NULL
                          : PyArray_FromArray(array, native, NPY_ARRAY_CARRAY_RO);
}

PyObject *
ca_py_ndarray_from(PyObject *object)
{
    return PyArray_FROM_O(object);
}

PyObject *
ca_py_descr(ca_dtype dtype)
{
    static const int numbers[CA_DTYPE_COUNT] = {
        [CA_BOOL] = NPY_BOOL,      [CA_FLOAT16] = NPY_HALF,  [CA_FLOAT32] = NPY_FLOAT,
        [CA_FLOAT64] = NPY_DOUBLE, [CA_INT8] = NPY_INT8,     [CA_INT16] = NPY_INT16,
        [CA_INT32] = NPY_INT32,    [CA_INT64] = NPY_INT64,   [CA_UINT8] = NPY_UINT8,
        [CA_UINT16] = NPY_UINT16,  [CA_UINT32] = NPY_UINT32, [CA_UINT64] = NPY_UINT64,
    };
    if (dtype != CA_BFLOAT16) {
        return (PyObject *)PyArray_DescrFromType(numbers[dtype]);
    }
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    if (module == NULL) {
        return NULL; /* an ImportError that names it */
    }
    PyArray_Descr *descr = NULL;
    PyObject *type = PyObject_GetAttrString(module, "bfloat16");
    Py_DECREF(module);
    if (type != NULL && !PyArray_DescrConverter(type, &descr)) {
        descr = NULL;
    }
    Py_XDECREF(type);
    return (PyObject *)descr;
}

PyObject *
ca_py_moving_descr(ca_dtype dtype)
{
    return ca_py_descr(dtype == CA_BFLOAT16 ? CA_UINT16 : dtype);
}

bool
ca_py_array_has_dtype(PyObject *array, ca_dtype dtype)
{
    ca_dtype given;
    return dtype_from_descr(PyArray_DESCR((PyArrayObject *)array), &given) &&
           given == dtype;
}

int
ca_py_dtype(PyObject *object, const char *name, ca_dtype *dtype, PyObject **native)
{
    PyArray_Descr *descr = NULL;
    if (!PyArray_DescrConverter(object, &descr)) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
            !PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear();
    }
    if (descr == NULL || !dtype_from_descr(descr, dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "%s is %R; expected bool, an integer type, float16, bfloat16, "
                     "float32 or float64",
                     name, object);
        Py_XDECREF(descr);
        return -1;
    }
    *native = (PyObject *)PyArray_DescrNewByteorder(descr, NPY_NATIVE);
    Py_DECREF(descr);
    return *native != NULL ? 0 : -1;
}

bool
ca_py_is_other_scalar(PyObject *object)
{
    return PyComplex_Check(object) || PyArray_IsScalar(object, ComplexFloating) ||
           PyArray_IsScalar(object, Timedelta) || PyArray_IsScalar(object, Datetime);
}
