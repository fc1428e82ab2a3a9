/* SPDX-License-Identifier: MIT
 *
 * Attention on GPUs without matrix units, many rows: tiles in local memory, sums in
 * registers.
 *
 *     global size   batch[0] * batch[1] * batch[2] * ceil(L / BM) * THREADS, local size
 *                   THREADS
 *     work-group    BM = TY * MI rows of one batch; all their keys, with an online
 *                   softmax; THREADS = TX * TY work-items
 *     work-item     MI of the rows: in each row NJ scores of a block of BN = TX * NJ
 *                   keys, and NC columns of the result
 *     local memory  queries [BM][EC], keys [BN][EC]; weights [BN][BM] and values
 *                   [KC][TX * NC] replace the keys
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DTX -DTY           work-items along keys and columns, a power of 2, default 8;
 *                         and along rows, default 16
 *     -DMI -DNJ -DNC      what a work-item owns: rows, 1, 2 or 4, default 4; keys,
 *                         default 8; columns, default Ev / TX rounded up
 *     -DEC                elements of queries and keys in local memory, a multiple of
 *                         8; default E
 *     -DKC                keys whose values are in local memory, a divisor of BN;
 *                         default 32
 *     -DSUB_GROUP         size of the sub-groups, a multiple of TX; 0, the default: the
 *                         kernel uses none
 *     ROW_IS_CALLED of attention/row.clh, and the macros of support/common.clh
 *
 * L and T are at most 2^28, so that an int holds the sum of a few of them.
 */
#include "kernels/attention/present.clh"        /* copy_present */
#include "kernels/attention/row.clh"            /* attention_row */
#include "kernels/attention/tiled/products.clh" /* multiply_values */
#include "kernels/attention/tiled/scores.clh"   /* tile_state, key_block, score_block */
#include "kernels/attention/tiled/softmax.clh"  /* softmax_state */

/* --- weights and values ----------------------------------------------------------- */

#if DROPOUT
/* Sets dropped weights of a block to 0, after they have been summed. */
static inline void
drop_weights(const tile_state *tile, const key_block *block, real *weights)
{
    const ca_attention_params *params = tile->call->params;
    ca_int64 row = 0;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        row = row * params->batch[n] + tile->batch[n];
    }
    row = row * params->L + tile->i0 + params->first_row;
    uint dropped = 0;
#pragma unroll 1
    for (int n = 0; n < MI * NJ; n++) {
        const bool drops =
            ca_drops(params, row + tile->ty + TY * (n / NJ), block->j0 + tile->tx + TX * (n % NJ));
        dropped |= drops ? 1u << n : 0u;
    }
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        weights[n] = dropped >> n & 1u ? REAL(0.0) : weights[n];
    }
}
#endif

