/* SPDX-License-Identifier: MIT */
#include "attention/options.h"

#include <math.h>

/* Stage STEP_ONE with a mask before a softcap that is absent is the score after the mask. */
static ca_scores_stage
stage_of(const ca_attention *attention)
{
    bool masked = attention->mask_before_softcap && !ca_attention_caps_last(attention) &&
                  attention->stage == CA_SCORES_STEP_ONE;
    return masked ? CA_SCORES_STEP_TWO : attention->stage;
}

int64_t
ca_attention_options(const ca_attention *attention)
{
    int64_t options = 0;
    for (int n = 0; n < CA_OPTIONAL_ROLES; n++) {
        bool has = ca_attention_has(attention, CA_ATTENTION_FIRST_OPTIONAL + n);
        options |= (int64_t)has << n;
    }
    if (ca_attention_has(attention, CA_ATTENTION_MASK)) {
        options |= attention->mask_is_added    ? CA_USES(ADDED_MASK)
                   : !isinf(attention->filter) ? CA_USES(FILTER)
                                               : 0;
    }
    if (ca_attention_softcap(attention) > 0) {
        options |= CA_USES(SOFTCAP);
        options |= ca_attention_caps_last(attention) ? CA_USES(LATE_SOFTCAP) : 0;
    }
    if (ca_attention_drops(attention)) {
        options |= CA_USES(DROPOUT);
    }
    if (ca_attention_has(attention, CA_ATTENTION_SCORES)) {
        options |= (int64_t)stage_of(attention) << CA_OPTION_STAGE;
    }
    return options;
}

int
ca_attention_optional(const ca_attention *attention, ca_attention_role roles[CA_OPTIONAL_ROLES])
{
    int count = 0;
    for (int role = CA_ATTENTION_FIRST_OPTIONAL; role < CA_ATTENTION_OPTIONAL_END; role++) {
        if (ca_attention_has(attention, role)) {
            roles[count++] = role;
        }
    }
    return count;
}
