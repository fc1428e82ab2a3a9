/* SPDX-License-Identifier: MIT */
#include "attention/backward_tiled.h"

#include "attention/options.h"
#include "attention/plan_tiled.h"
#include "attention/variants.h" /* CA_INDEX_tiled */
#include "kernels/attention/params.h"

/* A work-item keeps so many elements of its gradients in registers, at most, and reals of 32 bits where it has
   few registers. */
#define MAX_RESULT 64
#define FEW_RESULT 16

/* Of wide heads, local memory holds at most so many rows that a product reads where a work-item has few registers.
   With more of them EC would be small, and compilers would spill. */
#define WIDE_HEAD 128
#define WIDE_KEYS 16

/* Gradients of a step, at most: those of key and value. */
#define RESULTS 2

/* Numbers of a row in local memory, and the bytes of what else is there: views and places. */
#define NUMBERS 3
#define PLACES  512

/* The planner takes the first tiling that fits. The first six are for work-items with many registers, the others
   for work-items with few. The last tilings of each kind are for devices whose work-groups are small. */
static const ca_tiling tilings[] = {
    {16, 16, 4, 4, 0, 0, 0}, {32, 8, 4, 2, 0, 0, 0}, {32, 8, 2, 2, 0, 0, 0},
    {8, 8, 4, 4, 0, 0, 0},   {8, 8, 2, 4, 0, 0, 0},  {8, 8, 1, 4, 0, 0, 0},
    {16, 16, 2, 4, 0, 0, 0}, {32, 8, 2, 2, 0, 0, 0}, {32, 8, 1, 2, 0, 0, 0},
    {8, 8, 2, 4, 0, 0, 0},   {8, 8, 1, 4, 0, 0, 0},
};

enum { WIDE_TILINGS = 6, TILINGS = sizeof(tilings) / sizeof(tilings[0]) };

/* Fill in the rest of a tiling. False if it does not fit. All steps have the same tiling, and so the same bits of
   scores. */
static bool
complete_tiling(ca_tiling *t, const ca_device_info *info, const ca_attention *attention,
                int64_t result, int64_t available)
{
    int64_t head = attention->E > attention->Ev ? attention->E : attention->Ev;
    int64_t real = ca_plan_real_bytes(attention);
    int64_t rows = t->TX * t->NJ > t->TY * t->MI ? t->TX * t->NJ : t->TY * t->MI;
    t->NC = ca_tiling_columns(t, head);
    t->EC = CA_TILING_PASS;
    t->KC = info->registers < CA_TILING_REGISTERS && head > WIDE_HEAD ? WIDE_KEYS : CA_TILING_KEYS;
    return RESULTS * t->MI * t->NC <= result && t->TX * t->TY <= info->max_work_group &&
           ca_tiling_fit(t, head, real,
                         ca_smaller(available, CA_TILING_MEMORY) - NUMBERS * rows * real - PLACES);
}

/* False if no tiling fits the device. Where work-items have few registers, two work-groups share a unit's local
   memory, if there is such a tiling. */
static bool
choose_tiling(const ca_device_info *info, const ca_attention *attention, ca_tiling *chosen)
{
    bool few = info->registers < CA_TILING_REGISTERS;
    int64_t few_result = FEW_RESULT * 4 / ca_plan_real_bytes(attention);
    int64_t local = info->local_memory;
    for (int lean = few; lean >= 0; lean--) {
        for (int n = few ? WIDE_TILINGS : 0; n < (few ? TILINGS : WIDE_TILINGS); n++) {
            *chosen = tilings[n];
            if (complete_tiling(chosen, info, attention, lean ? few_result : MAX_RESULT,
                                lean ? local / 2 : local)) {
                return true;
            }
        }
    }
    return false;
}

/* ---- steps ---- */

static void
plan_step(const ca_device_info *info, uint32_t step, int64_t length, ca_launched *launched)
{
    ca_attention_plan *plan = &launched->plan;
    const ca_attention *attention = &launched->attention;
    ca_tiling t;
    (void)choose_tiling(info, attention, &t);
    ca_backward_begin_plan(info, "attention_tiled_backward", step, t.TX * t.TY, launched);
    plan->grid[3] = ca_divide_up(length, t.TY * t.MI);
    plan->grid[4] = t.TX * t.TY;
    ca_plan_define_sizes(plan, attention);
    ca_tiling_define(&t, info, &plan->spec);
    ca_kernel_define(&plan->spec, "STEP", step);
}

