/* SPDX-License-Identifier: MIT
 *
 * The variants cpu, pairs and amx, for many rows on CPUs: attention/cpu.cl, with queries in
 * vector lanes.
 */
#include <math.h>
#include <stdlib.h>

#include "attention/options.h"
#include "attention/variants.h"

/* A tile may have one vector of rows if the heads that share keys have at most FEW_VECTORS vectors of
   rows, or if a band has at most as many vectors of keys. */
#define FEW_VECTORS 8

/* A work-item may pack keys and values whose rows do not adjoin if a head has PACKING_ROWS rows of
   queries or more: see packing_pays. Addresses SET_BYTES apart share a set of a core's first cache. */
#define PACKING_ROWS 32
#define SET_BYTES    4096

/* Keys and values are far if those of a head take more than NEAR_BYTES: caches do not keep them from one tile
   of rows to the next. Fewer than NEAR_ROWS rows are few tiles, which count the keys of all heads. */
#define NEAR_ROWS  128
#define NEAR_BYTES (4 << 20)

/* A tile of three vectors takes all rows of a head only if there are so many heads for each core. With
   fewer heads, some cores would be idle. */
#define HEADS_FOR_EACH_CORE 2

/* The tiles of a work-item have queries and results of SMALL_TILES_BYTES at most, or of
   CA_CPU_TILES_BYTES if a core's first cache is large. */
#define SMALL_TILES_BYTES (128 << 10)

/* A work-item may read a mask for several heads. If it reads keys and values where they lie, the queries and
   results of one tile of each head take SHARED_MASK_BYTES at most, in sum. With more heads, the work-item
   would have fewer tiles of each, and would read keys and values more often from a cache that cores share. */
#define SHARED_MASK_BYTES (64 << 10)

/* A core's second cache keeps keys and values of less than MANY_KEYS_BYTES while the core computes all
   tiles of their head. So these tiles gain nothing from sharing a work-item. */
#define MANY_KEYS_BYTES (256 << 10)

/* A plan gives work-items fewer tiles if this shortens the idle time of cores by more than IDLE_SHARE
   of the call. */
#define IDLE_SHARE (1.0 / 32)

/* Bytes of the vectors of processors with 32 registers. */
#define WIDE_VECTOR 64

/* What the kernel's products multiply. */
typedef struct {
    bool pairs; /* pairs of bfloat16, not reals */
    bool amx;   /* AMX multiplies the pairs, not vectors */
} products;

/* AMX scores AMX_KEYS keys together, and multiplies AMX_ELEMENTS elements of a row. A block has
   AMX_STRIPS times as many keys. */
#define AMX_KEYS     32
#define AMX_ELEMENTS 32
#define AMX_STRIPS   8

/* The rows of a matrix of AMX. */
#define AMX_SIDE 16

/* How many rows the tiles have that cover `rows` rows, `of_tile` each. */
static int64_t
covered(int64_t rows, int64_t of_tile)
{
    return ca_divide_up(rows, of_tile) * of_tile;
}

/* Returns how many numbers a tile keeps for each of its rows: those of the query and of the result. A
   result has whole vectors, at least two of them, because the kernel sums two vectors at a time. */
static int64_t
tile_columns(const ca_attention *attention, int64_t lanes, products of)
{
    int64_t result = attention->Ev <= lanes ? 2 * lanes : covered(attention->Ev, lanes);
    return (of.amx ? covered(attention->E, AMX_ELEMENTS) / 2 : attention->E) + result;
}

/* Returns how many columns of packed keys and values a tile has. */
static int64_t
packed_columns(const ca_attention *attention, int64_t lanes, products of)
{
    int64_t key = covered(attention->E, of.amx ? AMX_ELEMENTS : 2);
    int64_t value = covered(attention->Ev, lanes);
    int64_t bytes = ca_plan_real_bytes(attention);
    return key + value + (of.amx ? 0 : CA_BYTES_BEHIND(value * bytes) / bytes);
}

/* True if the band of keys that a row sees is so narrow that a tile of one vector is faster. Only float32
   counts: for other dtypes this would be one more program. */
