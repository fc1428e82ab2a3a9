/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: queries in vector lanes.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM), local size 1
 *     work-item    BM = NV * LANES rows of one batch, all their keys, online softmax
 *
 * One vector holds one number of LANES rows, so the softmax needs no step across lanes:
 *
 *     queries  [E][NV]   scaled; a score is a sum of key[j][e] * queries[e]
 *     weights  [BN][NV]  exp2 of the scores of one block of keys
 *     result   [Ev][NV]  unnormalised, a sum of value[j][c] * weights[j]; by rows,
 *                        [LANES][Ev / LANES], where NV is 1
 *
 * Both products keep about 2 * 12 vectors of sums in registers over their inner loop.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DSOFTCAP           0 or 1
 *     -DKEY_DIRECT        1: keys are `real` and contiguous (key.column 1, key.row E)
 *     -DVALUE_DIRECT      1: values are `real` with value.column 1
 *     -DNV                vectors of queries: 2, or 1 where there are few rows, or 4 where
 *                         each tile converts its keys
 *     -DMR                keys scored together: 12, or 16 of one vector of queries
 *                         each, or 6 or 4 of four, or 6 where there are 16 registers
 *     -DBN                keys in a block, a multiple of MR
 *     LANES (lanes.cl), and those of common.cl but for SOFTCAP_LAST
 */
#include "attention_cpu_products.cl" /* dot_keys, add_values */
#include "attention_cpu_softmax.cl"  /* softmax_state */
#include "attention_cpu_tiles.cl"    /* the macros' defaults, load_… and store_… */
#include "attention_keys.cl"         /* key_segment, SCORE_UNIT */
#include "attention_present.cl"      /* copy_present */
#include "attention_row.cl"          /* attention_row */

/* BM rows of one batch, and the keys they may see: first … last. */
typedef struct {
    const attention_call *call;
    const ca_int64 *batch;
    ca_int64 i0;
    int rows;
    ca_int64 first;
    ca_int64 last;
    key_band band;
    real scale; /* from products to scores */
} tile_state;

/* Are scores written while they are at hand? Weights are known only at the end. */
#define KEEPS_SCORES (SCORES >= 0 && SCORES <= 2)

static inline void
keep_scores(const realv *scores, realv *kept)
{
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        kept[n] = scores[n];
    }
}

/* scores[k][v] of keys j … j + MR - 1, -inf where excluded; `added` is mask and bias.
   `kept` gets those of the stage that is written; if none of the keys is attended to,
   it is all that is wanted. */
static inline void
score_keys(const tile_state *tile, const key_segment *segment, const termv *queries,
           const realv *added, ca_int64 j, bool attended, realv *kept, realv *scores)
{
    const ca_int64 row = j - segment->start;
#if KEY_DIRECT
    if (j + MR <= segment->end) {
        dot_keys(scores, queries, (term_rows)(segment->key + row * HEAD_E));
    } else
#endif
    {
        term packed[MR * TERMS_E];
        const int present = (int)min((ca_int64)MR, segment->end - j);
        pack_keys(packed, segment->key, segment->key_view, row, present, HEAD_E,
                  segment->key_bias);
        for (int n = present * TERMS_E; n < MR * TERMS_E; n++) {
            packed[n] = (term)0;
        }
        dot_packed_keys(scores, queries, packed);
    }
#if BFLOAT16_PAIRS
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        scores[n] *= tile->scale;
    }
#endif
#if SCORES == 0
    keep_scores(scores, kept);
#endif
#if SOFTCAP
    const real softcap = ca_softcap(tile->call->params);
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        scores[n] = tanh_lanes(scores[n] / softcap) * (softcap * SCORE_UNIT);
    }
#endif
#if SCORES == 1
    keep_scores(scores, kept);
#endif
    if (KEEPS_SCORES && !attended) {
        return;
    }
#if HAS_ADDENDS
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        scores[n] = added[n] == (realv)(-INFINITY) ? added[n] : scores[n] + added[n];
    }
#endif
    /* Key j + k is in the band of lanes k - above … k - below. */
    const ca_int64 above = tile->i0 + tile->band.upper - j;
    const ca_int64 below = tile->i0 + tile->band.lower - j;
    if (above < MR - 1 || below > 1 - BM) {
        const realv lanes = lane_indices();
        const realv low = (realv)(-(real)clamp(above, (ca_int64)-BM, (ca_int64)MR));
        const realv high = (realv)(-(real)clamp(below, (ca_int64)-BM, (ca_int64)MR));
#pragma unroll
        for (int n = 0; n < MR * NV; n++) {
            const realv lane = lanes + (realv)(n % NV * LANES - n / NV);
            const intv attends = (lane >= low) & (lane <= high);
            scores[n] = attends ? scores[n] : (realv)(-INFINITY);
        }
    }
    const ca_int64 end = min(segment->end, tile->band.limit);
    if (j + MR > end) {
#pragma unroll
        for (int n = 0; n < MR * NV; n++) {
            if (j + n / NV >= end) {
                scores[n] = (realv)(-INFINITY);
            }
        }
    }
#if SCORES == 2
    keep_scores(scores, kept);
#endif
}

/* result[c][v] += weights * values of a block of keys from j0. */
static inline void
add_block(const key_segment *segment, ca_int64 j0, int keys, const termv *weights,
          realv *result)
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

