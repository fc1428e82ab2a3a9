/* SPDX-License-Identifier: MIT
 *
 * What another library says of its memory, and whether it can be so.
 */
#include "python/dlpack.h"

static bool
dtype_of(const ca_dlpack_tensor *tensor, ca_dtype *dtype)
{
    static const struct {
        uint8_t code;
        uint8_t bits;
        ca_dtype dtype;
    } rows[] = {
        {CA_DLPACK_BOOL, 8, CA_BOOL},        {CA_DLPACK_FLOAT, 16, CA_FLOAT16},
        {CA_DLPACK_BFLOAT, 16, CA_BFLOAT16}, {CA_DLPACK_FLOAT, 32, CA_FLOAT32},
        {CA_DLPACK_FLOAT, 64, CA_FLOAT64},   {CA_DLPACK_INT, 8, CA_INT8},
        {CA_DLPACK_INT, 16, CA_INT16},       {CA_DLPACK_INT, 32, CA_INT32},
        {CA_DLPACK_INT, 64, CA_INT64},       {CA_DLPACK_UINT, 8, CA_UINT8},
        {CA_DLPACK_UINT, 16, CA_UINT16},     {CA_DLPACK_UINT, 32, CA_UINT32},
        {CA_DLPACK_UINT, 64, CA_UINT64},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (tensor->code == rows[i].code && tensor->bits == rows[i].bits &&
            tensor->lanes == 1) {
            *dtype = rows[i].dtype;
            return true;
        }
    }
    return false;
}

static int
check_dtype(const ca_dlpack_tensor *given, const char *name, ca_dtype *dtype)
{
    static const char *const kinds[] = {"int",    "uint",    "float", "opaque",
                                        "bfloat", "complex", "bool"};
    if (dtype_of(given, dtype)) {
        return 0;
    }
    const char *kind = given->code < sizeof(kinds) / sizeof(kinds[0])
                           ? kinds[given->code]
                           : "unknown type of ";
    char lanes[32] = "";
    if (given->lanes != 1) {
        snprintf(lanes, sizeof(lanes), " with %d lanes", (int)given->lanes);
    }
    PyErr_Format(PyExc_TypeError,
                 "%s has dtype %s%d%s; expected bool, an integer type, float16, "
                 "bfloat16, float32 or float64",
                 name, kind, (int)given->bits, lanes);
    return -1;
}

static int
fault(const char *name, const char *what)
{
    PyErr_Format(PyExc_ValueError, "%s has a __dlpack__ whose tensor has %s", name,
                 what);
    return -1;
}

/* Sizes that are none, or whose bytes 63 bits do not count. */
static int
check_shape(const ca_dlpack_tensor *given, const char *name, size_t size, bool *empty)
{
    int64_t bytes = (int64_t)size;
    *empty = false;
    if (given->ndim < 0 || given->ndim > CA_MAX_DIMS - 1) {
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions; expected 0 to %d", name,
                     (int)given->ndim, CA_MAX_DIMS - 1);
        return -1;
    }
    if (given->ndim > 0 && given->shape == NULL) {
        return fault(name, "no shape");
    }
    for (int d = 0; d < given->ndim; d++) {
        if (given->shape[d] < 0) {
            PyErr_Format(PyExc_ValueError,
                         "%s has a __dlpack__ whose tensor has size %lld in dimension "
                         "%d; expected 0 or more",
                         name, (long long)given->shape[d], d);
            return -1;
        }
        *empty = *empty || given->shape[d] == 0;
    }
    for (int d = 0; d < given->ndim && !*empty; d++) {
        if (bytes > INT64_MAX / given->shape[d]) {
            return fault(name, "more elements than 63 bits count");
        }
        bytes *= given->shape[d];
    }
    return 0;
}

/* The elements lie within the addresses there are. */
static int
set_strides(const ca_dlpack_tensor *given, const char *name, bool empty,
            ca_tensor *tensor)
{
    int64_t stride = 1;
    int64_t reach = 0;
    int64_t limit = INT64_MAX / (int64_t)ca_dtype_size(tensor->dtype) / 2;
    for (int d = given->ndim - 1; d >= 0; d--) {
        int64_t size = given->shape[d];
        tensor->shape[d] = size;
        tensor->strides[d] = 0;
        if (size > 1 && !empty) {
            int64_t step = given->strides != NULL ? given->strides[d] : stride;
            int64_t room = (limit - reach) / (size - 1);
            if (step > room || step < -room) {
                return fault(name, "strides that leave the address space");
            }
            tensor->strides[d] = step;
            reach += (step < 0 ? -step : step) * (size - 1);
            stride *= size;
        }
    }
    return 0;
}

int
ca_py_dlpack_read(const ca_dlpack_tensor *given, const char *name, ca_tensor *tensor)
{
    static const char nowhere[sizeof(double)] = {0}; /* where an empty array lies */
    bool empty;
    if (check_dtype(given, name, &tensor->dtype) < 0 ||
        check_shape(given, name, ca_dtype_size(tensor->dtype), &empty) < 0 ||
        set_strides(given, name, empty, tensor) < 0) {
        return -1;
    }
    if (given->data == NULL && !empty) {
        return fault(name, "no memory");
    }
    tensor->ndim = given->ndim;
    tensor->block = NULL;
    tensor->data =
        empty ? (void *)nowhere : (void *)((char *)given->data + given->byte_offset);
    return 0;
}
