/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units: tiles of 16 x 16, held by warps of 32 work-items.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM) groups
 *     group        WARPS warps, which own BM = WARPS * MT * 16 rows of one batch
 *     warp         MT * 16 rows, all keys that one of the group's rows may see, online
 *                  softmax
 *
 * A warp keeps its queries and its result in registers, spread over its lanes as support/warp.clh
 * says. Keys and values pass through local memory in blocks of BN keys, STAGES of them
 * in a ring: while one is multiplied, the next ones are on their way. Of a block the
 * warp takes CHUNK keys at a time:
 *
 *     scores   = queries (16 MT x E) * keys (CHUNK x E) transposed
 *     weights  = exp2(scores - base), rounded to the half type
 *     result  += weights * values (CHUNK x Ev)
 *
 * The product's fragments of scores are, rounded, the other product's of weights, so
 * nothing but sums moves between lanes.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, filled up with zeros to a multiple of 16
 *     -DSOFTCAP           0 or 1
 *     -DLSE               1: lse is written
 *     -DALIGNED           1: rows of query, key and value are whole aligned 16 bytes
 *     -DOUTPUT_ALIGNED    1: those of output
 *     -DWARPS             4; BM is at most THREADS
 *     -DMT                tiles of rows of a warp: 1 or 2, which halve what is loaded of
 *                         keys and values
 *     -DBN                keys of a block, a multiple of CHUNK
 *     -DSTAGES            2 or more
 *     -DCHUNK             keys that are scored together, a multiple of 16
 *     -DWARP (support/warp.clh), and those of support/common.clh but for VALUE_DTYPE, REAL64, INPUT_BIAS,
 *     PAST, PRESENT, SCORES, SOFTCAP_LAST and DROPOUT; DTYPE is one of the half types
 */
#include "kernels/support/common.clh"

#include "kernels/attention/mma/softmax.clh" /* softmax_state, weigh_scores */
#include "kernels/attention/mma/tiles.clh"   /* load_tile, store_tile, PLACE */
#include "kernels/attention/row.clh"         /* attention_row */
#include "kernels/support/warp.clh"

/* BM rows of one batch, and the keys that they may see: first … end - 1. */
typedef struct {
    const attention_call *call;
    const ca_int64 *batch;
    int i0;
    int rows;
    int first;
    int end;
    int lower; /* row i sees keys i + lower … i + upper */
    int upper;
} mma_tile;

/* What a lane knows of itself. */
typedef struct {
    int row;    /* of the tile: that of its first fragment row */
    int column; /* 2 t */
    /* Where, in a tile, its row of the four matrices lies that are loaded together. */
    uint query_place;
    uint value_place;
    uint key_place; /* both chunks of a key follow each other in a fragment */
} mma_lane;

static inline mma_lane
lane_of(const warp_state *warp)
{
    const int n = (int)warp->lane;
    mma_lane lane;
    lane.row = (int)warp->index * WARP_ROWS + n / 4;
    lane.column = 2 * (n & 3);
    lane.query_place = (uint)PLACE(n & 15, n >> 4, E_CHUNKS);
    lane.value_place = (uint)PLACE(n & 15, n >> 4, EV_CHUNKS);
    lane.key_place = (uint)PLACE((n & 7) + (n >> 4) * 8, n >> 3 & 1, E_CHUNKS);
    return lane;
}

static inline mma_tile
tile_at(const attention_call *call, const ca_int64 *batch, ca_int64 row_of_tiles)
{
    const ca_attention_params *params = call->params;
    const key_band band = ca_band(call, batch);
    const ca_int64 i0 = row_of_tiles * BM;
    mma_tile tile;
    tile.call = call;
    tile.batch = batch;
    tile.i0 = (int)i0;
    tile.rows = (int)min((ca_int64)BM, params->L - i0);
    tile.first = (int)max((ca_int64)0, i0 + band.lower);
    tile.end = (int)min(band.limit, i0 + tile.rows + band.upper);
    tile.lower = (int)band.lower;
    tile.upper = (int)band.upper;
    return tile;
}

/* Have the next keys and values brought to a stage, `left` of them at most. */
static inline void
load_block(warp_state *warp, __local uint4 *memory, int stage, tile_source *key,
           tile_source *value, int left)
{
    const int tile = stage * STAGE_CHUNKS;
    if (left > 0) {
        load_tile(warp, memory, tile, key, left, BN, E_CHUNKS);
        load_tile(warp, memory, tile + BN * E_CHUNKS, value, left, BN, EV_CHUNKS);
    }
    warp_copies_end(warp);
}

/* The warp's rows of query, by way of local memory. Where the sign of the scale would
   turn the order of scores, it goes into the queries. */
