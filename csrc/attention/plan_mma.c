/* SPDX-License-Identifier: MIT
 *
 * The variant mma, for many rows on devices with matrix units: attention/mma.cl, with
 * tiles of half types.
 */
#include "attention/variants.h"

/* The rule for the warps of a group and the blocks of keys in the ring. Devices with fewer
   work-items are refused. */
#define WARPS   4
#define STAGES  3
#define THREADS (WARPS * 32)

/* Rows of a warp's matrix tile. A warp has one or two. */
#define TILE_ROWS 16

/* Local memory that every device with matrix units gives a group. */
#define LOCAL_BYTES (48 << 10)

#define MAX_HEAD 256

enum { ROW_TILES, BLOCK_KEYS, CHUNK_KEYS, RING_STAGES, GROUP_WARPS };

/* The kernel's macros. The registers of a compute unit hold eight warps of any shape. */
static const ca_knob knobs_of_mma[] = {
    [ROW_TILES] = {"MT", {1, 2}},         [BLOCK_KEYS] = {"BN", {16, 32, 64}},
    [CHUNK_KEYS] = {"CHUNK", {16, 32}},   [RING_STAGES] = {"STAGES", {2, 3, 4}},
    [GROUP_WARPS] = {"WARPS", {2, 4, 8}}, {NULL, {0}},
};

/* Where rows are copied by 16 bytes, the kernel counts offsets in a tile in 32 bits. */
#define MAX_STRIDE ((int64_t)1 << 22)

static bool
mma_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    return attention->T <= CA_MATRIX_MAX_ROWS && attention->L <= CA_MATRIX_MAX_ROWS;
}

static bool
rows_are_aligned(const ca_attention *attention, ca_attention_role role)
{
    const ca_operand *operand = &attention->operands[role];
    return ca_operand_is_wide(operand) && operand->row_stride <= MAX_STRIDE &&
           operand->row_stride >= -MAX_STRIDE;
}

/* Returns the next of a few head sizes, so that few programs are built. */
static int64_t
padded(int64_t head)
{
    static const int64_t sizes[] = {64, 80, 96, 128, 192};
    for (size_t n = 0; n < sizeof(sizes) / sizeof(sizes[0]); n++) {
        if (head <= sizes[n]) {
            return sizes[n];
        }
    }
    return MAX_HEAD;
}

/* Largest head sizes of a warp with two tiles of rows, so that nothing spills: with
   masks and the like, without them, and without them for chunks of WIDE_CHUNK keys. */
#define TWO_TILES_HEAD       96
#define TWO_TILES_PLAIN_HEAD 128
#define TWO_TILES_WIDE_HEAD  80

/* Keys that a warp scores together. More of them share the work of a chunk: branches, a
   vote, the comparison with the base. */
#define CHUNK      16
#define WIDE_CHUNK 32

/* True if a score is a scaled product, so that most chunks look at no single key. */
static bool
is_plain(const ca_attention *attention)
{
    return !ca_attention_has(attention, CA_ATTENTION_MASK) &&
           !ca_attention_has(attention, CA_ATTENTION_BIAS) && ca_attention_softcap(attention) == 0;
}

/* Returns how many tiles of rows a warp has. Two tiles halve the reads of keys and values.
   Two need enough registers, rows that fill them, and enough groups for all units. */
static int64_t
row_tiles(const ca_device_info *info, const ca_attention *attention, int64_t head, double heads)
{
    bool ample = !ca_plan_has_matrix_units(info, attention) || info->ample_registers;
    bool fits =
        head <= TWO_TILES_HEAD || (is_plain(attention) && head <= TWO_TILES_PLAIN_HEAD && ample);
    int64_t L = attention->L;
    double groups = heads * (double)ca_divide_up(L, 2 * WARPS * TILE_ROWS);
    return fits && L > WARPS * TILE_ROWS && groups >= (double)info->compute_units ? 2 : 1;
}

/* Returns the keys of a chunk, in blocks of `keys`. */
static int64_t
chunk_keys(const ca_attention *attention, int64_t tiles, int64_t head, int64_t keys)
{
    bool fits = tiles == 1 || head <= TWO_TILES_WIDE_HEAD;
    return is_plain(attention) && fits && keys >= WIDE_CHUNK ? WIDE_CHUNK : CHUNK;
}

