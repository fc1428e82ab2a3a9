/* SPDX-License-Identifier: MIT
 *
 * Leading dimensions of several tensors, walked together.
 */
#ifndef CLATTN_OP_FOLD_H
#define CLATTN_OP_FOLD_H

#include <stdint.h>

#include "tensor.h"

#define CA_FOLD_TENSORS 16

/* The leading dimensions after folding, and each tensor's strides along them. */
typedef struct {
    int count;
    int64_t size[CA_MAX_DIMS];
    int64_t stride[CA_MAX_DIMS][CA_FOLD_TENSORS];
} ca_leading_dims;

/* Dimensions that can be walked as a single one in every tensor become one; their
   linear order stays. `tensors` (at most CA_FOLD_TENSORS) have nleading leading
   dimensions of the sizes `shape`; absent ones count as of stride 0. */
void ca_fold_leading(const ca_tensor *tensors, int ntensors, int nleading,
                     const int64_t *shape, ca_leading_dims *dims);

#endif
