/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: the lanes of a vector are rows of queries.
 *
 *     global size  batch[0] * batch[1] * batch[2] / heads * ceil(L / BM), local size 1
 *     work-item    BM = NV * LANES rows of one batch, or of params.heads heads that
 *                  share mask and bias; all their keys, with an online softmax
 *
 * One vector holds one number of LANES rows, so the softmax needs no step across lanes:
 *
 *     queries  [E][NV]   scaled; a score is the sum of key[j][e] * queries[e]
 *     weights  [keys][NV]  exp of the scores of one block of keys
 *     result   [Ev][NV]  the sum of value[j][c] * weights[j], which the sum of weights
 *                        divides at the end; by rows, [LANES][Ev / LANES], where NV is 1
 *
 * Both products keep about 2 * 12 vectors of sums in registers over their inner loop.
 * Head sizes, 1 … CA_CPU_HEAD_SIZE, and all options but a late softcap are data.
 *
 *     -DBFLOAT16_PAIRS     1: products of pairs of bfloat16, cpu/pairs.clh
 *     -DNV                 vectors of queries: 2; 1 where there are few rows; 4, for
 *                          head sizes up to 128, where each tile converts its keys
 *     -DONE_ADDRESS_SPACE  1: an address means the same in every address space, as on
 *                          CPUs; 0: keys and values are always packed
 *     LANES of support/lanes.clh and the macros of support/common.clh, of which a plan
 *     sets OPTIONS only for calls without options
 */
#define SCORE_LANES 1
#include "kernels/attention/cpu/tiles.clh" /* tile_state, load_added, store_columns */

#include "kernels/attention/cpu/products.clh" /* multiply_keys, add_values */
#include "kernels/attention/cpu/softmax.clh"  /* score_keys, softmax_state */
#include "kernels/attention/keys.clh"         /* key_run_at */
#include "kernels/attention/present.clh"      /* copy_present */
#include "kernels/support/philox.clh"         /* DEFINE_PHILOX */

/* --- what few calls ask for: dropout, scores -------------------------------------- */

DEFINE_PHILOX(philox_lanes, uintv)

/* Sets the weights that dropout drops to 0, in a block of keys whose first key is j0. The
   sums of the rows already include these weights. */
CALLED void
drop_weights(const tile_state *tile, ca_int64 j0, int keys, termv *weights)
{
    const ca_attention_params *params = tile->call->params;
    const ca_int64 row = row_index(params, tile->batch, tile->i0) + params->first_row;
    ulong lanes[BM];
    PLAIN_FOR (int n = 0; n < BM; n++) {
        lanes[n] = (ulong)(row + n);
    }
    PLAIN_FOR (ca_int64 quad = j0 >> 2; quad <= (j0 + keys - 1) >> 2; quad++) {
        PLAIN_FOR (int v = 0; v < NV; v++) {
            const ulongv rows = WIDE(vload)(v, lanes);
            uintv words[4] = {(uintv)(uint)quad, (uintv)(uint)((ulong)quad >> 32),
                              convert_uintv(rows), convert_uintv(rows >> 32)};
            philox_lanes(words, params->seed);
            PLAIN_FOR (int n = 0; n < 4; n++) {
                const ca_int64 k = quad * 4 + n - j0;
                if (k >= 0 && k < keys) {
                    const intv kept = convert_intv(words[n] > params->last_dropped);
#if BFLOAT16_PAIRS
                    const intv other = k % 2 == 0 ? (intv)~0xffff : (intv)0xffff;
                    weights[k / 2 * NV + v] &= as_uintv(kept | other);
#else
                    weights[k * NV + v] = as_realv(as_intv(weights[k * NV + v]) & kept);
#endif
                }
            }
        }
    }
}

/* scores[lane][j0 + j] = block[j][lane] */
static inline void
store_scores(const tile_state *tile, ca_int64 j0, int keys, const realv *block)
{
    const attention_call *call = tile->call;
    const ca_view *view = VIEW(call->params, SCORES);
    store_columns(block, keys, call->scores + ca_offset(view, tile->batch, tile->i0, j0), view,
                  tile->rows);
}

/* Keeps scores of the chunks of a block after the `attended` keys: -inf in stage 2,
   after the mask, and like any others in the stages before it. */
CALLED void
keep_unattended(const tile_state *tile, const key_run *run, const termv *queries, ca_int64 j0,
                int attended, int keys, const realv *added, realv *kept)
{
    PLAIN_FOR (int k0 = (attended + MR - 1) / MR * MR; k0 < keys; k0 += MR) {
        realv scores[MR * NV];
        realv bounded[MR * NV];
        intv seen[NV] = {(intv)0};
        if (!WRITES_STAGE(tile->call->params, 2)) {
            score_keys(tile, run, queries, j0, k0, added, bounded, kept, seen, scores);
            continue;
        }
        PLAIN_FOR (int n = 0; n < MR * NV; n++) {
            kept[k0 * NV + n] = (realv)(-INFINITY);
        }
    }
}

