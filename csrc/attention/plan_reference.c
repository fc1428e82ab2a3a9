/* SPDX-License-Identifier: MIT
 *
 * The reference, attention/reference.cl: every problem, on every device.
 */
#include "attention/variants.h"

static void
plan_reference(const ca_device_info *info, const ca_attention *attention, ca_attention_plan *plan)
{
    ca_plan_begin(plan, attention, "attention_reference", 1);
    plan->grid[3] = attention->L;
    plan->redoes = false;
    if (info->items_are_lanes) {
        plan->local_size = (size_t)ca_smaller(info->max_work_group, 64);
        plan->any_local_size = true;
    }
    ca_plan_define_data(plan, info, attention);
}

const ca_variant ca_variant_reference = {
    .word = "reference",
    .takes = CA_ALL_OPTIONS,
    .fast = CA_FAST_ANYWHERE,
    .make_plan = plan_reference,
};
