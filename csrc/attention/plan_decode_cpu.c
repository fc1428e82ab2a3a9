/* SPDX-License-Identifier: MIT
 *
 * The variant decode_cpu, for few rows on CPUs: attention/decode_cpu.cl, with keys in
 * vector lanes.
 */
#include <math.h>

#include "attention/variants.h"
#include "kernels/attention/params.h" /* CA_CPU_HEAD_SIZE, CA_FETCHES_ROWS */

/* With more rows of a head, or FULL_ROWS of the heads that share keys, attention_cpu fills enough
   lanes of its vectors. It does not split keys. So it leaves cores idle where batches and rows
   are few, and there up to SPLIT_ROWS rows are few. */
#define FEW_ROWS   8
#define FULL_ROWS  16
#define SPLIT_ROWS 64

/* Rows that share a load; and how many such sets a work-item has at most. */
#define SHARED_ROWS 4
#define SHARES      8

/* A work-item reads at least so many bytes. Handing out less would cost as much as reading. */
#define BYTES_OF_AN_ITEM (256 << 10)

/* A tile of one or two rows of queries is done with a key before memory delivers the next key. */
#define ROWS_BOUND_BY_MEMORY 2

/* Keys and values are far if they take more than FAR_BYTES: the last cache does not hold them. */
#define FAR_BYTES (16 << 20)

/* Heads that lie side by side are read in the order of memory if keys and values take more than ORDERED_BYTES: by one
   work-item, or for one or two rows whose keys are not far by cores that take turns. Those in pages are always
   read so. */
#define ORDERED_BYTES (8 << 20)

/* Small pages, which end before a core has begun to prefetch their rows by itself. */
#define KEYS_OF_SMALL_PAGE 16

/* The most keys of a block, whose keys and values the second cache keeps: for tiles of one or two rows, and for
   other tiles. */
#define LONG_BLOCK  256
#define SHORT_BLOCK 128

/* The bytes of a block's keys, for tiles of one or two rows of half types on a core with a small first cache. */
#define HALF_BLOCK_BYTES (16 << 10)

static bool
decode_can_run(const ca_device_info *info, const ca_attention *attention)
{
    const ca_operand *operands = attention->operands;
    int64_t lanes = ca_plan_lanes(info, attention);
    return attention->E >= lanes && attention->Ev >= lanes &&
           ca_operand_rows_hold(&operands[CA_ATTENTION_KEY], lanes) &&
           ca_operand_rows_hold(&operands[CA_ATTENTION_VALUE], lanes) &&
           ca_operand_rows_hold(&operands[CA_ATTENTION_PAST_KEY], lanes) &&
           ca_operand_rows_hold(&operands[CA_ATTENTION_PAST_VALUE], lanes);
}

/* Returns how many splits of the keys are worth a work-item each. */
static int64_t
splits_worthwhile(const ca_attention *attention, int64_t key_heads)
{
    int64_t key_bytes = key_heads * ca_attention_key_bytes(attention);
    return key_bytes > 0
               ? ca_attention_visible_keys(attention) / ca_divide_up(BYTES_OF_AN_ITEM, key_bytes)
               : 0;
}

static bool
decode_is_fast(const ca_device_info *info, const ca_attention *attention)
{
    int64_t heads = ca_attention_heads_together(attention);
    int64_t rows = heads * attention->L;
    double tiles = (double)ca_divide_up(rows, 2 * ca_plan_lanes(info, attention));
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        tiles *= (double)attention->batch[d];
    }
    return (attention->L <= FEW_ROWS && rows < FULL_ROWS) ||
           (rows <= SPLIT_ROWS && tiles < (double)(heads * info->compute_units) &&
            splits_worthwhile(attention, 1) > 1);
}

/* True if the heads of dimension `d` lie side by side in each row, or one behind the other in each page. */
static bool
heads_adjoin(const ca_attention *attention, int d)
{
    static const ca_attention_role roles[] = {CA_ATTENTION_KEY, CA_ATTENTION_VALUE,
                                              CA_ATTENTION_PAST_KEY, CA_ATTENTION_PAST_VALUE};
    int64_t page = ca_attention_page_size(attention);
    for (size_t n = 0; n < sizeof(roles) / sizeof(*roles); n++) {
        const ca_operand *operand = &attention->operands[roles[n]];
        int64_t columns = operand->columns;
        bool in_rows = operand->batch[d] == columns && operand->row_stride > columns;
        bool in_pages =
            page > 0 && operand->row_stride == columns && operand->batch[d] == page * columns;
        if (ca_operand_has_rows(operand) && !in_rows && !in_pages) {
            return false;
        }
    }
    return true;
}

/* Returns the dimension of the key heads that a work-item may share, -1 if there is none. Their rows
   lie side by side, as in a cache (B, S, H, E), or one head behind the other in pages. So a work-item that
   has several heads reads memory in its order. */
static int
dimension_to_share(const ca_attention *attention, const ca_attention_plan *plan)
{
    const int last = CA_BATCH_DIMS - 1;
    const bool shares_outer = plan->heads == attention->batch[last];
    const int d = shares_outer ? last - 1 : last;
    return heads_adjoin(attention, d) ? d : -1;
}