static bool
band_is_narrow(const ca_device_info *info, const ca_attention *attention, int64_t lanes)
{
    bool bounded = attention->below != CA_BAND_UNBOUNDED && attention->above != CA_BAND_UNBOUNDED;
    double keys = (double)attention->below + (double)attention->above;
    return bounded && keys <= (double)(FEW_VECTORS * lanes) && ca_first_cache_is_large(info) &&
           attention->operands[CA_ATTENTION_QUERY].dtype == CA_FLOAT32;
}

/* True if one tile of three vectors can take all `rows` rows that share keys, and is faster than several
   smaller tiles. If a causal diagonal excludes about half of the keys, smaller tiles are faster, because
   they score fewer pairs. */
static bool
three_hold_all(const ca_device_info *info, const ca_attention *attention,
               const ca_attention_plan *plan, int64_t rows, int64_t lanes)
{
    return rows > 2 * lanes && rows <= 3 * lanes && attention->above > attention->L &&
           ca_plan_items(plan) >= HEADS_FOR_EACH_CORE * (double)info->compute_units;
}

/* Returns how many vectors of rows a tile has. More vectors read each key for more rows. Fewer leave fewer
   rows of the last tile empty, and score fewer pairs outside a narrow band. A small first cache reads near
   keys as fast for one vector. Narrow vectors have too few registers for tiles of one. */
static int64_t
vectors_of_rows(const ca_device_info *info, const ca_attention *attention,
                const ca_attention_plan *plan, int64_t lanes, bool keys_are_near, products of)
{
    int64_t rows = plan->heads * attention->L;
    bool wide = !of.amx && info->float_width >= 16;
    if (wide && !of.pairs && three_hold_all(info, attention, plan, rows, lanes)) {
        return 3;
    }
    int64_t two = covered(rows, 2 * lanes);
    bool emptier = !of.pairs && two - covered(rows, lanes) > rows / 8;
    bool near = keys_are_near && !ca_first_cache_is_large(info);
    bool few = rows <= FEW_VECTORS * lanes && (near || emptier);
    bool narrow = plan->heads == 1 && band_is_narrow(info, attention, lanes);
    return rows <= lanes || (wide && (few || narrow)) ? 1 : 2;
}

/* Returns MR, the keys that are scored together: NV * MR sums fill the registers. */
static int64_t
strip_keys(int64_t vectors, int64_t vector_bytes)
{
    return vector_bytes < WIDE_VECTOR ? 6 : vectors == 1 ? 16 : vectors == 2 ? 12 : 8;
}

/* True if the tiles of a work-item should share keys and values that lie in place. Sharing pays if the
   keys are many. */
static bool
tiles_share_in_place(const ca_attention *attention)
{
    double bytes = (double)attention->T * (double)ca_attention_key_bytes(attention);
    return bytes >= MANY_KEYS_BYTES;
}

/* True if packing keys and values whose rows do not adjoin is faster than reading them in place. Such rows
   lie in few sets of a core's first cache. Packing costs as much as some rows of queries gain, and more rows
   if keys are prefetched into a cache that holds a whole strip in one set. */
static bool
packing_pays(const ca_device_info *info, int64_t rows, bool fetches, int64_t strip)
{
    bool holds_strip = fetches && strip * SET_BYTES <= info->first_cache;
    return rows >= (holds_strip ? NEAR_ROWS : PACKING_ROWS);
}

/* True if neighbouring heads have the same numbers of a mask or bias, or numbers side by side, as in
   a permuted table (rows, keys, heads). */
static bool
heads_adjoin(const ca_operand *added)
{
    int64_t stride = llabs(added->batch[CA_BATCH_DIMS - 1]);
    return stride == 0 || stride < llabs(added->column_stride);
}

/* True if one work-item should read mask and bias for several heads, each with its own keys. If all rows
   of a mask have the same numbers, the mask is cheap to read. Then work-items of one head are faster, unless
   the kernel packs keys. */
