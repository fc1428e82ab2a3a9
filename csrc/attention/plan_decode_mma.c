/* SPDX-License-Identifier: MIT
 *
 * The variant decode_mma, for few rows on devices with matrix units:
 * attention/decode_mma.cl. Rows of query heads that share their keys make a tile of 16.
 */
#include <math.h>

#include "attention/plan_decode_gpu.h"
#include "attention/variants.h"

/* Rows of a matrix tile. With at most as many rows of one head, attention/mma.cl would
   not read keys less often: it reads them once for each head, and does not split them. */
#define TILE_ROWS 16

/* While 16 keys of E = 128 come from memory, at 20 bytes a cycle, a compute unit can issue
   1640 instructions. This kernel needs some 370, for any number of rows.
   attention/decode_gpu.cl needs 710 for one row, 910 for two, 1370 for four, 2320 for
   eight. */
#define FEWEST_ROWS 3

/* Warps of a group, and their work-items. Each warp has a share of the keys. */
#define WARPS   4
#define THREADS (WARPS * 32)

/* The registers of a work-item hold a key and a value of these sizes at once. */
#define MAX_HEAD       192
#define MAX_VALUE_HEAD 128

/* Local memory for the warps' results and the rest. */
#define LOCAL_BYTES (36 << 10)

/* Work-groups that a compute unit runs at a time: as many as its 64 Ki registers hold. By
   offline assembly, a work-item has 142 to 158 registers with head sizes of at most
   SMALL_HEAD, and more than 168 with larger ones. */
#define RESIDENT_GROUPS       2
#define RESIDENT_SMALL_GROUPS 3
#define SMALL_HEAD            64

/* Resident groups are a wave. The splits fill one wave, or a few if at least this share
   of the units' time is idle less. */
#define MOST_WAVES 6
#define LEAST_GAIN 0.1

/* Keys of a split, at least: four turns of each warp. What a group does once, before and
   after its keys, is as many instructions as five turns. */
#define SMALLEST_SPLIT (4 * WARPS * 16)

/* Bytes of a split, at least, where the groups fill one wave already. A split leaves up to 8 KiB for
   the merge, which writes and reads them: 6 % of the keys and values. */
#define AMPLE_SPLIT (256 << 10)

/* Returns how many splits keep all units busy. `groups` are the work-groups of one split. */
static int64_t
choose_splits(const ca_device_info *info, const ca_attention *attention, double groups)
{
    bool small = attention->E <= SMALL_HEAD && attention->Ev <= SMALL_HEAD;
    double wave = (double)(info->compute_units * (small ? RESIDENT_SMALL_GROUPS : RESIDENT_GROUPS));
    double keys = (double)ca_attention_visible_keys(attention);
    double most = floor(keys / SMALLEST_SPLIT);
    double ample = floor(keys * (double)ca_attention_key_bytes(attention) / AMPLE_SPLIT);
    double chosen = 1;
    double fullest = 0;
    for (int waves = 1; waves <= MOST_WAVES; waves++) {
        double splits = fmin(floor(waves * wave / groups), waves == 1 ? most : fmin(most, ample));
        double full = splits * groups / (waves * wave);
        if (splits >= 1 && full > fullest + LEAST_GAIN) {
            chosen = splits;
            fullest = full;
        }
    }
    return (int64_t)chosen;
}

static bool
decode_mma_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    return attention->T <= CA_MATRIX_MAX_ROWS &&
           attention->operands[CA_ATTENTION_QUERY].rows <= CA_MATRIX_MAX_ROWS &&
           ca_attention_page_size(attention) <= CA_MATRIX_MAX_ROWS &&
           ca_attention_keys_are(attention, ca_operand_is_wide) &&
           ca_attention_pages_are_wide(attention);
}

static const ca_knob knobs_of_decode_mma[] = CA_KNOBS_OF_SPLITS;

static void
plan_decode_mma(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    ca_plan_begin(plan, attention, "attention_decode_mma", THREADS);
    plan->heads = ca_attention_heads_together(attention);
    plan->grid[2] /= plan->heads;
    plan->rows = TILE_ROWS;
    plan->grid[3] = ca_divide_up(plan->heads * attention->L, TILE_ROWS);
    ca_knobs knobs = ca_knobs_of(info, attention, CA_INDEX_decode_mma, knobs_of_decode_mma);
    int64_t splits = choose_splits(info, attention, ca_plan_items(plan));
    plan->splits = ca_plan_tuned_splits(attention, splits, &knobs);
    plan->grid[4] = plan->splits * THREADS;
    ca_plan_define_sizes(plan, attention);
    ca_plan_define_warp(&plan->spec, info, attention, false);
    ca_kernel_define(&plan->spec, "WARPS", WARPS);
    ca_kernel_define(&plan->spec, "PAGED", ca_attention_has_pages(attention));
    ca_plan_merge_on_gpu(info, attention, plan);
}

const ca_variant ca_variant_decode_mma = {
    .word = "decode_mma",
    .dtypes = CA_ONE_HALF_TYPE,
    .max_head = MAX_HEAD,
    .max_value_head = MAX_VALUE_HEAD,
    .takes = CA_COMMON_OPTIONS | CA_RAGGED_OPTIONS,
    .group = THREADS,
    .local_memory = LOCAL_BYTES,
    .multiplies_matrices = true,
    .can_run = decode_mma_can_run,
    .of_problem = "rows of keys and values of whole aligned 16 bytes",
    .fast = CA_FAST_WITH_MATRIX_UNITS,
    .fast_rows = TILE_ROWS,
    .fewest_rows = FEWEST_ROWS,
    .make_plan = plan_decode_mma,
    .knobs = knobs_of_decode_mma,
};
