/* SPDX-License-Identifier: MIT
 *
 * The variant mma, for many rows on devices with matrix units: attention/mma.cl, with
 * tiles of half types.
 */
#include "attention/variants.h"

/* Work-items of a group, in warps of 32: WARPS of the kernel. */
#define THREADS 128

/* Rows of a matrix tile, of which each warp has one or two. */
#define TILE_ROWS (THREADS / 32 * 16)

/* Local memory that every device with matrix units gives a group. */
#define LOCAL_BYTES (48 << 10)

#define MAX_HEAD 256

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
    double groups = heads * (double)ca_divide_up(L, 2 * TILE_ROWS);
    return fits && L > TILE_ROWS && groups >= (double)info->compute_units ? 2 : 1;
}

/* Returns the keys of a chunk, in blocks of `keys`. */
static int64_t
chunk_keys(const ca_attention *attention, int64_t tiles, int64_t head, int64_t keys)
{
    bool fits = tiles == 1 || head <= TWO_TILES_WIDE_HEAD;
    return is_plain(attention) && fits && keys >= WIDE_CHUNK ? WIDE_CHUNK : CHUNK;
}

static void
plan_mma(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    int64_t E = padded(attention->E);
    int64_t Ev = padded(attention->Ev);
    ca_plan_begin(plan, attention, "attention_mma", THREADS);

    int64_t head = E > Ev ? E : Ev;
    int64_t tiles = row_tiles(info, attention, head, ca_plan_items(plan));
    plan->grid[3] = ca_divide_up(attention->L, tiles * TILE_ROWS);
    plan->grid[4] = THREADS;

    const int64_t stages = 3;
    int64_t keys = 64;
    while (keys > CHUNK && stages * keys * (E + Ev) * 2 > LOCAL_BYTES) {
        keys /= 2;
    }
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
    ca_kernel_define(spec, "MT", tiles);
    ca_kernel_define(spec, "BN", keys);
    ca_kernel_define(spec, "CHUNK", chunk_keys(attention, tiles, head, keys));
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
};