static bool
heads_share_mask(const ca_attention *attention, bool packs)
{
    const ca_operand *operands = attention->operands;
    const ca_operand *mask = &operands[CA_ATTENTION_MASK];
    const ca_operand *bias = &operands[CA_ATTENTION_BIAS];
    bool adds = ca_attention_has(attention, CA_ATTENTION_MASK) ||
                ca_attention_has(attention, CA_ATTENTION_BIAS);
    bool rows_differ = mask->row_stride != 0 || bias->row_stride != 0;
    return adds && (packs || rows_differ) && heads_adjoin(mask) && heads_adjoin(bias) &&
           operands[CA_ATTENTION_KEY_COUNTS].batch[CA_BATCH_DIMS - 1] == 0 &&
           operands[CA_ATTENTION_OFFSETS].batch[CA_BATCH_DIMS - 1] == 0;
}

/* Returns how many tiles of a head a work-item has: at most `most`, and so many that all cores end at
   about the same time. */
static int64_t
balanced_tiles(const ca_device_info *info, const ca_attention_plan *plan, int64_t tiles,
               int64_t most)
{
    const double heads = ca_plan_items(plan);
    const double cores = (double)info->compute_units;
    int64_t found = 1;
    double busiest = 0; /* the busy share of the cores' time, with `found` tiles */
    for (int64_t n = ca_smaller(most, tiles); n > 0 && busiest < 1 - IDLE_SHARE; n--) {
        double items = heads * (double)ca_divide_up(tiles, n);
        double busy = items / (ceil(items / cores) * cores);
        if (busy > busiest + IDLE_SHARE) {
            found = n;
            busiest = busy;
        }
    }
    return ca_divide_up(tiles, ca_divide_up(tiles, found));
}

/* Choose how many tiles a work-item has. Tiles of one head share its keys if the kernel packs the keys,
   or if the keys come from memory or are many. Several heads may share a mask and a bias, but each head
   needs its own packed keys. The work-items have to keep all cores busy. A cache has to hold the
   queries and results of a work-item's tiles. */
static void
share_work(const ca_device_info *info, const ca_attention *attention, int64_t rows, int64_t lanes,
           int64_t vectors, bool packs, products of, ca_attention_plan *plan)
{
    int64_t tile_rows = vectors * lanes;
    int64_t tiles = ca_divide_up(rows, tile_rows);
    int64_t columns = tile_columns(attention, lanes, of);
    int64_t tile_bytes = columns * tile_rows * ca_plan_real_bytes(attention);
    int64_t bytes = ca_first_cache_is_large(info) ? CA_CPU_TILES_BYTES : SMALL_TILES_BYTES;
    int64_t most = ca_smaller(CA_CPU_TILES, bytes / tile_bytes);
    double wanted = (double)(info->compute_units * CA_ITEMS_FOR_EACH_CORE);
    double shares = ca_plan_items(plan) * (double)tiles / wanted; /* tiles that may share */
    most = most < 1 || shares < 1 ? 1 : shares < (double)most ? (int64_t)shares : most;

    int64_t heads = 1;
    if (plan->heads == 1 && heads_share_mask(attention, packs)) {
        heads = ca_smaller(most, CA_CPU_COLUMNS / packed_columns(attention, lanes, of));
        heads = ca_smaller(heads, packs ? 2 : SHARED_MASK_BYTES / tile_bytes);
        heads = heads < 1 ? 1 : heads;
        while (attention->batch[CA_BATCH_DIMS - 1] % heads != 0) {
            heads--;
        }
    }
    bool windowed = attention->below != CA_BAND_UNBOUNDED ||
                    (attention->mods != NULL && attention->mods->has_mask);
    bool together = packs || windowed || plan->cpu.keys_are_far || tiles_share_in_place(attention);
    plan->cpu.key_heads = heads;
    plan->grid[2] /= heads;
    plan->tiles = together && most > heads ? balanced_tiles(info, plan, tiles, most / heads) : 1;
    plan->rows = plan->tiles * tile_rows;
    plan->grid[3] = ca_divide_up(tiles, plan->tiles);
}

/* True if the kernel can read an operand's rows where they lie. Each row has to be contiguous. If
   `packs` is true, each row also has to begin where the row before ends. */
static bool
lies_in_place(const ca_operand *operand, bool packs)
{
    return ca_operand_rows_contiguous(operand) && (ca_operand_rows_adjoin(operand) || !packs);
}

