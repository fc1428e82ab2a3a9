/* SPDX-License-Identifier: MIT
 *
 * The variant for few rows on CPUs, attention/decode_cpu.cl: keys in vector lanes.
 */
#include <math.h>

#include "attention/params.h" /* ca_attention_key_bytes */
#include "attention/variants.h"

/* More rows of a head fill enough lanes of attention_cpu's vectors. */
#define FEW_ROWS 8

/* Rows that share a load, and how many times as many a work-item has at most. */
#define SHARED_ROWS 4
#define SHARES      8

/* No work-item reads so little that handing it out costs as much. */
#define BYTES_OF_AN_ITEM (256 << 10)

/* Is a row of at least one vector, side by side? */
static bool
holds_vectors(const ca_tensor *tensor, int64_t lanes)
{
    return !ca_attention_has_rows(tensor) ||
           (ca_tensor_size(tensor, 1) >= lanes && ca_tensor_stride(tensor, 1) == 1);
}

static bool
decode_can_run(const ca_device_info *info, const ca_attention *attention)
{
    const ca_tensor *tensors = attention->tensors;
    int64_t lanes = ca_attention_lanes(info, attention);
    return ca_attention_cpu_can_run(info, attention) &&
           ca_attention_head_size(attention) >= lanes &&
           ca_attention_value_head_size(attention) >= lanes &&
           holds_vectors(&tensors[CA_ATTENTION_KEY], lanes) &&
           holds_vectors(&tensors[CA_ATTENTION_VALUE], lanes) &&
           holds_vectors(&tensors[CA_ATTENTION_PAST_KEY], lanes) &&
           holds_vectors(&tensors[CA_ATTENTION_PAST_VALUE], lanes) &&
           !ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS) &&
           !ca_attention_has(attention, CA_ATTENTION_SCORES) &&
           !ca_attention_drops(attention);
}

static bool
decode_is_fast(const ca_device_info *info, const ca_attention *attention,
               const ca_leading_dims *dims)
{
    (void)dims;
    return info->type == CA_DEVICE_CPU && ca_attention_rows(attention) <= FEW_ROWS;
}

static void
plan_decode(const ca_device_info *info, const ca_attention *attention,
            const ca_leading_dims *dims, ca_attention_plan *plan)
{
    const ca_tensor *tensors = attention->tensors;
    *plan =
        (ca_attention_plan){.spec = {.name = "attention_decode_cpu"}, .local_size = 1};
    ca_attention_cover(plan, dims);
    plan->heads = ca_attention_heads_together(dims);
    int64_t rows = plan->heads * ca_attention_rows(attention);
    int64_t together = ca_divide_up(rows, ca_divide_up(rows, SHARED_ROWS));
    plan->grid[2] /= plan->heads;
    plan->grid[3] = ca_divide_up(rows, together * SHARES);

    double items = ca_attention_items(plan);
    double wanted = (double)(info->compute_units * CA_ITEMS_FOR_EACH_CORE);
    int64_t worthwhile =
        ca_attention_visible_keys(attention) /
        ca_divide_up(BYTES_OF_AN_ITEM, ca_attention_key_bytes(attention));
    if (items < wanted && worthwhile > 1) {
        plan->splits = ca_smaller((int64_t)ceil(wanted / items), worthwhile);
        plan->grid[4] = plan->splits;
    }

    ca_kernel_spec *spec = &plan->spec;
    ca_attention_define_sizes(spec, attention);
    ca_attention_define(spec, "LANES", ca_attention_lanes(info, attention));
    plan->merge = (ca_kernel_spec){.name = "attention_decode_cpu_merge"};
    ca_attention_define_merge(&plan->merge, attention);
    ca_attention_define(&plan->merge, "LANES", ca_attention_lanes(info, attention));
    plan->merge_local = 1;
    size_t real = ca_attention_in_float64(attention) ? sizeof(double) : sizeof(float);
    plan->partial_bytes = (ca_attention_value_head_size(attention) + 2) * (int64_t)real;
    bool adjoin = ca_attention_rows_adjoin(&tensors[CA_ATTENTION_KEY]) &&
                  ca_attention_rows_adjoin(&tensors[CA_ATTENTION_PAST_KEY]);
    ca_attention_define(spec, "KEYS_ADJOIN", adjoin);
    ca_attention_define(spec, "RT", together);
}

const ca_attention_variant ca_attention_decoding = {
    CA_VARIANT_DECODE_CPU,
    "keys and values with contiguous rows of at least one vector and at most 512 "
    "elements only, and no input bias, dropout, scores or softcap after the mask",
    decode_can_run, decode_is_fast, plan_decode};
