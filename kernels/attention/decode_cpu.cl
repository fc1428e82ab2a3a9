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
 *     weights  [RT][BN]  exp(scores - highest score so far)
 *     result   [RT][Ev]  the sum of weights times values, LANES columns in a vector
 *
 * Where there are several splits, each leaves its rows in `partial`. A second launch of
 * the same kernel, with CA_MERGES and a work-item for each row, merges them:
 *
 *     highest = max_s highest[s]
 *     sum     = sum_s sum[s] * exp(highest[s] - highest), and likewise each column
 *
 * Head sizes, LANES … 512, and options are data; there is no input bias, no dropout, no
 * late softcap, and no scores are written.
 *
 *     -DRT  rows that share a load of keys or values: 1, the default, 2 or 4
 *     LANES of support/lanes.clh and the macros of support/common.clh
 */
#define SCORE_LANES 1
#include "kernels/attention/decode_cpu/rows.clh"  /* finish_row, store_partial */
#include "kernels/attention/decode_cpu/steps.clh" /* score_keys, add_values */
#include "kernels/attention/present.clh"          /* copy_present */

/* Replaces a row's scores by weights, exp(score - the highest score so far), and updates
   the row's sum. Returns the factor for the row's result so far. */
static inline realv
weigh_row(const ca_attention_params *params, decode_row *row, realv *scores, int keys)
{
    realv highest = (realv)(-INFINITY);
    realv sum = (realv)REAL(0.0);
    PLAIN_LOOP
    for (int k = 0; k < keys; k += LANES) {
        highest = larger(scores[k / LANES], highest);
    }
    const real old = row->highest;
    row->highest = max(old, highest_lane(highest));
    const real base = base_of(row->highest);
    PLAIN_LOOP
    for (int k = 0; k < keys; k += LANES) {
        const realv weight = weight_of(params, scores[k / LANES] - base);
        scores[k / LANES] = weight;
        sum += weight;
    }
    const realv decay = weight_of(params, (realv)(old - base));
    row->sum = row->sum * highest_lane(decay) + sum_of_lanes(sum);
    return decay;
}

/* RT rows attend to the first `keys` keys of a run, which starts at key j0. */
static inline void
attend_block(const attention_call *call, const key_run *run, ca_int64 j0, int keys,
             decode_row *rows, const realv *queries, realv *result)
{
    const ca_attention_params *params = call->params;
    realv scores[RT * (BN / LANES)]; /* then weights */
    realv decay[RT];
    score_keys(params, run, keys, queries, scores);
    for (int r = 0; r < RT; r++) {
        realv *of_row = scores + r * (BN / LANES);
        finish_scores(call, &rows[r], j0, keys, of_row);
        decay[r] = weigh_row(params, &rows[r], of_row, keys);
    }
    add_values(result, decay, scores, run->value, run->value_view->row, keys, (int)params->Ev);
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
    const key_band band = ca_band(call, row.batch);
    row.bounds = count_from(bounds_of(call, row.batch, &band), row.i, 0);
    row.first = max((ca_int64)0, row.i + band.lower);
    row.last = min(band.limit - 1, row.i + band.upper);
    row.highest = -INFINITY;
    row.sum = REAL(0.0);
    return row;
}

