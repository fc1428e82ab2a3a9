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
 * Head sizes, LANES … CA_CPU_HEAD_SIZE, and options are data. The kernel has no input
 * bias, no dropout and no late softcap, and writes no scores.
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
    PLAIN_FOR (int k = 0; k < keys; k += LANES) {
        highest = larger(scores[k / LANES], highest);
    }
    const real old = row->highest;
    row->highest = max(old, highest_lane(highest));
    const real base = base_of(row->highest);
    PLAIN_FOR (int k = 0; k < keys; k += LANES) {
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

/* Starts row r of a share, whose last row repeats. */
static inline decode_row
start_row(const attention_call *call, const split_share *share, int r)
{
    decode_row row;
    row.i = row_of_share(call->params, share, r, row.batch);
    const key_band band = ca_band(call, row.batch);
    row.bounds = count_from(bounds_of(call, row.batch, &band), row.i, 0);
    row.first = max((ca_int64)0, row.i + band.lower);
    row.last = min(band.limit - 1, row.i + band.upper);
    row.highest = -INFINITY;
    row.sum = REAL(0.0);
    return row;
}

/* Merges the partial rows of row `index` of all batches. */
CALLED void
merge_row(const attention_call *call, ca_int64 index)
{
    const ca_attention_params *params = call->params;
    const int Ev = (int)params->Ev;
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 i = row_of_index(params, index, batch);

    real highest = -INFINITY;
    PLAIN_FOR (ca_int64 split = 0; split < params->splits; split++) {
        highest = max(highest, partial_row(call, batch, i, split, PARTIAL_SIZE(Ev))[Ev]);
    }
    const real base = base_of(highest);
    realv result[CHUNKS(CA_CPU_HEAD_SIZE)];
    PLAIN_FOR (int n = 0; n < CHUNKS(Ev); n++) {
        result[n] = (realv)REAL(0.0);
    }
    real sum = REAL(0.0);
    PLAIN_FOR (ca_int64 split = 0; split < params->splits; split++) {
        __global const real *row = partial_row(call, batch, i, split, PARTIAL_SIZE(Ev));
        const realv factor = weight_of(params, (realv)(row[Ev] - base));
        sum += row[Ev + 1] * ((const real *)&factor)[0];
        PLAIN_FOR (int n = 0; n < CHUNKS(Ev); n++) {
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
    const split_share mine = split_share_of(&params, (ca_int64)get_global_id(0), ROWS);
    const int tiles = (mine.count + RT - 1) / RT;
    const int E_chunks = CHUNKS(params.E);
    const int Ev_slots = SLOTS_OF_ROW(params.Ev);
    decode_row rows[ROWS];
    realv queries[ROWS * CHUNKS(CA_CPU_HEAD_SIZE)];
    realv result[ROWS * SLOTS_OF_ROW(CA_CPU_HEAD_SIZE)];
    ca_int64 first = params.T;
    ca_int64 last = -1;
    PLAIN_FOR (int r = 0; r < tiles * RT; r++) {
        rows[r] = start_row(&call, &mine, r);
        first = min(first, rows[r].first);
        last = max(last, rows[r].last);
        load_query(queries + r / RT * RT * E_chunks + r % RT,
                   query + ca_offset(&params.query, rows[r].batch, rows[r].i, 0), &params.query,
                   (int)params.E, score_scale(&params));
    }
    PLAIN_FOR (int n = 0; n < tiles * RT * Ev_slots; n++) {
        result[n] = (realv)REAL(0.0);
    }
    const key_range keys = keys_of_split(&params, first, last, mine.split);

    present_share copied = {0, 0};
    if (USES(&params, PRESENT)) {
        copied = present_share_of(&params, mine.batch, mine.part, mine.parts);
        copy_present(&call, mine.batch, copied.first, min(copied.end, keys.start));
        copy_present(&call, mine.batch, max(copied.first, keys.end), copied.end);
    }
    int count; /* of the keys of a block */
    PLAIN_FOR (ca_int64 j0 = keys.start; j0 < keys.end; j0 += count) {
        const key_run run = key_run_at(&call, mine.batch, j0);
        count = (int)min((ca_int64)BN, min(keys.end - j0, run.count));
        if (USES(&params, PRESENT)) {
            copy_present(&call, mine.batch, max(copied.first, j0), min(copied.end, j0 + count));
        }
        PLAIN_FOR (int t = 0; t < tiles; t++) {
            attend_block(&call, &run, j0, count, rows + t * RT, queries + t * RT * E_chunks,
                         result + t * RT * Ev_slots);
        }
    }

    PLAIN_FOR (int r = 0; r < mine.count; r++) {
        const decode_row *row = &rows[r];
        realv of_row[CHUNKS(CA_CPU_HEAD_SIZE)];
        PLAIN_FOR (int n = 0; n < CHUNKS(params.Ev); n++) {
            of_row[n] = result[r / RT * RT * Ev_slots + slot_of(r % RT, n, (int)params.Ev)];
        }
        if (params.splits > 1) {
            store_partial(
                partial_row(&call, row->batch, row->i, mine.split, PARTIAL_SIZE(params.Ev)), of_row,
                row->highest, row->sum, (int)params.Ev);
        } else {
            finish_row(&call, row->batch, row->i, of_row, row->highest, row->sum);
        }
    }
}