static inline void
load_queries(warp_state *warp, __local uint4 *memory, const mma_tile *tile,
             const mma_lane *lane, uint4 (*queries)[HEAD_E / 16])
{
    const ca_attention_params *params = tile->call->params;
    tile_source source = source_at(tile->call->query,
                                   ca_offset(&params->query, tile->batch, tile->i0, 0),
                                   &params->query, params->E, E_CHUNKS);
    const uint signs = SCALED_LATE && params->scale < 0.0f ? SIGNS : 0u;
    load_tile(warp, memory, 0, &source, tile->rows, BM, E_CHUNKS);
    warp_copies_end(warp);
    WARP_COPIES_WAIT(warp, 0);
    barrier(CLK_LOCAL_MEM_FENCE); /* all that was copied, before it is read */
    const uint rows = warp->start + lane->query_place +
                      warp->index * (WARP_ROWS * E_CHUNKS * CHUNK_BYTES);
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        const uint place = rows + m * 16 * E_CHUNKS * CHUNK_BYTES;
        WARP_UNROLL
        for (int e = 0; e < HEAD_E / 16; e++) {
            queries[m][e] = warp_load(warp, PLACE_FROM(place, 2 * e, E_CHUNKS)) ^ signs;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* reading it, before keys take its place */
}

/* Products of the warp's queries and the CHUNK keys from a place on. */
static inline void
multiply_keys(const warp_state *warp, const mma_lane *lane, uint keys,
              uint4 (*queries)[HEAD_E / 16], float4 (*scores)[KEY_TILES])
{
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        WARP_UNROLL
        for (int n = 0; n < KEY_TILES; n++) {
            scores[m][n] = (float4)0.0f;
        }
    }
    WARP_UNROLL
    for (int e = 0; e < HEAD_E / 16; e++) {
        WARP_UNROLL
        for (int n = 0; n < KEY_TILES; n += 2) {
            const uint place = keys + lane->key_place + n * 8 * E_CHUNKS * CHUNK_BYTES;
            const uint4 b = warp_load(warp, PLACE_FROM(place, 2 * e, E_CHUNKS));
            WARP_UNROLL
            for (int m = 0; m < MT; m++) {
                scores[m][n] = warp_multiply(warp, scores[m][n], queries[m][e], b.xy);
                scores[m][n + 1] =
                    warp_multiply(warp, scores[m][n + 1], queries[m][e], b.zw);
            }
        }
    }
}

/* result += weights * values of CHUNK keys from a place on. */
static inline void
multiply_values(const warp_state *warp, const mma_lane *lane, uint values,
                float4 (*weights)[KEY_TILES], softmax_state *softmax,
                float4 (*result)[EV_TILES])
{
    WARP_UNROLL
    for (int n = 0; n < KEY_TILES; n += 2) {
        const uint place = values + lane->value_place + n * 8 * EV_CHUNKS * CHUNK_BYTES;
        uint4 a[MT];
        WARP_UNROLL
        for (int m = 0; m < MT; m++) {
            a[m] = round_weights(warp, softmax, m, weights[m][n], weights[m][n + 1]);
        }
        WARP_UNROLL
        for (int c = 0; c < EV_TILES; c += 2) {
            const uint4 b = warp_load_columns(warp, PLACE_FROM(place, c, EV_CHUNKS));
            WARP_UNROLL
            for (int m = 0; m < MT; m++) {
                result[m][c] = warp_multiply(warp, result[m][c], a[m], b.xy);
                result[m][c + 1] = warp_multiply(warp, result[m][c + 1], a[m], b.zw);
            }
        }
    }
}

#include "kernels/attention/mma/scores.clh" /* finish_scores */

/* The warp attends to the block at a place, whose first key is j0. */
static inline void
attend_block(const warp_state *warp, const mma_tile *tile, const mma_lane *lane, int j0,
             uint place, uint4 (*queries)[HEAD_E / 16], float factor,
             softmax_state *softmax, float4 (*result)[EV_TILES])
{
    const int i = tile->i0 + (int)warp->index * WARP_ROWS;
    for (int k = 0; k < BN; k += CHUNK) {
        const int j = j0 + k;
        if (WARP_SKIPS && (j >= tile->end || j > i + WARP_ROWS - 1 + tile->upper ||
                           j + CHUNK <= i + tile->lower)) {
            continue;
        }
        float4 scores[MT][KEY_TILES];
        multiply_keys(warp, lane, place + k * E_CHUNKS * CHUNK_BYTES, queries, scores);
        finish_scores(tile, lane, i, j, scores, softmax);
        weigh_scores(warp, softmax, scores, factor, result);
        multiply_values(warp, lane,
                        place + (BN * E_CHUNKS + k * EV_CHUNKS) * CHUNK_BYTES, scores,
                        softmax, result);
    }
}

/* Divide a row by its sum and put it, rounded, in its place in local memory. Returns
   whether it has to be done again: where it is not finite it may have met a NaN or
   infinity of an excluded key, as 0 * NaN, or overflowed under an early base. */