/* Writes all weights of the tile. A weight is divided by the sum of its row, which is
   known only at the end. So this function computes the scores a second time. `block`
   has room for MAX_KEYS keys. */
CALLED void
write_weights(const tile_state *tile, const termv *queries, const softmax_state *softmax,
              realv *block)
{
    const ca_attention_params *params = tile->call->params;
    realv factor[NV]; /* 0 for empty rows */
    int keys;
    for (int v = 0; v < NV; v++) {
        const realv inverse = REAL(1.0) / softmax->sum[v];
        factor[v] = softmax->seen[v] != 0 ? inverse : (realv)REAL(0.0);
    }
    PLAIN_FOR (ca_int64 j0 = 0; j0 < params->T; j0 += keys) {
        const key_run run = key_run_at(tile->call, tile->batch, j0);
        keys = (int)min((ca_int64)keys_of_block(params), run.count);
        const int attended = (int)clamp(tile->last + 1 - j0, (ca_int64)0, (ca_int64)keys);
        if (HAS_ADDENDS(params)) {
            load_added(block, tile, j0, attended);
        }
        int k0 = 0;
        PLAIN_FOR (; k0 < attended; k0 += MR) {
            realv scores[MR * NV];
            realv bounded[MR * NV];
            intv seen[NV] = {(intv)0};
            realv *weights = block + k0 * NV;
            score_keys(tile, &run, queries, j0, k0, block, bounded, 0, seen, scores);
            PLAIN_FOR (int n = 0; n < MR * NV; n++) {
                const int v = n % NV;
                weights[n] = weight_of(params, scores[n] - softmax->base[v]) * factor[v];
            }
        }
        PLAIN_FOR (int n = k0 * NV; n < keys * NV; n++) {
            block[n] = (realv)REAL(0.0);
        }
        store_scores(tile, j0, keys, block);
    }
}

/* --- heads of a tile -------------------------------------------------------------- */

/* One head of a tile. */
typedef struct {
    tile_state tile;
    softmax_state softmax;
    termv *queries;
    realv *result;
} head_state;

/* One head attends to the first `attended` of the `keys` keys from j0, which are of one
   run. */
static inline void
attend_block(head_state *head, const key_run *run, ca_int64 j0, int keys, int attended,
             const realv *added, termv *weights)
{
    const tile_state *tile = &head->tile;
    const ca_attention_params *params = tile->call->params;
    const bool keeps = KEEPS_SCORES(params);
    realv kept[MAX_KEYS * NV];
    realv bounded[MR * NV];
    PLAIN_FOR (int k0 = 0; k0 < attended; k0 += MR) {
#if BFLOAT16_PAIRS
        realv scores[MR * NV];
#else
        realv *scores = weights + k0 * NV;
#endif
        const realv *addends = score_keys(tile, run, head->queries, j0, k0, added, bounded,
                                          keeps ? kept : 0, head->softmax.seen, scores);
        weigh_scores(params, &head->softmax, scores, addends, weights, k0, head->result);
    }
    if (keeps) {
        keep_unattended(tile, run, head->queries, j0, attended, keys, added, kept);
        store_scores(tile, j0, keys, kept);
    }
    end_block(&head->softmax);
    if (USES(params, DROPOUT)) {
        drop_weights(tile, j0, attended, weights);
    }
    add_values(run, weights, attended, (int)params->Ev, head->result);
}

/* All heads attend to the tile's keys. Before each block is read, this work-item copies
   the present keys and values of its share that lie in the block. */
static inline void
attend(head_state *heads, const present_share *share, realv *added, termv *weights)
{
    const tile_state *tile = &heads[0].tile;
    const ca_attention_params *params = tile->call->params;
    const bool all = KEEPS_SCORES(params);
    const int most = keys_of_block(params);
    const ca_int64 end = all ? params->T : tile->last + 1;
    int keys;
    PLAIN_FOR (ca_int64 j0 = all ? 0 : tile->first; j0 < end; j0 += keys) {
        const key_run first_run = key_run_at(tile->call, tile->batch, j0);
        keys = (int)min((ca_int64)most, min(end - j0, first_run.count));
        int attended = (int)clamp(tile->last + 1 - j0, (ca_int64)0, (ca_int64)keys);
        attended = j0 + keys <= tile->first ? 0 : attended;
        if (USES(params, PRESENT)) {
            copy_present(tile->call, tile->batch, max(share->first, max(j0, tile->first)),
                         min(share->end, min(j0 + keys, tile->last + 1)));
        }
        if (HAS_ADDENDS(params) && attended > 0 && !load_added(added, tile, j0, attended)) {
            attended = 0;
        }
        PLAIN_FOR (int h = 0; h < params->heads && (attended > 0 || all); h++) {
            const key_run run = key_run_at(tile->call, heads[h].tile.batch, j0);
            attend_block(&heads[h], &run, j0, keys, attended, added, weights);
        }
    }
}

