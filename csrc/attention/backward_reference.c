/* SPDX-License-Identifier: MIT */
#include "attention/backward_reference.h"

#include "attention/backward_steps.h"
#include "attention/plan.h"
#include "kernels/attention/params.h"
#include "opencl/step.h" /* CA_MAX_STEPS */

/* Work-items of a group, where these are lanes. */
#define GROUP 64

/* What each gradient is computed by. */
static const struct {
    ca_attention_role role;
    uint32_t step;
    bool is_wide; /* some columns by a work-item, else one number */
} gradients[] = {
    {CA_ATTENTION_GRAD_QUERY, CA_BACKWARD_QUERY, true},
    {CA_ATTENTION_GRAD_KEY, CA_BACKWARD_KEY, true},
    {CA_ATTENTION_GRAD_VALUE, CA_BACKWARD_VALUE, true},
    {CA_ATTENTION_GRAD_MASK, CA_BACKWARD_MASK, false},
    {CA_ATTENTION_GRAD_SINKS, CA_BACKWARD_SINKS, false},
};

enum { GRADIENTS = sizeof gradients / sizeof gradients[0] };
_Static_assert(GRADIENTS + 2 <= CA_MAX_STEPS, "rows and deltas are steps too");

static void
plan_step(const ca_device_info *info, ca_launched *launched, uint32_t gradient,
          const int64_t grid[CA_ATTENTION_GRID_DIMS])
{
    ca_attention_plan *plan = &launched->plan;
    ca_plan_begin(plan, &launched->attention, "attention_backward", 1);
    plan->gradient = gradient;
    for (int d = 0; d < CA_ATTENTION_GRID_DIMS; d++) {
        plan->grid[d] = grid[d];
    }
    if (info->items_are_lanes) {
        plan->local_size = (size_t)ca_smaller(info->max_work_group, GROUP);
        plan->any_local_size = true;
    }
    ca_plan_define_data(plan, info, &launched->attention);
}

/* What the softmax of rows is made of. */
static void
plan_sums(const ca_device_info *info, const ca_attention *attention, const ca_operand *numbers,
          ca_launched *launched)
{
    const int64_t *batch = attention->batch;
    const int64_t grid[] = {batch[0], batch[1], batch[2], attention->L, 1};
    ca_backward_start_step(attention, numbers, &launched->attention);
    ca_attention_remove(&launched->attention, CA_ATTENTION_GRAD_OUTPUT);
    ca_launched_begin(launched, CA_REFERENCE_TIMES);
    plan_step(info, launched, CA_BACKWARD_ROWS, grid);
}

static void
plan_deltas(const ca_device_info *info, const ca_attention *attention, const ca_operand *numbers,
            ca_launched *launched)
{
    const int64_t *batch = attention->batch;
    const int64_t grid[] = {batch[0], batch[1], batch[2], attention->L, 1};
    ca_attention *step = &launched->attention;
    ca_backward_start_step(attention, numbers, step);
    ca_backward_remove_optional(step);
    step->operands[CA_ATTENTION_FORWARD] = attention->operands[CA_ATTENTION_OUTPUT];
    step->operands[CA_ATTENTION_GRAD_OUTPUT] = attention->operands[CA_ATTENTION_GRAD_OUTPUT];
    step->operands[CA_ATTENTION_GRAD_LSE] = attention->operands[CA_ATTENTION_GRAD_LSE];
    ca_launched_begin(launched, 0);
    plan_step(info, launched, CA_BACKWARD_DELTAS, grid);
}

/* Gradient n of the table. */
static void
plan_gradient(const ca_device_info *info, const ca_attention *attention, const ca_operand *numbers,
              int n, ca_launched *launched)
{
    const ca_operand *result = &attention->operands[gradients[n].role];
    ca_attention *step = &launched->attention;
    int64_t grid[CA_ATTENTION_GRID_DIMS];
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        grid[d] = result->batch[d] != 0 ? attention->batch[d] : 1;
    }
    grid[3] = gradients[n].is_wide || result->row_stride != 0 ? result->rows : 1;
    grid[4] = gradients[n].is_wide         ? ca_divide_up(result->columns, CA_REFERENCE_COLUMNS)
              : result->column_stride != 0 ? result->columns
                                           : 1;
    ca_backward_start_step(attention, numbers, step);
    if (gradients[n].role == CA_ATTENTION_GRAD_SINKS) {
        ca_attention_remove(step, CA_ATTENTION_GRAD_OUTPUT);
    } else {
        ca_attention_remove(step, CA_ATTENTION_SINKS); /* they are part of the rows' sums */
    }
    step->operands[CA_ATTENTION_OUTPUT] = *result;
    ca_launched_begin(launched, 3 * CA_REFERENCE_TIMES);
    launched->adds = (attention->repeated >> gradients[n].role & 1) != 0;
    plan_step(info, launched,
              gradients[n].step | (launched->adds ? CA_BACKWARD_ADDS : 0) |
                  CA_BACKWARD_DTYPE * (uint32_t)result->dtype,
              grid);
}

int
ca_backward_reference_plan_rows(const ca_device_info *info, const ca_attention *attention,
                                const ca_operand *numbers, ca_launched *steps)
{
    plan_sums(info, attention, numbers, &steps[0]);
    plan_deltas(info, attention, numbers, &steps[1]);
    return 2;
}

int
ca_backward_reference_plan(const ca_device_info *info, const ca_attention *attention,
                           const ca_operand *numbers, bool (*is_chosen)(ca_attention_role role),
                           ca_launched *steps)
{
    int count = 0;
    for (int n = 0; n < GRADIENTS; n++) {
        ca_attention_role role = gradients[n].role;
        if (is_chosen(role) && ca_attention_extent(attention, role).bytes > 0) {
            plan_gradient(info, attention, numbers, n, &steps[count++]);
        }
    }
    return count;
}

void
ca_backward_reference_plan_captured(const ca_device_info *info, ca_launched *launched, int products,
                                    int64_t copies, uint32_t gradient, int64_t rows,
                                    int64_t columns)
{
    const int64_t grid[] = {1, 1, 1, rows, columns};
    ca_launched_begin(launched, products * CA_REFERENCE_TIMES);
    launched->adds = true; /* to sums that a step before has left */
    plan_step(info, launched, gradient, grid);
    launched->plan.splits = copies;
}
