/* SPDX-License-Identifier: MIT */
#include "attention/backward_steps.h"

#include <string.h>

#include "attention/plan.h"
#include "attention/variants.h"
#include "kernels/attention/params.h" /* CA_BACKWARD_… */

void
ca_backward_start_step(const ca_attention *attention, const ca_operand *numbers, ca_attention *step)
{
    *step = *attention;
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        if (ca_attention_is_result(role)) {
            ca_attention_remove(step, role);
        }
    }
    ca_attention_remove(step, CA_ATTENTION_FORWARD_LSE);
    ca_attention_remove(step, CA_ATTENTION_GRAD_LSE);
    step->operands[CA_ATTENTION_LSE] = *numbers;
}

void
ca_backward_start_numbers(const ca_attention *attention, const ca_operand *numbers,
                          ca_attention *step)
{
    ca_backward_start_step(attention, numbers, step);
    step->operands[CA_ATTENTION_FORWARD] = attention->operands[CA_ATTENTION_OUTPUT];
    step->operands[CA_ATTENTION_FORWARD_LSE] = attention->operands[CA_ATTENTION_FORWARD_LSE];
    step->operands[CA_ATTENTION_GRAD_LSE] = attention->operands[CA_ATTENTION_GRAD_LSE];
}

bool
ca_backward_is_summed(const ca_attention *attention, ca_attention_role role, int d)
{
    return ca_attention_has(attention, role) && attention->batch[d] > 1 &&
           attention->operands[role].batch[d] == 0;
}

bool
ca_backward_is_chosen(const ca_device_info *info, const ca_forced *forced, int variant,
                      const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    return forced->kernel == NULL ? (forced->left_out >> variant & 1) == 0 &&
                                        ca_variant_is_fast_on(info, variant, dtype)
                                  : strcmp(forced->kernel, ca_variant_at(variant)->word) == 0;
}

/* Products of a tile and a block. */
static int
products_of(uint32_t step)
{
    return step == CA_BACKWARD_NUMBERS ? 1 : step == CA_BACKWARD_QUERY ? 3 : 4;
}

void
ca_backward_begin_plan(const ca_device_info *info, const char *name, uint32_t step, int64_t threads,
                       ca_launched *launched)
{
    ca_attention_plan *plan = &launched->plan;
    const ca_attention *attention = &launched->attention;
    ca_plan_begin(plan, attention, name, (size_t)threads);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        bool summed = ca_backward_is_summed(attention, CA_ATTENTION_GRAD_QUERY, d) ||
                      ca_backward_is_summed(attention, CA_ATTENTION_GRAD_KEY, d) ||
                      ca_backward_is_summed(attention, CA_ATTENTION_GRAD_VALUE, d);
        plan->grid[d] = summed ? 1 : attention->batch[d];
    }
    plan->gradient = step;
    plan->spec.unoptimised = info->optimises_slowly && info->type == CA_DEVICE_CPU;
    ca_launched_begin(launched, products_of(step));
}

void
ca_backward_remove_optional(ca_attention *step)
{
    for (int role = CA_ATTENTION_FIRST_OPTIONAL; role < CA_ATTENTION_OPTIONAL_END; role++) {
        ca_attention_remove(step, role);
    }
}
