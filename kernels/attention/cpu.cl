/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: the lanes of a vector are rows of queries.
 *
 *     global size  batch[0] * batch[1] * batch[2] / HEADS * ceil(L / BM), local size 1
 *     work-item    BM = NV * LANES rows of one batch, or of HEADS heads that share mask
 *                  and bias; all their keys, with an online softmax
 *
 * One vector holds one number of LANES rows, so the softmax needs no step across lanes:
 *
 *     queries  [E][NV]   scaled; a score is the sum of key[j][e] * queries[e]
 *     weights  [BN][NV]  exp2 of the scores of one block of keys
 *     result   [Ev][NV]  the sum of value[j][c] * weights[j], which the sum of weights
 *                        divides at the end; by rows, [LANES][Ev / LANES], where NV is 1
 *
 * Both products keep about 2 * 12 vectors of sums in registers over their inner loop.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DKEY_DIRECT        1: keys are `real` and contiguous (key.column 1, key.row E);
 *                         default 0
 *     -DVALUE_DIRECT      1: values are `real` with value.column 1; default 0
 *     -DBFLOAT16_PAIRS    1: products of pairs of bfloat16, cpu/pairs.clh; default 0
 *     -DNV                vectors of queries: 2, the default; 1 where there are few
 *                         rows; 4 where each tile converts its keys
 *     -DHEADS             heads of a work-item, a divisor of batch[2]; 1, the default,
 *                         with PRESENT
 *     -DMR                keys that are scored together, an even number; cpu/tiles.clh
 *                         has the default, which fills the registers
 *     -DBN                keys of a block, a multiple of MR; default in cpu/tiles.clh
 *     LANES of support/lanes.clh, ROW_IS_CALLED of attention/row.clh, and the macros of
 *     support/common.clh without SOFTCAP_LAST
 */
#include "kernels/attention/cpu/extras.clh"   /* drop_weights, write_weights */
#include "kernels/attention/cpu/products.clh" /* add_values */
#include "kernels/attention/cpu/scores.clh"   /* tile_state, score_keys */
#include "kernels/attention/cpu/softmax.clh"  /* softmax_state */
#include "kernels/attention/cpu/tiles.clh"    /* load_added, store_columns */
#include "kernels/attention/keys.clh"         /* key_segment, SCORE_UNIT */
#include "kernels/attention/present.clh"      /* copy_present */
#include "kernels/attention/row.clh"          /* attention_row */

/* result[c][v] += weights * values of a block of keys from j0. */
static inline void
add_block(const key_segment *segment, ca_int64 j0, int keys, const termv *weights, realv *result)
{
    const ca_int64 row = j0 - segment->start;
    const int terms = TERMS(keys);
#if VALUE_DIRECT
    const ca_int64 stride = segment->value_view->row;
    value_rows block = segment->value + row * stride;
#else
    term block[TERMS(BN) * HEAD_EV];
    const ca_int64 stride = HEAD_EV;
    pack_values(block, segment->value, segment->value_view, row, keys, HEAD_EV,
                segment->value_bias);
#endif
#if BY_ROWS
    add_values_by_rows(result, weights, block, stride, keys);
#else
    int c = 0;
    for (; c + COLUMNS <= HEAD_EV; c += COLUMNS) {
        add_values(result + c * NV, weights, block + c, stride, terms);
    }
#if HEAD_EV % COLUMNS
    add_last_values(result + c * NV, weights, block + c, stride, terms);
#endif
#endif
}

/* One head of a tile. */
typedef struct {
    tile_state tile;
    softmax_state softmax;
    termv queries[TERMS_E * NV];
    realv result[HEAD_EV * NV];
} head_state;

/* One head attends to the first `attended` of the `keys` keys from j0. */
static inline void
attend_block(head_state *head, int segment_index, ca_int64 j0, int keys, int attended,
             const realv *added, termv *weights)
{
    const tile_state *tile = &head->tile;
    const key_segment segment = segment_at(tile->call, tile->batch, segment_index);
#if KEEPS_SCORES
    realv kept[BN * NV];
    keep_unattended(tile, &segment, head->queries, j0, attended, keys, kept);
#else
    realv *kept = 0;
#endif
    for (int k0 = 0; k0 < attended; k0 += MR) {
        realv scores[MR * NV];
        score_keys(tile, &segment, head->queries, added + k0 * NV, j0 + k0, true, kept + k0 * NV,
                   scores);
        weigh_scores(&head->softmax, scores, weights, k0, head->result);
    }
#if KEEPS_SCORES
    store_scores(tile, j0, keys, kept);
#endif
    for (int v = 0; v < NV; v++) {
        head->softmax.sum[v] += head->softmax.block[v];
        head->softmax.block[v] = (realv)REAL(0.0);
    }
#if DROPOUT
    drop_weights(tile, j0, attended, weights);
#endif
    add_block(&segment, j0, attended, weights, head->result);
}

/* All heads attend to the tile's keys. Before each block is read, this work-item copies
   the present keys and values of its share that lie in the block. */
