/* SPDX-License-Identifier: MIT
 *
 * What both variants for few rows on GPUs share: the merge of splits.
 */
#ifndef CLATTN_ATTENTION_PLAN_DECODE_GPU_H
#define CLATTN_ATTENTION_PLAN_DECODE_GPU_H

#include "attention/plan.h"
#include "opencl/info.h" /* ca_device_info */

/* Plan the second kernel, attention/decode_gpu_merge.cl, and the memory that a split leaves
   for each row. */
void ca_plan_merge_on_gpu(const ca_device_info *info, const ca_attention *attention,
                          ca_attention_plan *plan);

#endif
