/* SPDX-License-Identifier: MIT */
#include "attention/backward_mma.h"

#include "attention/backward_tiled.h"
#include "attention/plan.h"
#include "attention/plan_mma.h"
#include "attention/variants.h" /* CA_INDEX_mma, CA_EMULATION_BYTES */
#include "kernels/attention/params.h"

#define THREADS (CA_MMA_WARPS * CA_MMA_LANES)

/* E and Ev are at most so large: registers hold the gradients of a warp's keys and values. */
#define MAX_HEAD 128

/* Blocks of the ring; lines of a block, rows or keys; and those that a warp takes together. Where the ring or
   registers lack room, there are FEW_LINES. */
#define STAGES    2
#define LINES     32
#define FEW_LINES 16

/* Above these head sizes registers spill: if a warp has two tiles and scores are plain products, and if it takes a
   wide strip otherwise. */
#define TWO_TILES_HEAD  64
#define WIDE_STRIP_HEAD 64

/* A step's work-group. */
typedef struct {
    int64_t tiles; /* of each warp */
    int64_t block; /* lines of a block */
    int64_t strip; /* and those that a warp takes together */
} shape;

static shape
choose_shape(const ca_device_info *info, const ca_attention *attention, int64_t E, int64_t Ev,
             bool fills_two)
{
    int64_t head = E > Ev ? E : Ev;
    bool plain = ca_mma_is_plain(attention);
    bool two = plain && head <= TWO_TILES_HEAD && fills_two;
    bool wide = !two && (plain || head <= WIDE_STRIP_HEAD);
    bool ample = info->ample_local_memory && ca_plan_has_matrix_units(info, attention);
    int64_t bytes = ample ? CA_AMPLE_LOCAL_BYTES : CA_MMA_LOCAL_BYTES;
    int64_t line = (E + Ev) * 2;
    int64_t tiles = two ? 2 : 1;
    int64_t left = bytes - CA_MMA_WARPS * tiles * CA_MMA_TILE_ROWS * line;
    int64_t block = STAGES * LINES * line <= left ? LINES : FEW_LINES;
    return (shape){tiles, block, wide ? block : FEW_LINES};
}

/* True if the rows of all operands in a list, but those that are absent, can be read or written by 16 bytes. */
static bool
are_aligned(const ca_attention *attention, const ca_attention_role *roles, int count)
{
    bool aligned = true;
    for (int n = 0; n < count; n++) {
        aligned = aligned && (!ca_attention_has(attention, roles[n]) ||
                              ca_mma_rows_are_aligned(&attention->operands[roles[n]]));
    }
    return aligned;
}

/* Plan a step of one gradient, or of those of key and value. */
static void
plan_step(const ca_device_info *info, uint32_t step, int64_t length, ca_launched *launched)
{
    static const ca_attention_role inputs[] = {CA_ATTENTION_QUERY, CA_ATTENTION_KEY,
                                               CA_ATTENTION_VALUE, CA_ATTENTION_GRAD_OUTPUT};
    static const ca_attention_role results[] = {CA_ATTENTION_GRAD_QUERY, CA_ATTENTION_GRAD_KEY,
                                                CA_ATTENTION_GRAD_VALUE};
    const ca_attention *attention = &launched->attention;
    ca_attention_plan *plan = &launched->plan;
    ca_kernel_spec *spec = &plan->spec;
    int64_t E = ca_mma_padded_head(attention->E);
    int64_t Ev = ca_mma_padded_head(attention->Ev);
    ca_backward_begin_plan(info, "attention_mma_backward", step, THREADS, launched);
    bool fills_two = ca_mma_fills_two_tiles(info, length, ca_plan_items(plan));
    shape s = choose_shape(info, attention, E, Ev, fills_two);
    plan->grid[3] = ca_divide_up(length, CA_MMA_WARPS * s.tiles * CA_MMA_TILE_ROWS);
    plan->grid[4] = THREADS;

    ca_plan_define_common(spec, attention);
    ca_plan_define_options(plan, spec, attention);
    ca_plan_define_warp(spec, info, attention, false);
    ca_kernel_define(spec, "HEAD_E", E);
    ca_kernel_define(spec, "HEAD_EV", Ev);
    ca_kernel_define(spec, "ALIGNED", are_aligned(attention, inputs, 4));
    ca_kernel_define(spec, "OUTPUT_ALIGNED", are_aligned(attention, results, 3));
    ca_kernel_define(spec, "WARPS", CA_MMA_WARPS);
    ca_kernel_define(spec, "MT", s.tiles);
    ca_kernel_define(spec, "STAGES", STAGES);
    ca_kernel_define(spec, "BN", s.block);
    ca_kernel_define(spec, "STRIP", s.strip);
    ca_kernel_define(spec, "STEP", step);
}

bool
ca_backward_mma_takes(const ca_device_info *info, const ca_forced *forced,
                      const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    bool units = ca_plan_has_matrix_units(info, attention);
    bool emulates = info->type == CA_DEVICE_CPU || forced->emulates;
    return ca_backward_is_chosen(info, forced, CA_INDEX_mma, attention) && (units || emulates) &&
           (dtype == CA_FLOAT16 || dtype == CA_BFLOAT16) &&
           (attention->mods == NULL || !attention->mods->has_score) && attention->E <= MAX_HEAD &&
           attention->Ev <= MAX_HEAD && info->max_work_group >= THREADS &&
           info->local_memory >= CA_MMA_LOCAL_BYTES + (units ? 0 : CA_EMULATION_BYTES) &&
           ca_backward_tiles_fit(info, attention);
}

int
ca_backward_mma_plan(const ca_device_info *info, const ca_attention *attention,
                     const ca_backward_division *division, const ca_operand *numbers,
                     const ca_operand *sums, ca_launched *steps)
{
    (void)division;
    (void)sums;
    return ca_backward_plan_steps(info, attention, numbers, plan_step, steps);
}
