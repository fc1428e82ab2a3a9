/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: queries in vector lanes.
 *
 *     global size  batch[0] * batch[1] * batch[2] / HEADS * ceil(L / BM), local size 1
 *     work-item    BM = NV * LANES rows of one batch, or of HEADS heads that share mask
 *                  and bias, all their keys, online softmax
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
 *     -DHEADS             heads of a work-item, a divisor of batch[2]; 1 with PRESENT
 *     -DMR                keys scored together: 12, or 16 of one vector of queries
 *                         each, or 6 or 4 of four, or 6 where there are 16 registers
 *     -DBN                keys in a block, a multiple of MR
 *     LANES (support/lanes.clh), and those of support/common.clh but for SOFTCAP_LAST
 */
#include "kernels/attention/cpu/products.clh" /* dot_keys, add_values */
#include "kernels/attention/cpu/softmax.clh"  /* softmax_state */
#include "kernels/attention/cpu/tiles.clh" /* the macros' defaults, load_… and store_… */
#include "kernels/attention/keys.clh"      /* key_segment, SCORE_UNIT */
#include "kernels/attention/present.clh"   /* copy_present */
#include "kernels/attention/row.clh"       /* attention_row */

/* BM rows of one head, and the keys they may see: first … last. */
typedef struct {
    const attention_call *call;
    ca_int64 batch[CA_BATCH_DIMS];
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

#if KEY_DIRECT
/* The keys after a chunk at `row`, and its values, which a product reads in columns. */
static inline void
prefetch_chunk(const key_segment *segment, ca_int64 row)
{
    const ca_int64 stride = segment->value_view->row;
    prefetch_bytes((__global const char *)(segment->key + (row + MR) * HEAD_E),
                   MR * HEAD_E * (int)sizeof(storage));
    for (int k = 0; k < MR; k++) {
        prefetch_bytes((__global const char *)(segment->value + (row + k) * stride),
                       HEAD_EV * (int)sizeof(value_storage));
    }
}
#endif

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
        if (tile->call->params->flags & CA_KEYS_ARE_FAR) {
            prefetch_chunk(segment, row);
        }
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

#include "kernels/attention/cpu/extras.clh" /* drop_weights, keep_unattended, write_weights */

/* What a tile keeps of one head. */
typedef struct {
    tile_state tile;
    softmax_state softmax;
    termv queries[TERMS_E * NV];
    realv result[HEAD_EV * NV];
} head_state;

/* One head attends to `attended` of the `keys` keys from j0. */
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
        score_keys(tile, &segment, head->queries, added + k0 * NV, j0 + k0, true,
                   kept + k0 * NV, scores);
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

/* The online softmax over the tile's keys. The share of present keys and values that
   this work-item writes is copied block by block, before the blocks are read. */
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
            if (attended > 0 && !load_added(added, tile->call, tile->batch, tile->i0,
                                            j0, tile->rows, attended)) {
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

/* Tile `row_of_tiles` of the head with a linear batch index. */
static inline void
start_head(head_state *head, const attention_call *call, ca_int64 linear,
           ca_int64 row_of_tiles)
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
    load_queries(head->queries,
                 call->query + ca_offset(&params->query, tile->batch, tile->i0, 0),
                 &params->query, tile->rows,
                 call->input_bias + ca_offset(&params->input_bias, tile->batch, 0, 0),
                 tile->scale);
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

static inline void
finish_head(head_state *head)
{
    const tile_state *tile = &head->tile;
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    const bool excluding = HAS_ADDENDS || DROPOUT || tile->band.limit < params->T ||
                           tile->band.lower > 1 - params->L ||
                           tile->band.upper < params->T - 1;
    real redo[BM];
    const bool marked =
        normalise(&head->softmax, ca_kept_scale(params), excluding, head->result, redo);
    __global storage *to =
        call->output + ca_offset(&params->output, tile->batch, tile->i0, 0);
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

/* The vector hint keeps compilers from vectorising over work-items as well: there is
   one a group, and building took up to ten times as long. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    /* The last rows first: below a causal diagonal they have the most keys. Heads that
       share a mask run side by side, while its rows are in the cache. */
    ca_int64 neighbours = 1;
#if HAS_MASK
    neighbours = params.mask.batch[2] == 0 ? params.batch[2] / HEADS : 1;
#endif
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 column = item / neighbours; /* of tiles, one head beside the other */
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
    realv *added = weights; /* weights take the place of what their scores needed */
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
