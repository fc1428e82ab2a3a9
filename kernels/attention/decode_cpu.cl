/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, few rows and many keys: the lanes of a vector are keys.
 *
 *     global size  batches * params.splits * groups of ROWS rows, local size 1
 *     work-item    ROWS rows that attend to the same keys, and one split of these keys
 *
 * The rows are those of params.heads query heads, which share keys and values: each key
 * and value is read from memory once for all of them. A batch here is an index of the
 * leading dimensions without these heads.
 *
 *     scores   [RT][BN]  of one block of keys, LANES keys in a vector
 *     weights  [RT][BN]  exp2(scores - highest score so far)
 *     result   [RT][Ev]  the sum of weights times values, LANES columns in a vector
 *
 * Where there are several splits, each leaves its rows in `partial`, and
 * attention/decode_cpu_merge.cl computes the result from them.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, LANES … 512
 *     -DKEYS_ADJOIN       1: all keys have the row stride E; default 0
 *     -DRT                rows that share a load of keys or values, 1 … 4; default 1
 *     -DBN                keys of a block, a multiple of LANES; default 128
 *     LANES of support/lanes.clh, ROW_IS_CALLED of attention/row.clh, and the macros of
 *     support/common.clh without INPUT_BIAS, SCORES, SOFTCAP_LAST and DROPOUT
 */
#include "kernels/attention/decode_cpu/rows.clh"  /* finish_row, store_partial */
#include "kernels/attention/decode_cpu/steps.clh" /* score_lanes, add_values */
#include "kernels/attention/keys.clh"             /* key_segment, SCORE_UNIT */
#include "kernels/attention/present.clh"          /* copy_present */

/* Turns products with keys j … j + LANES - 1 into scores. They are -inf for keys that
   the row does not attend to and from key `end` on. `added` holds mask and bias. */
static inline realv
finish_scores(realv score, const attention_call *call, const decode_row *row, realv added,
              ca_int64 j, ca_int64 end)
{
    const ca_int64 last = min(row->last, end - 1);
#if SOFTCAP
    const real softcap = ca_softcap(call->params);
    score = tanh_lanes(score / softcap) * (softcap * SCORE_UNIT);
#endif
#if HAS_ADDENDS
    score = added == (realv)(-INFINITY) ? added : score + added;
#endif
    if (j < row->first || j + LANES - 1 > last) {
        const realv lanes = lane_indices();
        const real low = (real)clamp(row->first - j, (ca_int64)0, (ca_int64)LANES);
        const real high = (real)clamp(last - j, (ca_int64)-1, (ca_int64)LANES);
        const intv attends = (lanes >= (realv)low) & (lanes <= (realv)high);
        score = attends ? score : (realv)(-INFINITY);
    }
    return score;
}

/* Replaces a row's scores by weights, exp2(score - the highest score so far), and
   updates the row's sum. Returns the factor for the row's result so far. */
static inline realv
weigh_row(decode_row *row, realv *scores, realv highest, int keys)
{
    const real old = row->highest;
    row->highest = max(old, highest_lane(highest));
    const real base = base_of(row->highest);
    realv sum = (realv)REAL(0.0);
    for (int k = 0; k < keys; k += LANES) {
        const realv weight = exp2_lanes(TO_LOG2(scores[k / LANES] - base));
        scores[k / LANES] = weight;
        sum += weight;
    }
    const realv decay = exp2_lanes((realv)(TO_LOG2(old - base)));
    real lanes[LANES];
    WIDE(vstore)(decay, 0, lanes);
    row->sum = row->sum * lanes[0] + sum_of_lanes(sum);
    return decay;
}

/* RT rows attend to keys j0 … j0 + keys - 1 of a segment. */
static inline void
attend_block(const attention_call *call, const key_segment *segment, ca_int64 j0, int keys,
             decode_row *rows, const realv *queries, realv *result)
{
    realv scores[RT * (BN / LANES)]; /* at first addends, then scores, then weights */
    realv highest[RT];
    realv decay[RT];
#if HAS_ADDENDS
    bool attends = false;
    for (int r = 0; r < RT; r++) {
        attends |= load_addends(scores + r * (BN / LANES), call, rows + r, j0, keys);
    }
    if (!attends) {
        return;
    }
#endif
    for (int r = 0; r < RT; r++) {
        highest[r] = (realv)(-INFINITY);
    }
    __global const storage *key = segment->key + (j0 - segment->start) * segment->key_view->row;
    for (int k = 0; k < keys; k += LANES) {
        realv products[RT];
        __global const storage *keys_k = key + k * segment->key_view->row;
        if (k + LANES <= keys) {
            score_lanes(products, queries, keys_k, segment->key_view->row, LANES);
        } else {
            score_lanes(products, queries, keys_k, segment->key_view->row, keys - k);
        }
        for (int r = 0; r < RT; r++) {
            realv *score = &scores[r * (BN / LANES) + k / LANES];
            *score = finish_scores(products[r], call, rows + r, *score, j0 + k, j0 + keys);
            highest[r] = larger(*score, highest[r]);
        }
    }
    for (int r = 0; r < RT; r++) {
        decay[r] = weigh_row(rows + r, scores + r * (BN / LANES), highest[r], keys);
    }
    add_values(result, decay, scores,
               segment->value + (j0 - segment->start) * segment->value_view->row,
               segment->value_view->row, keys);
}