#include "attention_cpu_extras.cl" /* drop_weights, keep_unattended, write_weights */

/* The online softmax over the tile's keys. The share of present keys and values that
   this work-item writes is copied block by block, before the blocks are read. */
static inline void
attend(const tile_state *tile, const termv *queries, const present_share *share,
       realv *added, termv *weights, softmax_state *softmax, realv *result)
{
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
            if (attended > 0 && !load_added(added, tile->call, tile->batch, tile->i0,
                                            j0, tile->rows, attended)) {
                attended = 0;
            }
#endif
#if KEEPS_SCORES
            realv kept[BN * NV];
            keep_unattended(tile, &segment, queries, j0, attended, keys, kept);
#else
            realv *kept = 0;
#endif
            for (int k0 = 0; k0 < attended; k0 += MR) {
                realv scores[MR * NV];
                score_keys(tile, &segment, queries, added + k0 * NV, j0 + k0, true,
                           kept + k0 * NV, scores);
                weigh_scores(softmax, scores, weights, k0, result);
            }
#if KEEPS_SCORES
            store_scores(tile, j0, keys, kept);
#endif
            for (int v = 0; v < NV; v++) {
                softmax->sum[v] += softmax->block[v];
                softmax->block[v] = (realv)REAL(0.0);
            }
#if DROPOUT
            drop_weights(tile, j0, attended, weights);
#endif
            add_block(&segment, j0, attended, weights, result);
        }
    }
}

/* The vector hint keeps compilers from vectorising over work-items as well: there is
   one a group, and building took up to ten times as long. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    /* The last rows first: below a causal diagonal they have the most keys. Heads that
       share a mask run side by side, while its rows are in the cache. */
    ca_int64 heads = 1;
#if HAS_MASK
    heads = params.mask.batch[2] == 0 ? params.batch[2] : 1;
#endif
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 column = item / heads; /* of tiles, one head beside the other */
    const ca_int64 group = column / tiles;
    const ca_int64 row_of_tiles = tiles - 1 - (column - group * tiles);
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(group * heads + item - column * heads, params.batch, batch);

    tile_state tile;
    tile.call = &call;
    tile.batch = batch;
    tile.band = ca_band(&call, batch);
    tile.i0 = row_of_tiles * BM;
    tile.rows = (int)min((ca_int64)BM, params.L - tile.i0);
    tile.first = max((ca_int64)0, tile.i0 + tile.band.lower);
    tile.scale = ca_scale(&params) * (SOFTCAP ? REAL(1.0) : SCORE_UNIT);
    tile.last = min(tile.band.limit, tile.i0 + tile.rows + tile.band.upper) - 1;

    termv queries[TERMS_E * NV];
    termv weights[TERMS(BN) * NV];
#if BFLOAT16_PAIRS
    realv added[BN * NV];
#else
    realv *added = weights; /* weights take the place of what their scores needed */
#endif
    realv result[HEAD_EV * NV];
    softmax_state softmax;
    load_queries(queries, query + ca_offset(&params.query, batch, tile.i0, 0),
                 &params.query, tile.rows,
                 input_bias + ca_offset(&params.input_bias, batch, 0, 0), tile.scale);
    for (int n = 0; n < HEAD_EV * NV; n++) {
        result[n] = (realv)REAL(0.0);
    }
    for (int v = 0; v < NV; v++) {
        softmax.base[v] = (realv)REAL(0.0);
        softmax.limit[v] = (realv)(-INFINITY);
        softmax.sum[v] = (realv)REAL(0.0);
        softmax.block[v] = (realv)REAL(0.0);
#if BFLOAT16_PAIRS
        softmax.rounded[v] = (realv)REAL(0.0);
#endif
    }

    present_share share = {0, 0};
#if PRESENT
    share = present_share_of(&params, batch, row_of_tiles, tiles);
    copy_present(&call, batch, share.first, min(share.end, tile.first));
    copy_present(&call, batch, max(share.first, tile.last + 1), share.end);
#endif
    attend(&tile, queries, &share, added, weights, &softmax, result);
#if SCORES == 3
    write_weights(&tile, queries, &softmax, added);
#endif

    const bool excluding = HAS_ADDENDS || DROPOUT || tile.band.limit < params.T ||
                           tile.band.lower > 1 - params.L ||
                           tile.band.upper < params.T - 1;
    real redo[BM];
    const bool marked =
        normalise(&softmax, ca_kept_scale(&params), excluding, result, redo);
    __global storage *to = output + ca_offset(&params.output, batch, tile.i0, 0);
#if BY_ROWS
    store_rows(result, to, &params.output, tile.rows);
#else
    store_columns(result, HEAD_EV, to, &params.output, tile.rows);
#endif
    if (!marked && (params.flags & CA_HAS_LSE) == 0) {
        return;
    }
    for (int n = 0; n < tile.rows; n++) {
        if (params.flags & CA_HAS_LSE) {
            lse[ca_offset(&params.lse, batch, tile.i0 + n, 0)] =
                TO_NATURAL(((const real *)softmax.base)[n]) +
                log(((const real *)softmax.sum)[n]);
        }
        if (redo[n] != REAL(0.0)) {
            attention_row(&call, batch, tile.i0 + n);
        }
    }
}
