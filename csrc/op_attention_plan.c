/* SPDX-License-Identifier: MIT
 *
 * The variant table: for each kernel, what it can run and its macros.
 */
#include "op_attention_plan.h"

#include <float.h>

#include "attention_params.h"

static void
define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    spec->defines[spec->ndefines++] = (ca_define){name, value};
}

static int64_t
mask_kind(const ca_attention *attention)
{
    return attention->mask.data != NULL ? (int64_t)attention->mask.dtype
                                        : CA_KERNEL_NO_MASK;
}

double
ca_attention_softcap(const ca_attention *attention)
{
    double softcap = attention->softcap;
    if (attention->query.dtype == CA_FLOAT64 || softcap == 0) {
        return softcap;
    }
    return softcap > FLT_MAX / 64 ? 0 : softcap < FLT_MIN ? FLT_MIN : softcap;
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
    define(&plan.spec, "DTYPE", (int64_t)attention->query.dtype);
    define(&plan.spec, "MASK", mask_kind(attention));
    return plan;
}

/* ---- attention_cpu.cl: CPUs, queries in vector lanes ---- */

/* Larger heads would outgrow the private memory that CPU drivers give a work-item. */
#define CPU_MAX_HEAD_SIZE 512

static int64_t
last_size(const ca_tensor *tensor)
{
    return tensor->shape[tensor->ndim - 1];
}

/* Do the elements of a row lie side by side? A row of one element does. */
static bool
rows_are_contiguous(const ca_tensor *tensor)
{
    return last_size(tensor) == 1 || tensor->strides[tensor->ndim - 1] == 1;
}

static bool
cpu_can_run(const ca_attention *attention)
{
    int64_t E = last_size(&attention->query);
    int64_t Ev = last_size(&attention->value);
    return E >= 1 && E <= CPU_MAX_HEAD_SIZE && Ev >= 1 && Ev <= CPU_MAX_HEAD_SIZE;
}

static ca_attention_plan
plan_cpu(const ca_device_info *info, const ca_attention *attention)
{
    const ca_tensor *key = &attention->key;
    const ca_tensor *value = &attention->value;
    ca_dtype dtype = attention->query.dtype;
    int64_t E = last_size(key);
    int64_t Ev = last_size(value);
    bool in_place = dtype == CA_FLOAT32 || dtype == CA_FLOAT64;
    bool keys_adjoin = rows_are_contiguous(key) && key->strides[key->ndim - 2] == E;

    int64_t float_lanes = info->float_width >= 16 ? 16 : info->float_width >= 8 ? 8 : 4;
    int64_t lanes =
        dtype == CA_FLOAT64 && float_lanes > 4 ? float_lanes / 2 : float_lanes;
    int64_t vectors =
        attention->query.shape[attention->query.ndim - 2] <= lanes ? 1 : 2;

    ca_attention_plan plan = {.spec = {.name = "attention_cpu"},
                              .rows_per_item = vectors * lanes,
                              .local_size = 1};
    define(&plan.spec, "DTYPE", (int64_t)dtype);
    define(&plan.spec, "MASK", mask_kind(attention));
    define(&plan.spec, "HEAD_E", E);
    define(&plan.spec, "HEAD_EV", Ev);
    define(&plan.spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
    define(&plan.spec, "KEY_DIRECT", in_place && keys_adjoin);
    define(&plan.spec, "VALUE_DIRECT", in_place && rows_are_contiguous(value));
    define(&plan.spec, "LANES", lanes);
    define(&plan.spec, "NV", vectors);
    return plan;
}

ca_status
ca_attention_make_plan(const ca_device_info *info, const ca_attention *attention,
                       ca_attention_plan *plan, ca_error *error)
{
    if (attention->query.dtype == CA_FLOAT64 && !info->float64) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "query has dtype float64, which %s cannot compute in; "
                            "convert to float32 or choose another device",
                            info->name);
    }
    bool cpu = cpu_can_run(attention);
    if (attention->variant == CA_VARIANT_CPU && !cpu) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "CLATTN_KERNEL is \"cpu\", whose kernel takes head sizes of "
            "1 to %d only",
            CPU_MAX_HEAD_SIZE);
    }
    /* Forced, it runs anywhere; on its own account only where it is fast. */
    bool chosen = attention->variant == CA_VARIANT_ANY && info->type == CA_DEVICE_CPU;
    *plan = cpu && (chosen || attention->variant == CA_VARIANT_CPU)
                ? plan_cpu(info, attention)
                : plan_reference(info, attention);
    return CA_OK;
}
