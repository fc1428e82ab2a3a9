/* SPDX-License-Identifier: MIT */
#define NPY_NO_DEPRECATED_API  NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION     NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL clattn_numpy_api
#include "python/convert.h"

#include <numpy/arrayobject.h>
#include <stdlib.h>
#include <string.h>

#include "python/error.h"
#include "python/imports.h"

int
ca_py_convert_init(void)
{
    return PyArray_ImportNumPyAPI();
}

/* ml_dtypes registers bfloat16 with NumPy at import; its type number varies. */
static bool
is_bfloat16(PyArray_Descr *descr)
{
    const char *name = descr->typeobj->tp_name;
    const char *dot = strrchr(name, '.');
    return PyTypeNum_ISUSERDEF(descr->type_num) && PyDataType_ELSIZE(descr) == 2 &&
           strcmp(dot != NULL ? dot + 1 : name, "bfloat16") == 0;
}

/* Finds an integer type by its size: NumPy has two types of 64 bits, long and long long. */
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
    *dtype = PyTypeNum_ISUNSIGNED(descr->type_num) ? unsigned_dtypes[size] : signed_dtypes[size];
    return true;
}

static bool
dtype_from_descr(PyArray_Descr *descr, ca_dtype *dtype)
{
    int number = descr->type_num;
    *dtype = number == NPY_BOOL     ? CA_BOOL
             : number == NPY_HALF   ? CA_FLOAT16
             : number == NPY_FLOAT  ? CA_FLOAT32
             : number == NPY_DOUBLE ? CA_FLOAT64
                                    : CA_BFLOAT16;
    return *dtype != CA_BFLOAT16 || is_bfloat16(descr) || integer_dtype(descr, dtype);
}

#define BIT(dtype) (1u << (dtype))
#define FLOATS     (BIT(CA_FLOAT16) | BIT(CA_BFLOAT16) | BIT(CA_FLOAT32) | BIT(CA_FLOAT64))

static const struct {
    unsigned taken;
    const char *text;
} rules[] = {
    [CA_TAKES_FLOATS] = {FLOATS, "float16, bfloat16, float32 or float64"},
    [CA_TAKES_BOOL_AND_FLOATS] = {FLOATS | BIT(CA_BOOL),
                                  "bool, float16, bfloat16, float32 or float64"},
    [CA_TAKES_NUMBERS] = {~0u, "bool, an integer type, float16, bfloat16, float32 or float64"},
    [CA_TAKES_HALF_AND_SINGLE] = {BIT(CA_FLOAT16) | BIT(CA_FLOAT32), "float16 or float32"},
    [CA_TAKES_INT32] = {BIT(CA_INT32), "int32"},
};

static bool
takes(ca_py_dtypes dtypes, ca_dtype dtype)
{
    return (rules[dtypes].taken & BIT(dtype)) != 0;
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
    if (PyArray_CheckExact(object)) {
        return 0;
    }
    PyObject *type = ca_py_import_from("numpy.ma", "MaskedArray");
    int masked = type != NULL ? PyObject_IsInstance(object, type) : -1;
    Py_XDECREF(type);
    return masked <= 0
               ? masked
               : ca_py_raise(PyExc_TypeError,
                             "%s must be an array, got %.200s, whose mask would be ignored; "
                             "give %s.filled(value)",
                             name, Py_TYPE(object)->tp_name, name);
}

/* NumPy may give any stride to a dimension of size 1 and to an empty array. */
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

void
ca_py_array_describe_bytes(PyObject *object, ca_tensor *bytes)
{
    PyArrayObject *array = (PyArrayObject *)object;
    bytes->dtype = CA_UINT8;
    bytes->data = PyArray_DATA(array);
    bytes->block = NULL;
    bytes->ndim = 0;
    for (int d = 0; d < PyArray_NDIM(array); d++) {
        npy_intp length = PyArray_DIM(array, d);
        ca_tensor_add_dim(bytes, length, length > 1 ? PyArray_STRIDE(array, d) : 0);
    }
    ca_tensor_add_dim(bytes, PyArray_ITEMSIZE(array), 1);
}