/* result += weights * values of a block. Both replace the keys in local memory. */
static inline void
add_block(const tile_state *tile, const key_segment *segment, const key_block *block,
          const real *weights, real *result)
{
    __local real4 *shared = tile->memory.shared;
    __local real4 *values = shared + WEIGHTS_SIZE;
    __local row_vector *to = (__local row_vector *)shared + tile->ty;
    const ca_int64 row = block->j0 - segment->start;
    const ca_int64 stride = segment->value_view->row;
#pragma unroll
    for (int n = 0; n < NJ; n++) {
        row_vector column;
#pragma unroll
        for (int m = 0; m < MI; m++) {
            ((real *)&column)[m] = weights[m * NJ + n];
        }
        to[(tile->tx + TX * n) * (STRIDE_M * 4 / MI)] = column;
    }
#pragma unroll 1
    for (int k0 = 0; k0 < block->keys; k0 += KC) {
        if (k0 > 0) {
            /* reads of the chunk before: these writes */
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        load_value_tile(values, STRIDE_C, KC, STRIDE_C, segment->value + (row + k0) * stride,
                        segment->value_view, block->keys - k0, 0, HEAD_EV, segment->value_bias,
                        tile->item);
        barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads */
        multiply_values(shared + k0 * STRIDE_M, values, KC, tile->tx, tile->ty, result);
    }
}

/* The tile attends to its keys. */
static inline __attribute__((always_inline)) void
attend(const tile_state *tile, softmax_state *softmax, real *result)
{
    int turn = 0;
    for (int s = 0; s < SEGMENTS; s++) {
        const key_segment segment = segment_at(tile->call, tile->batch, s);
        const int start = (int)segment.start;
        const int last = (int)segment.end;
        const int end = ALL_BLOCKS ? last : min(tile->end, last);
#pragma unroll 1
        for (int j0 = ALL_BLOCKS ? start : max(tile->first, start); j0 < end; j0 += BN) {
            const key_block block = block_at(tile, j0, end);
            const uint attended = find_attended(tile, &block);
            const uint weighed = find_weighed(tile, &block, attended);
#if HAS_ADDENDS && !ALL_BLOCKS
            turn = turn == 2 ? 0 : turn + 1;
            if (!group_attends(tile, attended, turn)) {
                continue;
            }
#endif
            real scores[MI * NJ];
            score_block(tile, &segment, &block, scores);
            finish_scores(tile, &block, attended, weighed, scores);
#pragma unroll
            for (int m = 0; m < MI; m++) {
                const uint of_row = weighed >> (m * NJ) & ((1u << NJ) - 1u);
                softmax->seen |= of_row != 0 ? 1u << m : 0u;
            }
            raise_bases(softmax, scores, result, tile->memory.highest, tile->ty);
            weigh_scores(softmax, scores);
#if DROPOUT
            drop_weights(tile, &block, scores);
#endif
            add_block(tile, &segment, &block, scores, result);
        }
    }
}

#if SCORES == 3
/* Writes all weights of the tile. Weights need the sums, so the scores are computed a
   second time. */
static inline void
write_weights(const tile_state *tile, const softmax_state *softmax)
{
    for (int s = 0; s < SEGMENTS; s++) {
        const key_segment segment = segment_at(tile->call, tile->batch, s);
#pragma unroll 1
        for (int j0 = (int)segment.start; j0 < (int)segment.end; j0 += BN) {
            const key_block block = block_at(tile, j0, (int)segment.end);
            const uint attended = find_attended(tile, &block);
            const uint weighed = find_weighed(tile, &block, attended);
            real scores[MI * NJ];
            score_block(tile, &segment, &block, scores);
            finish_scores(tile, &block, attended, weighed, scores);
#pragma unroll
            for (int n = 0; n < MI * NJ; n++) {
                const real weight =
                    exp2(TO_LOG2(scores[n] - softmax->base[n / NJ])) / softmax->sum[n / NJ];
                scores[n] = weighed >> n & 1u ? weight : REAL(0.0);
            }
            write_scores(tile, &block, scores);
        }
    }
}
#endif

/* --- results ---------------------------------------------------------------------- */

/* Divides the result by the sums, and marks the rows that attention_row has to redo.
   Where keys are excluded, these are rows that are not finite: a NaN or infinity of an
   excluded key may have spoilt them, as 0 * NaN. Elsewhere these are rows with an
   infinity: sums overflow early under a base that lags. Rows whose weights are all 0
   are always marked. */
static inline void
normalise(const tile_state *tile, const softmax_state *softmax, const real *seen, real *result,
          real *marks)
{
    const ca_attention_params *params = tile->call->params;
    const bool excluding = HAS_ADDENDS || DROPOUT || tile->limit < params->T ||
                           tile->lower + BM - 1 > 0 || tile->upper < params->T - 1;
#pragma unroll
    for (int m = 0; m < MI; m++) {
        const real inverse = ca_kept_scale(params) / softmax->sum[m];
        bool redo = softmax->sum[m] == REAL(0.0);
#pragma unroll
        for (int c = 0; c < NC; c++) {
            const real x = result[m * NC + c] * inverse;
            redo = redo || isinf(x) || (excluding && isnan(x));
            result[m * NC + c] = x;
        }
        marks[m] = redo && seen[m] > REAL(0.0) ? REAL(1.0) : REAL(0.0);
    }
}

/* Writes the rows. It is inlined so that the result stays in registers. */
static inline __attribute__((always_inline)) void
store_result(const tile_state *tile, const softmax_state *softmax, const real *seen,
             const real *result)
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
#pragma unroll
    for (int m = 0; m < MI; m++) {
        const int r = tile->ty + TY * m;
        if (r >= tile->rows) {
            continue;
        }
        __global storage *to =
            call->output + ca_offset(&params->output, tile->batch, tile->i0 + r, 0);
#pragma unroll
        for (int n = 0; n < NC; n++) {
            const int c = VC * (tile->tx + TX * (n / VC)) + n % VC;
            if (c < HEAD_EV) {
                store(seen[m] > REAL(0.0) ? result[m * NC + n] : REAL(0.0),
                      to + c * params->output.column);
            }
        }
        if ((params->flags & CA_HAS_LSE) && tile->tx == 0) {
            call->lse[ca_offset(&params->lse, tile->batch, tile->i0 + r, 0)] =
                TO_NATURAL(softmax->base[m]) + log(softmax->sum[m]);
        }
    }
}

