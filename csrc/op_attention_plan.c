/* SPDX-License-Identifier: MIT
 *
 * The variant table: for each kernel, what it can run and its macros.
 */
#include "op_attention_plan.h"

#include <float.h>
#include <math.h>

#include "attention_params.h"

static void
define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    spec->defines[spec->ndefines++] = (ca_define){name, value};
}

/* Is the arithmetic in double? */
static bool
computes_in_float64(const ca_attention *attention)
{
    return attention->in_float64 ||
           attention->tensors[CA_ATTENTION_QUERY].dtype == CA_FLOAT64 ||
           attention->tensors[CA_ATTENTION_VALUE].dtype == CA_FLOAT64;
}

static bool
has(const ca_attention *attention, ca_attention_tensor t)
{
    return attention->tensors[t].data != NULL;
}

double
ca_attention_softcap(const ca_attention *attention)
{
    double softcap = attention->softcap;
    if (computes_in_float64(attention) || softcap == 0) {
        return softcap;
    }
    return softcap > FLT_MAX / 64 ? 0 : softcap < FLT_MIN ? FLT_MIN : softcap;
}

/* Without a softcap there is no such order, and one step less. */
static bool
softcap_is_last(const ca_attention *attention)
{
    return attention->mask_before_softcap && ca_attention_softcap(attention) > 0;
}

static ca_scores_stage
stage_of(const ca_attention *attention)
{
    bool masked = attention->mask_before_softcap && !softcap_is_last(attention) &&
                  attention->stage == CA_SCORES_STEP_ONE;
    return masked ? CA_SCORES_STEP_TWO : attention->stage;
}

bool
ca_attention_drops(const ca_attention *attention)
{
    return nearbyint(ldexp(attention->dropout, 32)) >= 1;
}

/* The macros of common.cl, those that differ from their defaults. */
static void
define_common(ca_kernel_spec *spec, const ca_attention *attention)
{
    const ca_tensor *mask = &attention->tensors[CA_ATTENTION_MASK];
    ca_dtype dtype = attention->tensors[CA_ATTENTION_QUERY].dtype;
    ca_dtype value_dtype = attention->tensors[CA_ATTENTION_VALUE].dtype;
    define(spec, "DTYPE", (int64_t)dtype);
    if (value_dtype != dtype) {
        define(spec, "VALUE_DTYPE", (int64_t)value_dtype);
    }
    if (computes_in_float64(attention)) {
        define(spec, "REAL64", 1);
    }
    if (mask->data != NULL) {
        define(spec, "MASK", (int64_t)mask->dtype);
        define(spec, "MASK_ADDS", attention->mask_is_added);
        define(spec, "FILTER", !isinf(attention->filter));
    }
    if (has(attention, CA_ATTENTION_BIAS)) {
        define(spec, "BIAS", 1);
    }
    if (has(attention, CA_ATTENTION_INPUT_BIAS)) {
        define(spec, "INPUT_BIAS", 1);
    }
    if (has(attention, CA_ATTENTION_PAST_KEY)) {
        define(spec, "PAST", 1);
    }
    if (has(attention, CA_ATTENTION_PRESENT_KEY)) {
        define(spec, "PRESENT", 1);
    }
    if (has(attention, CA_ATTENTION_SCORES)) {
        define(spec, "SCORES", (int64_t)stage_of(attention));
    }
    if (softcap_is_last(attention)) {
        define(spec, "SOFTCAP_LAST", 1);
    }
    if (ca_attention_drops(attention)) {
        define(spec, "DROPOUT", 1);
    }
}

/* ---- attention_reference.cl: everything, everywhere ---- */

static ca_attention_plan
plan_reference(const ca_device_info *info, const ca_attention *attention)
{
    /* A CPU takes a row a work-group; a GPU wants its lanes filled. */
    ca_attention_plan plan = {
        .spec = {.name = "attention_reference"}, .rows_per_item = 1, .local_size = 1};
    if (info->type != CA_DEVICE_CPU) {
        plan.local_size = info->max_work_group < 64 ? (size_t)info->max_work_group : 64;
    }
    define_common(&plan.spec, attention);
    return plan;
}

/* ---- attention_cpu.cl: CPUs, queries in vector lanes ---- */

