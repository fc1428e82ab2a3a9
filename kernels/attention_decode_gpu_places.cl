/* SPDX-License-Identifier: MIT
 *
 * Which rows a work-group of the kernels for few rows on GPUs has, and which keys each
 * of them may see: rows of all query heads that share their keys, params.heads * L.
 */
#ifndef CLATTN_ATTENTION_DECODE_GPU_PLACES_CL
#define CLATTN_ATTENTION_DECODE_GPU_PLACES_CL

#include "common.cl"

/* The batch, and as the result the row in it, of row `index` of params.heads * L. */
static inline ca_int64
row_of(const ca_attention_params *params, const ca_int64 *batch, ca_int64 index,
       ca_int64 *row_batch)
{
    const ca_int64 head = index / params->L;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        row_batch[n] = batch[n];
    }
    row_batch[CA_BATCH_DIMS - 1] += head;
    return index - head * params->L;
}

/* One row of the group: which keys it may see, where its mask and bias are. */
typedef struct {
    ca_int64 first; /* keys first … last */
    ca_int64 last;
    ca_int64 mask; /* offsets of key 0 */
    ca_int64 bias;
} row_place;

static inline row_place
place_of(const attention_call *call, const ca_int64 *batch, ca_int64 i)
{
    const key_band band = ca_band(call, batch);
    const row_place place = {max((ca_int64)0, i + band.lower),
                             min(band.limit - 1, i + band.upper),
                             ca_offset(&call->params->mask, batch, i, 0),
                             ca_offset(&call->params->bias, batch, i, 0)};
    return place;
}

/* The keys of a part: start … end - 1, of those that one of the rows may see. */
typedef struct {
    ca_int64 start;
    ca_int64 end;
} key_part;

static inline key_part
part_of_keys(const ca_attention_params *params, const __local row_place *rows,
             int count, ca_int64 split)
{
    ca_int64 first = params->T;
    ca_int64 last = -1;
    for (int r = 0; r < count; r++) {
        first = min(first, rows[r].first);
        last = max(last, rows[r].last);
    }
    const ca_int64 span = max(last + 1 - first, (ca_int64)0);
    const key_part part = {first + span * split / params->splits,
                           first + span * (split + 1) / params->splits};
    return part;
}

/* What mask and bias add to the score of a row and key j; -inf where it is excluded. */
static inline real
addend_of(const attention_call *call, const __local row_place *row, ca_int64 j)
{
    const ca_attention_params *params = call->params;
    real added = REAL(0.0);
    if (j < row->first || j > row->last) {
        return -INFINITY;
    }
#if HAS_MASK
    added =
        load_mask(call->mask + row->mask + j * params->mask.column, ca_filter(params));
#endif
#if BIAS
    added = add_addends(added, load(call->bias + row->bias + j * params->bias.column));
#endif
    return added;
}

/* Do rows that start at `row`, one every `row_bytes`, lie at multiples of 16 bytes? */
static inline bool
is_aligned(size_t row, ca_int64 row_bytes)
{
    return (((ulong)row | (ulong)row_bytes) & 15ul) == 0;
}

#endif