static inline void
attend(head_state *heads, const present_share *share, realv *added, termv *weights)
{
    const tile_state *tile = &heads[0].tile;
    for (int s = 0; s < SEGMENTS; s++) {
        const key_segment segment = segment_at(tile->call, tile->batch, s);
        const ca_int64 first = max(tile->first, segment.start);
        const ca_int64 last = min(tile->last, segment.end - 1);
        const ca_int64 end = KEEPS_SCORES ? segment.end : last + 1;
        for (ca_int64 j0 = KEEPS_SCORES ? segment.start : first; j0 < end; j0 += BN) {
            const int keys = (int)min((ca_int64)BN, end - j0);
            int attended = (int)clamp(last + 1 - j0, (ca_int64)0, (ca_int64)keys);
            attended = j0 + keys <= first ? 0 : attended;
#if PRESENT
            copy_present(tile->call, tile->batch, max(share->first, max(j0, first)),
                         min(share->end, min(j0 + keys, last + 1)));
#endif
#if HAS_ADDENDS
            if (attended > 0 &&
                !load_added(added, tile->call, tile->batch, tile->i0, j0, tile->rows, attended)) {
                attended = 0;
            }
#endif
#pragma unroll 1
            for (int h = 0; h < HEADS; h++) {
                attend_block(&heads[h], s, j0, keys, attended, added, weights);
            }
        }
    }
}

/* Starts tile `row_of_tiles` of the head with a linear batch index. */
static inline void
start_head(head_state *head, const attention_call *call, ca_int64 linear, ca_int64 row_of_tiles)
{
    const ca_attention_params *params = call->params;
    tile_state *tile = &head->tile;
    tile->call = call;
    ca_unravel(linear, params->batch, tile->batch);
    tile->band = ca_band(call, tile->batch);
    tile->i0 = row_of_tiles * BM;
    tile->rows = (int)min((ca_int64)BM, params->L - tile->i0);
    tile->first = max((ca_int64)0, tile->i0 + tile->band.lower);
    tile->last = min(tile->band.limit, tile->i0 + tile->rows + tile->band.upper) - 1;
    tile->scale = ca_scale(params) * (SOFTCAP ? REAL(1.0) : SCORE_UNIT);
    load_queries(head->queries, call->query + ca_offset(&params->query, tile->batch, tile->i0, 0),
                 &params->query, tile->rows,
                 call->input_bias + ca_offset(&params->input_bias, tile->batch, 0, 0), tile->scale);
    for (int n = 0; n < HEAD_EV * NV; n++) {
        head->result[n] = (realv)REAL(0.0);
    }
    for (int v = 0; v < NV; v++) {
        head->softmax.base[v] = (realv)REAL(0.0);
        head->softmax.limit[v] = (realv)(-INFINITY);
        head->softmax.sum[v] = (realv)REAL(0.0);
        head->softmax.block[v] = (realv)REAL(0.0);
#if BFLOAT16_PAIRS
        head->softmax.rounded[v] = (realv)REAL(0.0);
#endif
    }
}

/* Writes the rows of a head, and redoes those that attention_row has to redo. */
static inline void
finish_head(head_state *head)
{
    const tile_state *tile = &head->tile;
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    const bool excluding = HAS_ADDENDS || DROPOUT || tile->band.limit < params->T ||
                           tile->band.lower > 1 - params->L || tile->band.upper < params->T - 1;
    real redo[BM];
    const bool marked =
        normalise(&head->softmax, ca_kept_scale(params), excluding, head->result, redo);
    __global storage *to = call->output + ca_offset(&params->output, tile->batch, tile->i0, 0);
#if BY_ROWS
    store_rows(head->result, to, &params->output, tile->rows);
#else
    store_columns(head->result, HEAD_EV, to, &params->output, tile->rows);
#endif
    if (!marked && (params->flags & CA_HAS_LSE) == 0) {
        return;
    }
    for (int n = 0; n < tile->rows; n++) {
        if (params->flags & CA_HAS_LSE) {
            call->lse[ca_offset(&params->lse, tile->batch, tile->i0 + n, 0)] =
                TO_NATURAL(((const real *)head->softmax.base)[n]) +
                log(((const real *)head->softmax.sum)[n]);
        }
        if (redo[n] != REAL(0.0)) {
            attention_row(call, tile->batch, tile->i0 + n);
        }
    }
}

/* The vector hint keeps compilers from vectorising over work-items as well. There is
   only one a group, and building would take up to ten times as long. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    /* The last rows come first: below a causal diagonal they have the most keys. Heads
       that share a mask run side by side, while the mask's rows are in the cache. */
    ca_int64 neighbours = 1;
#if HAS_MASK
    neighbours = params.mask.batch[2] == 0 ? params.batch[2] / HEADS : 1;
#endif
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 column = item / neighbours; /* the same tile of all neighbours */
    const ca_int64 group = column / tiles;
    const ca_int64 row_of_tiles = tiles - 1 - (column - group * tiles);
    const ca_int64 linear = (group * neighbours + item - column * neighbours) * HEADS;

    head_state heads[HEADS];
    for (int h = 0; h < HEADS; h++) {
        start_head(&heads[h], &call, linear + h, row_of_tiles);
    }
    termv weights[TERMS(BN) * NV];
#if BFLOAT16_PAIRS || HEADS > 1
    realv added[BN * NV];
#else
    realv *added = weights; /* a chunk's weights overwrite its addends, used by then */
#endif
    present_share share = {0, 0};
#if PRESENT
    const tile_state *tile = &heads[0].tile;
    share = present_share_of(&params, tile->batch, row_of_tiles, tiles);
    copy_present(&call, tile->batch, share.first, min(share.end, tile->first));
    copy_present(&call, tile->batch, max(share.first, tile->last + 1), share.end);
#endif
    attend(heads, &share, added, weights);
    for (int h = 0; h < HEADS; h++) {
#if SCORES == 3
        write_weights(&heads[h].tile, heads[h].queries, &heads[h].softmax, added);
#endif
        finish_head(&heads[h]);
    }
}
