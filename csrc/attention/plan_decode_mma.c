/* SPDX-License-Identifier: MIT
 *
 * The variant for few rows on devices with matrix units, attention/decode_mma.cl: the
 * rows of query heads that share their keys are a tile of 16.
 */
#include "attention/variants.h"

/* Rows of a matrix tile. With as many of one head at most, keys are not read more often
   than by attention/mma.cl, which reads them once for each head and does not split them.
 */
#define TILE_ROWS 16

/* While 16 keys of E = 128 come from memory, at 20 bytes a cycle for each compute unit, it
   issues 1640 instructions. Some 300 of these are this kernel's, whatever the count of
   rows; attention/decode_gpu.cl needs 710 with one row, 910 with two, 1370 with four and
   2320 with eight. */
#define FEWEST_ROWS 3

/* Work-items of a group, in warps of 32, each with its own share of the keys: WARPS of
   the kernel. */
#define THREADS 128

/* What the registers of a work-item hold beside each other. */
#define MAX_HEAD       192
#define MAX_VALUE_HEAD 128

/* The warps' results, and the rest. */
#define LOCAL_BYTES (36 << 10)

static bool
decode_mma_can_run(const ca_device_info *info, const ca_attention *attention)
{
    int64_t E = ca_attention_head_size(attention);
    int64_t Ev = ca_attention_value_head_size(attention);
    return ca_attention_suits_matrix_units(attention) && E >= 1 && E <= MAX_HEAD &&
           Ev >= 1 && Ev <= MAX_VALUE_HEAD &&
           ca_attention_is_wide(&attention->tensors[CA_ATTENTION_KEY]) &&
           ca_attention_is_wide(&attention->tensors[CA_ATTENTION_VALUE]) &&
           ca_attention_holds_matrices(info, THREADS, LOCAL_BYTES);
}

/* The emulation is for tests. */
static bool
decode_mma_is_fast(const ca_device_info *info, const ca_attention *attention,
                   const ca_leading_dims *dims)
{
    int64_t L = ca_attention_rows(attention);
    return ca_attention_has_matrix_units(info) && L <= TILE_ROWS &&
           ca_attention_heads_together(dims) * L >= FEWEST_ROWS;
}

static void
plan_decode_mma(const ca_device_info *info, const ca_attention *attention,
                const ca_leading_dims *dims, ca_attention_plan *plan)
{
    *plan = (ca_attention_plan){.spec = {.name = "attention_decode_mma"},
                                .local_size = THREADS};
    ca_attention_cover(plan, dims);
    plan->heads = ca_attention_heads_together(dims);
    plan->grid[2] /= plan->heads;
    plan->grid[3] = ca_divide_up(plan->heads * ca_attention_rows(attention), TILE_ROWS);
    plan->splits = ca_attention_parts_on_gpu(info, attention, ca_attention_items(plan));
    plan->grid[4] = plan->splits * THREADS;
    ca_attention_define_sizes(&plan->spec, attention);
    ca_attention_define(&plan->spec, "WARP", ca_attention_has_matrix_units(info));
    ca_attention_plan_merge_on_gpu(info, attention, plan);
}

const ca_attention_variant ca_attention_decoding_on_matrix_units = {
    CA_VARIANT_DECODE_MMA,
    "query and value of one half type, head sizes of 1 to 192 and of value of 1 to "
    "128, "
    "rows of keys and values of whole aligned 16 bytes, and no past keys, input bias, "
    "dropout, scores or softcap after the mask, on devices with 40 KiB of local memory",
    decode_mma_can_run, decode_mma_is_fast, plan_decode_mma};