/* Starts tile `row_of_tiles` of the head with a linear batch index. `memory` is for its
   queries and its result. */
CALLED void
start_head(head_state *head, const attention_call *call, ca_int64 linear, ca_int64 row_of_tiles,
           realv *memory)
{
    const ca_attention_params *params = call->params;
    tile_state *tile = &head->tile;
    tile->call = call;
    ca_unravel(linear, params->batch, tile->batch);
    const key_band band = ca_band(call, tile->batch);
    tile->i0 = row_of_tiles * BM;
    tile->rows = (int)min((ca_int64)BM, params->L - tile->i0);
    tile->first = max((ca_int64)0, tile->i0 + band.lower);
    tile->last = min(band.limit, tile->i0 + tile->rows + band.upper) - 1;
    tile->bounds = count_from(bounds_of(call, tile->batch, &band), tile->i0, 0);
    tile->excluding = HAS_ADDENDS(params) || USES(params, DROPOUT) || band.limit < params->T ||
                      band.lower > 1 - params->L || band.upper < params->T - 1;
    head->queries = (termv *)memory;
    head->result = memory + TERMS(params->E) * NV;
    const int result_vectors = RESULT_VECTORS(params->Ev);
    load_queries(head->queries, call->query + ca_offset(&params->query, tile->batch, tile->i0, 0),
                 &params->query, tile->rows, (int)params->E, query_bias_at(call, tile->batch),
                 score_scale(params));
    PLAIN_FOR (int n = 0; n < result_vectors; n++) {
        head->result[n] = (realv)REAL(0.0);
    }
    start_softmax(&head->softmax);
}

/* Writes the rows of a head. */
CALLED void
finish_head(head_state *head)
{
    const tile_state *tile = &head->tile;
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    if (normalise(&head->softmax, ca_kept_scale(params), tile->excluding, head->result,
                  (int)params->Ev)) {
        ask_to_redo(call);
    }
    store_result(head->result, (int)params->Ev,
                 call->output + ca_offset(&params->output, tile->batch, tile->i0, 0),
                 &params->output, tile->rows);
    const softmax_state *softmax = &head->softmax;
    PLAIN_FOR (int n = 0; n < tile->rows && (params->flags & CA_HAS_LSE); n++) {
        write_lse(call, tile->batch, tile->i0 + n, ((const real *)softmax->base)[n],
                  ((const real *)softmax->sum)[n], ((const INT_NAME *)softmax->seen)[n] != 0);
    }
}

/* Attends to the keys of a work-item's heads. */
CALLED void
attend_tile(const attention_call *call, ca_int64 item)
{
    const ca_attention_params *params = call->params;
    /* The last rows come first: below a causal diagonal they have the most keys. Heads
       that share a mask run side by side, while the mask's rows are in the cache. */
    const int count = (int)params->heads;
    const bool shares = USES(params, MASK) && VIEW(params, MASK)->batch[2] == 0;
    const ca_int64 neighbours = shares ? params->batch[2] / count : 1;
    const ca_int64 tiles = (params->L + BM - 1) / BM;
    const ca_int64 column = item / neighbours; /* the same tile of all neighbours */
    const ca_int64 group = column / tiles;
    const ca_int64 row_of_tiles = tiles - 1 - (column - group * tiles);
    const ca_int64 linear = (group * neighbours + item - column * neighbours) * count;

    head_state heads[CA_CPU_HEADS];
    realv memory[MEMORY_VECTORS];
    termv weights[TERMS(MAX_KEYS) * NV];
    realv added[MAX_KEYS * NV];
    const int size = TERMS((int)params->E) * NV + RESULT_VECTORS((int)params->Ev);
    PLAIN_FOR (int h = 0; h < count; h++) {
        start_head(&heads[h], call, linear + h, row_of_tiles, memory + h * size);
    }
    present_share share = {0, 0};
    if (USES(params, PRESENT)) {
        const tile_state *tile = &heads[0].tile;
        share = present_share_of(params, tile->batch, row_of_tiles, tiles);
        copy_present(call, tile->batch, share.first, min(share.end, tile->first));
        copy_present(call, tile->batch, max(share.first, tile->last + 1), share.end);
    }
    attend(heads, &share, added, weights);
    PLAIN_FOR (int h = 0; h < count; h++) {
        if (WRITES_STAGE(params, 3)) {
            write_weights(&heads[h].tile, heads[h].queries, &heads[h].softmax, added);
        }
        finish_head(&heads[h]);
    }
}

/* The kernel is short, because some compilers take longer for a kernel's own text. The
   vector hint keeps compilers from vectorising over work-items as well. There is only
   one a group, and building would take up to ten times as long. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    attend_tile(&call, (ca_int64)get_global_id(0));
}
