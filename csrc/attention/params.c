/* SPDX-License-Identifier: MIT */
#include "attention/params.h"

#include <math.h>
#include <string.h>

#include "attention/plan.h"

_Static_assert(sizeof(ca_attention_params) == CA_ATTENTION_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");
_Static_assert(CA_BOOL == CA_KERNEL_BOOL && CA_FLOAT16 == CA_KERNEL_FLOAT16 &&
                   CA_BFLOAT16 == CA_KERNEL_BFLOAT16 &&
                   CA_FLOAT32 == CA_KERNEL_FLOAT32 && CA_FLOAT64 == CA_KERNEL_FLOAT64 &&
                   CA_INT8 == CA_KERNEL_INT8 && CA_UINT64 == CA_KERNEL_UINT64,
               "dtypes are passed to kernels by value");

int
ca_attention_trailing(ca_attention_tensor t)
{
    switch (t) {
    case CA_ATTENTION_KEY_COUNTS:
        return 0;
    case CA_ATTENTION_INPUT_BIAS:
    case CA_ATTENTION_LSE:
        return 1;
    default:
        return 2;
    }
}

int64_t
ca_attention_past_keys(const ca_attention *attention)
{
    const ca_tensor *past = &attention->tensors[CA_ATTENTION_PAST_KEY];
    return past->data != NULL ? ca_tensor_size(past, 2) : 0;
}

int64_t
ca_attention_keys(const ca_attention *attention)
{
    return ca_attention_past_keys(attention) +
           ca_tensor_size(&attention->tensors[CA_ATTENTION_KEY], 2);
}

int64_t
ca_attention_key_bytes(const ca_attention *attention)
{
    const ca_tensor *query = &attention->tensors[CA_ATTENTION_QUERY];
    const ca_tensor *value = &attention->tensors[CA_ATTENTION_VALUE];
    return ca_tensor_size(query, 1) * (int64_t)ca_dtype_size(query->dtype) +
           ca_tensor_size(value, 1) * (int64_t)ca_dtype_size(value->dtype);
}

bool
ca_attention_is_result(ca_attention_tensor t)
{
    return t >= CA_ATTENTION_OUTPUT;
}

void
ca_attention_fold(const ca_attention *attention, ca_leading_dims *dims)
{
    const ca_tensor *output = &attention->tensors[CA_ATTENTION_OUTPUT];
    ca_fold_leading(attention->tensors, CA_ATTENTION_TENSORS, output->ndim - 2,
                    output->shape, dims);
}

/* ---- the parameter struct ---- */

static int64_t
clamp_bound(int64_t bound, int64_t limit)
{
    return bound > limit ? limit : bound < -limit ? -limit : bound;
}

static int64_t
double_bits(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* Row and column strides are those of the last two dimensions, or of the last one. */
static void
set_views(const ca_attention *attention, const ca_extent *extents,
          const ca_leading_dims *dims, ca_attention_params *params)
{
    ca_view *const views[CA_ATTENTION_TENSORS] = {
        [CA_ATTENTION_QUERY] = &params->query,
        [CA_ATTENTION_KEY] = &params->key,
        [CA_ATTENTION_VALUE] = &params->value,
        [CA_ATTENTION_PAST_KEY] = &params->past_key,
        [CA_ATTENTION_PAST_VALUE] = &params->past_value,
        [CA_ATTENTION_INPUT_BIAS] = &params->input_bias,
        [CA_ATTENTION_MASK] = &params->mask,
        [CA_ATTENTION_BIAS] = &params->bias,
        [CA_ATTENTION_KEY_COUNTS] = &params->key_counts,
        [CA_ATTENTION_OUTPUT] = &params->output,
        [CA_ATTENTION_LSE] = &params->lse,
        [CA_ATTENTION_PRESENT_KEY] = &params->present_key,
        [CA_ATTENTION_PRESENT_VALUE] = &params->present_value,
        [CA_ATTENTION_SCORES] = &params->scores,
    };
    for (int t = 0; t < CA_ATTENTION_TENSORS; t++) {
        const ca_tensor *tensor = &attention->tensors[t];
        int trailing = ca_attention_trailing((ca_attention_tensor)t);
        if (tensor->data == NULL) {
            continue;
        }
        ca_view *view = views[t];
        view->offset = extents[t].offset;
        if (trailing >= 1) {
            view->row = tensor->strides[tensor->ndim - trailing];
        }
        if (trailing == 2) {
            view->column = tensor->strides[tensor->ndim - 1];
        }
        ca_fold_strides(dims, t, view->batch);
    }
}

/* The highest random word whose weight is dropped. */
static uint32_t
last_dropped(double dropout)
{
    double dropped = nearbyint(ldexp(dropout, 32));
    return dropped >= 1 ? (uint32_t)(dropped - 1) : 0;
}

/* Drivers do not tell how much of the last cache a core has to itself; 4 MiB still
   stayed. */
bool
ca_attention_keys_are_far(const ca_attention *attention)
{
    double bytes = (double)ca_attention_keys(attention) *
                   (double)ca_attention_key_bytes(attention);
    return bytes > 4 << 20;
}

ca_attention_params
ca_attention_describe(const ca_attention *attention, const ca_extent *extents,
                      const ca_leading_dims *dims, int64_t first_row)
{
    const ca_tensor *tensors = attention->tensors;
    const ca_tensor *mask = &tensors[CA_ATTENTION_MASK];
    int64_t L = ca_tensor_size(&tensors[CA_ATTENTION_QUERY], 2);
    int64_t P = ca_attention_past_keys(attention);
    int64_t T = ca_attention_keys(attention);
    bool counted = tensors[CA_ATTENTION_KEY_COUNTS].data != NULL;
    bool shifted = counted && attention->band_follows_counts;
    int64_t farthest = shifted ? L + 2 * T : L + T;
    double softcap = ca_attention_softcap(attention);
    double kept_scale = attention->dropout < 1 ? 1 / (1 - attention->dropout) : 0;
    ca_attention_params params = {
        .batch = {1, 1, 1},
        .L = L,
        .P = P,
        .T = T,
        .E = ca_tensor_size(&tensors[CA_ATTENTION_QUERY], 1),
        .Ev = ca_tensor_size(&tensors[CA_ATTENTION_VALUE], 1),
        .lower = -clamp_bound(attention->below, farthest),
        .upper = clamp_bound(attention->above, farthest),
        .limit = mask->data != NULL ? ca_tensor_size(mask, 1) : T,
        .first_row = first_row,
        .seed = (int64_t)attention->seed,
        .scale_bits = double_bits(attention->scale),
        .softcap_bits = double_bits(softcap),
        .kept_scale_bits = double_bits(kept_scale),
        .scale = (float)attention->scale,
        .softcap = (float)softcap,
        .filter = (float)attention->filter,
        .kept_scale = (float)kept_scale,
        .last_dropped = last_dropped(attention->dropout),
        .flags = (tensors[CA_ATTENTION_LSE].data != NULL ? CA_HAS_LSE : 0) |
                 (counted ? CA_HAS_KEY_COUNTS : 0) |
                 (shifted ? CA_COUNTS_SHIFT_BAND : 0) |
                 (ca_attention_keys_are_far(attention) ? CA_KEYS_ARE_FAR : 0),
    };
    ca_fold_sizes(dims, params.batch);
    set_views(attention, extents, dims, &params);
    return params;
}