#if SUB_GROUP
#define IN_SUB_GROUPS __attribute__((intel_reqd_sub_group_size(SUB_GROUP)))
#else
#define IN_SUB_GROUPS
#endif

__kernel IN_SUB_GROUPS __attribute__((reqd_work_group_size(THREADS, 1, 1))) void
attention_tiled(ATTENTION_ARGUMENTS)
{
    __local real4 queries[BM * STRIDE_E];
    __local real4 shared[SHARED_SIZE];
    __local int highest[BM];
    __local int attended[3];
    __local key_band band;

    const attention_call call = ATTENTION_CALL;
    const tile_memory memory = {queries, shared, highest, attended};
    tile_state tile;
    tile.call = &call;
    tile.memory = memory;
#if SUB_GROUP
    tile.item = (int)(get_sub_group_id() * SUB_GROUP + get_sub_group_local_id());
#else
    tile.item = (int)get_local_id(0);
#endif
    tile.ty = tile.item / TX;
    tile.tx = tile.item - tile.ty * TX;

    /* The last rows come first: below a causal diagonal they have the most keys. */
    const int tiles = ((int)params.L + BM - 1) / BM;
    const ca_int64 group = (ca_int64)get_group_id(0);
    const ca_int64 linear = group / tiles;
    const int row_of_tiles = tiles - 1 - (int)(group - linear * tiles);
    ca_unravel(linear, params.batch, tile.batch);
    tile.i0 = row_of_tiles * BM;
    tile.rows = min(BM, (int)params.L - tile.i0);

    clear_highest(highest, tile.item);
    if (tile.item == 0) {
        /* One work-item reads the key counts: another thread of the host may write them
           meanwhile, and the group has to agree on its blocks. */
        band = ca_band(&call, tile.batch);
        attended[0] = attended[1] = attended[2] = 0;
    }
#if E_PASSES == 1
    load_queries(&tile, 0);
#endif
#if PRESENT
    const present_share share =
        present_share_of(&params, tile.batch, row_of_tiles * THREADS + tile.item, tiles * THREADS);
    copy_present(&call, tile.batch, share.first, share.end);
#endif
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads */
    tile.limit = (int)band.limit;
    tile.lower = tile.i0 + (int)band.lower;
    tile.upper = tile.i0 + (int)band.upper;
    tile.first = max(0, tile.lower);
    tile.end = min(tile.limit, tile.upper + tile.rows);

    softmax_state softmax;
    real result[MI * NC];
    start_softmax(&softmax);
#pragma unroll
    for (int n = 0; n < MI * NC; n++) {
        result[n] = REAL(0.0);
    }
    attend(&tile, &softmax, result);

    /* Not a cast of the array's name: some compilers then give all work-groups the same
       array. */
    __local real *scratch = (__local real *)tile.memory.shared;
    real seen[MI];
    real marks[MI];
#pragma unroll
    for (int m = 0; m < MI; m++) {
        seen[m] = softmax.seen >> m & 1u ? REAL(1.0) : REAL(0.0);
    }
    sum_rows(softmax.sum, scratch, tile.tx, tile.ty);
    sum_rows(seen, scratch, tile.tx, tile.ty);
#if SCORES == 3
    write_weights(&tile, &softmax);
#endif
    normalise(&tile, &softmax, seen, result, marks);
    sum_rows(marks, scratch, tile.tx, tile.ty);
    store_result(&tile, &softmax, seen, result);
    uint redo = 0;
#pragma unroll
    for (int m = 0; m < MI; m++) {
        redo |= marks[m] > REAL(0.0) ? 1u << m : 0u;
    }
    barrier(CLK_GLOBAL_MEM_FENCE); /* writes of the rows: those of attention_row */
#pragma unroll 1
    for (int m = 0; m < MI; m++) {
        const int r = tile.ty + TY * m;
        if ((redo >> m & 1u) && tile.tx == 0 && r < tile.rows) {
            attention_row(&call, tile.batch, tile.i0 + r);
        }
    }
}
