/* SPDX-License-Identifier: MIT */
#include "attention/describe.h"

#include <math.h>
#include <string.h>

#include "attention/options.h"

_Static_assert(sizeof(ca_attention_params) == CA_ATTENTION_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");
_Static_assert(CA_UNBOUNDED == CA_BAND_UNBOUNDED, "kernels know sides of the band without a bound");
_Static_assert(CA_BOOL == CA_KERNEL_BOOL && CA_FLOAT16 == CA_KERNEL_FLOAT16 &&
                   CA_BFLOAT16 == CA_KERNEL_BFLOAT16 && CA_FLOAT32 == CA_KERNEL_FLOAT32 &&
                   CA_FLOAT64 == CA_KERNEL_FLOAT64 && CA_INT8 == CA_KERNEL_INT8 &&
                   CA_UINT64 == CA_KERNEL_UINT64,
               "dtypes are passed to kernels by value");

static int64_t
clamp_bound(int64_t bound, int64_t limit)
{
    return bound > limit ? limit : bound < -limit ? -limit : bound;
}

/* The bits of a real of the arithmetic. */
static int64_t
real_bits(const ca_attention *attention, double value)
{
    int64_t bits = 0;
    float single = (float)value;
    if (ca_attention_in_float64(attention)) {
        memcpy(&bits, &value, sizeof value);
    } else {
        memcpy(&bits, &single, sizeof single);
    }
    return bits;
}

static ca_view
view_of(const ca_attention *attention, ca_attention_role role)
{
    const ca_operand *operand = &attention->operands[role];
    ca_view view = {.offset = operand->memory.offset,
                    .row = operand->row_stride,
                    .column = operand->column_stride};
    memcpy(view.batch, operand->batch, sizeof(view.batch));
    return view;
}

/* The highest random word whose weight is dropped. */
static uint32_t
last_dropped(double dropout)
{
    double dropped = nearbyint(ldexp(dropout, 32));
    return dropped >= 1 ? (uint32_t)(dropped - 1) : 0;
}

void
ca_attention_describe_plan(const ca_attention_plan *plan, ca_attention_params *params)
{
    params->heads = plan->heads;
    params->tiles = (uint32_t)plan->tiles;
    params->own = plan->gradient != 0 ? plan->gradient : (uint32_t)plan->cpu.turns;
    params->block_keys = (uint32_t)plan->cpu.block_keys;
    params->key_heads = (uint32_t)plan->cpu.key_heads;
    params->splits = (uint32_t)plan->splits;
    params->flags |= plan->cpu.fetches | (plan->cpu.keys_are_far ? CA_KEYS_ARE_FAR : 0) |
                     (plan->cpu.keys_in_place ? CA_KEYS_IN_PLACE : 0) |
                     (plan->cpu.values_in_place ? CA_VALUES_IN_PLACE : 0);
}

void
ca_attention_describe(const ca_attention *attention, ca_attention_params *params)
{
    int64_t L = attention->L;
    int64_t T = attention->T;
    bool masked = ca_attention_has(attention, CA_ATTENTION_MASK);
    bool counted = ca_attention_has(attention, CA_ATTENTION_KEY_COUNTS);
    bool shifted = counted && attention->band_follows_counts;
    bool moved = ca_attention_has(attention, CA_ATTENTION_OFFSETS); /* kernels clamp the band */
    int64_t farthest = moved ? CA_UNBOUNDED : shifted ? L + 2 * T : L + T;
    ca_attention_role optional[CA_OPTIONAL_ROLES];
    int count = ca_attention_optional(attention, optional);
    double softcap = ca_attention_softcap(attention);
    bool split = attention->operands[CA_ATTENTION_LSE].columns == 2;
    double kept_scale = attention->dropout < 1 ? 1 / (1 - attention->dropout) : 0;
    *params = (ca_attention_params){
        .L = L,
        .P = attention->P,
        .T = T,
        .E = attention->E,
        .Ev = attention->Ev,
        .lower = -clamp_bound(attention->below, farthest),
        .upper = clamp_bound(attention->above, farthest),
        .limit = masked ? attention->operands[CA_ATTENTION_MASK].columns : T,
        .query = view_of(attention, CA_ATTENTION_QUERY),
        .key = view_of(attention, CA_ATTENTION_KEY),
        .value = view_of(attention, CA_ATTENTION_VALUE),
        .output = view_of(attention, CA_ATTENTION_OUTPUT),
        .lse = view_of(attention, CA_ATTENTION_LSE),
        .key_counts = view_of(attention, CA_ATTENTION_KEY_COUNTS),
        .options = ca_attention_options(attention),
        .first_row = attention->first_row,
        .seed = (int64_t)attention->seed,
        .scale = real_bits(attention, attention->scale),
        .softcap = real_bits(attention, softcap),
        .inverse_softcap = real_bits(attention, softcap > 0 ? 1 / softcap : 0),
        .kept_scale = real_bits(attention, kept_scale),
        .filter = (float)attention->filter,
        .last_dropped = last_dropped(attention->dropout),
        .mask_dtype = (uint32_t)attention->operands[CA_ATTENTION_MASK].dtype,
        .flags = (ca_attention_has(attention, CA_ATTENTION_LSE) ? CA_HAS_LSE : 0) |
                 (split ? CA_SPLITS_LSE : 0) | (counted ? CA_HAS_KEY_COUNTS : 0) |
                 (shifted ? CA_COUNTS_SHIFT_BAND : 0),
    };
    memcpy(params->batch, attention->batch, sizeof(params->batch));
    for (int n = 0; n < count; n++) {
        params->optional[n] = view_of(attention, optional[n]);
    }
}
