/* SPDX-License-Identifier: MIT
 *
 * Scores or weights on GPUs, in a step behind attention. The kernel computes them from queries and keys. It
 * reads no values, and nothing that the kernel before it has computed.
 *
 *     global size, local size, work-group, work-item: those of attention/tiled.cl
 *
 * Weights take two passes over the keys: the first one finds the base and the sum of each row. Dropout
 * does not change them.
 *
 * Macros: those of attention/tiled.cl.
 */
#define SCORES_IN_LOG2 1
#define WRITES_SCORES  1
#include "kernels/attention/keys.clh"          /* find_key_run */
#include "kernels/attention/score.clh"         /* weight_of_sink */
#include "kernels/attention/tiled/scores.clh"  /* tile_state, score_block, finish_scores */
#include "kernels/attention/tiled/softmax.clh" /* softmax_state, weigh_scores */
#include "kernels/support/sub_group.clh"       /* SUB_GROUP_ATTRIBUTE */

/* Writes the scores of the work-item in a block or, where weights are written, its weights. */
INLINED __attribute__((always_inline)) void
write_scores(const tile_state *tile, const tile_block *block, const softmax_state *softmax,
             const real *scores)
{
    const ca_attention_params *params = tile->call->params;
    const ca_view *view = VIEW(params, SCORES);
    __global storage *first = tile->call->scores + ca_offset(view, tile->batch, tile->i0 + tile->ty,
                                                             block->j0 + tile->tx);
    UNROLLED_FOR (int n = 0; n < MI * NJ; n++) {
        const int r = TY * (n / NJ);
        const int k = TX * (n % NJ);
        real x = scores[n];
        if (WRITES_STAGE(params, 3)) {
            const real weight = exp2(TO_LOG2(params, x - softmax->base[n / NJ]));
            x = x != -INFINITY ? weight / softmax->sum[n / NJ] : REAL(0.0);
        }
        if (r < tile->rows - tile->ty && k < block->keys - tile->tx) {
            store(x, first + r * view->row + k * view->column);
        }
    }
}

/* Makes a pass over the keys of a tile. The pass sums the weights if `sums` is true. Otherwise it writes
   scores or weights. */
INLINED __attribute__((always_inline)) void
pass_over_keys(const tile_state *tile, bool sums, softmax_state *softmax)
{
    const ca_attention_params *params = tile->call->params;
    const score_bounds *bounds = &tile->bounds;
    const int start = sums ? max(0, bounds->lower) : 0;
    const int end = sums ? min(bounds->limit, bounds->upper + tile->rows) : (int)params->T;
    int run_end;
    for (int first = start; first < end; first = run_end) {
        key_run run;
        find_key_run(&run, tile->call, tile->batch, first);
        run_end = USES(params, PAST_KEY) ? min(end, first + (int)run.count) : end;
        PLAIN_FOR (int j0 = first; j0 < run_end; j0 += BN) {
            const tile_block block = block_at(tile, j0, run_end);
            if (sums && block.known == CA_BLOCK_EMPTY) { /* so it is for the whole group */
                continue;
            }
            real scores[MI * NJ] = {REAL(0.0)};
            score_block(tile, &run, j0 - first, false, &block, scores);
            softmax->seen |= finish_scores(tile, &block, scores);
            if (sums) {
                raise_bases(params, softmax, scores, 0, tile->highest, tile->ty);
                weigh_scores(params, softmax, scores);
            } else {
                write_scores(tile, &block, softmax, scores);
            }
        }
    }
}

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
SUB_GROUP_ATTRIBUTE(float4) void attention_tiled_scores(ATTENTION_ARGUMENTS)
{
    __local real4 queries[BM * STRIDE_E];
    __local real4 shared[SHARED_SIZE];
    __local int highest[BM];
    __local batch_shift shift;

    DEFINE_CALL(call);
    tile_state tile = {&call, queries, shared, highest};
    find_tile(&tile);
    start_tile(&tile, &shift);
    softmax_state softmax;
    start_softmax(&softmax);
    /* One loop has the text of both passes once, so that all of it is inlined. */
    PLAIN_FOR (int pass = WRITES_STAGE(&params, 3) ? 0 : 1; pass < 2; pass++) {
        pass_over_keys(&tile, pass == 0, &softmax);
        if (pass == 0) {
            sum_rows(softmax.sum, &tile);
            UNROLLED_FOR (int m = 0; m < MI && USES(&params, SINKS); m++) {
                softmax.sum[m] += weight_of_sink(&call, tile.batch, softmax.base[m]);
            }
        }
    }
}
