/* SPDX-License-Identifier: MIT */
#include "attention/backward_cpu.h"

#include <math.h>
#include <string.h>

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

static bool
is_wanted(const ca_attention *attention, ca_attention_role role)
{
    return ca_attention_has(attention, role);
}

/* A work-item adds to the gradients of a key and its value over the same heads, and to those of queries once. */
static bool
can_own_sums(const ca_attention *attention)
{
    bool both = is_wanted(attention, CA_ATTENTION_GRAD_KEY) &&
                is_wanted(attention, CA_ATTENTION_GRAD_VALUE);
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
           attention->mods == NULL && can_own_sums(attention) &&
           operands[CA_ATTENTION_QUERY].dtype == operands[CA_ATTENTION_VALUE].dtype;
}

static int64_t
covered(int64_t size, int64_t unit)
{
    return ca_divide_up(size, unit) * unit;
}

/* The heads that have keys and values of their own. */
static double
own_heads(const ca_attention *attention)
{
    double heads = 1;
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        bool summed = ca_backward_is_summed(attention, CA_ATTENTION_GRAD_KEY, d) ||
                      ca_backward_is_summed(attention, CA_ATTENTION_GRAD_VALUE, d);
        heads *= summed ? 1 : (double)attention->batch[d];
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
    if (is_wanted(attention, CA_ATTENTION_GRAD_QUERY) && stays) {
        int64_t row = covered(attention->E, lanes);
        division.stride = row > lanes ? row : 2 * lanes;
    }
    return division;
}

/* Plan a step whose operands are set, of a kernel of `items` work-items. */
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
    launched->products = products;
    launched->adds = false;
    launched->flags = 0;
    ca_plan_define_lanes(plan, info, &launched->attention);
    ca_kernel_define(&plan->spec, "NV", VECTORS);
    ca_kernel_define(&plan->spec, "MR", strip_keys(info));
    ca_kernel_define(&plan->spec, "BFLOAT16_PAIRS", 0);
    ca_kernel_define(&plan->spec, "AMX", 0);
    ca_kernel_define(&plan->spec, "USUAL", 0);
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
    int64_t by_keys[] = {1, 1, 1, division->parts, 1};
    int count = 0;

    ca_launched *rows = &steps[count++];
    ca_backward_start_step(attention, numbers, &rows->attention);
    rows->attention.operands[CA_ATTENTION_FORWARD] = operands[CA_ATTENTION_OUTPUT];
    rows->attention.operands[CA_ATTENTION_FORWARD_LSE] = operands[CA_ATTENTION_FORWARD_LSE];
    rows->attention.operands[CA_ATTENTION_GRAD_LSE] = operands[CA_ATTENTION_GRAD_LSE];
    plan_step(info, division, CA_BACKWARD_NUMBERS, 1, by_tiles, rows);

    bool any = is_wanted(attention, CA_ATTENTION_GRAD_QUERY) ||
               is_wanted(attention, CA_ATTENTION_GRAD_KEY) ||
               is_wanted(attention, CA_ATTENTION_GRAD_VALUE);
    if (!any) {
        return count;
    }

    ca_launched *gradients = &steps[count++];
    ca_attention *step = &gradients->attention;
    ca_backward_start_step(attention, numbers, step);
    ca_attention_remove(step, CA_ATTENTION_SINKS); /* they are part of the rows' sums */
    for (ca_attention_role role = CA_ATTENTION_GRAD_QUERY; role <= CA_ATTENTION_GRAD_VALUE;
         role++) {
        step->operands[role] = operands[role];
    }
    step->operands[CA_ATTENTION_OUTPUT] = *sums;
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        bool summed = ca_backward_is_summed(attention, CA_ATTENTION_GRAD_KEY, d) ||
                      ca_backward_is_summed(attention, CA_ATTENTION_GRAD_VALUE, d);
        by_keys[d] = summed ? 1 : batch[d];
    }
    plan_step(info, division, CA_BACKWARD_GRADIENTS, 5, by_keys, gradients);

    if (division->parts > 1 && is_wanted(attention, CA_ATTENTION_GRAD_QUERY)) {
        ca_launched *parts = &steps[count++];
        ca_backward_start_step(attention, numbers, &parts->attention);
        ca_backward_remove_optional(&parts->attention);
        parts->attention.operands[CA_ATTENTION_GRAD_QUERY] = operands[CA_ATTENTION_GRAD_QUERY];
        parts->attention.operands[CA_ATTENTION_OUTPUT] = *sums;
        plan_step(info, division, CA_BACKWARD_PARTS, 0, by_tiles, parts);
    }
    return count;
}
