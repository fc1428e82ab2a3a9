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
 *     local memory  queries [BM][EC], keys [BN][EC], values [KC][TX * NC]; weights
 *                   [BN][BM] replace the keys
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DTX -DTY           work-items along keys and columns, a power of 2; and along
 *                         rows
 *     -DMI -DNJ -DNC      what a work-item owns: rows, 1, 2 or 4; keys; columns, at least
 *                         Ev / TX
 *     -DEC                elements of queries and keys in local memory, a multiple of 8
 *     -DKC                keys whose values are in local memory, a divisor of BN
 *     -DENDS_IN_LOCAL     1: local memory holds the offsets and strides of the output. Some
 *                         compilers load params when the kernel starts, and hold them in registers
 *     -DSUB_GROUP         see support/sub_group.clh
 *     and the macros of support/common.clh
 *
 * L and T are at most 2^28, so that an int holds the sum of a few of them.
 */
#define SCORES_IN_LOG2 1
#include "kernels/attention/keys.clh"          /* find_key_run */
#include "kernels/attention/score.clh"         /* factor_of_row, store_lse */
#include "kernels/attention/tiled/scores.clh"  /* tile_state, score_block, finish_scores */
#include "kernels/attention/tiled/softmax.clh" /* softmax_state, weigh_scores */
#include "kernels/attention/tiled/tiles.clh"   /* multiply_values */
#include "kernels/support/philox.clh"          /* ca_drops */
#include "kernels/support/sub_group.clh"       /* SUB_GROUP_ATTRIBUTE */

/* Where a tile's first row is written, and how far its rows and columns are apart. */
typedef struct {
    ca_int64 output;
    ca_int64 output_row;
    ca_int64 output_column;
    ca_int64 lse;
    ca_int64 lse_row;
} row_ends;

/* --- weights and values ----------------------------------------------------------- */

/* Makes zeros of the weights that dropout drops, in a block of keys. The sums of the rows
   include these weights already. */
INLINED void
drop_weights(const tile_state *tile, const tile_block *block, real *weights)
{
    const ca_attention_params *params = tile->call->params;
    const ca_int64 row = row_index(params, tile->batch, tile->i0) + params->first_row;
    uint dropped = 0;
    PLAIN_FOR (int n = 0; n < MI * NJ; n++) {
        const bool drops =
            ca_drops(params, row + tile->ty + TY * (n / NJ), block->j0 + tile->tx + TX * (n % NJ));
        dropped |= drops ? 1u << n : 0u;
    }
    UNROLLED_FOR (int n = 0; n < MI * NJ; n++) {
        weights[n] = dropped >> n & 1u ? REAL(0.0) : weights[n];
    }
}

/* result += weights * values of a block. The weights replace the keys in local memory. */
INLINED void
add_block(const tile_state *tile, const key_run *run, int first, const tile_block *block,
          const real *weights, real *result)
{
    __local real4 *shared = tile->shared;
    __local row_vector *to = (__local row_vector *)shared + tile->ty;
    UNROLLED_FOR (int n = 0; n < NJ; n++) {
        row_vector column;
        UNROLLED_FOR (int m = 0; m < MI; m++) {
            ((real *)&column)[m] = weights[m * NJ + n];
        }
        to[(tile->tx + TX * n) * (STRIDE_M * 4 / MI)] = column;
    }
    PLAIN_FOR (int k0 = 0; k0 < block->keys; k0 += KC) {
        if (k0 > 0) {
            /* reads of the values before: these writes */
            barrier(CLK_LOCAL_MEM_FENCE);
            load_values(tile, run, first, block, k0);
        }
        barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads */
        multiply_values(shared + k0 * STRIDE_M, shared + VALUES_AT, KC, tile->tx, tile->ty, result);
    }
}

/* Multiplies the numbers of the work-item's rows and keys of a block, whose first key is number `first` of a
   run, by the scales of these keys, or of their values. */
INLINED void
scale_numbers(const tile_state *tile, const key_run *run, int first, const tile_block *block,
              bool of_values, real *numbers)
{
    const ca_attention_params *params = tile->call->params;
    UNROLLED_FOR (int n = 0; n < NJ; n++) {
        const int k = tile->tx + TX * n;
        real scale = REAL(0.0);
        if (k < block->keys) {
            scale = of_values ? value_scale_of(params, run, first + k)
                              : key_scale_of(params, run, first + k);
        }
        UNROLLED_FOR (int m = 0; m < MI; m++) {
            numbers[m * NJ + n] *= scale;
        }
    }
}

