/* SPDX-License-Identifier: MIT
 *
 * The rows of the variant table in op_attention_plan.c, and what they share.
 */
#ifndef CLATTN_OP_ATTENTION_VARIANTS_H
#define CLATTN_OP_ATTENTION_VARIANTS_H

#include <stdbool.h>

#include "op_attention_plan.h"

/* A kernel of attention problems. `dims` are the leading dimensions, folded to at most
   CA_BATCH_DIMS; what the device lacks float64 for never comes here. */
typedef struct {
    ca_variant variant;
    const char *limits; /* what it takes, for the refusal where it is forced */
    bool (*can_run)(const ca_device_info *info, const ca_attention *attention);
    /* Is it the one to use, on its own account, where it can run? */
    bool (*is_fast)(const ca_device_info *info, const ca_attention *attention);
    void (*make)(const ca_device_info *info, const ca_attention *attention,
                 const ca_leading_dims *dims, ca_attention_plan *plan);
} ca_attention_variant;

extern const ca_attention_variant ca_attention_on_cpu;   /* attention_cpu.cl */
extern const ca_attention_variant ca_attention_on_pairs; /* with pairs of bfloat16 */
extern const ca_attention_variant ca_attention_decoding; /* attention_decode.cl */

bool ca_attention_has(const ca_attention *attention, ca_attention_tensor t);

/* Is the arithmetic in double? */
bool ca_attention_in_float64(const ca_attention *attention);

/* Does the softcap come after the mask? Without a softcap there is no such order. */
bool ca_attention_caps_last(const ca_attention *attention);

/* A grid of all batches, and one work-item for each head and all keys. */
void ca_attention_cover(ca_attention_plan *plan, const ca_leading_dims *dims);

void ca_attention_define(ca_kernel_spec *spec, const char *name, int64_t value);

/* The macros of common.cl, those that differ from their defaults. */
void ca_attention_define_common(ca_kernel_spec *spec, const ca_attention *attention);

#endif
