/* SPDX-License-Identifier: MIT */
#include "attention/backward_cpu.h"

#include <math.h>
#include <string.h>

#include "attention/options.h" /* ca_attention_optional */
#include "attention/plan.h"
#include "attention/variants.h" /* CA_INDEX_cpu */
#include "kernels/attention/params.h"

/* Vectors of rows of a tile, and keys that are scored together: their product of sums fills the registers. */
#define VECTORS     2
#define WIDE_KEYS   12
#define NARROW_KEYS 6

#define CACHE_LINE 64

/* The keys of a head are divided if this shortens the idle time of cores by more than IDLE_SHARE of the
   call. */
#define IDLE_SHARE (1.0 / 16)

static int64_t
strip_keys(const ca_device_info *info)
{
    return info->float_width >= 16 ? WIDE_KEYS : NARROW_KEYS;
}

/* True if one work-item can own a gradient: those of a key and its value are sums over the same heads, and those of
   queries are no sums over heads. */
static bool
can_own_sums(const ca_attention *attention)
{
    bool both = ca_attention_has(attention, CA_ATTENTION_GRAD_KEY) &&
                ca_attention_has(attention, CA_ATTENTION_GRAD_VALUE);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        if (ca_backward_is_summed(attention, CA_ATTENTION_GRAD_QUERY, d) ||
            (both && ca_backward_is_summed(attention, CA_ATTENTION_GRAD_KEY, d) !=
                         ca_backward_is_summed(attention, CA_ATTENTION_GRAD_VALUE, d))) {
            return false;
        }
    }
    uint64_t three = UINT64_C(1) << CA_ATTENTION_GRAD_QUERY | UINT64_C(1) << CA_ATTENTION_GRAD_KEY |
                     UINT64_C(1) << CA_ATTENTION_GRAD_VALUE;
    return (attention->repeated & three) == 0;
}

/* Returns how many optional operands the first step has: those of scores, and four of the backward pass. */
static int
optional_of_numbers(const ca_attention *attention)
{
    ca_attention step;
    ca_attention_role roles[CA_OPTIONAL_ROLES];
    ca_backward_start_numbers(attention, &(ca_operand){0}, &step);
    return ca_attention_optional(&step, roles);
}

/* Returns how many a step of one gradient has. */
static int
optional_of_gradient(const ca_attention *attention)
{
    ca_attention step;
    ca_attention_role roles[CA_OPTIONAL_ROLES];
    ca_backward_start_step(attention, &(ca_operand){0}, &step);
    ca_attention_remove(&step, CA_ATTENTION_SINKS);
    return ca_attention_optional(&step, roles) + 1;
}

bool
ca_backward_cpu_takes(const ca_device_info *info, const ca_forced *forced,
                      const ca_attention *attention)
{
    const ca_operand *operands = attention->operands;
    bool chosen = forced->kernel == NULL ? (forced->left_out >> CA_INDEX_cpu & 1) == 0
                                         : strcmp(forced->kernel, "cpu") == 0;
    bool sizes = attention->E > 0 && attention->E <= CA_BACKWARD_SIZE && attention->Ev > 0 &&
                 attention->Ev <= CA_BACKWARD_SIZE && attention->L > 0 && attention->T > 0;
    return chosen && sizes && info->type == CA_DEVICE_CPU && !info->items_are_lanes &&
           can_own_sums(attention) &&
           operands[CA_ATTENTION_QUERY].dtype == operands[CA_ATTENTION_VALUE].dtype &&
           optional_of_numbers(attention) <= CA_OPTIONAL_VIEWS &&
           optional_of_gradient(attention) <= CA_OPTIONAL_VIEWS;
}

static int64_t
covered(int64_t size, int64_t unit)
{
    return ca_divide_up(size, unit) * unit;
}

/* True if heads along leading dimension d share their keys and values. */
static bool
share_keys(const ca_attention *attention, int d)
{
    return ca_backward_is_summed(attention, CA_ATTENTION_GRAD_KEY, d) ||
           ca_backward_is_summed(attention, CA_ATTENTION_GRAD_VALUE, d);
}

