/* SPDX-License-Identifier: MIT
 *
 * Tensor descriptors: strided views of memory of the host or of a device. A descriptor
 * does not own the memory.
 */
#ifndef CLATTN_TENSOR_H
#define CLATTN_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum {
    CA_BOOL, /* one byte, 0 or 1 */
    CA_FLOAT16,
    CA_BFLOAT16,
    CA_FLOAT32,
    CA_FLOAT64,
    CA_INT8,
    CA_INT16,
    CA_INT32,
    CA_INT64,
    CA_UINT8,
    CA_UINT16,
    CA_UINT32,
    CA_UINT64,
    CA_DTYPE_COUNT,
} ca_dtype;

size_t ca_dtype_size(ca_dtype dtype);
const char *ca_dtype_name(ca_dtype dtype); /* "float16" */

static inline bool
ca_dtype_is_float(ca_dtype dtype)
{
    return dtype >= CA_FLOAT16 && dtype <= CA_FLOAT64;
}

/* NumPy's limit is 64. One more is for heads that are split into groups. */
#define CA_MAX_DIMS 65

/* Memory of a device, as a range of addresses. If the host does not share the memory,
   nobody may read the addresses; they only tell elements apart. */
typedef struct {
    void *address;
    size_t bytes;
} ca_block;

/* Only the first `ndim` entries of shape and strides are meaningful. */
typedef struct {
    ca_dtype dtype;
    int ndim;
    void *data;      /* element [0, 0, …], aligned to its dtype; NULL: an absent tensor */
    ca_block *block; /* the device's memory that holds it; NULL: host memory */
    int64_t shape[CA_MAX_DIMS];
    int64_t strides[CA_MAX_DIMS]; /* in elements; zero and negative are fine */
} ca_tensor;

/* Makes the tensor absent. Its shape and strides stay uninitialised. */
void ca_tensor_set_absent(ca_tensor *tensor);

/* Makes `view` start at the same element. It has no dimensions yet. */
void ca_tensor_start_view(const ca_tensor *tensor, ca_tensor *view);

/* Appends a dimension to a view. */
void ca_tensor_add_dim(ca_tensor *view, int64_t size, int64_t stride);

/* Takes the entries first … first + count - 1 of dimension `d`. */
void ca_tensor_take(ca_tensor *view, int d, int64_t first, int64_t count);

/* Swaps the dimensions `d` and `d` + 1. */
void ca_tensor_swap(ca_tensor *view, int d);

/* Returns the number of elements of a tensor that is not absent. */
int64_t ca_tensor_count(const ca_tensor *tensor);

/* Return a size or stride, counted from the end: 1 is the last dimension. As in
   broadcasting, a missing dimension has size 1. A dimension of size 1 has stride 0. */
int64_t ca_tensor_size(const ca_tensor *tensor, int from_end);
int64_t ca_tensor_stride(const ca_tensor *tensor, int from_end);

/* The range of memory [data, data + bytes) in which a tensor's elements lie. */
typedef struct {
    void *data;
    size_t bytes;   /* 0 for an empty or absent tensor */
    int64_t offset; /* elements from `data` to element [0, 0, …]: with negative strides */
} ca_extent;

ca_extent ca_tensor_extent(const ca_tensor *tensor);

/* Returns the whole block of a tensor that a device holds, else the extent. */
ca_extent ca_tensor_memory(const ca_tensor *tensor);

/* True if every byte of the extent belongs to an element. Dimensions of stride 0 count once. */
bool ca_tensor_fills_extent(const ca_tensor *tensor);

/* True if each stride steps over everything that the dimensions of smaller strides
   reach. Then no two elements share memory. */
bool ca_tensor_is_nested(const ca_tensor *tensor);

/* Sets *repeats to whether two elements share memory, exactly. CA_ERROR_MEMORY if the host has no
   memory for a bit for each element of the extent, which only strides that are not nested need. */
ca_status ca_tensor_find_repeats(const ca_tensor *tensor, bool *repeats, ca_error *error);

/* True if the extents share a byte. */
bool ca_extents_overlap(const ca_extent *a, const ca_extent *b);

/* Returns the first element of a float or bool tensor in the host's memory, 0 if it is empty. */
double ca_tensor_first_number(const ca_tensor *tensor);

/* Writes "(2, 8, 77, 64)" into `text`, cut to fit. Returns `text`. */
const char *ca_shape_format(int ndim, const int64_t *shape, char *text, size_t size);

/* The text of ca_shape_format as an argument of ca_error_set, in memory of the enclosing block. */
#define CA_SHAPE_TEXT 160
#define CA_SHAPE_WORDS(ndim, shape)                                                                \
    ca_shape_format(ndim, shape, (char[CA_SHAPE_TEXT]){0}, CA_SHAPE_TEXT)
#define CA_SHAPE_OF(tensor) CA_SHAPE_WORDS((tensor)->ndim, (tensor)->shape)

/* Computes the number of elements. CA_ERROR_VALUE naming `what` if 64 bits do not hold it. */
ca_status ca_shape_count(int ndim, const int64_t *shape, const char *what, int64_t *count,
                         ca_error *error);

#endif
