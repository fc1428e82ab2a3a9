/* SPDX-License-Identifier: MIT */
#include "base/tensor.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[CA_DTYPE_COUNT] = {
    [CA_BOOL] = {"bool", 1},       [CA_FLOAT16] = {"float16", 2}, [CA_BFLOAT16] = {"bfloat16", 2},
    [CA_FLOAT32] = {"float32", 4}, [CA_FLOAT64] = {"float64", 8}, [CA_INT8] = {"int8", 1},
    [CA_INT16] = {"int16", 2},     [CA_INT32] = {"int32", 4},     [CA_INT64] = {"int64", 8},
    [CA_UINT8] = {"uint8", 1},     [CA_UINT16] = {"uint16", 2},   [CA_UINT32] = {"uint32", 4},
    [CA_UINT64] = {"uint64", 8},
};

size_t
ca_dtype_size(ca_dtype dtype)
{
    return dtypes[dtype].size;
}

const char *
ca_dtype_name(ca_dtype dtype)
{
    return dtypes[dtype].name;
}

void
ca_tensor_set_absent(ca_tensor *tensor)
{
    tensor->dtype = CA_FLOAT32;
    tensor->ndim = 0;
    tensor->data = NULL;
    tensor->block = NULL;
}

void
ca_tensor_start_view(const ca_tensor *tensor, ca_tensor *view)
{
    view->dtype = tensor->dtype;
    view->ndim = 0;
    view->data = tensor->data;
    view->block = tensor->block;
}

void
ca_tensor_add_dim(ca_tensor *view, int64_t size, int64_t stride)
{
    view->shape[view->ndim] = size;
    view->strides[view->ndim++] = stride;
}

void
ca_tensor_take(ca_tensor *view, int d, int64_t first, int64_t count)
{
    ptrdiff_t size = (ptrdiff_t)ca_dtype_size(view->dtype);
    view->data = (char *)view->data + first * view->strides[d] * size;
    view->shape[d] = count;
}

void
ca_tensor_swap(ca_tensor *view, int d)
{
    const int64_t size = view->shape[d];
    const int64_t stride = view->strides[d];
    view->shape[d] = view->shape[d + 1];
    view->strides[d] = view->strides[d + 1];
    view->shape[d + 1] = size;
    view->strides[d + 1] = stride;
}

int64_t
ca_tensor_count(const ca_tensor *tensor)
{
    uint64_t count = 1; /* may wrap around before a size of 0 */
    for (int d = 0; d < tensor->ndim; d++) {
        count *= (uint64_t)tensor->shape[d];
    }
    return (int64_t)count;
}

int64_t
ca_tensor_size(const ca_tensor *tensor, int from_end)
{
    return from_end <= tensor->ndim ? tensor->shape[tensor->ndim - from_end] : 1;
}

int64_t
ca_tensor_stride(const ca_tensor *tensor, int from_end)
{
    bool broadcasts = ca_tensor_size(tensor, from_end) == 1;
    return broadcasts ? 0 : tensor->strides[tensor->ndim - from_end];
}

ca_extent
ca_tensor_extent(const ca_tensor *tensor)
{
    int64_t below = 0; /* elements before and after element [0, 0, …] */
    int64_t above = 0;
    if (tensor->data == NULL) {
        return (ca_extent){0};
    }
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) {
            return (ca_extent){.data = tensor->data};
        }
        int64_t reach = (tensor->shape[i] - 1) * tensor->strides[i];
        if (reach < 0) {
            below -= reach;
        } else {
            above += reach;
        }
    }
    size_t size = ca_dtype_size(tensor->dtype);
    return (ca_extent){
        .data = (char *)tensor->data - (size_t)below * size,
        .bytes = (size_t)(below + above + 1) * size,
        .offset = below,
    };
}

ca_extent
ca_tensor_memory(const ca_tensor *tensor)
{
    ca_extent extent = ca_tensor_extent(tensor);
    if (tensor->block == NULL || extent.bytes == 0) {
        return extent;
    }
    ptrdiff_t before = (char *)tensor->data - (char *)tensor->block->address;
    return (ca_extent){
        .data = tensor->block->address,
        .bytes = tensor->block->bytes,
        .offset = before / (ptrdiff_t)ca_dtype_size(tensor->dtype),
    };
}

bool
ca_tensor_fills_extent(const ca_tensor *tensor)
{
    size_t bytes = ca_dtype_size(tensor->dtype);
    for (int d = 0; d < tensor->ndim; d++) {
        bool moves = tensor->strides[d] != 0 || tensor->shape[d] == 0;
        bytes *= moves ? (size_t)tensor->shape[d] : 1;
    }
    return bytes == ca_tensor_extent(tensor).bytes;
}

static int64_t
step_of(const ca_tensor *tensor, int d)
{
    return llabs(tensor->strides[d]);
}

/* True if each dimension steps over everything that the dimensions behind it reach. */
static bool
is_nested_in_order(const ca_tensor *tensor)
{
    int64_t reach = 0;
    for (int d = tensor->ndim - 1; d >= 0; d--) {
        if (tensor->shape[d] > 1) {
            if (step_of(tensor, d) <= reach) {
                return false;
            }
            reach += (tensor->shape[d] - 1) * step_of(tensor, d);
        }
    }
    return true;
}

