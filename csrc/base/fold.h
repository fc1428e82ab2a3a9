/* SPDX-License-Identifier: MIT
 *
 * Leading dimensions of several tensors, walked together.
 */
#ifndef CLATTN_FOLD_H
#define CLATTN_FOLD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/tensor.h"
#include "kernels/support/view_params.h" /* CA_BATCH_DIMS */

#define CA_FOLD_TENSORS 36

/* Leading dimensions after folding, and each tensor's strides along them. */
typedef struct {
    int count;
    int64_t size[CA_MAX_DIMS];
    int64_t stride[CA_MAX_DIMS][CA_FOLD_TENSORS];
} ca_leading_dims;

/* Joins neighbouring dimensions that every tensor can walk as a single one. Their linear
   order stays. `tensors`, at most CA_FOLD_TENSORS, have nleading leading dimensions of
   the sizes `shape`; an absent tensor counts as one whose strides are 0. */
void ca_fold_leading(const ca_tensor *tensors, int ntensors, int nleading, const int64_t *shape,
                     ca_leading_dims *dims);

/* Removes folded dimension `d`. */
void ca_fold_remove(ca_leading_dims *dims, int d);

/* Write the sizes, or the strides of tensor `t`, of at most CA_BATCH_DIMS folded dimensions for a
   kernel. The last dimension comes last; entries before the first one keep their values. */
void ca_fold_sizes(const ca_leading_dims *dims, ca_int64 batch[CA_BATCH_DIMS]);
void ca_fold_strides(const ca_leading_dims *dims, int t, ca_int64 batch[CA_BATCH_DIMS]);

/* Returns the dimension of the smallest size above 1, -1 if there is none. Halving this
   dimension until its size is 1 takes the fewest halves. */
int ca_smallest_dimension(const int64_t *shape, int ndim);

#endif