/* Merges the partial rows of row `item` of all. */
CALLED void
merge_row(const attention_call *call, ca_int64 item)
{
    const ca_attention_params *params = call->params;
    const int Ev = (int)params->Ev;
    const ca_int64 linear = item / params->L;
    const ca_int64 i = item - linear * params->L;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params->batch, batch);

    real highest = -INFINITY;
    PLAIN_LOOP
    for (ca_int64 split = 0; split < params->splits; split++) {
        highest = max(highest, partial_row(call, batch, i, split, PARTIAL_SIZE(Ev))[Ev]);
    }
    const real base = base_of(highest);
    realv result[CHUNKS(MAX_HEAD)];
    PLAIN_LOOP
    for (int n = 0; n < CHUNKS(Ev); n++) {
        result[n] = (realv)REAL(0.0);
    }
    real sum = REAL(0.0);
    PLAIN_LOOP
    for (ca_int64 split = 0; split < params->splits; split++) {
        __global const real *row = partial_row(call, batch, i, split, PARTIAL_SIZE(Ev));
        const realv factor = weight_of(params, (realv)(row[Ev] - base));
        sum += row[Ev + 1] * ((const real *)&factor)[0];
        PLAIN_LOOP
        for (int n = 0; n < CHUNKS(Ev); n++) {
            result[n] = fma(WIDE(vload)(0, row + COLUMN(n, Ev)), factor, result[n]);
        }
    }
    finish_row(call, batch, i, result, highest, sum);
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_decode_cpu(ATTENTION_ARGUMENTS)
{
    const attention_call call = ATTENTION_CALL;
    if (params.flags & CA_MERGES) {
        merge_row(&call, (ca_int64)get_global_id(0));
        return;
    }
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
    const int E_chunks = CHUNKS(params.E);
    const int Ev_slots = SLOTS_OF_ROW(params.Ev);
    decode_row rows[ROWS];
    realv queries[ROWS * CHUNKS(MAX_HEAD)];
    realv result[ROWS * SLOTS_OF_ROW(MAX_HEAD)];
    ca_int64 first = params.T;
    ca_int64 last = -1;
    PLAIN_LOOP
    for (int r = 0; r < tiles * RT; r++) {
        rows[r] = row_of(&call, batch, row0 + min(r, count - 1));
        first = min(first, rows[r].first);
        last = max(last, rows[r].last);
        load_query(queries + r / RT * RT * E_chunks + r % RT,
                   query + ca_offset(&params.query, rows[r].batch, rows[r].i, 0), &params.query,
                   (int)params.E, score_scale(&params));
    }
    PLAIN_LOOP
    for (int n = 0; n < tiles * RT * Ev_slots; n++) {
        result[n] = (realv)REAL(0.0);
    }
    const ca_int64 span = max(last + 1 - first, (ca_int64)0);
    const ca_int64 start = first + span * split / params.splits;
    const ca_int64 end = first + span * (split + 1) / params.splits;

    present_share share = {0, 0};
    if (USES(&params, PRESENT)) {
        share = present_share_of(&params, batch, split * groups + group, params.splits * groups);
        copy_present(&call, batch, share.first, min(share.end, start));
        copy_present(&call, batch, max(share.first, end), share.end);
    }
    int keys;
    PLAIN_LOOP
    for (ca_int64 j0 = start; j0 < end; j0 += keys) {
        const key_run run = key_run_at(&call, batch, j0);
        keys = (int)min((ca_int64)BN, min(end - j0, run.count));
        if (USES(&params, PRESENT)) {
            copy_present(&call, batch, max(share.first, j0), min(share.end, j0 + keys));
        }
        PLAIN_LOOP
        for (int t = 0; t < tiles; t++) {
            attend_block(&call, &run, j0, keys, rows + t * RT, queries + t * RT * E_chunks,
                         result + t * RT * Ev_slots);
        }
    }

    PLAIN_LOOP
    for (int r = 0; r < count; r++) {
        const decode_row *row = &rows[r];
        realv of_row[CHUNKS(MAX_HEAD)];
        PLAIN_LOOP
        for (int n = 0; n < CHUNKS(params.Ev); n++) {
            of_row[n] = result[r / RT * RT * Ev_slots + slot_of(r % RT, n, (int)params.Ev)];
        }
        if (params.splits > 1) {
            store_partial(partial_row(&call, row->batch, row->i, split, PARTIAL_SIZE(params.Ev)),
                          of_row, row->highest, row->sum, (int)params.Ev);
        } else {
            finish_row(&call, row->batch, row->i, of_row, row->highest, row->sum);
        }
    }
}