bool
ca_tensor_is_nested(const ca_tensor *tensor)
{
    bool taken[CA_MAX_DIMS] = {false};
    int64_t reach = 0; /* of the dimensions taken so far */
    if (ca_tensor_extent(tensor).bytes == 0 || is_nested_in_order(tensor)) {
        return true;
    }
    for (int n = 0; n < tensor->ndim; n++) {
        int next = 0;
        while (taken[next]) {
            next++;
        }
        for (int d = next + 1; d < tensor->ndim; d++) {
            if (!taken[d] && step_of(tensor, d) < step_of(tensor, next)) {
                next = d;
            }
        }
        taken[next] = true;
        if (tensor->shape[next] > 1) {
            if (step_of(tensor, next) <= reach) {
                return false;
            }
            reach += (tensor->shape[next] - 1) * step_of(tensor, next);
        }
    }
    return true;
}

/* Marks each element of the extent that an element of the tensor is. True if one was marked. */
static bool
mark_elements(const ca_tensor *tensor, uint8_t *marks)
{
    int64_t index[CA_MAX_DIMS] = {0};
    int64_t place = ca_tensor_extent(tensor).offset;
    int64_t count = ca_tensor_count(tensor);
    for (int64_t n = 0; n < count; n++) {
        uint8_t bit = (uint8_t)(1u << place % 8);
        if ((marks[place / 8] & bit) != 0) {
            return true;
        }
        marks[place / 8] |= bit;
        for (int d = tensor->ndim - 1; d >= 0; d--) {
            place += tensor->strides[d];
            if (++index[d] < tensor->shape[d]) {
                break;
            }
            place -= tensor->shape[d] * tensor->strides[d];
            index[d] = 0;
        }
    }
    return false;
}

ca_status
ca_tensor_find_repeats(const ca_tensor *tensor, bool *repeats, ca_error *error)
{
    *repeats = false;
    if (ca_tensor_is_nested(tensor)) {
        return CA_OK;
    }
    size_t places = ca_tensor_extent(tensor).bytes / ca_dtype_size(tensor->dtype);
    if ((uint64_t)ca_tensor_count(tensor) > places) {
        *repeats = true;
        return CA_OK;
    }
    uint8_t *marks = calloc(places / 8 + 1, 1);
    if (marks == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory to look for shared elements");
    }
    *repeats = mark_elements(tensor, marks);
    free(marks);
    return CA_OK;
}

bool
ca_extents_overlap(const ca_extent *a, const ca_extent *b)
{
    const char *a_start = a->data;
    const char *b_start = b->data;
    return a->bytes != 0 && b->bytes != 0 && a_start < b_start + b->bytes &&
           b_start < a_start + a->bytes;
}

static double
half_to_double(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    int fraction = bits & 1023;
    double size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                  : exponent == 0 ? ldexp(fraction, -24)
                                  : ldexp(1024 + fraction, exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
}

double
ca_tensor_first_number(const ca_tensor *tensor)
{
    uint32_t bits;
    float number;
    if (ca_tensor_extent(tensor).bytes == 0) {
        return 0;
    }
    switch (tensor->dtype) {
    case CA_BOOL:
        return *(const uint8_t *)tensor->data;
    case CA_FLOAT16:
        return half_to_double(*(const uint16_t *)tensor->data);
    case CA_BFLOAT16:
        bits = (uint32_t)*(const uint16_t *)tensor->data << 16;
        memcpy(&number, &bits, sizeof(number));
        return number;
    case CA_FLOAT64:
        return *(const double *)tensor->data;
    default:
        return *(const float *)tensor->data;
    }
}

const char *
ca_shape_format(int ndim, const int64_t *shape, char *text, size_t size)
{
    size_t length = 0;
    /* snprintf returns the full length, even if the text was cut. */
    for (int i = 0; i < ndim && length < size; i++) {
        length += (size_t)snprintf(text + length, size - length, "%s%" PRId64, i == 0 ? "(" : ", ",
                                   shape[i]);
    }
    if (length < size) {
        const char *end = ndim == 0 ? "()" : ndim == 1 ? ",)" : ")";
        (void)snprintf(text + length, size - length, "%s", end);
    }
    return text;
}

ca_status
ca_shape_count(int ndim, const int64_t *shape, const char *what, int64_t *count, ca_error *error)
{
    int64_t product = 1;
    bool overflow = false;
    bool empty = false; /* whatever the other sizes are */
    for (int i = 0; i < ndim && !empty; i++) {
        empty = shape[i] == 0;
        bool large = ((product | shape[i]) >> 31) != 0; /* a division takes long */
        overflow = overflow || (!empty && large && product > INT64_MAX / shape[i]);
        product *= overflow ? 0 : shape[i];
    }
    if (overflow && !empty) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s of shape %s has more elements than 64 bits count", what,
                            CA_SHAPE_WORDS(ndim, shape));
    }
    *count = product;
    return CA_OK;
}