/* Returns which short program can compute the call, or 0. Such a call has no options, or a bool mask
   alone, and each row of its arrays is contiguous and holds at least one vector. The program for masks is
   for float32 alone. It knows neither a band nor key counts, and prefetches no keys. All calls in float64
   share one program, the long one. */
static int
find_usual(const ca_attention *attention, const ca_attention_plan *plan, int64_t lanes, products of)
{
    const ca_operand *operands = attention->operands;
    int64_t least = of.pairs ? 2 * lanes : lanes;
    int64_t whole = !of.pairs ? 1 : of.amx ? AMX_ELEMENTS : 2;
    bool adjoins = ca_operand_rows_hold(&operands[CA_ATTENTION_QUERY], least) &&
                   ca_operand_rows_hold(&operands[CA_ATTENTION_KEY], least) &&
                   ca_operand_rows_hold(&operands[CA_ATTENTION_VALUE], lanes) &&
                   ca_operand_rows_hold(&operands[CA_ATTENTION_OUTPUT], lanes) &&
                   attention->E % whole == 0;
    if (!adjoins || attention->mods != NULL || ca_attention_has(attention, CA_ATTENTION_LSE) ||
        ca_attention_in_float64(attention)) {
        return 0;
    }
    int64_t options = ca_attention_options(attention);
    bool float32 = operands[CA_ATTENTION_QUERY].dtype == CA_FLOAT32 &&
                   operands[CA_ATTENTION_VALUE].dtype == CA_FLOAT32;
    bool bounded = attention->below != CA_BAND_UNBOUNDED || attention->above != CA_BAND_UNBOUNDED ||
                   ca_attention_has(attention, CA_ATTENTION_KEY_COUNTS) ||
                   operands[CA_ATTENTION_MASK].columns != attention->T;
    bool masked = options == CA_USES(MASK) && float32 && !bounded && !plan->cpu.keys_are_far &&
                  operands[CA_ATTENTION_MASK].dtype == CA_BOOL;
    return options == 0 ? CA_USUAL : masked ? CA_USUAL_MASKED : 0;
}

/* The plan of all variants. Keys can be read as pairs where a row has an even size, and by AMX where
   it has whole matrices. */
static void
plan_tiles(const ca_device_info *info, const ca_attention *attention, products of,
           ca_attention_plan *plan)
{
    const ca_operand *operands = attention->operands;
    const ca_operand *key = &operands[CA_ATTENTION_KEY];
    const ca_operand *past = &operands[CA_ATTENTION_PAST_KEY];
    const ca_operand *value = &operands[CA_ATTENTION_VALUE];
    ca_dtype real = ca_attention_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32;
    bool even = (attention->E | key->row_stride | past->row_stride) % 2 == 0;
    bool whole = !of.amx || attention->E % AMX_ELEMENTS == 0;
    bool keys_are_terms = of.pairs ? even && whole : key->dtype == real;
    int64_t lanes = ca_plan_lanes(info, attention);

    ca_plan_begin(plan, attention, "attention_cpu", 1);
    plan->heads = ca_attention_heads_together(attention);
    plan->grid[2] /= plan->heads;
    int64_t rows = plan->heads * attention->L;
    bool readable = !info->items_are_lanes && !ca_attention_has_pages(attention) &&
                    (ca_attention_options(attention) & CA_SCALE_OPTIONS) == 0;
    plan->cpu.keys_are_far = ca_attention_keys_exceed(attention, rows < NEAR_ROWS, NEAR_BYTES);
    uint32_t fetches = ca_second_cache_is_large(info) ? CA_FETCHES_STARTS : CA_FETCHES_ROWS;
    plan->cpu.fetches = plan->cpu.keys_are_far ? fetches : 0;
    int64_t strip = strip_keys(vectors_of_rows(info, attention, plan, lanes, false, of),
                               lanes * ca_plan_real_bytes(attention));
    bool packs = packing_pays(info, rows, plan->cpu.keys_are_far, strip);
    plan->cpu.keys_in_place =
        readable && keys_are_terms && lies_in_place(key, packs) && lies_in_place(past, packs);
    plan->cpu.values_in_place = readable && value->dtype == real && attention->Ev >= lanes &&
                                lies_in_place(value, packs) &&
                                lies_in_place(&operands[CA_ATTENTION_PAST_VALUE], packs);
    bool in_place = plan->cpu.keys_in_place && plan->cpu.values_in_place;
    bool near = in_place && !plan->cpu.keys_are_far;
    int64_t vectors = vectors_of_rows(info, attention, plan, lanes, near, of);
    int64_t keys = of.amx ? AMX_KEYS : strip_keys(vectors, lanes * ca_plan_real_bytes(attention));
    plan->cpu.block_keys = keys * (of.amx ? AMX_STRIPS : CA_CPU_STRIPS);
    share_work(info, attention, rows, lanes, vectors, !in_place, of, plan);
    ca_plan_define_lanes(plan, info, attention);
    ca_kernel_define(&plan->spec, "NV", vectors);
    ca_kernel_define(&plan->spec, "MR", keys);
    ca_kernel_define(&plan->spec, "BFLOAT16_PAIRS", of.pairs);
    ca_kernel_define(&plan->spec, "AMX", of.amx);
    int usual = find_usual(attention, plan, lanes, of);
    ca_kernel_define(&plan->spec, "USUAL", usual);
    if (usual != 0) {
        ca_plan_define_options(plan, &plan->spec, attention);
    }
}

