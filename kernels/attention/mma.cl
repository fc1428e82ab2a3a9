/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units, many rows: tiles of 16 x 16, held by warps of 32
 * work-items.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM) * THREADS, local size
 *                  THREADS
 *     work-group   WARPS warps, which own BM = WARPS * MT * 16 rows of one batch
 *     warp         MT * 16 rows; all keys that one of the group's rows may see, with an
 *                  online softmax
 *
 * A warp keeps its queries and its result in registers, as the fragments of
 * support/warp.clh. Keys and values pass through local memory in blocks of BN keys,
 * STAGES blocks in a ring: while one block is multiplied, the next ones are on their
 * way. The warp takes CHUNK keys of a block at a time:
 *
 *     scores   = queries (16 MT x E) * keys (CHUNK x E) transposed
 *     weights  = exp2(scores - base), rounded to the half type
 *     result  += weights * values (CHUNK x Ev)
 *
 * The fragments of scores that the first product gives are, rounded, the fragments of
 * weights that the second product takes, so only maxima and sums move between lanes.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, filled up with zeros to a multiple of 16
 *     -DLSE               1: lse is written; default 0
 *     -DALIGNED           1: rows of query, key and value are whole aligned 16 bytes;
 *                         default 0
 *     -DOUTPUT_ALIGNED    1: so are rows of output; default 0
 *     -DMT                tiles of rows of a warp: 1, the default, or 2, which halve
 *                         the loads of keys and values
 *     -DBN                keys of a block, a multiple of CHUNK; default 32
 *     WARP of support/warp.clh, and the macros of support/common.clh without
 *     VALUE_DTYPE and REAL64; DTYPE is one of the half types, and OPTIONS has masks,
 *     bias and an early softcap
 */
#define CAP warp_tanh
#include "kernels/attention/gpu.clh" /* OPTIONS */
#include "kernels/support/warp.clh"

#include "kernels/attention/ends.clh"        /* factor_of_row, write_lse */
#include "kernels/attention/mma/softmax.clh" /* softmax_state, weigh_scores */
#include "kernels/attention/mma/tiles.clh"   /* mma_tile, mma_lane, load_tile */

/* Starts to load the next keys and values, at most `left` of them, into a stage. */
static inline void
load_block(const warp_state *warp, __local uint4 *memory, int stage, tile_source *key,
           tile_source *value, int left)
{
    const int tile = stage * STAGE_CHUNKS;
    if (left > 0) {
        load_tile(warp, memory, tile, key, left, BN, E_CHUNKS);
        load_tile(warp, memory, tile + BN * E_CHUNKS, value, left, BN, EV_CHUNKS);
    }
    warp_copies_end(warp);
}

/* Loads the warp's rows of query, by way of local memory. A negative scale would turn
   the order of scores, so its sign goes into the queries. */
static inline void
load_queries(const warp_state *warp, __local uint4 *memory, const mma_tile *tile,
             const mma_lane *lane, uint4 (*queries)[HEAD_E / 16])
{
    const ca_attention_params *params = tile->call->params;
    tile_source source =
        source_at(tile->call->query, ca_offset(&params->query, tile->batch, tile->i0, 0),
                  &params->query, params->E, E_CHUNKS);
    const uint signs = SCALED_LATE(params) && ca_scale(params) < 0.0f ? SIGNS : 0u;
    load_tile(warp, memory, 0, &source, tile->rows, BM, E_CHUNKS);
    warp_copies_end(warp);
    WARP_COPIES_WAIT(warp, 0);
    barrier(CLK_LOCAL_MEM_FENCE); /* the copies: their reads */
    const uint rows =
        warp->start + lane->query_offset + warp->index * (WARP_ROWS * E_CHUNKS * CHUNK_BYTES);
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        const uint address = rows + m * 16 * E_CHUNKS * CHUNK_BYTES;
        WARP_UNROLL
        for (int e = 0; e < HEAD_E / 16; e++) {
            queries[m][e] = warp_load(warp, CHUNK_OFFSET_FROM(address, 2 * e, E_CHUNKS)) ^ signs;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these reads: the copies of keys over them */
}

/* Multiplies the warp's queries with the CHUNK keys from an address on. */
static inline void
multiply_keys(const warp_state *warp, const mma_lane *lane, uint keys,
              uint4 (*queries)[HEAD_E / 16], float4 (*scores)[KEY_TILES])
{
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        scores[m][0] = (float4)0.0f;
        scores[m][1] = (float4)0.0f;
    }
    WARP_UNROLL
    for (int e = 0; e < HEAD_E / 16; e++) {
        const uint4 b =
            warp_load(warp, CHUNK_OFFSET_FROM(keys + lane->key_offset, 2 * e, E_CHUNKS));
        WARP_UNROLL
        for (int m = 0; m < MT; m++) {
            scores[m][0] = warp_multiply(warp, scores[m][0], queries[m][e], b.xy);
            scores[m][1] = warp_multiply(warp, scores[m][1], queries[m][e], b.zw);
        }
    }
}

