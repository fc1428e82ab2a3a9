/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units, few rows and many keys: the rows of a group of query
 * heads, filled up to a tile of 16, and one part of the keys that they share.
 *
 *     global size  batches * params.splits * ceil(rows / 16) * THREADS, local size
 *                  THREADS
 *     group        WARPS warps, with the same 16 rows and one part of the keys
 *     warp         every WARPS'th 16 keys of these, with a softmax of its own
 *
 * A batch here is what is left of the leading dimensions without the query heads, rows
 * are those of all heads, params.heads * L. Keys and values go from global memory to the
 * registers that are multiplied, 16 bytes a load, without changing lanes: lane 4 g + t
 * loads
 *
 *     keys g and g + 8             chunks t, t + 4, t + 8, … of 8 numbers
 *     values 2 t, 2 t + 1, and     chunks g, g + 8, …
 *            2 t + 8, 2 t + 9
 *
 * Which columns a product sums over at a time does not matter as long as queries and
 * keys agree, nor which columns of the result a tile has: chunks are taken as they come.
 * The next keys are on their way while scores are weighed and values multiplied, the
 * next values while keys are multiplied; nothing waits for another warp before the end.
 *
 *     -DHEAD_E -DHEAD_EV   head sizes E and Ev, multiples of 8, filled up with zeros to
 *                          multiples of 32 and 64
 *     -DSOFTCAP            0 or 1
 *     -DWARPS              warps of a group, 4
 *     -DWARP (support/warp.clh), and those of support/common.clh but for VALUE_DTYPE, REAL64, INPUT_BIAS,
 *     PAST, PRESENT, SCORES, SOFTCAP_LAST and DROPOUT; DTYPE is one of the half types,
 *     and rows of key and value are whole aligned 16 bytes
 */
#define LSE 1 /* the exact sum of weights is always wanted */
#include "kernels/support/common.clh"

#include "kernels/attention/decode_mma/rows.clh"  /* share_rows, write_rows */
#include "kernels/attention/decode_mma/tiles.clh" /* load_keys, multiply_keys, … */
#include "kernels/attention/row.clh"              /* attention_row */

/* In local memory, in chunks of 16 bytes: queries, as the lanes have them, and in their
   place the results of all warps. */
#define QUERY_SIZE (2 * KEY_LOADS * WARP_LANES)
#define LOCAL_SIZE LARGER(QUERY_SIZE, RESULT_SIZE)

/* Put rows of query, of which there are `rows`, where lanes find their chunks: for each
   load of a key those of rows g, then those of rows g + 8. Where the sign of the scale
   would turn the order of scores, it goes into them. */
static inline void
share_queries(__local uint4 *queries, const attention_call *call, const ca_int64 *batch,
              ca_int64 row0, int rows)
{
    const ca_attention_params *params = call->params;
    const uint signs = SCALED_LATE && params->scale < 0.0f ? SIGNS : 0u;
    for (int n = (int)get_local_id(0); n < QUERY_SIZE; n += THREADS) {
        const int row = n / (4 * KEY_LOADS);
        const int chunk = n - row * (4 * KEY_LOADS);
        ca_int64 row_batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of(params, batch, row0 + min(row, rows - 1), row_batch);
        __global const ushort *from =
            (__global const ushort *)(call->query +
                                      ca_offset(&params->query, row_batch, i, 0));
        ushort x[8];
        for (int e = 0; e < 8; e++) {
            const int column = chunk * 8 + e;
            x[e] = column < HEAD_E ? from[column * params->query.column] : 0;
        }
        const int place = (chunk / 4 * 2 + row / 8) * WARP_LANES + row % 8 * 4;
        queries[place + chunk % 4] = as_uint4(vload8(0, x)) ^ signs;
    }
}

/* From products to scores of the 16 keys from j on, -inf where a row does not attend.
   Returns a bit for each of the lane's four values that a row attends to. */
static inline uint
finish_scores(const warp_state *warp, const part_source *part, int j, float4 *scores,
              softmax_state *softmax)
{
    uint used = 0u;
    WARP_UNROLL
    for (int r = 0; r < 2; r++) {
        bool seen = false;
        WARP_UNROLL
        for (int n = 0; n < 2; n++) {
            const float4 x = scores[n];
            float pair[2] = {r == 0 ? x.x : x.z, r == 0 ? x.y : x.w};
            WARP_UNROLL
            for (int k = 0; k < 2; k++) {
                const int key = j + key_of(part, 2 * n + k);
                float added = -INFINITY;
                if (key < part->count) {
                    added = addend_of(part->call, part->places + part->g + 8 * r,
                                      part->start + key);
                }
                const bool attends = added != -INFINITY;
                pair[k] = !attends ? added : HAS_ADDENDS ? pair[k] + added : pair[k];
                seen = seen || attends;
                used |= attends ? 1u << (2 * n + k) : 0u;
            }
            scores[n] = r == 0 ? (float4)(pair[0], pair[1], x.zw)
                               : (float4)(x.xy, pair[0], pair[1]);
        }
        softmax->seen |= seen ? 1u << r : 0u;
    }
    WARP_UNROLL
    for (uint mask = 4u; mask < WARP_LANES; mask *= 2u) {
        used |= as_uint(warp_exchange(warp, as_float(used), mask));
    }
    return used;
}