int
ca_py_check_dtype(ca_dtype dtype, ca_py_dtypes dtypes, const char *name)
{
    if (takes(dtypes, dtype)) {
        return 0;
    }
    const bool is_float = ca_dtype_is_float(dtype);
    const bool is_code = dtype == CA_INT8 || dtype == CA_UINT8;
    return ca_py_raise(PyExc_TypeError, "%s has dtype %s; expected %s%s", name,
                       ca_dtype_name(dtype), rules[dtypes].text,
                       is_float                             ? ""
                       : dtypes == CA_TAKES_BOOL_AND_FLOATS ? "; of 0 and 1, give mask != 0"
                       : dtypes != CA_TAKES_FLOATS          ? ""
                       : is_code ? "; convert it to float32, codes of a cache by clattn.dequantize"
                                 : "; convert it to float32");
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
    if (!dtype_from_descr(PyArray_DESCR(array), &dtype)) {
        return ca_py_raise(PyExc_TypeError, "%s has dtype %S; expected %s", name,
                           (PyObject *)PyArray_DESCR(array), rules[dtypes].text);
    }
    if (ca_py_check_dtype(dtype, dtypes, name) < 0) {
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

/* Returns the object that a view's memory comes from, borrowed. */
static PyObject *
owner_of(PyObject *object)
{
    PyObject *base = object;
    while (base != NULL && (PyArray_Check(base) || PyMemoryView_Check(base))) {
        object = base;
        base = PyArray_Check(object) ? PyArray_BASE((PyArrayObject *)object)
                                     : PyMemoryView_GET_BASE(object);
    }
    return object;
}

int
ca_py_hold(PyObject *array, PyObject **hold)
{
    PyObject *owner = owner_of(array);
    *hold = NULL;
    if (!PyArray_Check(owner) || !PyArray_CHKFLAGS((PyArrayObject *)owner, NPY_ARRAY_OWNDATA)) {
        return 0;
    }
    *hold = PyWeakref_NewRef(owner, NULL);
    return *hold != NULL ? 0 : -1;
}

PyObject *
ca_py_contiguous(PyObject *object)
{
    PyArray_Descr *native = (PyArray_Descr *)ca_py_native_descr(object);
    return native == NULL ? NULL
                          : PyArray_FromArray((PyArrayObject *)object, native, NPY_ARRAY_CARRAY_RO);
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
    PyArray_Descr *descr = NULL;
    PyObject *type = ca_py_import_from("ml_dtypes", "bfloat16");
    if (type == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_SetString(PyExc_ModuleNotFoundError,
                        "NumPy's bfloat16 needs the package ml_dtypes: pip install ml_dtypes");
    }
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
    return dtype_from_descr(PyArray_DESCR((PyArrayObject *)array), &given) && given == dtype;
}

int
ca_py_dtype(PyObject *object, const char *name, ca_dtype *dtype, PyObject **native)
{
    PyArray_Descr *descr = NULL;
    /* NumPy knows this word only after ml_dtypes is imported. */
    if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, "bfloat16") == 0) {
        descr = (PyArray_Descr *)ca_py_descr(CA_BFLOAT16);
        if (descr == NULL) {
            return -1;
        }
    } else if (!PyArray_DescrConverter(object, &descr)) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError) || !PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear();
    }
    if (descr == NULL || !dtype_from_descr(descr, dtype)) {
        Py_XDECREF(descr);
        return ca_py_refuse(PyExc_TypeError, name, object,
                            "bool, an integer type, float16, bfloat16, float32 or float64");
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

/* ---- arrays that results are written to ---- */

/* Frees `pages` bytes of pages; 0: memory of ca_memory_allocate. */
static void
free_of(void *memory, size_t pages)
{
    if (pages > 0) {
        ca_pages_free(memory, pages);
    } else {
        ca_memory_free(memory);
    }
}

static void
free_memory(PyObject *capsule)
{
    free_of(PyCapsule_GetPointer(capsule, NULL), (size_t)PyCapsule_GetContext(capsule));
}

/* Allocates memory. Returns its owner; NULL with an exception, or without one if there is no
   memory, which is then NULL, too. */
static PyObject *
allocate(size_t bytes, ca_pages pages, void **memory)
{
    size_t context = pages != CA_PAGES_ANY ? bytes : 0;
    *memory = pages != CA_PAGES_ANY ? ca_pages_allocate(bytes) : ca_memory_allocate(bytes);
    if (*memory == NULL) {
        return NULL;
    }
    PyObject *owner = PyCapsule_New(*memory, NULL, free_memory);
    if (owner == NULL) {
        free_of(*memory, context);
        return NULL;
    }
    (void)PyCapsule_SetContext(owner, (void *)context); /* cannot fail for a capsule */
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

static PyObject *
no_memory(ca_dtype dtype, int ndim, const int64_t *shape)
{
    return PyErr_Format(PyExc_MemoryError,
                        "no memory for a result of shape %s and dtype %s; compute it in parts",
                        CA_SHAPE_WORDS(ndim, shape), ca_dtype_name(dtype));
}

PyObject *
ca_py_array_new(ca_pages pages, PyObject *descr, ca_dtype dtype, int ndim, const int64_t *shape,
                ca_tensor *tensor)
{
    npy_intp dims[CA_MAX_DIMS];
    bool empty = false;
    size_t bytes = ca_dtype_size(dtype);
    for (int d = 0; d < ndim; d++) {
        dims[d] = (npy_intp)shape[d];
        empty = empty || shape[d] == 0;
        size_t length = shape[d] > 0 ? (size_t)shape[d] : 1; /* as NumPy counts empty arrays */
        if (bytes > PTRDIFF_MAX / length) {
            return no_memory(dtype, ndim, shape);
        }
        bytes *= length;
    }
    bytes = empty ? ca_dtype_size(dtype) : bytes; /* an empty array has memory, too */
    void *memory;
    PyObject *owner = allocate(bytes, pages, &memory);
    if (owner == NULL) {
        return memory == NULL ? no_memory(dtype, ndim, shape) : NULL;
    }
    Py_INCREF(descr); /* the array takes a reference */
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)descr, ndim, dims, NULL,
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

PyObject *
ca_py_array_over(const ca_tensor *tensor, PyObject *descr, bool writeable, PyObject *owner)
{
    size_t size = ca_dtype_size(tensor->dtype);
    npy_intp dims[CA_MAX_DIMS];
    npy_intp strides[CA_MAX_DIMS];
    for (int d = 0; d < tensor->ndim; d++) {
        dims[d] = (npy_intp)tensor->shape[d];
        strides[d] = (npy_intp)tensor->strides[d] * (npy_intp)size;
    }
    PyArray_Descr *taken =
        (PyArray_Descr *)(descr != NULL ? Py_NewRef(descr) : ca_py_moving_descr(tensor->dtype));
    if (taken == NULL) {
        return NULL;
    }
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, taken, tensor->ndim, dims, strides,
                                           tensor->data, writeable ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (array != NULL && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) < 0) {
        Py_CLEAR(array);
    }
    return array;
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
        PyErr_Format(PyExc_ValueError, "copy is False, but dtype is %S and the array's %S",
                     (PyObject *)descr, (PyObject *)PyArray_DESCR((PyArrayObject *)array));
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

/* True if two arrays of one dtype and shape have the same elements in the same order. */
static bool
is_same_view(PyArrayObject *a, PyArrayObject *b)
{
    bool same = PyArray_DATA(a) == PyArray_DATA(b) && PyArray_NDIM(a) == PyArray_NDIM(b) &&
                PyArray_ISNOTSWAPPED(a) == PyArray_ISNOTSWAPPED(b);
    for (int d = 0; same && d < PyArray_NDIM(a); d++) {
        same = same && (PyArray_DIM(a, d) == 1 || PyArray_STRIDE(a, d) == PyArray_STRIDE(b, d));
    }
    return same;
}

/* The limit of numpy.shares_memory, whose worst case is exponential. */
#define SHARING_WORK 100000

/* Returns the array as an ndarray: NumPy's functions ask a subclass, which may answer anything. */
static PyObject *
as_base_class(PyObject *array)
{
    return PyArray_CheckExact(array) ? Py_NewRef(array)
                                     : PyArray_View((PyArrayObject *)array, NULL, &PyArray_Type);
}

static int
find_sharing(PyObject *out, PyObject *input, ca_py_sharing *sharing)
{
    PyObject *near = ca_py_call_from("numpy", "may_share_memory", "(OO)", out, input);
    PyObject *shared = NULL;
    int result = near != NULL ? 0 : -1;
    *sharing = CA_PY_APART;
    if (near == Py_True && is_same_view((PyArrayObject *)out, (PyArrayObject *)input)) {
        *sharing = CA_PY_SAME;
    } else if (near == Py_True) {
        shared = ca_py_call_from("numpy", "shares_memory", "(OOi)", out, input, SHARING_WORK);
        *sharing = shared == Py_False ? CA_PY_INTERLEAVED : CA_PY_OVERLAPPING;
        /* numpy.exceptions.TooHardError is a RuntimeError */
        if (shared == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear();
        } else if (shared == NULL) {
            result = -1;
        }
    }
    Py_XDECREF(shared);
    Py_XDECREF(near);
    return result;
}

int
ca_py_sharing_of(PyObject *out, PyObject *input, ca_py_sharing *sharing)
{
    PyObject *plain_out = as_base_class(out);
    PyObject *plain_input = plain_out != NULL ? as_base_class(input) : NULL;
    int result = plain_input != NULL ? find_sharing(plain_out, plain_input, sharing) : -1;
    Py_XDECREF(plain_input);
    Py_XDECREF(plain_out);
    return result;
}
