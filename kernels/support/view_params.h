/* SPDX-License-Identifier: MIT
 *
 * A tensor as kernels see it. Host C and OpenCL C include the same text. All sizes and
 * strides count elements, in 64 bits.
 */
#pragma once

#ifdef __OPENCL_C_VERSION__
typedef long ca_int64;
typedef uint ca_uint32;
#else
#include <stdint.h>
typedef int64_t ca_int64;
typedef uint32_t ca_uint32;
#endif

/* The leading dimensions of a kernel. The host folds dimensions where it can, and
   halves a problem that still has more. Grouped query heads (GQA) are a dimension whose
   stride is 0 in key and value. */
#define CA_BATCH_DIMS 3

/* Element [b0, b1, b2, r, c] lies at offset + sum(b[n] * batch[n]) + r * row + c *
   column from the tensor's pointer. */
typedef struct {
    ca_int64 offset;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_int64 row;
    ca_int64 column;
} ca_view;
