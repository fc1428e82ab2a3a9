/* SPDX-License-Identifier: MIT
 *
 * The variant mma, for many rows on devices with matrix units: attention/mma.cl, with
 * tiles of half types.
 */
#include "attention/plan_mma.h"

#include "attention/options.h"
#include "attention/variants.h"

#define THREADS (CA_MMA_WARPS * CA_MMA_LANES)

#define MAX_HEAD 256

/* Largest head size of sequences, so that nothing spills where warps multiply alone. */
#define MAX_HEAD_OF_SEQUENCES 192

/* Warps that multiply together, if they do. Their tiles in local memory are panels of PANEL_COLUMNS, and
   a product has LEAST_GROUP_KEYS keys, or twice as many. */
#define TOGETHER_WARPS   4
#define PANEL_COLUMNS    64
#define LEAST_GROUP_KEYS 64
#define MOST_GROUP_KEYS  128

/* Where rows are copied by 16 bytes, the kernel counts offsets in a tile in 32 bits. */
#define MAX_STRIDE ((int64_t)1 << 22)

enum { ROW_TILES, BLOCK_KEYS, STRIP_KEYS, RING_STAGES, GROUP_WARPS, QUERIES, TOGETHER };

/* The kernel's macros. The registers of a compute unit hold eight warps of any shape. */
static const ca_knob knobs_of_mma[] = {
    [ROW_TILES] = {"MT", {1, 2}},
    [BLOCK_KEYS] = {"BN", {16, 32, 64, 128}},
    [STRIP_KEYS] = {"STRIP", {16, 32, 64, 128}},
    [RING_STAGES] = {"STAGES", {2, 3, 4}},
    [GROUP_WARPS] = {"WARPS", {2, 4, 8}},
    [QUERIES] = {"QUERIES", {CA_QUERIES_IN_REGISTERS, CA_QUERIES_IN_LOCAL_MEMORY}},
    [TOGETHER] = {"TOGETHER", {1, TOGETHER_WARPS}},
    {NULL, {0}},
};

bool
ca_mma_rows_are_aligned(const ca_operand *operand)
{
    return ca_operand_is_wide(operand) && operand->row_stride <= MAX_STRIDE &&
           operand->row_stride >= -MAX_STRIDE;
}

int64_t
ca_mma_padded_head(int64_t head)
{
    static const int64_t sizes[] = {64, 80, 96, 128, 192};
    for (size_t n = 0; n < sizeof(sizes) / sizeof(sizes[0]); n++) {
        if (head <= sizes[n]) {
            return sizes[n];
        }
    }
    return MAX_HEAD;
}

/* A work-group: warps, tiles of rows of each, blocks of the ring, keys of a block, keys that a warp
   scores together, and where queries stay. */
typedef struct {
    int64_t warps;
    int64_t tiles;
    int64_t stages;
    int64_t keys;
    int64_t strip;
    int64_t queries;
    int64_t together; /* warps that multiply together */
} shape;

/* Keys that a warp scores together. More keys share the work of a strip: branches, a vote, the
   comparison with the base. */
#define STRIP        16
#define WIDE_STRIP   32
#define WIDEST_STRIP 64

/* Keys of a block, at most. */
#define MOST_KEYS 64

/* Largest head sizes of a warp with two tiles of rows whose queries stay in registers, so that
   nothing spills: with masks, pages and the like, without them, and without them for strips of
   WIDE_STRIP keys. */
#define TWO_TILES_HEAD       96
#define TWO_TILES_PLAIN_HEAD 128
#define TWO_TILES_WIDE_HEAD  80

bool
ca_mma_is_plain(const ca_attention *attention)
{
    return !ca_attention_has(attention, CA_ATTENTION_MASK) &&
           !ca_attention_has(attention, CA_ATTENTION_BIAS) && ca_attention_softcap(attention) == 0;
}

bool
ca_mma_fills_two_tiles(const ca_device_info *info, int64_t length, double heads)
{
    double groups = heads * (double)ca_divide_up(length, 2 * CA_MMA_WARPS * CA_MMA_TILE_ROWS);
    return length > CA_MMA_WARPS * CA_MMA_TILE_ROWS && groups >= (double)info->compute_units;
}

