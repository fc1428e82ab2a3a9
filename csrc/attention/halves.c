/* SPDX-License-Identifier: MIT */
#include "attention/halves.h"

#include <stdlib.h>

#include "attention/params.h" /* ca_attention_is_result */
#include "attention/plan.h"   /* ca_attention_drops */
#include "base/fold.h"        /* ca_take_part */

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

/* Parts are of half to all of that. */
#define PART_BYTES ((size_t)8 << 20)

/* A smaller input may be sent with each part. */
#define SMALL_BYTES (PART_BYTES / 64)

/* Do the entries of dimension `d` lie one behind the other in memory? */
static bool
lies_apart(const ca_tensor *tensor, int d)
{
    ca_tensor entry = *tensor;
    ca_take_part(&entry, d, 0, 1);
    uint64_t step = (uint64_t)llabs(tensor->strides[d]) * ca_dtype_size(tensor->dtype);
    return step >= ca_tensor_extent(&entry).bytes;
}

int
ca_attention_dimension_to_send(const ca_attention *attention)
{
    const ca_tensor *output = &attention->tensors[CA_ATTENTION_OUTPUT];
    int d = outermost_dimension(output);
    size_t total = 0;
    if (d == output->ndim - 2) {
        return -1;
    }
    for (int t = 0; t < TENSORS; t++) {
        const ca_tensor *tensor = &attention->tensors[t];
        size_t bytes = ca_tensor_extent(tensor).bytes;
        bool small = !ca_attention_is_result(t) && bytes <= SMALL_BYTES;
        if (tensor->block != NULL || (bytes > 0 && !small && !lies_apart(tensor, d))) {
            return -1;
        }
        total += bytes;
    }
    return total > PART_BYTES ? d : -1;
}