/* A work-group: warps, tiles of rows of each, blocks of the ring, keys of a block. */
typedef struct {
    int64_t warps;
    int64_t tiles;
    int64_t stages;
    int64_t keys;
} shape;

/* Make the blocks of keys so small that they fit the local memory, which holds the queries first.
   False if the group does not fit the device. The emulation of matrix units takes a KiB for each
   warp, and a device that needs it has one for each of WARPS. */
static bool
fit_device(shape *s, const ca_device_info *info, const ca_attention *attention, int64_t E,
           int64_t Ev)
{
    int64_t shown = ca_plan_has_matrix_units(info, attention) ? 0 : (s->warps - WARPS) << 10;
    int64_t bytes = LOCAL_BYTES - shown;
    while (s->keys > CHUNK && s->stages * s->keys * (E + Ev) * 2 > bytes) {
        s->keys /= 2;
    }
    return s->stages * s->keys * (E + Ev) * 2 <= bytes &&
           s->warps * s->tiles * TILE_ROWS * E * 2 <= bytes &&
           s->warps * 32 <= info->max_work_group;
}

static void
plan_mma(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    int64_t E = padded(attention->E);
    int64_t Ev = padded(attention->Ev);
    ca_plan_begin(plan, attention, "attention_mma", THREADS);

    ca_knobs knobs = ca_knobs_of(info, attention, CA_INDEX_mma, knobs_of_mma);
    int64_t head = E > Ev ? E : Ev;
    const shape rule = {WARPS, row_tiles(info, attention, head, ca_plan_items(plan)), STAGES, 64};
    shape s = {ca_knob_value(&knobs, GROUP_WARPS, rule.warps),
               ca_knob_value(&knobs, ROW_TILES, rule.tiles),
               ca_knob_value(&knobs, RING_STAGES, rule.stages),
               ca_knob_value(&knobs, BLOCK_KEYS, rule.keys)};
    if (!fit_device(&s, info, attention, E, Ev)) {
        s = rule;
        (void)fit_device(&s, info, attention, E, Ev);
    }
    plan->local_size = (size_t)s.warps * 32;
    plan->grid[3] = ca_divide_up(attention->L, s.warps * s.tiles * TILE_ROWS);
    plan->grid[4] = s.warps * 32;

    ca_kernel_spec *spec = &plan->spec;
    ca_plan_define_options(spec, attention);
    ca_kernel_define(spec, "HEAD_E", E);
    ca_kernel_define(spec, "HEAD_EV", Ev);
    ca_kernel_define(spec, "LSE", ca_attention_has(attention, CA_ATTENTION_LSE));
    ca_kernel_define(spec, "ALIGNED",
                     rows_are_aligned(attention, CA_ATTENTION_QUERY) &&
                         rows_are_aligned(attention, CA_ATTENTION_KEY) &&
                         rows_are_aligned(attention, CA_ATTENTION_VALUE));
    ca_kernel_define(spec, "OUTPUT_ALIGNED", rows_are_aligned(attention, CA_ATTENTION_OUTPUT));
    ca_plan_define_warp(spec, info, attention);
    ca_kernel_define(spec, "WARPS", s.warps);
    ca_kernel_define(spec, "MT", s.tiles);
    ca_kernel_define(spec, "STAGES", s.stages);
    ca_kernel_define(spec, "BN", s.keys);
    int64_t chunk = chunk_keys(attention, s.tiles, head, s.keys);
    ca_kernel_define(spec, "CHUNK", ca_smaller(ca_knob_value(&knobs, CHUNK_KEYS, chunk), s.keys));
}

const ca_variant ca_variant_mma = {
    .word = "mma",
    .dtypes = CA_ONE_HALF_TYPE,
    .max_head = MAX_HEAD,
    .max_value_head = MAX_HEAD,
    .refuses = CA_NO_PAST | CA_NO_INPUT_BIAS | CA_NO_DROPOUT | CA_NO_SCORES | CA_NO_LATE_SOFTCAP,
    .group = THREADS,
    .local_memory = LOCAL_BYTES,
    .multiplies_matrices = true,
    .can_run = mma_can_run,
    .fast = CA_FAST_WITH_MATRIX_UNITS,
    .make_plan = plan_mma,
    .knobs = knobs_of_mma,
};