/* Returns how many heads have keys and values of their own. */
static double
own_heads(const ca_attention *attention)
{
    double heads = 1;
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        heads *= share_keys(attention, d) ? 1 : (double)attention->batch[d];
    }
    return heads;
}

/* Returns in how many parts to divide the keys of a head, so that all cores end at about the same time. */
static int64_t
choose_parts(const ca_device_info *info, const ca_attention *attention, int64_t keys)
{
    double heads = own_heads(attention);
    double cores = (double)info->compute_units;
    int64_t most = ca_divide_up(attention->T, keys);
    int64_t found = 1;
    double busiest = 0; /* the busy share of the cores' time, with `found` parts */
    for (int64_t n = 1; n <= most && busiest < 1 - IDLE_SHARE && heads * (double)n <= 4 * cores;
         n++) {
        double items = heads * (double)n;
        double busy = items / (ceil(items / cores) * cores);
        if (busy > busiest + IDLE_SHARE) {
            found = n;
            busiest = busy;
        }
    }
    return found;
}

ca_backward_division
ca_backward_cpu_divide(const ca_device_info *info, const ca_attention *attention)
{
    ca_backward_division division = {1, 0, 0};
    int64_t lanes = ca_plan_lanes(info, attention);
    int64_t panel = VECTORS * lanes;
    int64_t columns = covered(attention->E, panel) + covered(attention->Ev, panel) +
                      2 * CACHE_LINE / ca_plan_real_bytes(attention);
    division.keys = ca_smaller(CA_BACKWARD_COLUMNS / columns, CA_CPU_STRIPS) * strip_keys(info);
    division.parts = choose_parts(info, attention, division.keys);
    bool stays = division.parts > 1 || attention->T > division.keys;
    if (ca_attention_has(attention, CA_ATTENTION_GRAD_QUERY) && stays) {
        int64_t row = covered(attention->E, lanes);
        division.stride = row > lanes ? row : 2 * lanes;
    }
    return division;
}

/* Plan a step whose operands are set. The product of `grid` is the number of work-items. */
static void
plan_step(const ca_device_info *info, const ca_backward_division *division, uint32_t step,
          int products, const int64_t grid[CA_ATTENTION_GRID_DIMS], ca_launched *launched)
{
    ca_attention_plan *plan = &launched->plan;
    ca_plan_begin(plan, &launched->attention, "attention_cpu_backward", 1);
    plan->gradient = step;
    plan->tiles = division->keys;
    plan->splits = division->parts;
    plan->cpu.block_keys = strip_keys(info) * CA_CPU_STRIPS;
    for (int d = 0; d < CA_ATTENTION_GRID_DIMS; d++) {
        plan->grid[d] = grid[d];
    }
    ca_launched_begin(launched, products);
    ca_plan_define_lanes(plan, info, &launched->attention);
    ca_kernel_define(&plan->spec, "NV", VECTORS);
    ca_kernel_define(&plan->spec, "MR", strip_keys(info));
    ca_kernel_define(&plan->spec, "BFLOAT16_PAIRS", 0);
    ca_kernel_define(&plan->spec, "AMX", 0);
    ca_kernel_define(&plan->spec, "USUAL", 0);
}

/* Plan the gradients of some of query, key and value, by one step. */
static void
plan_gradients(const ca_device_info *info, const ca_attention *attention,
               const ca_backward_division *division, const ca_operand *numbers,
               const ca_operand *sums, const ca_attention_role *roles, int count,
               ca_launched *launched)
{
    ca_attention *step = &launched->attention;
    int64_t grid[] = {1, 1, 1, division->parts, 1};
    ca_backward_start_step(attention, numbers, step);
    ca_attention_remove(step, CA_ATTENTION_SINKS); /* they are part of the rows' sums */
    step->operands[CA_ATTENTION_OUTPUT] = *sums;
    for (int n = 0; n < count; n++) {
        step->operands[roles[n]] = attention->operands[roles[n]];
    }
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        grid[d] = share_keys(step, d) ? 1 : attention->batch[d];
    }
    plan_step(info, division, CA_BACKWARD_GRADIENTS, 5, grid, launched);
}