int
ca_backward_plan_steps(const ca_device_info *info, const ca_attention *attention,
                       const ca_operand *numbers, ca_backward_plan_step *plan_gradient,
                       ca_launched *steps)
{
    const ca_attention_role key = CA_ATTENTION_GRAD_KEY;
    const ca_attention_role value = CA_ATTENTION_GRAD_VALUE;
    bool together = ca_attention_has(attention, key) && ca_attention_has(attention, value);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        together = together && ca_backward_is_summed(attention, key, d) ==
                                   ca_backward_is_summed(attention, value, d);
    }
    int count = 0;
    ca_backward_start_numbers(attention, numbers, &steps[count].attention);
    plan_step(info, CA_BACKWARD_NUMBERS, attention->L, &steps[count++]);
    for (ca_attention_role role = CA_ATTENTION_GRAD_QUERY; role <= value; role++) {
        if (!ca_attention_has(attention, role) || (together && role == value)) {
            continue;
        }
        ca_attention *step = &steps[count].attention;
        bool query = role == CA_ATTENTION_GRAD_QUERY;
        ca_backward_start_step(attention, numbers, step);
        ca_attention_remove(step, CA_ATTENTION_SINKS); /* they are part of the rows' sums */
        step->operands[role] = attention->operands[role];
        if (together && role == key) {
            step->operands[value] = attention->operands[value];
        }
        plan_gradient(info, query ? CA_BACKWARD_QUERY : CA_BACKWARD_KEY,
                      query ? attention->L : attention->T, &steps[count++]);
    }
    return count;
}

/* ---- the kernel ---- */

bool
ca_backward_tiles_fit(const ca_device_info *info, const ca_attention *attention)
{
    const ca_operand *operands = attention->operands;
    const ca_operand none = {.dtype = CA_FLOAT32};
    ca_dtype dtype = operands[CA_ATTENTION_QUERY].dtype;
    bool sizes = attention->E > 0 && attention->E <= CA_TILING_HEAD && attention->Ev > 0 &&
                 attention->Ev <= CA_TILING_HEAD && attention->L > 0 &&
                 attention->L <= CA_TILING_LENGTH && attention->T > 0 &&
                 attention->T <= CA_TILING_LENGTH;
    uint64_t three = UINT64_C(1) << CA_ATTENTION_GRAD_QUERY | UINT64_C(1) << CA_ATTENTION_GRAD_KEY |
                     UINT64_C(1) << CA_ATTENTION_GRAD_VALUE;
    int64_t refused = CA_PAST_OPTIONS | CA_USES(INPUT_BIAS) | CA_USES(LATE_SOFTCAP);
    if (!sizes || (attention->repeated & three) != 0 ||
        operands[CA_ATTENTION_VALUE].dtype != dtype ||
        (ca_attention_options(attention) & refused) != 0) {
        return false;
    }
    ca_tiling t;
    ca_attention step;
    ca_attention_role roles[CA_OPTIONAL_ROLES];
    ca_backward_start_numbers(attention, &none, &step); /* of all steps it has the most operands */
    return ca_attention_optional(&step, roles) <= CA_OPTIONAL_VIEWS &&
           choose_tiling(info, attention, &t);
}

bool
ca_backward_tiled_takes(const ca_device_info *info, const ca_forced *forced,
                        const ca_attention *attention)
{
    return ca_backward_is_chosen(info, forced, CA_INDEX_tiled, attention) &&
           ca_backward_tiles_fit(info, attention);
}

ca_backward_division
ca_backward_tiled_divide(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    (void)attention;
    return (ca_backward_division){.parts = 1};
}

int
ca_backward_tiled_plan(const ca_device_info *info, const ca_attention *attention,
                       const ca_backward_division *division, const ca_operand *numbers,
                       const ca_operand *sums, ca_launched *steps)
{
    (void)division;
    (void)sums;
    return ca_backward_plan_steps(info, attention, numbers, plan_step, steps);
}