/* The keys that all rows may see, from first to last, relative to the part's first. */
static inline int2
seen_by_all(const part_source *part)
{
    int2 keys = (int2)(0, part->count - 1);
    for (int r = 0; r < TILE_ROWS; r++) {
        keys.x = max(keys.x, (int)(part->places[r].first - part->start));
        keys.y = min(keys.y, (int)(part->places[r].last - part->start));
    }
    return keys;
}

/* The warp attends to its share of the part. */
static inline void
attend_part(const warp_state *warp, const part_source *part,
            __local const uint4 *queries, softmax_state *softmax,
            float4 (*result)[EV_TILES])
{
    const float factor = fabs(part->call->params->scale) * SCORE_UNIT;
    const int step = WARPS * CHUNK;
    const int2 all = seen_by_all(part);
    int j = (int)warp->index * CHUNK;
    uint4 keys[2][KEY_LOADS];
    uint4 values[4][VALUE_LOADS];
    load_keys(keys, part, j);
    load_values(values, part, j);
    for (int j0 = 0; j0 < part->count; j0 += step, j += step) {
        if (WARP_SKIPS && j >= part->count) {
            break;
        }
        float4 scores[1][KEY_TILES];
        multiply_keys(warp, queries, keys, scores[0]);
        if (j + step < part->count) {
            load_keys(keys, part, j + step);
        }
        scale_scores(part->call->params, scores);
        uint used = 15u;
        if (!HAS_ADDENDS && WARP_SKIPS && j >= all.x && j + CHUNK - 1 <= all.y) {
            softmax->seen = ~0u;
        } else {
            used = finish_scores(warp, part, j, scores[0], softmax);
        }
        weigh_scores(warp, softmax, scores, factor, result);
        multiply_values(warp, values, used, scores[0], softmax, result[0]);
        if (j + step < part->count) {
            load_values(values, part, j + step);
        }
    }
}

/* Are rows where the host has promised? Two inputs that overlap may share a copy, which
   starts where the first of them does. */
static inline bool
is_usable(const part_source *part)
{
    const ca_attention_params *params = part->call->params;
    return is_aligned((size_t)part->keys,
                      params->key.row * (ca_int64)sizeof(storage)) &&
           is_aligned((size_t)part->values,
                      params->value.row * (ca_int64)sizeof(storage));
}

/* Have all rows computed again. */
static inline void
poison(softmax_state *softmax)
{
    softmax->seen = ~0u;
    softmax->sum[0] = softmax->sum[1] = NAN;
}

__kernel
WARP_KERNEL(THREADS) void attention_decode_mma(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_SIZE);
    __local row_place places[TILE_ROWS];
    __local float highest[WARPS * TILE_ROWS];
    __local float sums[WARPS * TILE_ROWS];
    __local int redo[TILE_ROWS];
    const end_memory ends = {highest, sums, (__local float2 *)memory, redo};
    const attention_call call = ATTENTION_CALL;
    const int item = (int)get_local_id(0);

    const ca_int64 all_rows = params.heads * params.L;
    const ca_int64 tiles = (all_rows + TILE_ROWS - 1) / TILE_ROWS;
    const ca_int64 group = (ca_int64)get_group_id(0);
    const ca_int64 share = group / tiles; /* of the keys of a batch */
    const ca_int64 row0 = (group - share * tiles) * TILE_ROWS;
    const ca_int64 linear = share / params.splits;
    const ca_int64 split = share - linear * params.splits;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear * params.heads, params.batch, batch);

    /* The last tile repeats the last row. */
    const int rows = (int)min((ca_int64)TILE_ROWS, all_rows - row0);
    share_queries(memory, &call, batch, row0, rows);
    if (item < TILE_ROWS) {
        ca_int64 row_batch[CA_BATCH_DIMS];
        const ca_int64 i =
            row_of(&params, batch, row0 + min(item, rows - 1), row_batch);
        places[item] = place_of(&call, row_batch, i);
        redo[item] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* queries and places, before they are used */

    const key_part keys = part_of_keys(&params, places, TILE_ROWS, split);
    const part_source part = {
        &call,
        places,
        key + ca_offset(&params.key, batch, keys.start, 0),
        value + ca_offset(&params.value, batch, keys.start, 0),
        keys.start,
        (int)(keys.end - keys.start),
        (int)warp.lane / 4,
        (int)warp.lane % 4,
    };
    softmax_state softmax;
    float4 result[1][EV_TILES];
    start_softmax(&softmax);
    WARP_UNROLL
    for (int c = 0; c < EV_TILES; c++) {
        result[0][c] = (float4)0.0f;
    }
    if (part.count > 0 && !is_usable(&part)) {
        poison(&softmax);
    } else if (part.count > 0) {
        attend_part(&warp, &part, memory, &softmax, result);
    }

    share_rows(&warp, &part, &ends, &softmax, result[0]);
    barrier(CLK_LOCAL_MEM_FENCE); /* the warps' rows, before they are added up */
    write_rows(&warp, &part, &ends, batch, row0, rows, split);
    /* What was written, before it is written again. */
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item < rows && redo[item]) {
        ca_int64 row_batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of(&params, batch, row0 + item, row_batch);
        attention_row(&call, row_batch, i);
    }
}
