/* SPDX-License-Identifier: MIT
 *
 * Leading dimensions of several tensors, walked together, and halves of what one launch
 * cannot hold.
 */
#ifndef CLATTN_OP_FOLD_H
#define CLATTN_OP_FOLD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/tensor.h"
#include "kernels/support/view_params.h" /* CA_BATCH_DIMS */
#include "opencl/info.h"                 /* ca_device_info */

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

/* What kernels are told: sizes, and the strides of tensor `t`, of at most CA_BATCH_DIMS
   folded dimensions, the last ones last. What there is not is left as it is. */
void ca_fold_sizes(const ca_leading_dims *dims, ca_int64 batch[CA_BATCH_DIMS]);
void ca_fold_strides(const ca_leading_dims *dims, int t, ca_int64 batch[CA_BATCH_DIMS]);

/* Make it entries first … first + count - 1 of dimension `d`; an absent tensor stays
   so. */
void ca_take_part(ca_tensor *tensor, int d, int64_t first, int64_t count);

/* The dimension of the smallest size above 1, -1 if there is none: halving it first
   takes the fewest parts to be rid of a dimension. */
int ca_smallest_dimension(const int64_t *shape, int ndim);

/* Is one of them more than the device takes as one buffer? */
bool ca_exceeds_device(const ca_device_info *info, const ca_extent *extents, int count);

#endif
