/* SPDX-License-Identifier: MIT */
#include "attention/plan.h"

#include <math.h>

#include "kernels/attention/params.h"

void
ca_plan_begin(ca_attention_plan *plan, const ca_attention *attention, const char *name,
              size_t local_size)
{
    *plan = (ca_attention_plan){
        .spec = {.name = name}, .local_size = local_size, .heads = 1, .splits = 1};
    for (int d = 0; d < CA_ATTENTION_GRID_DIMS; d++) {
        plan->grid[d] = d < CA_BATCH_DIMS ? attention->batch[d] : 1;
    }
}

double
ca_plan_items(const ca_attention_plan *plan)
{
    double items = 1;
    for (int d = 0; d < CA_ATTENTION_GRID_DIMS; d++) {
        items *= (double)plan->grid[d];
    }
    return items;
}

int64_t
ca_plan_lanes(const ca_device_info *info, const ca_attention *attention)
{
    int64_t lanes = info->float_width >= 16 ? 16 : info->float_width >= 8 ? 8 : 4;
    return ca_attention_in_float64(attention) && lanes > 4 ? lanes / 2 : lanes;
}

int64_t
ca_plan_real_bytes(const ca_attention *attention)
{
    return ca_attention_in_float64(attention) ? sizeof(double) : sizeof(float);
}

static ca_scores_stage
stage_of(const ca_attention *attention)
{
    bool masked = attention->mask_before_softcap && !ca_attention_caps_last(attention) &&
                  attention->stage == CA_SCORES_STEP_ONE;
    return masked ? CA_SCORES_STEP_TWO : attention->stage;
}

/* Define the macros of attention/row.clh that differ from their defaults. */
static void
define_row(ca_kernel_spec *spec, const ca_attention *attention)
{
    const ca_operand *mask = &attention->operands[CA_ATTENTION_MASK];
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    ca_dtype value_dtype = attention->operands[CA_ATTENTION_VALUE].dtype;
    ca_kernel_define(spec, "DTYPE", (int64_t)dtype);
    if (value_dtype != dtype) {
        ca_kernel_define(spec, "VALUE_DTYPE", (int64_t)value_dtype);
    }
    if (ca_attention_in_float64(attention)) {
        ca_kernel_define(spec, "REAL64", 1);
    }
    if (mask->data != NULL) {
        ca_kernel_define(spec, "MASK", (int64_t)mask->dtype);
        ca_kernel_define(spec, "MASK_ADDS", attention->mask_is_added);
        ca_kernel_define(spec, "FILTER", !isinf(attention->filter));
    }
    if (ca_attention_has(attention, CA_ATTENTION_BIAS)) {
        ca_kernel_define(spec, "BIAS", 1);
    }
    if (ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS)) {
        ca_kernel_define(spec, "INPUT_BIAS", 1);
    }
    if (ca_attention_has(attention, CA_ATTENTION_PAST_KEY)) {
        ca_kernel_define(spec, "PAST", 1);
    }
    if (ca_attention_has(attention, CA_ATTENTION_SCORES)) {
        ca_kernel_define(spec, "SCORES", (int64_t)stage_of(attention));
    }
    if (ca_attention_caps_last(attention)) {
        ca_kernel_define(spec, "SOFTCAP_LAST", 1);
    }
    if (ca_attention_drops(attention)) {
        ca_kernel_define(spec, "DROPOUT", 1);
    }
}

void
ca_plan_define_common(ca_kernel_spec *spec, const ca_attention *attention)
{
    define_row(spec, attention);
    if (ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY)) {
        ca_kernel_define(spec, "PRESENT", 1);
    }
}

void
ca_plan_define_merge(ca_kernel_spec *spec, const ca_attention *attention)
{
    define_row(spec, attention);
    ca_kernel_define(spec, "HEAD_EV", attention->Ev);
}

void
ca_plan_define_sizes(ca_kernel_spec *spec, const ca_attention *attention)
{
    ca_plan_define_common(spec, attention);
    ca_kernel_define(spec, "HEAD_E", attention->E);
    ca_kernel_define(spec, "HEAD_EV", attention->Ev);
    ca_kernel_define(spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
}
