/* SPDX-License-Identifier: MIT
 *
 * The backward pass of attention on GPUs: gradients of query, key and value, by the tiles of attention/tiled.cl.
 * attention/backward.cl has the formulas. Three steps, each a program:
 *
 *     -DSTEP=CA_BACKWARD_…
 *     NUMBERS  lse[i] = base, sum, delta      a work-group owns BM rows
 *     QUERY    gradient of query              a work-group owns BM rows, and goes over keys in blocks of BN
 *     KEY      gradients of key and value     a work-group owns BM keys, and goes over rows in blocks of BN
 *
 * Each result has one work-group, which computes all scores and weights that it needs. So a result has the
 * same bits each time, and memory keeps nothing but the numbers of rows. Of a block and the tile that a work-group
 * owns it computes
 *
 *     product[own][other]     = dot(query, key)               a score is made of it, and a weight
 *     grad_weight[own][other] = dot(grad_output, value)
 *     grad_query[own][e]     += sum_other grad_product * key[other][e]
 *     grad_value[own][c]     += sum_other kept * weight * grad_output[other][c]
 *     grad_key[own][e]       += sum_other grad_product * query[other][e]
 *
 *     global size   the product of the leading dimensions that the gradient has, and of tiles, and of THREADS
 *     work-item     of its MI rows or keys NJ pairs of a block, and NC columns of each gradient
 *     local memory  the tile [BM][EC], a block [BN][EC], then rows of it [KC][TX * NC]; factors [BN][BM] replace
 *                   the block; the numbers of rows
 *
 * The base of a row is its log-sum-exp, and the sum is 1. A row without a key has the base +inf, so its weights
 * are 0. What is excluded adds 0 unless it holds NaN or infinity: then the host is asked for
 * attention/backward.cl.
 *
 * Other macros: those of attention/tiled.cl, without ENDS_IN_LOCAL. NC and EC are for the wider one of E and
 * Ev. L and T are at most 2^28.
 */
#define IS_BACKWARD
/* All products are long sums if one is: then all steps make the same scores. See tiled/scores.clh. */
#define LONG_SUM (HEAD_EV > 128 ? 0 : 128)
#include "kernels/attention/params.h" /* CA_BACKWARD_… */

#if STEP == CA_BACKWARD_NUMBERS
#include "kernels/attention/tiled_backward/numbers.clh" /* write_numbers */
#else
#include "kernels/attention/tiled_backward/pairs.clh" /* own_tile, add_pairs */
#endif
#include "kernels/support/sub_group.clh" /* SUB_GROUP_ATTRIBUTE */

#if STEP != CA_BACKWARD_NUMBERS

/* Finds the places of the tile's gradients. */
INLINED void
find_results(own_tile *own)
{
    const ca_attention_params *params = own->call->params;
    if (own->item == 0) {
        set_place(&own->places[OF_FIRST],
                  USES(params, GRAD_VALUE) ? VIEW(params, GRAD_VALUE)
                  : OWNS_KEYS              ? VIEW(params, GRAD_KEY)
                                           : VIEW(params, GRAD_QUERY),
                  own->batch, own->range.first);
        if (IS_SECOND_TOO(params)) {
            set_place(&own->places[OF_SECOND], VIEW(params, GRAD_KEY), own->batch,
                      own->range.first);
        }
    }
}

/* --- the pairs of one head ------------------------------------------------------------ */

/* Adds what the pairs of a batch give to the gradients. */
INLINED __attribute__((always_inline)) void
add_head(own_tile *own, const ca_int64 *batch, __local batch_shift *shift, real *first,
         real *second)
{
    const attention_call *call = own->call;
    find_places(own, batch);
    const batch_sequence sequence = sequence_of_group(call, batch, shift);
    const score_bounds bounds = bounds_of(&sequence);
    const line_range others = others_of(own->range, call->params, &bounds);
#if !OWNS_KEYS
    load_numbers(own, own->range);
#endif
    PLAIN_FOR (int at = others.first; at < others.end; at += BN) {
        pair_block block;
        const line_range these = {at, min(at + BN, others.end)};
        find_block(&block, call, batch, &sequence, own->range, these);
        if (block.known == CA_BLOCK_EMPTY) { /* so it is for the whole group */
            continue;
        }
#if OWNS_KEYS
        load_numbers(own, these);
#endif
        add_pairs(own, &block, first, second);
    }
}

/* Writes a gradient of the tile. Returns true if its numbers are finite. */
INLINED __attribute__((always_inline)) bool
write_sums(const own_tile *own, __global storage *array, __local const matrix_place *place,
           int columns, const real *sums)
{
    const ca_int64 column = place->column;
    bool finite = true;
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        const int r = own->ty + TY * m;
        if (r >= own->range.end - own->range.first) {
            continue;
        }
        __global storage *to = array + place->offset + r * place->row;
        UNROLLED_FOR (int n = 0; n < NC; n++) {
            const int c = VC * (own->tx + TX * (n / VC)) + n % VC;
            if (c < columns) {
                finite = finite && is_finite(sums[m * NC + n]);
                store(sums[m * NC + n], to + c * column);
            }
        }
    }
    return finite;
}

#endif

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
SUB_GROUP_ATTRIBUTE(float4) void attention_tiled_backward(ATTENTION_ARGUMENTS)
{
    __local real4 tile[BM * STRIDE_E];
    __local real4 shared[SHARED_SIZE];
    __local batch_shift shift;
    DEFINE_CALL(call);
#if STEP == CA_BACKWARD_NUMBERS
    __local int highest[BM];
    __local int unsure;
    tile_state rows = {&call, tile, shared, highest};
    write_numbers(&rows, &unsure, &shift);
#else
    __local real numbers[NUMBERS * ROWS];
    __local int empty;
    __local ca_view views[HEAD_PLACES];
    __local matrix_place places[PLACES];
    own_tile own = {&call, tile, shared, numbers, &empty, views, places};
    divided_batch divided;
    real first[MI * NC] = {REAL(0.0)};
    real second[MI * NC] = {REAL(0.0)};
    start_own(&own);
    own.range = find_own_tile(&params, group_of(&params), BM, own.batch, &divided);
    find_results(&own);
    const ca_int64 heads = count_of(divided.shared);
    PLAIN_FOR (ca_int64 n = 0; n < heads; n++) {
        ca_int64 batch[CA_BATCH_DIMS];
        find_entry(&divided, own.batch, n, batch);
        add_head(&own, batch, &shift, first, second);
    }
    bool finite =
        write_sums(&own,
                   USES(&params, GRAD_VALUE) ? call.grad_value
                   : OWNS_KEYS               ? call.grad_key
                                             : call.grad_query,
                   places + OF_FIRST, USES(&params, GRAD_VALUE) ? HEAD_EV : HEAD_E, first);
    if (IS_SECOND_TOO(&params)) {
        finite &= write_sums(&own, call.grad_key, places + OF_SECOND, HEAD_E, second);
    }
    if (!finite && own.excluding) { /* perhaps by 0 * NaN, of what is excluded */
        ask_to_redo(&call);
    }
#endif
}
