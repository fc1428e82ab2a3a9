/* SPDX-License-Identifier: MIT
 *
 * The variant decode_gpu, for few rows on GPUs: attention/decode_gpu.cl. Work-groups share
 * the keys; a work-item loads 16 bytes at a time.
 *
 * By offline assembly for sm_90 (float16, E = 128) a work-item has 98 registers with 1 row, 128 with 2,
 * 160 with 4 and 251 with 8, and spills none. So the 64 Ki registers of a compute unit hold four groups
 * with 1 or 2 rows, three with 4 and two with 8: 64, 48 or 32 KiB are under way at a time. Of keys and values
 * in bytes, with scales, it has 113 to 121 registers with 1 row, 160 with 2 and 232 to 238 with 4.
 */
#include <math.h>

#include "attention/plan_decode_gpu.h"
#include "attention/variants.h"

/* With more rows of a head, a kernel for many rows fills its tiles well enough. */
#define FEW_ROWS 8

/* A work-group has at most this many rows, since a work-item keeps sums for each row in
   registers. If a group of query heads has more rows, several work-groups read the same
   keys, all but the first from the cache. This costs arithmetic, but less than a kernel
   for many rows, which pads each head's rows to a tile. */
#define MOST_ROWS 8

/* Of keys and values in bytes. A load brings twice as many columns as one of float16, so a row has twice
   as many sums. */
#define MOST_ROWS_OF_CODES 4

/* Work-items of a group. Four groups, with 64 to 128 bytes under way for each work-item,
   keep a compute unit's share of the memory busy. */
#define GROUP        128
#define FEWEST_GROUP 64
#define MERGE_GROUP  256

#define BYTES_OF_LOAD CA_WIDE_BYTES
#define LOADS_AHEAD   4 /* of keys, in one work-item */

/* A work-group uses at most this much local memory, so that several groups share a unit.
   Every device has as much. */
#define LOCAL_BYTES (15 << 10)

/* Work-groups for each compute unit: about twice as many as run at a time. */
#define GROUPS_FOR_EACH_UNIT 8

/* A split takes at least a few microseconds, as its merge does. No sum in a split has
   more than LARGEST_SPLIT / (2 * GROUP * BYTES_OF_LOAD) = 256 terms. */
#define SMALLEST_SPLIT (64 << 10) /* bytes */
#define LARGEST_SPLIT  (1 << 20)

/* Work-items that may share a key: a warp has as many, and local memory serves any number. */
#define MOST_LANES 32

/* Registers for addresses, bounds and what is computed in between, so counted that compilers for
   Intel's GPUs spill nothing. */
#define OTHER_REGISTERS   84
#define SEVERAL_REGISTERS 4 /* where a work-group has several rows */

/* Returns how many work-items share a key of `chunks` loads. Eight, which read 128 bytes
   together. More, if one key would take more than half of a work-item's loads. Fewer, if
   more than a quarter of the work-items had nothing to do. */
static int64_t
key_lanes(int64_t chunks)
{
    int64_t lanes = 8;
    while (lanes < MOST_LANES && ca_divide_up(chunks, lanes) > LOADS_AHEAD / 2) {
        lanes *= 2;
    }
    while (lanes > 1 && ca_divide_up(chunks, lanes) * lanes * 4 > chunks * 5) {
        lanes /= 2;
    }
    return lanes;
}

static int64_t
power_of_two(int64_t count)
{
    int64_t power = 1;
    while (power < count) {
        power *= 2;
    }
    return power;
}

/* The tile of a work-group. */
typedef struct {
    int64_t group; /* work-items */
    int64_t lanes; /* work-items that share a key */
    int64_t keys;  /* keys of a block */
    int64_t rows;
} tile;

/* Returns the reals that the kernel keeps in local memory: queries, two blocks of scores,
   columns of slices or numbers that work-items exchange, two numbers of each slice and
   row. */