/* Starts row `index` of the params.heads * L rows of a batch. */
static inline decode_row
row_of(const attention_call *call, const ca_int64 *batch, ca_int64 index)
{
    const ca_attention_params *params = call->params;
    const ca_int64 head = index / params->L;
    decode_row row;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        row.batch[n] = batch[n];
    }
    row.batch[CA_BATCH_DIMS - 1] += head;
    row.i = index - head * params->L;
    row.mask = call->mask + ca_offset(&params->mask, row.batch, row.i, 0);
    row.bias = call->bias + ca_offset(&params->bias, row.batch, row.i, 0);
    const key_band band = ca_band(call, row.batch);
    row.first = max((ca_int64)0, row.i + band.lower);
    row.last = min(band.limit - 1, row.i + band.upper);
    row.highest = -INFINITY;
    row.sum = REAL(0.0);
    return row;
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_decode_cpu(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    const ca_int64 all_rows = params.heads * params.L;
    const ca_int64 groups = (all_rows + ROWS - 1) / ROWS;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 batch_split = item / groups; /* over all batches */
    const ca_int64 group = item - batch_split * groups;
    const ca_int64 linear = batch_split / params.splits;
    const ca_int64 split = batch_split - linear * params.splits;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear * params.heads, params.batch, batch);

    /* The last tile repeats the last row. */
    const ca_int64 row0 = group * ROWS;
    const int count = (int)min((ca_int64)ROWS, all_rows - row0);
    const int tiles = (count + RT - 1) / RT;
    decode_row rows[ROWS];
    realv queries[ROWS * E_CHUNKS];
    realv result[ROWS * EV_SLOTS];
    ca_int64 first = params.T;
    ca_int64 last = -1;
    for (int r = 0; r < tiles * RT; r++) {
        rows[r] = row_of(&call, batch, row0 + min(r, count - 1));
        first = min(first, rows[r].first);
        last = max(last, rows[r].last);
        load_query(queries + r / RT * RT * E_CHUNKS + r % RT,
                   query + ca_offset(&params.query, rows[r].batch, rows[r].i, 0), &params.query,
                   ca_scale(&params) * (SOFTCAP ? REAL(1.0) : SCORE_UNIT));
        for (int n = 0; n < EV_SLOTS; n++) {
            result[r * EV_SLOTS + n] = (realv)REAL(0.0);
        }
    }
    const ca_int64 span = max(last + 1 - first, (ca_int64)0);
    const ca_int64 start = first + span * split / params.splits;
    const ca_int64 end = first + span * (split + 1) / params.splits;

#if PRESENT
    const present_share share =
        present_share_of(&params, batch, split * groups + group, params.splits * groups);
    copy_present(&call, batch, share.first, min(share.end, start));
    copy_present(&call, batch, max(share.first, end), share.end);
#endif
    for (int s = 0; s < SEGMENTS; s++) {
        const key_segment segment = segment_at(&call, batch, s);
        const ca_int64 segment_end = min(end, segment.end);
        for (ca_int64 j0 = max(start, segment.start); j0 < segment_end; j0 += BN) {
            const int keys = (int)min((ca_int64)BN, segment_end - j0);
#if PRESENT
            copy_present(&call, batch, max(share.first, j0), min(share.end, j0 + keys));
#endif
            for (int t = 0; t < tiles; t++) {
                attend_block(&call, &segment, j0, keys, rows + t * RT, queries + t * RT * E_CHUNKS,
                             result + t * RT * EV_SLOTS);
            }
        }
    }

    for (int r = 0; r < count; r++) {
        const decode_row *row = &rows[r];
        if (params.splits > 1) {
            store_partial(partial_row(&call, row->batch, row->i, split, PARTIAL_SIZE),
                          result + r * EV_SLOTS, row->highest, row->sum);
        } else {
            finish_row(&call, row->batch, row->i, result + r * EV_SLOTS, row->highest, row->sum);
        }
    }
}
