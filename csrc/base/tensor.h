/* SPDX-License-Identifier: MIT
 *
 * Tensor descriptors: strided views of memory that somebody else owns, the host's or a
 * device's.
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

/* NumPy's own limit, and one more for heads split into groups. */
#define CA_MAX_DIMS 65

/* Memory of a device, as a range of addresses. Where the host does not share it, they
   are only there to tell one element's place from another's. */
typedef struct {
    void *address;
    size_t bytes;
} ca_block;

/* Only the first `ndim` entries of shape and strides are meaningful. */
typedef struct {
    ca_dtype dtype;
    int ndim;
    void
        *data; /* element [0, 0, …], aligned to its dtype; NULL: the tensor is absent */
    ca_block *block; /* of a device that holds it; NULL: host memory */
    int64_t shape[CA_MAX_DIMS];
    int64_t strides[CA_MAX_DIMS]; /* in elements; zero and negative are fine */
} ca_tensor;

/* Make it an absent tensor, without clearing what is not looked at then. */
void ca_tensor_set_absent(ca_tensor *tensor);

/* Make `view` start at the same element, without dimensions yet. */
void ca_tensor_start_view(const ca_tensor *tensor, ca_tensor *view);

/* The number of elements of a tensor that there is. */
int64_t ca_tensor_count(const ca_tensor *tensor);

/* Sizes and strides counted from the end: 1 is the last dimension. A missing dimension
   is of size 1, as in broadcasting; one of size 1 has stride 0. */
int64_t ca_tensor_size(const ca_tensor *tensor, int from_end);
int64_t ca_tensor_stride(const ca_tensor *tensor, int from_end);

/* The bytes a tensor touches: [data, data + bytes), and how many elements lie between
   the start and element [0, 0, …] (not 0 with negative strides). bytes is 0 for an
   empty or absent tensor. */
typedef struct {
    void *data;
    size_t bytes;
    int64_t offset;
} ca_extent;

ca_extent ca_tensor_extent(const ca_tensor *tensor);

/* The same, or all of the block of a tensor that a device holds. */
ca_extent ca_tensor_memory(const ca_tensor *tensor);

/* Does every byte of the extent belong to an element? Broadcast ones count once. */
bool ca_tensor_fills_extent(const ca_tensor *tensor);

/* Does each dimension step over all that lies within those of smaller steps, so that no
   two elements share a place? */
bool ca_tensor_is_nested(const ca_tensor *tensor);

/* Do they share a byte? */
bool ca_extents_overlap(const ca_extent *a, const ca_extent *b);

/* The first element of a float or bool tensor in the host's memory, 0 of an empty
   one. */
double ca_tensor_first_number(const ca_tensor *tensor);

/* "(2, 8, 77, 64)" into `text`, cut to fit. Returns `text`. */
const char *ca_shape_format(int ndim, const int64_t *shape, char *text, size_t size);

/* Product of sizes; CA_ERROR_VALUE naming `what` where it does not fit in int64. */
ca_status ca_shape_count(int ndim, const int64_t *shape, const char *what,
                         int64_t *count, ca_error *error);

#endif