static inline bool
finish_row(const warp_state *warp, const mma_lane *lane, int r, bool seen, float sum,
           const float4 *result, __local uint4 *memory)
{
    const int row = lane->row + 8 * r;
    const float inverse = seen ? 1.0f / sum : 0.0f;
    float bad = inverse * 0.0f;
    WARP_UNROLL
    for (int c = 0; c < EV_TILES; c++) {
        const float2 x = (r % 2 == 0 ? result[c].xy : result[c].zw) * inverse;
        __local uint *word =
            (__local uint *)memory + PLACE(row, c, EV_CHUNKS) / 4 + lane->column / 2;
        *word = seen ? warp_pack(x.x, x.y) : 0u;
        bad += x.x * 0.0f + x.y * 0.0f;
    }
    const float bad_row = sum_of_four(warp, bad);
    return seen && bad_row != 0.0f;
}

/* Write the rows of a warp to local memory, and marks of those to be done again. */
static inline void
finish_rows(const warp_state *warp, const mma_tile *tile, const mma_lane *lane,
            const softmax_state *softmax, float4 (*result)[EV_TILES],
            __local uint4 *memory)
{
    const attention_call *call = tile->call;
    __local uint *marks = (__local uint *)(memory + RESULT_CHUNKS);
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int row = lane->row + 8 * r;
        const float4 rounded = softmax->rounded[r / 2];
        const float seen =
            sum_of_four(warp, (softmax->seen >> r & 1u) != 0u ? 1.0f : 0.0f);
        const bool again =
            finish_row(warp, lane, r, seen != 0.0f, r % 2 == 0 ? rounded.x : rounded.z,
                       result[r / 2], memory);
#if LSE
        const float sum = sum_of_four(warp, softmax->sum[r]);
        if (lane->column == 0 && row < tile->rows) {
            call->lse[ca_offset(&call->params->lse, tile->batch, tile->i0 + row, 0)] =
                seen != 0.0f ? TO_NATURAL(softmax->base[r]) + log(sum) : -INFINITY;
        }
#endif
        if (lane->column == 0) {
            marks[row] = again ? 1u : 0u;
        }
    }
}

__kernel
WARP_KERNEL(THREADS) void attention_mma(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_CHUNKS);
    const attention_call call = ATTENTION_CALL;
    /* The last rows first: below a causal diagonal they have the most keys. */
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 group = (ca_int64)get_group_id(0);
    const ca_int64 linear = group / tiles;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params.batch, batch);
    const mma_tile tile = tile_at(&call, batch, tiles - 1 - (group - linear * tiles));
    const mma_lane lane = lane_of(&warp);
    const float factor = fabs(params.scale) * SCORE_UNIT; /* of SCALED_LATE */

    uint4 queries[MT][HEAD_E / 16];
    float4 result[MT][EV_TILES];
    softmax_state softmax;
    start_softmax(&softmax);
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        WARP_UNROLL
        for (int c = 0; c < EV_TILES; c++) {
            result[m][c] = (float4)0.0f;
        }
    }
    load_queries(&warp, memory, &tile, &lane, queries);

    tile_source keys = source_at(key, ca_offset(&params.key, batch, tile.first, 0),
                                 &params.key, params.E, E_CHUNKS);
    tile_source values =
        source_at(value, ca_offset(&params.value, batch, tile.first, 0), &params.value,
                  params.Ev, EV_CHUNKS);
    int left = tile.end - tile.first; /* to be loaded */
#pragma unroll 1
    for (int n = 0; n < STAGES - 1; n++, left -= BN) {
        load_block(&warp, memory, n, &keys, &values, left);
    }
    int stage = 0;
    int next = STAGES - 1;
    for (int j = tile.first; j < tile.end; j += BN, left -= BN) {
        WARP_COPIES_WAIT(&warp, STAGES - 2);
        /* what was copied, before it is read; reading the last block, before the next
           copies take its place */
        barrier(CLK_LOCAL_MEM_FENCE);
        load_block(&warp, memory, next, &keys, &values, left);
        attend_block(&warp, &tile, &lane, j,
                     warp.start + stage * (STAGE_CHUNKS * CHUNK_BYTES), queries, factor,
                     &softmax, result);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }

    barrier(CLK_LOCAL_MEM_FENCE); /* reading the last block, before results come */
    finish_rows(&warp, &tile, &lane, &softmax, result, memory);
    /* writing results and marks, before they are read; an lse, before it is computed again
       and written by another work-item */
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    __local const uint *marks = (__local const uint *)(memory + RESULT_CHUNKS);
    store_tile(&call, batch, tile.i0, tile.rows, memory, marks);
    const int row = (int)get_local_id(0);
    if (row < tile.rows && marks[row] != 0u) {
        attention_row(&call, batch, tile.i0 + row);
    }
}