static int64_t
local_reals(const ca_device_info *info, const ca_attention *attention, const tile *t)
{
    int64_t Ev = attention->Ev;
    ca_dtype value_dtype = attention->operands[CA_ATTENTION_VALUE].dtype;
    ca_dtype dtype = attention->operands[CA_ATTENTION_KEY].dtype;
    int64_t chunk = BYTES_OF_LOAD / (int64_t)ca_dtype_size(dtype);
    int64_t value_chunk = BYTES_OF_LOAD / (int64_t)ca_dtype_size(value_dtype);
    int64_t E = ca_divide_up(attention->E, chunk * t->lanes) * chunk * t->lanes;
    int64_t value_chunks = ca_divide_up(Ev, value_chunk);
    int64_t columns = ca_divide_up(value_chunks, t->group) * value_chunk * t->group;
    int64_t terms = t->keys * t->lanes / t->group * t->rows;
    int64_t exchanged = info->warp_shuffles ? 0 : ca_divide_up(terms, 2) * t->group;
    int64_t slices = ca_divide_up(t->group, value_chunks);
    return t->rows * E + 2 * t->keys * t->rows + (columns > exchanged ? columns : exchanged) +
           2 * slices * t->rows;
}

/* Returns how many loads of values a work-item has for a block. Short keys need many. */
static int64_t
loads_of_values(const ca_attention *attention, int64_t group, int64_t keys)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_VALUE].dtype;
    int64_t chunk = BYTES_OF_LOAD / (int64_t)ca_dtype_size(dtype);
    int64_t chunks = ca_divide_up(attention->Ev, chunk);
    int64_t for_each = ca_divide_up(chunks, group);
    int64_t slices = group / ca_divide_up(chunks, for_each);
    return ca_divide_up(keys, slices) * for_each;
}

static bool
rows_are_wide(const ca_attention *attention)
{
    return ca_attention_keys_are(attention, ca_operand_is_wide) &&
           ca_attention_pages_are_wide(attention);
}

/* Returns the registers of what a work-item has loaded ahead, of its products and of its sums of
   columns. */
static int64_t
registers_of(const ca_attention *attention, const tile *t)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_KEY].dtype;
    ca_dtype value_dtype = attention->operands[CA_ATTENTION_VALUE].dtype;
    int64_t chunk = BYTES_OF_LOAD / (int64_t)ca_dtype_size(dtype);
    int64_t value_chunk = BYTES_OF_LOAD / (int64_t)ca_dtype_size(value_dtype);
    int64_t keys = t->keys * t->lanes / t->group;
    int64_t loads = keys * ca_divide_up(ca_divide_up(attention->E, chunk), t->lanes) +
                    loads_of_values(attention, t->group, t->keys);
    if (ca_attention_has_codes(attention) && !rows_are_wide(attention)) {
        /* Bytes that come one by one have a register each, and as many addresses are on hand. */
        loads = (loads + LOADS_AHEAD) * (int64_t)sizeof(float);
    }
    int64_t columns = ca_divide_up(ca_divide_up(attention->Ev, value_chunk), t->group);
    int64_t reals = t->rows * (columns * value_chunk + keys);
    return (loads * BYTES_OF_LOAD + reals * ca_plan_real_bytes(attention)) / 4 +
           (t->rows > 1 ? SEVERAL_REGISTERS : 0);
}

static bool
tile_fits(const ca_device_info *info, const ca_attention *attention, const tile *t)
{
    return local_reals(info, attention, t) <= LOCAL_BYTES / ca_plan_real_bytes(attention) &&
           registers_of(attention, t) <= info->registers - OTHER_REGISTERS;
}

static tile
choose_tile(const ca_device_info *info, const ca_attention *attention, int64_t rows)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_KEY].dtype;
    int64_t chunk = BYTES_OF_LOAD / (int64_t)ca_dtype_size(dtype);
    int64_t chunks = ca_divide_up(attention->E, chunk);
    /* Sums of columns of codes in float64 would take all local memory of a group of GROUP. */
    bool codes_in_float64 = ca_attention_has_codes(attention) && ca_attention_in_float64(attention);
    bool few = info->max_work_group < GROUP || codes_in_float64;
    tile t = {.group = few ? FEWEST_GROUP : GROUP};
    t.lanes = key_lanes(chunks);
    int64_t keys = t.group / t.lanes * LOADS_AHEAD;
    while (keys * t.lanes > t.group &&
           keys * ca_divide_up(chunks, t.lanes) * t.lanes > t.group * LOADS_AHEAD) {
        keys /= 2;
    }
    while (loads_of_values(attention, t.group, keys) > 2 * LOADS_AHEAD &&
           (keys * t.lanes > t.group || t.lanes < MOST_LANES)) {
        t.lanes *= keys * t.lanes > t.group ? 1 : 2;
        keys /= 2;
    }
    int64_t most = ca_attention_has_codes(attention) ? MOST_ROWS_OF_CODES : MOST_ROWS;
    do {
        int64_t tiles = ca_divide_up(rows, most);
        t.rows = power_of_two(ca_divide_up(rows, tiles));
        t.keys = keys;
        while (t.keys * t.lanes > t.group && !tile_fits(info, attention, &t)) {
            t.keys /= 2;
        }
        most = t.rows / 2;
    } while (t.rows > 1 && !tile_fits(info, attention, &t));
    return t;
}

