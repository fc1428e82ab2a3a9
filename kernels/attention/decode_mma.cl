/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units, few rows and many keys: the rows of the query heads that
 * share their keys, filled up to tiles of 16.
 *
 *     global size  batches * params.splits * ceil(rows / 16) * THREADS, local size
 *                  THREADS
 *     work-group   WARPS warps, with the same 16 rows and one split of the keys
 *     warp         every WARPS'th 16 keys of the split, with a softmax of its own
 *
 * A batch here is an index of the leading dimensions without the query heads; its rows
 * are params.heads * L. Keys and values go from global memory straight to the registers
 * that are multiplied, 16 bytes a load. Lane 4 g + t loads
 *
 *     keys g and g + 8             chunks t, t + 4, t + 8, … of 8 numbers
 *     values 2 t, 2 t + 1, and     chunks g, g + 8, …
 *            2 t + 8, 2 t + 9
 *
 * and multiplies its chunks in the order of their loads: a product may sum over columns
 * in any order if queries and keys have the same order, and a tile of the result may have
 * any columns. A warp loads the next keys while it weighs scores and multiplies values,
 * and the next values while it multiplies keys. No warp waits for another one before the
 * end.
 *
 *     -DHEAD_E -DHEAD_EV   head sizes E and Ev, multiples of 8, filled up with zeros to
 *                          multiples of 32 and 64
 *     -DWARPS              warps of a group; default 4
 *     WARP of support/warp.clh, ROW_IS_CALLED of attention/row.clh, and the macros of
 *     support/common.clh without VALUE_DTYPE, REAL64, INPUT_BIAS, PAST, PRESENT,
 *     SCORES, SOFTCAP_LAST and DROPOUT; DTYPE is one of the half types
 *
 * Rows of key and value are whole aligned 16 bytes.
 */
#include "kernels/attention/decode_mma/sizes.clh"

#include "kernels/attention/decode_mma/rows.clh"  /* share_rows, write_rows */
#include "kernels/attention/decode_mma/tiles.clh" /* load_keys, multiply_keys, … */
#include "kernels/attention/row.clh"              /* attention_row */

/* Sizes in local memory, in chunks of 16 bytes: the queries, in the order of the lanes'
   loads, are replaced by the results of all warps. */
#define QUERY_SIZE (2 * KEY_LOADS * WARP_LANES)
#define LOCAL_SIZE LARGER(QUERY_SIZE, RESULT_SIZE)

/* Puts `rows` rows of query into local memory: for each load of a key the chunks of
   rows g, then those of rows g + 8. A negative scale would turn the order of scores, so
   its sign goes into the queries. */
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
            (__global const ushort *)(call->query + ca_offset(&params->query, row_batch, i, 0));
        ushort x[8];
        for (int e = 0; e < 8; e++) {
            const int column = chunk * 8 + e;
            x[e] = column < HEAD_E ? from[column * params->query.column] : 0;
        }
        const int at = (chunk / 4 * 2 + row / 8) * WARP_LANES + row % 8 * 4;
        queries[at + chunk % 4] = as_uint4(vload8(0, x)) ^ signs;
    }
}

/* Turns products with the 16 keys from j on into scores, -inf where a row does not
   attend. Returns a bit for each of the lane's four values that at least one row
   attends to. */
static inline uint
finish_scores(const warp_state *warp, const split_source *source, int j, float4 *scores,
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
                const int key = j + key_of(source, 2 * n + k);
                float added = -INFINITY;
                if (key < source->count) {
                    added = addend_of(source->call, source->rows + source->g + 8 * r,
                                      source->start + key);
                }
                const bool attends = added != -INFINITY;
                pair[k] = !attends ? added : HAS_ADDENDS ? pair[k] + added : pair[k];
                seen = seen || attends;
                used |= attends ? 1u << (2 * n + k) : 0u;
            }
            scores[n] =
                r == 0 ? (float4)(pair[0], pair[1], x.zw) : (float4)(x.xy, pair[0], pair[1]);
        }
        softmax->seen |= seen ? 1u << r : 0u;
    }
    WARP_UNROLL
    for (uint mask = 4u; mask < WARP_LANES; mask *= 2u) {
        used |= as_uint(warp_exchange(warp, as_float(used), mask));
    }
    return used;
}