/* Weighs a block of keys and adds its values. */
INLINED __attribute__((always_inline)) void
attend_block(const tile_state *tile, const key_run *run, int row, const tile_block *block,
             softmax_state *softmax, real *result)
{
    const ca_attention_params *params = tile->call->params;
    real scores[MI * NJ] = {REAL(0.0)};
    score_block(tile, run, row, true, block, scores);
    if (SCALES(params, KEY_SCALE)) {
        scale_numbers(tile, run, row, block, false, scores);
    }
    softmax->seen |= finish_scores(tile, block, scores);
    raise_bases(params, softmax, scores, result, tile->highest, tile->ty);
    weigh_scores(params, softmax, scores);
    if (USES(params, DROPOUT)) {
        drop_weights(tile, block, scores);
    }
    if (SCALES(params, VALUE_SCALE)) {
        scale_numbers(tile, run, row, block, true, scores);
    }
    add_block(tile, run, row, block, scores, result);
}

/* The tile attends to its keys. */
INLINED __attribute__((always_inline)) void
attend(const tile_state *tile, softmax_state *softmax, real *result)
{
    const ca_attention_params *params = tile->call->params;
    const score_bounds *bounds = &tile->bounds;
    const int end = min(bounds->limit, bounds->upper + tile->rows);
    int run_end;
    for (int first = max(0, bounds->lower); first < end; first = run_end) {
        key_run run;
        find_key_run(&run, tile->call, tile->batch, first);
        run_end = KEYS_HAVE_RUNS(params) ? min(end, first + (int)run.count) : end;
        PLAIN_FOR (int j0 = first; j0 < run_end; j0 += BN) {
            const tile_block block = block_at(tile, j0, run_end);
            if (block.known == CA_BLOCK_EMPTY) { /* so it is for the whole group */
                continue;
            }
            attend_block(tile, &run, j0 - first, &block, softmax, result);
        }
    }
}

#if ENDS_IN_LOCAL
#define OUTPUT_AT(ends, tile, r)  ((ends)->output + (r) * (ends)->output_row)
#define OUTPUT_COLUMN(ends, tile) ((ends)->output_column)
#define LSE_AT(ends, tile, r)     ((ends)->lse + (r) * (ends)->lse_row)
#else
#define OUTPUT_AT(ends, tile, r)                                                                   \
    ca_offset(&(tile)->call->params->output, (tile)->batch, (tile)->i0 + (r), 0)
#define OUTPUT_COLUMN(ends, tile) ((tile)->call->params->output.column)
#define LSE_AT(ends, tile, r)                                                                      \
    ca_offset(&(tile)->call->params->lse, (tile)->batch, (tile)->i0 + (r), 0)
#endif

/* Writes the rows. It is inlined so that the result stays in registers. */
INLINED __attribute__((always_inline)) void
write_rows(const tile_state *tile, __local const row_ends *ends, const softmax_state *softmax,
           const real *seen, const real *result)
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        const int r = tile->ty + TY * m;
        const bool attends = seen[m] > REAL(0.0);
        const real factor =
            factor_of_row(call, tile->batch, softmax->base[m], softmax->sum[m], attends);
        bool finite = true;
        if (r >= tile->rows) {
            continue;
        }
        __global storage *to = call->output + OUTPUT_AT(ends, tile, r);
        UNROLLED_FOR (int n = 0; n < NC; n++) {
            const int c = VC * (tile->tx + TX * (n / VC)) + n % VC;
            const real x = attends ? result[m * NC + n] * factor : REAL(0.0);
            if (c < HEAD_EV) {
                finite = finite && is_finite(x);
                store(x, to + c * OUTPUT_COLUMN(ends, tile));
            }
        }
        if (tile->tx == 0 && (params->flags & CA_HAS_LSE) != 0) {
            store_lse(call, tile->batch, LSE_AT(ends, tile, r), softmax->base[m], softmax->sum[m],
                      attends);
        }
        if (!finite) {
            ask_to_redo(call);
        }
    }
}

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
SUB_GROUP_ATTRIBUTE(float4) void attention_tiled(ATTENTION_ARGUMENTS)
{
    __local real4 queries[BM * STRIDE_E];
    __local real4 shared[SHARED_SIZE];
    __local int highest[BM];
    __local batch_shift shift;
#if ENDS_IN_LOCAL
    __local row_ends local_ends;
    __local row_ends *ends = &local_ends;
#else
    __local row_ends *ends = 0;
#endif

    DEFINE_CALL(call);
    tile_state tile = {&call, queries, shared, highest};
    find_tile(&tile);
    if (ENDS_IN_LOCAL && tile.item == 0) {
        ends->output = ca_offset(&params.output, tile.batch, tile.i0, 0);
        ends->output_row = params.output.row;
        ends->output_column = params.output.column;
        ends->lse = ca_offset(&params.lse, tile.batch, tile.i0, 0);
        ends->lse_row = params.lse.row;
    }
    start_tile(&tile, &shift);

    softmax_state softmax;
    real result[MI * NC] = {REAL(0.0)};
    start_softmax(&softmax);
    attend(&tile, &softmax, result);

    real seen[MI];
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        seen[m] = softmax.seen >> m & 1u ? REAL(1.0) : REAL(0.0);
    }
    sum_rows(softmax.sum, &tile);
    sum_rows(seen, &tile);
    write_rows(&tile, ends, &softmax, seen, result);
}