/* Returns the shape of a group whose queries stay in registers. The ring of keys and values then takes
   the place of the queries in local memory. */
static shape
usual_shape(const ca_device_info *info, const ca_attention *attention, int64_t head, bool fills_two)
{
    bool plain = ca_mma_is_plain(attention);
    bool ample = !ca_plan_has_matrix_units(info, attention) || info->ample_registers;
    bool fits = head <= TWO_TILES_HEAD || (plain && head <= TWO_TILES_PLAIN_HEAD && ample &&
                                           !ca_attention_has_pages(attention));
    int64_t tiles = fits && fills_two ? 2 : 1;
    bool wide = plain && (tiles == 1 || head <= TWO_TILES_WIDE_HEAD);
    return (shape){
        .warps = CA_MMA_WARPS,
        .tiles = tiles,
        .stages = 3,
        .keys = MOST_KEYS,
        .strip = wide ? WIDE_STRIP : STRIP,
        .queries = CA_QUERIES_IN_REGISTERS,
        .together = 1,
    };
}

/* True if the queries of the usual shape should move to local memory, to make room for wider strips. A
   device needs ample local memory for that. Wider strips pay if two tiles of rows leave registers for
   STRIP keys only, and if no function of the user takes registers too. Groups of warps always have their
   queries in local memory, so this is for capabilities 10.0 and 11.0, which have the local memory but no
   wgmma. It was timed on an H200 without groups, where it gained 8 to 15 %. */
static bool
queries_move(const ca_device_info *info, const ca_attention *attention, int64_t head, int64_t tiles)
{
    return info->ample_local_memory && ca_plan_has_matrix_units(info, attention) &&
           attention->mods == NULL && tiles == 2 && head > TWO_TILES_HEAD;
}

/* Returns the head size that the kernel multiplies. Warps that multiply together multiply whole panels, and
   zeros fill the last one. */
static int64_t
multiplied(int64_t head, int64_t together)
{
    return together > 1 ? ca_divide_up(head, PANEL_COLUMNS) * PANEL_COLUMNS : head;
}

/* Returns the largest head size for which warps should multiply together. If a mask or a bias adds numbers to
   scores, larger heads gain nothing. Softcaps were timed up to 128, and with 256 columns registers spill. */
static int64_t
most_grouped_head(const ca_attention *attention)
{
    int64_t numbers = CA_USES(ADDED_MASK) | CA_USES(FILTER) | CA_USES(BIAS);
    bool adds = (ca_attention_options(attention) & numbers) != 0;
    return adds ? 64 : ca_attention_softcap(attention) != 0 ? 128 : MAX_HEAD;
}

/* True if groups of warps should multiply together. Groups multiply whole panels. If a head does not fill its
   last panel, they multiply zeros too, which pays only with a mask. */
static bool
groups_pay(const ca_device_info *info, const ca_attention *attention, int64_t head)
{
    return info->group_matrices && ca_plan_has_matrix_units(info, attention) &&
           attention->mods == NULL && attention->L > CA_MMA_WARPS * CA_MMA_TILE_ROWS &&
           head <= most_grouped_head(attention) &&
           (multiplied(head, TOGETHER_WARPS) == head ||
            ca_attention_has(attention, CA_ATTENTION_MASK));
}

static bool
mma_can_run(const ca_device_info *info, const ca_attention *attention)
{
    int64_t head = attention->E > attention->Ev ? attention->E : attention->Ev;
    bool fits = attention->sequences == NULL || head <= MAX_HEAD_OF_SEQUENCES ||
                groups_pay(info, attention, ca_mma_padded_head(head));
    /* Rows are numbered over all sequences. */
    return fits && ca_attention_page_size(attention) <= CA_MATRIX_MAX_ROWS &&
           attention->T <= CA_MATRIX_MAX_ROWS && attention->L <= CA_MATRIX_MAX_ROWS &&
           attention->operands[CA_ATTENTION_QUERY].rows <= CA_MATRIX_MAX_ROWS;
}