/* Returns the first and the last key that all rows may see, counted from the split's
   first. */
static inline int2
seen_by_all(const split_source *source)
{
    int2 keys = (int2)(0, source->count - 1);
    for (int r = 0; r < TILE_ROWS; r++) {
        keys.x = max(keys.x, (int)(source->rows[r].first - source->start));
        keys.y = min(keys.y, (int)(source->rows[r].last - source->start));
    }
    return keys;
}

/* The warp attends to its share of the split. */
static inline void
attend_split(const warp_state *warp, const split_source *source, __local const uint4 *queries,
             softmax_state *softmax, float4 (*result)[EV_TILES])
{
    const float factor = fabs(source->call->params->scale) * SCORE_UNIT;
    const int step = WARPS * CHUNK;
    const int2 all = seen_by_all(source);
    int j = (int)warp->index * CHUNK;
    uint4 keys[2][KEY_LOADS];
    uint4 values[4][VALUE_LOADS];
    load_keys(keys, source, j);
    load_values(values, source, j);
    for (int j0 = 0; j0 < source->count; j0 += step, j += step) {
        if (WARP_SKIPS && j >= source->count) {
            break;
        }
        float4 scores[1][KEY_TILES];
        multiply_keys(warp, queries, keys, scores[0]);
        if (j + step < source->count) {
            load_keys(keys, source, j + step);
        }
        scale_scores(source->call->params, scores);
        uint used = 15u;
        if (!HAS_ADDENDS && WARP_SKIPS && j >= all.x && j + CHUNK - 1 <= all.y) {
            softmax->seen = ~0u;
        } else {
            used = finish_scores(warp, source, j, scores[0], softmax);
        }
        weigh_scores(warp, softmax, scores, factor, result);
        multiply_values(warp, values, used, scores[0], softmax, result[0]);
        if (j + step < source->count) {
            load_values(values, source, j + step);
        }
    }
}

__kernel
WARP_KERNEL(THREADS) void attention_decode_mma(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_SIZE);
    __local group_row group_rows[TILE_ROWS];
    __local float highest[WARPS * TILE_ROWS];
    __local float sums[WARPS * TILE_ROWS];
    __local int redo[TILE_ROWS];
    const end_memory ends = {highest, sums, (__local float2 *)memory, redo};
    const attention_call call = ATTENTION_CALL;
    const int item = (int)get_local_id(0);

    const ca_int64 all_rows = params.heads * params.L;
    const ca_int64 tiles = (all_rows + TILE_ROWS - 1) / TILE_ROWS;
    const ca_int64 group = (ca_int64)get_group_id(0);
    const ca_int64 batch_split = group / tiles; /* over all batches */
    const ca_int64 row0 = (group - batch_split * tiles) * TILE_ROWS;
    const ca_int64 linear = batch_split / params.splits;
    const ca_int64 split = batch_split - linear * params.splits;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear * params.heads, params.batch, batch);

    /* The last tile repeats the last row. */
    const int rows = (int)min((ca_int64)TILE_ROWS, all_rows - row0);
    share_queries(memory, &call, batch, row0, rows);
    if (item < TILE_ROWS) {
        ca_int64 row_batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of(&params, batch, row0 + min(item, rows - 1), row_batch);
        group_rows[item] = group_row_of(&call, row_batch, i);
        redo[item] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of queries and rows: their reads */

    const key_range keys = keys_of_split(&params, group_rows, TILE_ROWS, split);
    const split_source source = {
        &call,
        group_rows,
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
    if (source.count > 0) {
        attend_split(&warp, &source, memory, &softmax, result);
    }

    share_rows(&warp, &source, &ends, &softmax, result[0]);
    barrier(CLK_LOCAL_MEM_FENCE); /* writes of the warps' rows: their reads */
    write_rows(&warp, &source, &ends, batch, row0, rows, split);
    /* Writes of the rows: attention_row writes them again. */
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item < rows && redo[item]) {
        ca_int64 row_batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of(&params, batch, row0 + item, row_batch);
        attention_row(&call, row_batch, i);
    }
}
