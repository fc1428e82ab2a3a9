/* SPDX-License-Identifier: MIT
 *
 * A tensor as kernels see it, one text for host C and OpenCL C. All sizes and strides
 * count elements, in 64 bits.
 */
#ifndef CLATTN_VIEW_PARAMS_H
#define CLATTN_VIEW_PARAMS_H

#ifdef __OPENCL_C_VERSION__
typedef long ca_int64;
typedef uint ca_uint32;
#else
#include <stdint.h>
typedef int64_t ca_int64;
typedef uint32_t ca_uint32;
#endif

/* Leading dimensions a kernel walks; the host folds what it can and halves a call that
   has more. A grouped query (GQA) is a dimension with stride 0 in key and value. */
#define CA_BATCH_DIMS 3

/* Where element [b0, b1, b2, row, column] of a tensor lies from its pointer:
   offset + sum(b[n] * batch[n]) + r * row + c * column. */
typedef struct {
    ca_int64 offset;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_int64 row;
    ca_int64 column;
} ca_view;

#endif