/* Turns products with keys j … j + CHUNK - 1 into scores. */
static inline void
finish_scores(const mma_tile *tile, const mma_lane *lane, int j, float4 (*scores)[KEY_TILES],
              softmax_state *softmax)
{
    /* The bounds of other rows and keys differ by constants. */
    int key = j + lane->column;
    WARP_COMPUTE_AGAIN(key);
    const score_bounds bounds = count_from(tile->bounds, tile->i0 + lane->row, key);
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        const addend_row addends = addends_at(tile, lane->row + 8 * r);
        const uint attended = finish_row(tile->call, &addends, key, &bounds, 8 * r, r, scores);
        softmax->seen |= attended != 0u ? 1u << r : 0u;
    }
}

/* result += weights * values of the CHUNK keys from an address on. */
static inline void
multiply_values(const warp_state *warp, const mma_lane *lane, uint values,
                float4 (*weights)[KEY_TILES], softmax_state *softmax, float4 (*result)[EV_TILES])
{
    uint4 a[MT];
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        a[m] = round_weights(warp, softmax, m, weights[m][0], weights[m][1]);
    }
    WARP_UNROLL
    for (int c = 0; c < EV_TILES; c += 2) {
        const uint4 b =
            warp_load_columns(warp, CHUNK_OFFSET_FROM(values + lane->value_offset, c, EV_CHUNKS));
        WARP_UNROLL
        for (int m = 0; m < MT; m++) {
            result[m][c] = warp_multiply(warp, result[m][c], a[m], b.xy);
            result[m][c + 1] = warp_multiply(warp, result[m][c + 1], a[m], b.zw);
        }
    }
}

/* The warp attends to the block at an address, whose first key is j0. */
static inline void
attend_block(const warp_state *warp, const mma_tile *tile, const mma_lane *lane, int j0,
             uint address, uint4 (*queries)[HEAD_E / 16], float factor, softmax_state *softmax,
             float4 (*result)[EV_TILES])
{
    const ca_attention_params *params = tile->call->params;
    const int i = tile->i0 + (int)warp->index * WARP_ROWS;
    for (int n = 0; n < BN; n += CHUNK) {
        int k = n;
        WARP_COMPUTE_AGAIN(k);
        const int j = j0 + k;
        if (WARP_SKIPS && (j >= tile->end || j > i + WARP_ROWS - 1 + tile->bounds.upper ||
                           j + CHUNK <= i + tile->bounds.lower)) {
            continue;
        }
        float4 scores[MT][KEY_TILES];
        multiply_keys(warp, lane, address + k * E_CHUNKS * CHUNK_BYTES, queries, scores);
        if (SCORE_IS_PLAIN(params) && sees_all(params, &tile->bounds, i, WARP_ROWS, j, CHUNK)) {
            softmax->seen = ~0u;
        } else {
            finish_scores(tile, lane, j, scores, softmax);
        }
        weigh_scores(warp, params, softmax, scores, factor, result);
        multiply_values(warp, lane, address + (BN * E_CHUNKS + k * EV_CHUNKS) * CHUNK_BYTES, scores,
                        softmax, result);
    }
}