/* Returns how many splits of the keys keep a GPU busy without being too small. `groups`
   are the work-groups of one split. */
static int64_t
choose_splits(const ca_device_info *info, const ca_attention *attention, double groups)
{
    double bytes =
        (double)ca_attention_visible_keys(attention) * (double)ca_attention_key_bytes(attention);
    double wanted = (double)(info->compute_units * GROUPS_FOR_EACH_UNIT);
    double splits = fmin(ceil(wanted / groups), floor(bytes / SMALLEST_SPLIT));
    return (int64_t)fmax(fmax(splits, ceil(bytes / LARGEST_SPLIT)), 1);
}

int64_t
ca_plan_tuned_splits(const ca_attention *attention, int64_t splits, const ca_knobs *knobs)
{
    int64_t most = ca_attention_visible_keys(attention);
    int64_t tuned = ca_smaller(splits * ca_knob_value(knobs, 0, 100) / 100, most);
    return splits == 1 || tuned < 1 ? 1 : tuned;
}

void
ca_plan_merge_on_gpu(const ca_device_info *info, const ca_attention *attention,
                     ca_attention_plan *plan)
{
    int64_t piece = BYTES_OF_LOAD / ca_plan_real_bytes(attention);
    int64_t sums = ca_divide_up(attention->Ev, piece);
    plan->partial_bytes = (sums + 1) * BYTES_OF_LOAD;
    plan->merge.name = "attention_decode_gpu_merge";
    plan->merge_local = (size_t)ca_smaller(MERGE_GROUP, info->max_work_group);
    ca_plan_define_common(&plan->merge, attention);
    ca_plan_define_options(plan, &plan->merge, attention);
    ca_kernel_define(&plan->merge, "HEAD_EV", attention->Ev);
    ca_kernel_define(&plan->merge, "WARP_SHUFFLES", info->warp_shuffles);
    ca_kernel_define(&plan->merge, "WG", (int64_t)plan->merge_local);
}

static const ca_knob knobs_of_decode_gpu[] = CA_KNOBS_OF_SPLITS;

static void
plan_decode_gpu(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    ca_plan_begin(plan, attention, "attention_decode_gpu", 0);
    plan->heads = ca_attention_heads_together(attention);
    int64_t rows = plan->heads * attention->L;
    tile t = choose_tile(info, attention, rows);
    plan->local_size = (size_t)t.group;
    plan->grid[2] /= plan->heads;
    plan->rows = t.rows;
    plan->grid[3] = ca_divide_up(rows, t.rows);
    ca_knobs knobs = ca_knobs_of(info, attention, CA_INDEX_decode_gpu, knobs_of_decode_gpu);
    int64_t splits = choose_splits(info, attention, ca_plan_items(plan));
    plan->splits = ca_plan_tuned_splits(attention, splits, &knobs);
    plan->grid[4] = plan->splits * t.group;

    ca_kernel_spec *spec = &plan->spec;
    ca_plan_define_sizes(plan, attention);
    ca_kernel_define(spec, "WARP_SHUFFLES", info->warp_shuffles);
    ca_kernel_define(spec, "SUB_GROUP", info->smallest_sub_group);
    ca_plan_merge_on_gpu(info, attention, plan);
    ca_kernel_define(spec, "WG", t.group);
    ca_kernel_define(spec, "KEY_LANES", t.lanes);
    ca_kernel_define(spec, "BN", t.keys);
    ca_kernel_define(spec, "RT", t.rows);
    ca_kernel_define(spec, "WIDE", rows_are_wide(attention));
}

const ca_variant ca_variant_decode_gpu = {
    .word = "decode_gpu",
    .max_head = 512,
    .max_value_head = 512,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_RAGGED_OPTIONS | CA_SCALE_OPTIONS,
    .group = FEWEST_GROUP,
    .local_memory = LOCAL_BYTES + (1 << 10),
    .fast = CA_FAST_ON_GPUS,
    .fast_rows = FEW_ROWS,
    .make_plan = plan_decode_gpu,
    .knobs = knobs_of_decode_gpu,
};
