/* SPDX-License-Identifier: MIT */
#include "attention/halves.h"

#include "attention/params.h" /* ca_attention_is_result */
#include "attention/plan.h"   /* ca_attention_drops */
#include "opencl/fold.h"

#define TENSORS CA_ATTENTION_TENSORS

ca_attention
ca_attention_part(const ca_attention *attention, int d, int64_t first, int64_t count)
{
    ca_attention part = *attention;
    int leading = attention->tensors[CA_ATTENTION_OUTPUT].ndim - 2;
    if (d < leading) {
        for (int t = 0; t < TENSORS; t++) {
            ca_take_part(&part.tensors[t], d, first, count);
        }
        return part;
    }
    ca_take_part(&part.tensors[CA_ATTENTION_QUERY], d, first, count);
    ca_take_part(&part.tensors[CA_ATTENTION_MASK], d, first, count);
    ca_take_part(&part.tensors[CA_ATTENTION_BIAS], d, first, count);
    ca_take_part(&part.tensors[CA_ATTENTION_OUTPUT], d, first, count);
    ca_take_part(&part.tensors[CA_ATTENTION_LSE], d, first, count);
    ca_take_part(&part.tensors[CA_ATTENTION_SCORES], d, first, count);
    if (part.below != CA_BAND_UNBOUNDED) {
        part.below -= first;
    }
    if (part.above != CA_BAND_UNBOUNDED) {
        part.above += first;
    }
    return part;
}

static int
outermost_dimension(const ca_tensor *output)
{
    int d = 0;
    while (d < output->ndim - 2 && output->shape[d] == 1) {
        d++;
    }
    return d;
}

int
ca_attention_dimension_to_halve(const ca_attention *attention, bool fits)
{
    const ca_tensor *output = &attention->tensors[CA_ATTENTION_OUTPUT];
    int leading = output->ndim - 2;
    if (fits && !ca_attention_drops(attention)) {
        int smallest = ca_smallest_dimension(output->shape, leading);
        return smallest < 0 ? leading : smallest;
    }
    return outermost_dimension(output);
}