static void
plan_cpu(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    plan_tiles(info, attention, (products){false, false}, plan);
}

const ca_variant ca_variant_cpu = {
    .word = "cpu",
    .scores = "attention_cpu_scores",
    .max_head = CA_CPU_HEAD_SIZE,
    .max_value_head = CA_CPU_HEAD_SIZE,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_RAGGED_OPTIONS | CA_SCALE_OPTIONS |
             CA_INT4_OPTIONS | CA_USES(DROPOUT),
    .fast = CA_FAST_ON_CPUS,
    .make_plan = plan_cpu,
};

/* ---- attention/cpu.cl with pairs of bfloat16 ---- */

static bool
pairs_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)attention;
    return info->bfloat16_pairs;
}

static bool
pairs_are_fast(const ca_device_info *info, const ca_attention *attention)
{
    (void)attention;
    return info->fast_pairs;
}

static void
plan_pairs(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    plan_tiles(info, attention, (products){true, false}, plan);
}

/* An input bias is refused: its sum with an element would have to be rounded. */
const ca_variant ca_variant_pairs = {
    .word = "pairs",
    .scores = "attention_cpu_scores",
    .dtypes = CA_BFLOAT16_ONLY,
    .max_head = CA_CPU_HEAD_SIZE,
    .max_value_head = CA_CPU_HEAD_SIZE,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_RAGGED_OPTIONS | CA_USES(DROPOUT),
    .can_run = pairs_can_run,
    .of_device = "that multiply pairs of bfloat16",
    .fast = CA_FAST_ON_CPUS,
    .is_fast = pairs_are_fast,
    .make_plan = plan_pairs,
};

/* ---- attention/cpu.cl with AMX ---- */

static bool
amx_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)attention;
    return info->amx;
}

/* AMX multiplies matrices of AMX_SIDE rows. Fewer query rows would leave them mostly empty. */
static bool
amx_is_fast(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    return ca_attention_heads_together(attention) * attention->L > AMX_SIDE;
}

static void
plan_amx(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    plan_tiles(info, attention, (products){true, true}, plan);
}

/* The variant refuses an input bias, as the variant pairs does. */
const ca_variant ca_variant_amx = {
    .word = "amx",
    .scores = "attention_cpu_scores",
    .dtypes = CA_BFLOAT16_ONLY,
    .max_head = CA_CPU_HEAD_SIZE,
    .max_value_head = CA_CPU_HEAD_SIZE,
    .takes = CA_COMMON_OPTIONS | CA_PAST_OPTIONS | CA_RAGGED_OPTIONS | CA_USES(DROPOUT),
    .can_run = amx_can_run,
    .of_device = "with AMX",
    .fast = CA_FAST_ON_CPUS,
    .is_fast = amx_is_fast,
    .make_plan = plan_amx,
};