/* Returns the shape of a group whose warps multiply together. With head sizes up to 128, two or three
   work-groups share a compute unit, and one multiplies while another computes weights. Masks and the like
   take registers, so that blocks have fewer keys. So do sequences. */
static shape
grouped_shape(const ca_attention *attention, int64_t head)
{
    bool ample =
        head <= PANEL_COLUMNS && ca_mma_is_plain(attention) && attention->sequences == NULL;
    return (shape){
        .warps = head <= 128 ? CA_MMA_WARPS : 2 * CA_MMA_WARPS,
        .tiles = 1,
        .stages = 2,
        .keys = ample ? MOST_GROUP_KEYS : LEAST_GROUP_KEYS,
        .queries = CA_QUERIES_IN_LOCAL_MEMORY,
        .together = TOGETHER_WARPS,
    };
}

/* Returns the local memory of a work-group of this shape. The emulation of matrix units takes a KiB of it
   for each warp, and a device that needs the emulation has one KiB more for each of CA_MMA_WARPS. */
static int64_t
local_bytes(const shape *s, const ca_device_info *info, const ca_attention *attention)
{
    bool units = ca_plan_has_matrix_units(info, attention);
    bool ample = s->queries == CA_QUERIES_IN_LOCAL_MEMORY && units && info->ample_local_memory;
    int64_t bytes = s->together > 1 && units && info->group_matrices ? CA_GROUP_LOCAL_BYTES
                    : ample                                          ? CA_AMPLE_LOCAL_BYTES
                                                                     : CA_MMA_LOCAL_BYTES;
    return bytes - (units ? 0 : (s->warps - CA_MMA_WARPS) << 10);
}

/* Halves the keys of a block until the group fits the local memory. Warps that multiply together score
   a block as one strip, and take queries from local memory. Returns false if the group does not fit
   the device. */
static bool
fit_device(shape *s, const ca_device_info *info, const ca_attention *attention, int64_t E,
           int64_t Ev)
{
    bool grouped = s->together > 1;
    int64_t least = STRIP;
    if (grouped) {
        s->tiles = 1;
        s->queries = CA_QUERIES_IN_LOCAL_MEMORY;
        s->keys = s->keys < LEAST_GROUP_KEYS ? LEAST_GROUP_KEYS : s->keys;
        least = LEAST_GROUP_KEYS;
    }
    E = multiplied(E, s->together);
    Ev = multiplied(Ev, s->together);
    int64_t bytes = local_bytes(s, info, attention);
    int64_t queries = s->warps * s->tiles * CA_MMA_TILE_ROWS * E * 2;
    int64_t block = s->stages * (E + Ev) * 2; /* for each key */
    int64_t left = bytes - (s->queries == CA_QUERIES_IN_LOCAL_MEMORY ? queries : 0);
    int64_t most = grouped ? MOST_GROUP_KEYS : MOST_KEYS;
    while (s->keys > most || (s->keys > least && s->keys * block > left)) {
        s->keys /= 2;
    }
    s->strip = grouped ? s->keys : ca_smaller(s->strip, ca_smaller(s->keys, WIDEST_STRIP));
    return s->keys * block <= left && queries <= bytes && s->warps % s->together == 0 &&
           s->warps * CA_MMA_LANES <= info->max_work_group;
}

/* Returns the rule's shape, of warps that multiply together or alone. */
static shape
rule_shape(const ca_device_info *info, const ca_attention *attention, int64_t head, bool together,
           double heads)
{
    shape rule =
        usual_shape(info, attention, head, ca_mma_fills_two_tiles(info, attention->L, heads));
    if (together) {
        rule = grouped_shape(attention, head);
    } else if (queries_move(info, attention, head, rule.tiles)) {
        rule.stages = 2;
        rule.strip = WIDEST_STRIP;
        rule.queries = CA_QUERIES_IN_LOCAL_MEMORY;
    }
    return rule;
}

