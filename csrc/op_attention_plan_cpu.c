/* SPDX-License-Identifier: MIT
 *
 * The variant for CPUs: attention_cpu.cl, queries in vector lanes.
 */
#include "op_attention_variants.h"

/* Larger heads would outgrow the private memory that CPU drivers give a work-item. */
#define MAX_HEAD_SIZE 512
#define LIMITS        "head sizes of 1 to 512 only, and no softcap after the mask"

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
can_run(const ca_attention *attention)
{
    int64_t E = ca_tensor_size(&attention->tensors[CA_ATTENTION_QUERY], 1);
    int64_t Ev = ca_tensor_size(&attention->tensors[CA_ATTENTION_VALUE], 1);
    return E >= 1 && E <= MAX_HEAD_SIZE && Ev >= 1 && Ev <= MAX_HEAD_SIZE &&
           !ca_attention_caps_last(attention);
}

static bool
is_fast(const ca_device_info *info, const ca_attention *attention)
{
    (void)attention;
    return info->type == CA_DEVICE_CPU;
}

static void
make(const ca_device_info *info, const ca_attention *attention,
     const ca_leading_dims *dims, ca_attention_plan *plan)
{
    const ca_tensor *tensors = attention->tensors;
    const ca_tensor *query = &tensors[CA_ATTENTION_QUERY];
    const ca_tensor *value = &tensors[CA_ATTENTION_VALUE];
    ca_dtype real = ca_attention_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32;
    bool biased = ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS);
    bool key_direct = query->dtype == real && !biased &&
                      rows_adjoin(&tensors[CA_ATTENTION_KEY]) &&
                      rows_adjoin(&tensors[CA_ATTENTION_PAST_KEY]);
    bool value_direct = value->dtype == real && !biased && rows_are_contiguous(value) &&
                        rows_are_contiguous(&tensors[CA_ATTENTION_PAST_VALUE]);

    int64_t float_lanes = info->float_width >= 16 ? 16 : info->float_width >= 8 ? 8 : 4;
    int64_t lanes =
        real == CA_FLOAT64 && float_lanes > 4 ? float_lanes / 2 : float_lanes;
    int64_t L = ca_tensor_size(query, 2);
    int64_t vectors = L <= lanes ? 1 : 2;
    int64_t rows = vectors * lanes; /* of a work-item */

    *plan = (ca_attention_plan){
        .spec = {.name = "attention_cpu"}, .grid = {1, 1, 1}, .local_size = 1};
    ca_fold_sizes(dims, plan->grid);
    plan->grid[3] = (L + rows - 1) / rows;
    ca_kernel_spec *spec = &plan->spec;
    ca_attention_define_common(spec, attention);
    ca_attention_define(spec, "HEAD_E", ca_tensor_size(query, 1));
    ca_attention_define(spec, "HEAD_EV", ca_tensor_size(value, 1));
    ca_attention_define(spec, "SOFTCAP", ca_attention_softcap(attention) > 0);
    ca_attention_define(spec, "KEY_DIRECT", key_direct);
    ca_attention_define(spec, "VALUE_DIRECT", value_direct);
    ca_attention_define(spec, "LANES", lanes);
    ca_attention_define(spec, "NV", vectors);
}

const ca_attention_variant ca_attention_on_cpu = {CA_VARIANT_CPU, LIMITS, can_run,
                                                  is_fast, make};
