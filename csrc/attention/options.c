/* SPDX-License-Identifier: MIT */
#include "attention/options.h"

#include <math.h>

/* The operand of each slot. */
static const ca_attention_role operands[] = {
    [CA_PAST_KEY] = CA_ATTENTION_PAST_KEY,
    [CA_PAST_VALUE] = CA_ATTENTION_PAST_VALUE,
    [CA_INPUT_BIAS] = CA_ATTENTION_INPUT_BIAS,
    [CA_MASK] = CA_ATTENTION_MASK,
    [CA_BIAS] = CA_ATTENTION_BIAS,
    [CA_PRESENT_KEY] = CA_ATTENTION_PRESENT_KEY,
    [CA_PRESENT_VALUE] = CA_ATTENTION_PRESENT_VALUE,
    [CA_SCORES] = CA_ATTENTION_SCORES,
    [CA_SINKS] = CA_ATTENTION_SINKS,
    [CA_OFFSETS] = CA_ATTENTION_OFFSETS,
    [CA_BLOCKS] = CA_ATTENTION_BLOCKS,
    [CA_TABLE0] = CA_ATTENTION_TABLE0,
    [CA_TABLE1] = CA_ATTENTION_TABLE1,
    [CA_TABLE2] = CA_ATTENTION_TABLE2,
    [CA_TABLE3] = CA_ATTENTION_TABLE3,
};

#define COUNT ((int)(sizeof(operands) / sizeof(operands[0])))

/* Stage STEP_ONE with a mask before a softcap that is absent is the score after the mask. */
static ca_scores_stage
stage_of(const ca_attention *attention)
{
    bool masked = attention->mask_before_softcap && !ca_attention_caps_last(attention) &&
                  attention->stage == CA_SCORES_STEP_ONE;
    return masked ? CA_SCORES_STEP_TWO : attention->stage;
}

uint32_t
ca_attention_options(const ca_attention *attention)
{
    const ca_operand *mask = &attention->operands[CA_ATTENTION_MASK];
    uint32_t options = 0;
    if (mask->data != NULL) {
        options |= CA_USES_MASK;
        options |= attention->mask_is_added    ? CA_USES_ADDED_MASK
                   : !isinf(attention->filter) ? CA_USES_FILTER
                                               : 0;
    }
    if (ca_attention_has(attention, CA_ATTENTION_BIAS)) {
        options |= CA_USES_BIAS;
    }
    if (ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS)) {
        options |= CA_USES_INPUT_BIAS;
    }
    if (ca_attention_has(attention, CA_ATTENTION_PAST_KEY)) {
        options |= CA_USES_PAST;
    }
    if (ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY)) {
        options |= CA_USES_PRESENT;
    }
    if (ca_attention_softcap(attention) > 0) {
        options |= CA_USES_SOFTCAP;
        options |= ca_attention_caps_last(attention) ? CA_USES_LATE_SOFTCAP : 0;
    }
    if (ca_attention_drops(attention)) {
        options |= CA_USES_DROPOUT;
    }
    if (ca_attention_has(attention, CA_ATTENTION_BLOCKS)) {
        options |= CA_USES_BLOCKS;
    }
    if (ca_attention_has(attention, CA_ATTENTION_SCORES)) {
        options |= CA_USES_SCORES | (uint32_t)stage_of(attention) << CA_STAGE_SHIFT;
    }
    if (ca_attention_has(attention, CA_ATTENTION_SINKS)) {
        options |= CA_USES_SINKS;
    }
    if (ca_attention_has(attention, CA_ATTENTION_OFFSETS)) {
        options |= CA_USES_OFFSETS;
    }
    return options;
}

ca_optional_arrays
ca_attention_optional(const ca_attention *attention)
{
    ca_optional_arrays arrays = {0};
    uint64_t slots = 0;
    for (int n = 0; n < COUNT; n++) {
        if (ca_attention_has(attention, operands[n])) {
            slots |= (uint64_t)arrays.count << (4 * n);
            arrays.roles[arrays.count++] = operands[n];
        }
    }
    arrays.slots = (int64_t)slots;
    return arrays;
}
