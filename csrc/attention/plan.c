/* SPDX-License-Identifier: MIT
 *
 * The variant table, and what its rows share of planning.
 */
#include "attention/plan.h"

#include <math.h>

#include "attention/variants.h"
#include "kernels/attention/params.h"

void
ca_attention_define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    spec->defines[spec->ndefines++] = (ca_define){name, value};
}

static ca_scores_stage
stage_of(const ca_attention *attention)
{
    bool masked = attention->mask_before_softcap &&
                  !ca_attention_caps_last(attention) &&
                  attention->stage == CA_SCORES_STEP_ONE;
    return masked ? CA_SCORES_STEP_TWO : attention->stage;
}

/* The macros of attention/row.clh, those that differ from their defaults. */
static void
define_row(ca_kernel_spec *spec, const ca_attention *attention)
{
    const ca_tensor *mask = &attention->tensors[CA_ATTENTION_MASK];
    ca_dtype dtype = attention->tensors[CA_ATTENTION_QUERY].dtype;
    ca_dtype value_dtype = attention->tensors[CA_ATTENTION_VALUE].dtype;
    ca_attention_define(spec, "DTYPE", (int64_t)dtype);
    if (value_dtype != dtype) {
        ca_attention_define(spec, "VALUE_DTYPE", (int64_t)value_dtype);
    }
    if (ca_attention_in_float64(attention)) {
        ca_attention_define(spec, "REAL64", 1);
    }
    if (mask->data != NULL) {
        ca_attention_define(spec, "MASK", (int64_t)mask->dtype);
        ca_attention_define(spec, "MASK_ADDS", attention->mask_is_added);
        ca_attention_define(spec, "FILTER", !isinf(attention->filter));
    }
    if (ca_attention_has(attention, CA_ATTENTION_BIAS)) {
        ca_attention_define(spec, "BIAS", 1);
    }
    if (ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS)) {
        ca_attention_define(spec, "INPUT_BIAS", 1);
    }
    if (ca_attention_has(attention, CA_ATTENTION_PAST_KEY)) {
        ca_attention_define(spec, "PAST", 1);
    }
    if (ca_attention_has(attention, CA_ATTENTION_SCORES)) {
        ca_attention_define(spec, "SCORES", (int64_t)stage_of(attention));
    }
    if (ca_attention_caps_last(attention)) {
        ca_attention_define(spec, "SOFTCAP_LAST", 1);
    }
    if (ca_attention_drops(attention)) {
        ca_attention_define(spec, "DROPOUT", 1);
    }
}

void
ca_attention_define_common(ca_kernel_spec *spec, const ca_attention *attention)
{
    define_row(spec, attention);
    if (ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY)) {
        ca_attention_define(spec, "PRESENT", 1);
    }
}

void
ca_attention_define_merge(ca_kernel_spec *spec, const ca_attention *attention)
{
    define_row(spec, attention);
    ca_attention_define(spec, "HEAD_EV", ca_attention_value_head_size(attention));
}

