/* SPDX-License-Identifier: MIT */
#include "attention/backward_steps.h"

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

void
ca_backward_remove_optional(ca_attention *step)
{
    for (int role = CA_ATTENTION_FIRST_OPTIONAL; role < CA_ATTENTION_OPTIONAL_END; role++) {
        ca_attention_remove(step, role);
    }
}