/* Writes a pair of numbers to two columns of a row, those that are among `columns`. */
static inline void
write_pair(__global ushort *to, ca_int64 stride, uint pair, int columns)
{
    if (OUTPUT_ALIGNED && columns > 0) {
        *(__global uint *)to = pair;
    } else if (columns > 0) {
        to[0] = (ushort)pair;
        if (columns > 1) {
            to[stride] = (ushort)(pair >> 16);
        }
    }
}

/* Divides the rows of a warp by their sums, and writes them. */
static inline void
write_rows(const warp_state *warp, const mma_tile *tile, const mma_lane *lane,
           const softmax_state *softmax, float4 (*result)[EV_TILES])
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    const ca_view *view = &params->output;
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int row = lane->row + 8 * r;
        const bool seen = row_is_seen(warp, softmax, r);
        const float factor = factor_of_row(params, rounded_sum(softmax, r), seen);
        const float sum = LSE ? sum_of_four(warp, softmax->sum[r]) : 0.0f;
        if (row < tile->rows) {
            __global ushort *to = (__global ushort *)call->output +
                                  ca_offset(view, tile->batch, tile->i0 + row, lane->column);
            const int columns = (int)params->Ev - lane->column;
            float bad = 0.0f; /* a NaN if a number is not finite */
            WARP_UNROLL
            for (int c = 0; c < EV_TILES; c++) {
                const float4 sums = result[r / 2][c];
                const float2 x = (r % 2 == 0 ? sums.xy : sums.zw) * factor;
                write_pair(to + 8 * c * view->column, view->column, seen ? warp_pack(x.x, x.y) : 0u,
                           columns - 8 * c);
                bad += x.x * 0.0f + x.y * 0.0f;
            }
            if (seen && bad != 0.0f) {
                ask_to_redo(call);
            }
            if (LSE && lane->column == 0) {
                write_lse(call, tile->batch, tile->i0 + row, softmax->base[r], sum, seen);
            }
        }
    }
}

__kernel
WARP_KERNEL(THREADS) void attention_mma(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_CHUNKS);
    const attention_call call = ATTENTION_CALL;
    /* The last rows come first: below a causal diagonal they have the most keys. */
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 group = (ca_int64)get_group_id(0);
    const ca_int64 linear = group / tiles;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params.batch, batch);
    const mma_tile tile = tile_at(&call, batch, tiles - 1 - (group - linear * tiles));
    const mma_lane lane = lane_of(&warp);
    const float factor = late_factor(&params);

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

    tile_source keys = source_at(key, ca_offset(&params.key, batch, tile.first, 0), &params.key,
                                 params.E, E_CHUNKS);
    tile_source values = source_at(value, ca_offset(&params.value, batch, tile.first, 0),
                                   &params.value, params.Ev, EV_CHUNKS);
#pragma unroll 1
    for (int n = 0; n < STAGES - 1; n++) {
        load_block(&warp, memory, n, &keys, &values, tile.end - tile.first - n * BN);
    }
    int stage = 0;
    for (int j = tile.first; j < tile.end; j += BN) {
        WARP_COPIES_WAIT(&warp, STAGES - 2);
        /* the copies: their reads; reads of the last block: the next copies over it */
        barrier(CLK_LOCAL_MEM_FENCE);
        load_block(&warp, memory, stage == 0 ? STAGES - 1 : stage - 1, &keys, &values,
                   tile.end - j - (STAGES - 1) * BN);
        attend_block(&warp, &tile, &lane, j, warp.start + stage * (STAGE_CHUNKS * CHUNK_BYTES),
                     queries, factor, &softmax, result);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    write_rows(&warp, &tile, &lane, &softmax, result);
}