static shape
choose_shape(const ca_device_info *info, const ca_attention *attention, int64_t E, int64_t Ev,
             double heads)
{
    int64_t head = E > Ev ? E : Ev;
    int64_t usual = groups_pay(info, attention, head) ? TOGETHER_WARPS : 1;
    ca_knobs knobs = ca_knobs_of(info, attention, CA_INDEX_mma, knobs_of_mma);
    bool together = ca_knob_value(&knobs, TOGETHER, usual) > 1;
    shape rule = rule_shape(info, attention, head, together, heads);
    shape s = {ca_knob_value(&knobs, GROUP_WARPS, rule.warps),
               ca_knob_value(&knobs, ROW_TILES, rule.tiles),
               ca_knob_value(&knobs, RING_STAGES, rule.stages),
               ca_knob_value(&knobs, BLOCK_KEYS, rule.keys),
               ca_knob_value(&knobs, STRIP_KEYS, rule.strip),
               ca_knob_value(&knobs, QUERIES, rule.queries),
               rule.together};
    if (fit_device(&s, info, attention, E, Ev)) {
        return s;
    }
    if (!fit_device(&rule, info, attention, E, Ev)) {
        rule = rule_shape(info, attention, head, false, heads);
        (void)fit_device(&rule, info, attention, E, Ev);
    }
    return rule;
}

/* Returns what lies in one page, for blocks of so many keys: the macro PAGED. */
static int64_t
paged(const ca_attention *attention, int64_t keys)
{
    int64_t size = ca_attention_page_size(attention);
    return size == 0 ? 0 : size % keys == 0 ? CA_BLOCKS_IN_PAGES : CA_ROWS_IN_PAGES;
}

static void
plan_mma(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    int64_t E = ca_mma_padded_head(attention->E);
    int64_t Ev = ca_mma_padded_head(attention->Ev);
    ca_plan_begin(plan, attention, "attention_mma", THREADS);
    shape s = choose_shape(info, attention, E, Ev, ca_plan_items(plan));
    plan->local_size = (size_t)s.warps * CA_MMA_LANES;
    plan->rows = s.warps * s.tiles * CA_MMA_TILE_ROWS;
    plan->grid[3] = ca_divide_up(attention->L, plan->rows);
    plan->grid[4] = s.warps * CA_MMA_LANES;

    ca_kernel_spec *spec = &plan->spec;
    ca_plan_define_common(spec, attention);
    ca_plan_define_options(plan, spec, attention);
    ca_kernel_define(spec, "HEAD_E", multiplied(E, s.together));
    ca_kernel_define(spec, "HEAD_EV", multiplied(Ev, s.together));
    ca_kernel_define(spec, "LSE", ca_attention_has(attention, CA_ATTENTION_LSE));
    ca_kernel_define(spec, "ALIGNED",
                     ca_mma_rows_are_aligned(&attention->operands[CA_ATTENTION_QUERY]) &&
                         ca_attention_keys_are(attention, ca_mma_rows_are_aligned) &&
                         ca_attention_pages_are_wide(attention));
    ca_kernel_define(spec, "OUTPUT_ALIGNED",
                     ca_mma_rows_are_aligned(&attention->operands[CA_ATTENTION_OUTPUT]));
    ca_plan_define_warp(spec, info, attention, s.together > 1);
    ca_kernel_define(spec, "WARPS", s.warps);
    ca_kernel_define(spec, "MT", s.tiles);
    ca_kernel_define(spec, "STAGES", s.stages);
    ca_kernel_define(spec, "BN", s.keys);
    ca_kernel_define(spec, "STRIP", s.strip);
    ca_kernel_define(spec, "QUERIES", s.queries);
    ca_kernel_define(spec, "TOGETHER", s.together);
    ca_kernel_define(spec, "PAGED", paged(attention, s.keys));
}

const ca_variant ca_variant_mma = {
    .word = "mma",
    .dtypes = CA_ONE_HALF_TYPE,
    .max_head = MAX_HEAD,
    .max_value_head = MAX_HEAD,
    .takes = CA_COMMON_OPTIONS | CA_RAGGED_OPTIONS,
    .group = THREADS,
    .local_memory = CA_MMA_LOCAL_BYTES,
    .multiplies_matrices = true,
    .can_run = mma_can_run,
    .fast = CA_FAST_WITH_MATRIX_UNITS,
    .make_plan = plan_mma,
    .knobs = knobs_of_mma,
};
