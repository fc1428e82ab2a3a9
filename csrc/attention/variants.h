/* SPDX-License-Identifier: MIT
 *
 * The rows of the variant table in attention/plan.c, and what they share.
 */
#ifndef CLATTN_OP_ATTENTION_VARIANTS_H
#define CLATTN_OP_ATTENTION_VARIANTS_H

#include <stdbool.h>

#include "attention/plan.h"

/* A kernel of attention problems. `dims` are the leading dimensions, folded to at most
   CA_BATCH_DIMS; what the device lacks float64 for never comes here. */
typedef struct {
    ca_variant variant;
    const char *limits; /* what it takes, for the refusal where it is forced */
    bool (*can_run)(const ca_device_info *info, const ca_attention *attention);
    /* Is it the one to use, on its own account, where it can run? */
    bool (*is_fast)(const ca_device_info *info, const ca_attention *attention,
                    const ca_leading_dims *dims);
    void (*make)(const ca_device_info *info, const ca_attention *attention,
                 const ca_leading_dims *dims, ca_attention_plan *plan);
} ca_attention_variant;

extern const ca_attention_variant ca_attention_on_cpu;   /* attention/cpu.cl */
extern const ca_attention_variant ca_attention_on_pairs; /* with pairs of bfloat16 */
extern const ca_attention_variant ca_attention_decoding; /* attention/decode_cpu.cl */
extern const ca_attention_variant
    ca_attention_decoding_on_gpu;                     /* attention/decode_gpu.cl */
extern const ca_attention_variant ca_attention_tiled; /* attention/tiled.cl */
extern const ca_attention_variant ca_attention_on_matrix_units; /* attention/mma.cl */
extern const ca_attention_variant
    ca_attention_decoding_on_matrix_units; /* attention/decode_mma.cl */

/* ---- attention/facts.c ---- */

bool ca_attention_has(const ca_attention *attention, ca_attention_tensor t);

/* Is the arithmetic in double? */
bool ca_attention_in_float64(const ca_attention *attention);

/* Does the softcap come after the mask? Without a softcap there is no such order. */
bool ca_attention_caps_last(const ca_attention *attention);

/* L, E and Ev. */
int64_t ca_attention_rows(const ca_attention *attention);
int64_t ca_attention_head_size(const ca_attention *attention);
int64_t ca_attention_value_head_size(const ca_attention *attention);

/* Lanes that fill a vector register. */
int64_t ca_attention_lanes(const ca_device_info *info, const ca_attention *attention);

/* An absent tensor has none, a past of no keys neither: its strides mean nothing. */
bool ca_attention_has_rows(const ca_tensor *tensor);

/* Do the elements of a row lie side by side? A row of one element does. */
bool ca_attention_rows_contiguous(const ca_tensor *tensor);

/* And each row behind the one before? A single row, of a new key, has none before. */
bool ca_attention_rows_adjoin(const ca_tensor *tensor);

/* Can the rows be read so many bytes at a time? */
#define CA_WIDE_BYTES 16
bool ca_attention_is_wide(const ca_tensor *tensor);

/* Query heads with the same keys, which may become rows of one work-item: the last
   leading dimension, where nothing of the keys moves along it. */
int64_t ca_attention_heads_together(const ca_leading_dims *dims);

/* Keys that a row may see at most. */
int64_t ca_attention_visible_keys(const ca_attention *attention);

/* ---- attention/plan.c ---- */

/* A grid of all batches, and one work-item for each head and all keys. */
void ca_attention_cover(ca_attention_plan *plan, const ca_leading_dims *dims);

/* Work-items so far, as a number that does not overflow. */
double ca_attention_items(const ca_attention_plan *plan);

void ca_attention_define(ca_kernel_spec *spec, const char *name, int64_t value);

/* The macros of support/common.clh, those that differ from their defaults. */
void ca_attention_define_common(ca_kernel_spec *spec, const ca_attention *attention);

/* These, and the head sizes and whether there is a softcap. */
void ca_attention_define_sizes(ca_kernel_spec *spec, const ca_attention *attention);

/* Those of a kernel that merges rows: all that redoing one takes, and its head size. */
void ca_attention_define_merge(ca_kernel_spec *spec, const ca_attention *attention);

/* ---- attention/plan_decode_gpu.c: what both kernels for few rows share ---- */

/* Parts of the keys: enough to keep a GPU busy, but not too small ones. `groups` are the
   work-groups for one part. */
int64_t ca_attention_parts_on_gpu(const ca_device_info *info,
                                  const ca_attention *attention, double groups);

/* The second kernel, attention/decode_gpu_merge.cl, and what it is left for a row. */
void ca_attention_plan_merge_on_gpu(const ca_device_info *info,
                                    const ca_attention *attention,
                                    ca_attention_plan *plan);

/* ---- attention/plan_mma.c: what both kernels for matrix units share ---- */

/* Has the device the instructions of support/warp_ptx.clh? Others emulate them. */
bool ca_attention_has_matrix_units(const ca_device_info *info);

/* Has it work-groups of so many items, and so much local memory, with what the emulation
   needs besides? */
bool ca_attention_holds_matrices(const ca_device_info *info, int64_t group,
                                 int64_t bytes);

/* Are query and value of one half type, and the problem one that the kernels take but
   for their head sizes? */
bool ca_attention_suits_matrix_units(const ca_attention *attention);

/* ---- attention/plan_cpu.c ---- */

/* Work-items for each core of a CPU, so that all end at about the same time. */
#define CA_ITEMS_FOR_EACH_CORE 4

/* Larger heads would outgrow the private memory that CPU drivers give a work-item. */
#define CA_CPU_MAX_HEAD 512

bool ca_attention_cpu_can_run(const ca_device_info *info,
                              const ca_attention *attention);

static inline int64_t
ca_divide_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step;
}

static inline int64_t
ca_smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