void
ca_attention_define_sizes(ca_kernel_spec *spec, const ca_attention *attention)
{
    ca_attention_define_common(spec, attention);
    ca_attention_define(spec, "HEAD_E", ca_attention_head_size(attention));
    ca_attention_define(spec, "HEAD_EV", ca_attention_value_head_size(attention));
    ca_attention_define(spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
}

void
ca_attention_cover(ca_attention_plan *plan, const ca_leading_dims *dims)
{
    for (int n = 0; n < CA_ATTENTION_GRID_DIMS; n++) {
        plan->grid[n] = 1;
    }
    ca_fold_sizes(dims, plan->grid);
    plan->heads = 1;
    plan->splits = 1;
}

double
ca_attention_items(const ca_attention_plan *plan)
{
    double items = 1;
    for (int n = 0; n < CA_ATTENTION_GRID_DIMS; n++) {
        items *= (double)plan->grid[n];
    }
    return items;
}

/* ---- attention/reference.cl: everything, everywhere ---- */

static bool
reference_can_run(const ca_device_info *info, const ca_attention *attention)
{
    (void)info;
    (void)attention;
    return true;
}

static bool
reference_is_fast(const ca_device_info *info, const ca_attention *attention,
                  const ca_leading_dims *dims)
{
    (void)dims;
    (void)info;
    (void)attention;
    return true; /* nothing comes after it */
}

static void
plan_reference(const ca_device_info *info, const ca_attention *attention,
               const ca_leading_dims *dims, ca_attention_plan *plan)
{
    *plan =
        (ca_attention_plan){.spec = {.name = "attention_reference"}, .local_size = 1};
    ca_attention_cover(plan, dims);
    plan->grid[3] = ca_attention_rows(attention);
    /* A CPU takes a row a work-group; a GPU wants its lanes filled. */
    if (info->type != CA_DEVICE_CPU) {
        plan->local_size =
            info->max_work_group < 64 ? (size_t)info->max_work_group : 64;
    }
    ca_attention_define_common(&plan->spec, attention);
}

static const ca_attention_variant reference = {CA_VARIANT_REFERENCE, "everything",
                                               reference_can_run, reference_is_fast,
                                               plan_reference};

/* ---- the choice ---- */

/* The first that is fast and can run it is used, unless one is forced. */
static const ca_attention_variant *const variants[] = {
    &ca_attention_decoding_on_matrix_units,
    &ca_attention_decoding_on_gpu,
    &ca_attention_on_matrix_units,
    &ca_attention_tiled,
    &ca_attention_decoding,
    &ca_attention_on_pairs,
    &ca_attention_on_cpu,
    &reference};

/* Is it what CLATTN_KERNEL forces? "decode" is a kernel for each type of device. */
static bool
is_forced(const ca_attention_variant *row, const ca_device_info *info,
          ca_variant variant)
{
    if (variant == CA_VARIANT_DECODE) {
        variant =
            info->type == CA_DEVICE_CPU ? CA_VARIANT_DECODE_CPU : CA_VARIANT_DECODE_GPU;
    }
    return row->variant == variant;
}

static ca_status
choose(const ca_device_info *info, const ca_attention *attention,
       const ca_leading_dims *dims, ca_attention_plan *plan, ca_error *error)
{
    if (ca_attention_in_float64(attention) && !info->float64) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "this call computes in float64, which %s cannot; use "
                            "float32 or choose another device",
                            info->name);
    }
    const ca_attention_variant *const *row = variants;
    bool forced = attention->variant != CA_VARIANT_ANY;
    while (forced ? !is_forced(*row, info, attention->variant)
                  : !(*row)->is_fast(info, attention, dims) ||
                        !(*row)->can_run(info, attention)) {
        row++;
    }
    if (!(*row)->can_run(info, attention)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "CLATTN_KERNEL is \"%s\", whose kernel takes %s",
                            ca_variant_name(attention->variant), (*row)->limits);
    }
    (*row)->make(info, attention, dims, plan);
    return CA_OK;
}

/* Does attention/row.clh, which redoes few rows if any, cost less as a call? Built it is
   quicker. But where one instruction works for several items of a group, as on GPUs and
   on CPUs with sub-groups, a call has to be made for all of them. */
static bool
calls_rows(const ca_device_info *info, size_t local_size)
{
    return local_size == 1 || (info->type == CA_DEVICE_CPU && info->sub_groups == 0);
}

ca_status
ca_attention_make_plan(const ca_device_info *info, const ca_attention *attention,
                       const ca_leading_dims *dims, ca_attention_plan *plan,
                       ca_error *error)
{
    ca_status status = CA_OK;
    if (ca_limits_are_set(&attention->limits)) {
        ca_device_info limited = *info;
        CA_TRY(ca_limits_apply(&attention->limits, &limited, error));
        CA_TRY(choose(&limited, attention, dims, plan, error));
    } else {
        CA_TRY(choose(info, attention, dims, plan, error));
    }
    if (calls_rows(info, plan->local_size)) {
        ca_attention_define(&plan->spec, "ROW_IS_CALLED", 1);
    }
    if (plan->splits > 1 && calls_rows(info, plan->merge_local)) {
        ca_attention_define(&plan->merge, "ROW_IS_CALLED", 1);
    }
done:
    return status;
}