/* Returns how many keys the kernel reads as one block. `few` is true if a tile has one or two rows. */
static int64_t
keys_of_block(const ca_device_info *info, const ca_attention *attention, bool few)
{
    int64_t size = (int64_t)ca_dtype_size(attention->operands[CA_ATTENTION_KEY].dtype);
    if (few && size == 2 && ca_attention_page_size(attention) == 0 &&
        !ca_first_cache_is_large(info)) {
        return ca_smaller(HALF_BLOCK_BYTES / (size * attention->E), LONG_BLOCK);
    }
    return few ? LONG_BLOCK : SHORT_BLOCK;
}

/* Returns what the kernel prefetches. A core with a small first cache reads rows that adjoin faster if tiles
   of one or two rows do not prefetch them. */
static uint32_t
what_to_fetch(const ca_device_info *info, const ca_attention *attention, bool few, bool far)
{
    int64_t page = ca_attention_page_size(attention);
    bool adjoin = ca_attention_keys_are(attention, ca_operand_rows_adjoin) &&
                  (page == 0 || page > KEYS_OF_SMALL_PAGE);
    if (few) {
        return adjoin && !ca_first_cache_is_large(info) ? 0 : CA_FETCHES_ROWS;
    }
    return far && ca_second_cache_is_large(info) ? CA_FETCHES_STARTS : CA_FETCHES_ROWS;
}

static void
plan_decode(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    int64_t lanes = ca_plan_lanes(info, attention);
    const double cores = (double)info->compute_units;

    ca_plan_begin(plan, attention, "attention_decode_cpu", 1);
    plan->heads = ca_attention_heads_together(attention);
    int64_t rows = plan->heads * attention->L;
    plan->grid[2] /= plan->heads;
    bool many = ca_attention_keys_exceed(attention, true, ORDERED_BYTES);
    /* Each number is a program. float64 has one: its rows take longer to read than to use. */
    bool few = rows <= ROWS_BOUND_BY_MEMORY && !ca_attention_in_float64(attention);
    int64_t together = few ? rows : SHARED_ROWS;
    const int adjoining = dimension_to_share(attention, plan);
    const bool far = ca_attention_keys_exceed(attention, true, FAR_BYTES);
    const bool ordered =
        far || ca_attention_page_size(attention) > 0 || (many && rows > ROWS_BOUND_BY_MEMORY);
    const int shared = ordered ? adjoining : -1;
    plan->cpu.keys_are_far = far || shared >= 0;
    plan->cpu.fetches = what_to_fetch(info, attention, few, plan->cpu.keys_are_far);
    plan->rows = together * SHARES;
    plan->grid[3] = ca_divide_up(rows, plan->rows);
    if (shared >= 0 && rows <= together * SHARES) {
        plan->cpu.key_heads = SHARES / ca_divide_up(rows, together);
        while (plan->grid[shared] % plan->cpu.key_heads != 0) {
            plan->cpu.key_heads--;
        }
        /* Reading half as many heads is nearly as fast, and may give each core a work-item. */
        double found = ca_plan_items(plan) / (double)plan->cpu.key_heads;
        if (plan->cpu.key_heads == SHARES && found < cores && 2 * found >= cores) {
            plan->cpu.key_heads /= 2;
        }
        plan->grid[shared] /= plan->cpu.key_heads;
    }

    double items = ca_plan_items(plan);
    double wanted = cores * CA_ITEMS_FOR_EACH_CORE;
    int64_t worthwhile = splits_worthwhile(attention, plan->cpu.key_heads);
    /* Work-items of several heads are long. If each core gets the same number of them, splitting their keys
       would only add a merge. */
    bool even = plan->cpu.key_heads > 1 && fmod(items, cores) == 0;
    if (items < wanted && worthwhile > 1 && !even) {
        plan->splits = ca_smaller((int64_t)ceil(wanted / items), worthwhile);
        plan->grid[4] = plan->splits;
    }

    /* Cores read neighbouring heads faster if they read them at the same time. But in smaller calls each
       core keeps its heads: its caches may hold them until the next call. */
    bool turns = few && adjoining >= 0 && many && plan->splits == 1;
    plan->cpu.turns = turns ? info->compute_units : 1;

    ca_kernel_spec *spec = &plan->spec;
    ca_plan_define_lanes(plan, info, attention);
    plan->merge_local = 1;
    plan->partial_bytes = (attention->Ev + 2) * ca_plan_real_bytes(attention);
    ca_kernel_define(spec, "RT", together);
    ca_kernel_define(spec, "BN", few ? LONG_BLOCK : SHORT_BLOCK);
    plan->cpu.block_keys = ca_divide_up(keys_of_block(info, attention, few), lanes) * lanes;
    plan->merge = *spec;
}

const ca_variant ca_variant_decode_cpu = {
    .word = "decode_cpu",
    .max_head = CA_CPU_HEAD_SIZE,
    .max_value_head = CA_CPU_HEAD_SIZE,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_RAGGED_OPTIONS | CA_SCALE_OPTIONS |
             CA_INT4_OPTIONS,
    .can_run = decode_can_run,
    .of_problem = "keys and values with contiguous rows of at least one vector",
    .fast = CA_FAST_ON_CPUS,
    .is_fast = decode_is_fast,
    .make_plan = plan_decode,
};