/* Plan the gradient of the mask. */
static void
plan_mask(const ca_device_info *info, const ca_attention *attention,
          const ca_backward_division *division, const ca_operand *numbers, ca_launched *launched)
{
    const ca_operand *result = &attention->operands[CA_ATTENTION_GRAD_MASK];
    int64_t rows = VECTORS * ca_plan_lanes(info, attention);
    bool adds = (attention->repeated >> CA_ATTENTION_GRAD_MASK & 1) != 0;
    int64_t grid[] = {1, 1, 1, 1, 1};
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        grid[d] = result->batch[d] != 0 ? attention->batch[d] : 1;
    }
    grid[3] = result->row_stride != 0 ? ca_divide_up(attention->L, rows) : 1;
    grid[4] = result->column_stride != 0 ? ca_divide_up(attention->T, division->keys) : 1;
    ca_backward_start_step(attention, numbers, &launched->attention);
    ca_attention_remove(&launched->attention, CA_ATTENTION_SINKS);
    launched->attention.operands[CA_ATTENTION_OUTPUT] = *result;
    plan_step(info, division,
              CA_BACKWARD_MASK | (adds ? CA_BACKWARD_ADDS : 0) |
                  CA_BACKWARD_DTYPE * (uint32_t)result->dtype,
              2, grid, launched);
    launched->adds = adds;
}

void
ca_backward_cpu_plan_captured(const ca_device_info *info, const ca_backward_division *division,
                              uint32_t gradient, int64_t groups, int64_t copies,
                              ca_launched *launched)
{
    const int64_t grid[] = {1, 1, 1, groups, copies};
    plan_step(info, division, gradient, 2, grid, launched);
    launched->adds = true; /* to sums that a step before has cleared */
    launched->plan.splits = copies;
}

int
ca_backward_cpu_plan(const ca_device_info *info, const ca_attention *attention,
                     const ca_backward_division *division, const ca_operand *numbers,
                     const ca_operand *sums, ca_launched *steps)
{
    const ca_operand *operands = attention->operands;
    const int64_t *batch = attention->batch;
    int64_t tiles = ca_divide_up(attention->L, VECTORS * ca_plan_lanes(info, attention));
    const int64_t by_tiles[] = {batch[0], batch[1], batch[2], tiles, 1};
    ca_attention_role wanted[3];
    int gradients = 0;
    int count = 0;
    for (ca_attention_role role = CA_ATTENTION_GRAD_QUERY; role <= CA_ATTENTION_GRAD_VALUE;
         role++) {
        if (ca_attention_has(attention, role)) {
            wanted[gradients++] = role;
        }
    }

    ca_launched *rows = &steps[count++];
    ca_backward_start_numbers(attention, numbers, &rows->attention);
    plan_step(info, division, CA_BACKWARD_NUMBERS, 1, by_tiles, rows);
    rows->at_most = true; /* few rows need the product, if any */

    /* Where one step has no room for all operands, each gradient has a step. */
    bool together = optional_of_gradient(attention) - 1 + gradients <= CA_OPTIONAL_VIEWS;
    int each = together ? gradients : 1;
    for (int n = 0; n < gradients; n += each) {
        plan_gradients(info, attention, division, numbers, sums, wanted + n, each, &steps[count++]);
    }
    if (division->parts > 1 && ca_attention_has(attention, CA_ATTENTION_GRAD_QUERY)) {
        ca_launched *parts = &steps[count++];
        ca_backward_start_step(attention, numbers, &parts->attention);
        ca_backward_remove_optional(&parts->attention);
        parts->attention.operands[CA_ATTENTION_GRAD_QUERY] = operands[CA_ATTENTION_GRAD_QUERY];
        parts->attention.operands[CA_ATTENTION_OUTPUT] = *sums;
        plan_step(info, division, CA_BACKWARD_PARTS, 0, by_tiles, parts);
    }
    if (ca_attention_has(attention, CA_ATTENTION_GRAD_MASK)) {
        plan_mask(info, attention, division, numbers, &steps[count++]);
    }
    return count;
}
