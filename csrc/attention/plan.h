/* SPDX-License-Identifier: MIT
 *
 * Which kernel runs an attention problem on a device, and how it covers it.
 */
#ifndef CLATTN_OP_ATTENTION_PLAN_H
#define CLATTN_OP_ATTENTION_PLAN_H

#include "attention/problem.h"
#include "base/fold.h"      /* ca_leading_dims */
#include "opencl/program.h" /* ca_kernel_spec */

#define CA_ATTENTION_GRID_DIMS 5

typedef struct {
    ca_kernel_spec spec;
    int64_t grid[CA_ATTENTION_GRID_DIMS]; /* work-items: the product */
    size_t local_size;                    /* those of a group */
    int64_t heads;                        /* query heads of one work-item */
    /* Parts of the keys. With more than one, each row of each part leaves so many bytes
       in `partial`, of which the second kernel, run for each row, makes the result: a
       group of merge_local work-items. */
    int64_t splits;
    int64_t partial_bytes;
    ca_kernel_spec merge;
    size_t merge_local;
} ca_attention_plan;

/* The softcap within the range of the arithmetic, 0 for none: in float32 one above its
   range is as good as none, one below as good as the lowest there is. */
double ca_attention_softcap(const ca_attention *attention);

/* False where the probability of dropping is less than a random word resolves. */
bool ca_attention_drops(const ca_attention *attention);

/* CA_ERROR_DEVICE where the device lacks the dtype; CA_ERROR_VALUE where the variant
   asked for cannot run the problem. */
ca_status ca_attention_make_plan(const ca_device_info *info,
                                 const ca_attention *attention,
                                 const ca_leading_dims *dims, ca_attention_plan *plan,
                                 ca_error *error);

#endif
