/* SPDX-License-Identifier: MIT */
#include "attention/plan.h"

#include <stddef.h>
#include <string.h>

#include "attention/options.h"
#include "kernels/attention/params.h"

void
ca_plan_begin(ca_attention_plan *plan, const ca_attention *attention, const char *name,
              size_t local_size)
{
    memset(plan, 0, offsetof(ca_attention_plan, spec));
    ca_kernel_spec_begin(&plan->spec, name);
    ca_kernel_spec_begin(&plan->merge, NULL);
    plan->local_size = local_size;
    plan->heads = 1;
    plan->tiles = 1;
    plan->cpu.key_heads = 1;
    plan->cpu.turns = 1;
    plan->splits = 1;
    plan->arrays = CA_OPTIONAL_VIEWS;
    plan->redoes = true;
    for (int d = 0; d < CA_ATTENTION_GRID_DIMS; d++) {
        plan->grid[d] = d < CA_BATCH_DIMS ? attention->batch[d] : 1;
    }
}

ca_status
ca_plan_check_float64(const ca_device_info *info, const ca_attention *attention, ca_error *error)
{
    return !ca_attention_in_float64(attention) || info->float64
               ? CA_OK
               : ca_error_set(error, CA_ERROR_DEVICE,
                              "this call computes in float64, which %s cannot; use float32 or "
                              "choose another device",
                              info->name);
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

bool
ca_first_cache_is_large(const ca_device_info *info)
{
    return info->first_cache >= 48 << 10;
}

bool
ca_second_cache_is_large(const ca_device_info *info)
{
    return info->second_cache >= 2 << 20;
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

void
ca_plan_define_common(ca_kernel_spec *spec, const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    ca_dtype value_dtype = attention->operands[CA_ATTENTION_VALUE].dtype;
    const ca_mods *mods = attention->mods;
    ca_kernel_define(spec, "DTYPE", (int64_t)dtype);
    if (ca_attention_has_codes(attention)) {
        ca_dtype key_dtype = attention->operands[CA_ATTENTION_KEY].dtype;
        int64_t code = attention->code != 0 ? attention->code : (int64_t)key_dtype;
        ca_kernel_define(spec, "KEY_DTYPE", code);
        ca_kernel_define(spec, "VALUE_DTYPE", code);
    } else {
        ca_kernel_define(spec, "VALUE_DTYPE", (int64_t)value_dtype);
    }
    ca_kernel_define(spec, "REAL64", ca_attention_in_float64(attention));
    if (ca_attention_has(attention, CA_ATTENTION_SEQUENCES)) {
        ca_kernel_define(spec, "RAGGED", 1);
    }
    if (mods != NULL) {
        ca_kernel_define(spec, "HAS_SCORE_MOD", mods->has_score);
        ca_kernel_define(spec, "HAS_MASK_MOD", mods->has_mask);
        spec->mods = mods->text;
        spec->mods_hash[0] = mods->hash[0];
        spec->mods_hash[1] = mods->hash[1];
    }
}

void
ca_plan_define_options(ca_attention_plan *plan, ca_kernel_spec *spec, const ca_attention *attention)
{
    ca_attention_role roles[CA_OPTIONAL_ROLES];
    plan->arrays = ca_attention_optional(attention, roles);
    ca_kernel_define(spec, "OPTIONS", ca_attention_options(attention));
    ca_kernel_define(spec, "ARRAYS", plan->arrays);
    ca_kernel_define(spec, "MASK_DTYPE", (int64_t)attention->operands[CA_ATTENTION_MASK].dtype);
}

void
ca_plan_define_lanes(ca_attention_plan *plan, const ca_device_info *info,
                     const ca_attention *attention)
{
    ca_kernel_spec *spec = &plan->spec;
    ca_plan_define_common(spec, attention);
    ca_kernel_define(spec, "LANES", ca_plan_lanes(info, attention));
    ca_kernel_define(spec, "ON_CPU", info->type == CA_DEVICE_CPU);
    /* The driver optimises the kernel later. An optimised build would take longer, and the kernel
       would run no faster. */
    spec->unoptimised = info->type == CA_DEVICE_CPU && info->optimises_later;
    if (attention->mods != NULL) { /* a program of its own, which may as well be short */
        ca_plan_define_options(plan, spec, attention);
    }
}

void
ca_plan_define_sizes(ca_attention_plan *plan, const ca_attention *attention)
{
    ca_plan_define_common(&plan->spec, attention);
    ca_plan_define_options(plan, &plan->spec, attention);
    ca_kernel_define(&plan->spec, "HEAD_E", attention->E);
    ca_kernel_define(&plan->spec, "HEAD_EV", attention->Ev);
}

void
ca_plan_define_data(ca_attention_plan *plan, const ca_device_info *info,
                    const ca_attention *attention)
{
    ca_plan_define_common(&plan->spec, attention);
    if (info->items_are_lanes && info->type == CA_DEVICE_CPU) {
        ca_plan_define_options(plan, &plan->spec, attention);
    }
}

bool
ca_plan_has_matrix_units(const ca_device_info *info, const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_QUERY].dtype;
    return (dtype == CA_FLOAT16 && info->float16_matrices) ||
           (dtype == CA_BFLOAT16 && info->bfloat16_matrices);
}

void
ca_plan_define_warp(ca_kernel_spec *spec, const ca_device_info *info, const ca_attention *attention,
                    bool grouped)
{
    bool units = ca_plan_has_matrix_units(info, attention);
    spec->for_90a = grouped && info->group_matrices;
    ca_kernel_define(spec, "WARP",
                     !units          ? CA_WARP_EMULATED
                     : spec->for_90a ? CA_WARP_PTX_GROUPS
                                     : CA_WARP_PTX);
}