/* Larger heads would outgrow the private memory that CPU drivers give a work-item. */
#define CPU_MAX_HEAD_SIZE 512

/* Do the elements of a row lie side by side? A row of one element does. An absent
   tensor has no row that does not. */
static bool
rows_are_contiguous(const ca_tensor *tensor)
{
    return tensor->data == NULL || ca_tensor_size(tensor, 1) == 1 ||
           ca_tensor_stride(tensor, 1) == 1;
}

/* And each row behind the one before? */
static bool
rows_adjoin(const ca_tensor *tensor)
{
    return tensor->data == NULL ||
           (rows_are_contiguous(tensor) &&
            tensor->strides[tensor->ndim - 2] == ca_tensor_size(tensor, 1));
}

static bool
cpu_can_run(const ca_attention *attention)
{
    int64_t E = ca_tensor_size(&attention->tensors[CA_ATTENTION_QUERY], 1);
    int64_t Ev = ca_tensor_size(&attention->tensors[CA_ATTENTION_VALUE], 1);
    return E >= 1 && E <= CPU_MAX_HEAD_SIZE && Ev >= 1 && Ev <= CPU_MAX_HEAD_SIZE &&
           !softcap_is_last(attention);
}

static ca_attention_plan
plan_cpu(const ca_device_info *info, const ca_attention *attention)
{
    const ca_tensor *tensors = attention->tensors;
    const ca_tensor *query = &tensors[CA_ATTENTION_QUERY];
    const ca_tensor *value = &tensors[CA_ATTENTION_VALUE];
    ca_dtype real = computes_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32;
    bool biased = has(attention, CA_ATTENTION_INPUT_BIAS);
    bool key_direct = query->dtype == real && !biased &&
                      rows_adjoin(&tensors[CA_ATTENTION_KEY]) &&
                      rows_adjoin(&tensors[CA_ATTENTION_PAST_KEY]);
    bool value_direct = value->dtype == real && !biased && rows_are_contiguous(value) &&
                        rows_are_contiguous(&tensors[CA_ATTENTION_PAST_VALUE]);

    int64_t float_lanes = info->float_width >= 16 ? 16 : info->float_width >= 8 ? 8 : 4;
    int64_t lanes =
        real == CA_FLOAT64 && float_lanes > 4 ? float_lanes / 2 : float_lanes;
    /* Few rows: tiles of one vector of them leave less of the last tile empty. With 16
       registers two are needed to have enough sums at a time. */
    int64_t wide = lanes * (int64_t)ca_dtype_size(real) == 64;
    int64_t vectors = ca_tensor_size(query, 2) <= (wide ? 8 : 1) * lanes ? 1 : 2;

    ca_attention_plan plan = {.spec = {.name = "attention_cpu"},
                              .rows_per_item = vectors * lanes,
                              .local_size = 1};
    define_common(&plan.spec, attention);
    define(&plan.spec, "HEAD_E", ca_tensor_size(query, 1));
    define(&plan.spec, "HEAD_EV", ca_tensor_size(value, 1));
    define(&plan.spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
    define(&plan.spec, "KEY_DIRECT", key_direct);
    define(&plan.spec, "VALUE_DIRECT", value_direct);
    define(&plan.spec, "LANES", lanes);
    define(&plan.spec, "NV", vectors);
    return plan;
}

ca_status
ca_attention_make_plan(const ca_device_info *info, const ca_attention *attention,
                       ca_attention_plan *plan, ca_error *error)
{
    if (computes_in_float64(attention) && !info->float64) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "this call computes in float64, which %s cannot; use "
                            "float32 or choose another device",
                            info->name);
    }
    bool cpu = cpu_can_run(attention);
    if (attention->variant == CA_VARIANT_CPU && !cpu) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "CLATTN_KERNEL is \"cpu\", whose kernel takes head sizes of "
            "1 to %d only, and no softcap after the mask",
            CPU_MAX_HEAD_SIZE);
    }
    /* Forced, it runs anywhere; on its own account only where it is fast. */
    bool chosen = attention->variant == CA_VARIANT_ANY && info->type == CA_DEVICE_CPU;
    *plan = cpu && (chosen || attention->variant == CA_VARIANT_CPU)
                ? plan_cpu(info, attention)
                : plan_reference(info, attention);
    return CA_OK;
}
