/* SPDX-License-Identifier: MIT
 *
 * Attention of any problem on any device: one row by one work-item, in two passes over
 * its keys and O(1) memory:
 *
 *     m, l      = max_j score[j], sum_j exp(score[j] - m)     pass 1, online; the sink counts
 *     output[c] = sum_j exp(score[j] - m) / l * value[j, c]   pass 2, some columns at a time,
 *                                                             with the weights of a block of keys
 *
 *     rows         batch[0] * batch[1] * batch[2] * L, counted from 0 on
 *     global size  G = ceil(rows / params.tiles), or more
 *     work-item n  rows n, n + G, n + 2 G, …, at most params.tiles
 *
 * A third pass writes scores, if the call asks for them. The kernel never reads an
 * excluded key. So it also redoes rows of other kernels, which a NaN or infinity of an
 * excluded key has spoilt: with CA_REDOES it computes only rows that are not finite, and
 * none unless the call's mark is set.
 *
 * Macros: DTYPE, VALUE_DTYPE and REAL64, see support/common.clh.
 */
#include "kernels/attention/rows.clh" /* find_row, score_of, sum_weights */

/* Returns a score of the stage that is written, one before the weights. */
INLINED real
score_of_stage(const ca_attention_params *params, real score, real added)
{
    const real earlier = WRITES_STAGE(params, 0)      ? score
                         : USES(params, LATE_SOFTCAP) ? add_to_score(params, score, added)
                                                      : cap_score(params, score);
    return WRITES_STAGE(params, 2) ? finish_score_in_order(params, score, added) : earlier;
}

/* Writes the scores of all keys, at the stage that is asked for. */
CALLED void
write_scores(const row_state *row, real m, real l)
{
    const attention_call *call = row->call;
    const ca_attention_params *params = call->params;
    const ca_view *view = VIEW(params, SCORES);
    __global storage *scores = call->scores + ca_offset(view, row->batch, row->i, 0);
    PLAIN_FOR (ca_int64 j = 0; j < params->T && !is_stopped(call); j++) {
        real score;
        if (WRITES_STAGE(params, 3)) {
            score = score_of(row, j, &score) ? exp(score - m) / l : REAL(0.0);
        } else {
            score = score_of_stage(params, product_with(row, j), addend_at(row, j));
        }
        store(score, scores + j * view->column);
    }
}

/* exp(score[j] - m) of a block's keys; -1 for a key that adds no value: excluded, or dropped. */
typedef struct {
    ca_int64 first; /* key of the first weight; -1: none yet */
    real weights[BLOCK];
} weight_block;

/* Computes the weights of the block at key j0, unless the columns before have left them: a row
   of one block has its scores computed once, however many columns there are. */
CALLED void
find_weights(const row_state *row, real m, ca_int64 j0, weight_block *block)
{
    const ca_attention_params *params = row->call->params;
    if (block->first == j0) {
        return;
    }
    block->first = j0;
    PLAIN_FOR (ca_int64 j = j0; j <= min(j0 + BLOCK - 1, row->last); j++) {
        real score;
        const bool drops = USES(params, DROPOUT) && ca_drops(params, row->number, j);
        const bool adds = !drops && score_of(row, j, &score);
        block->weights[j - j0] = adds ? exp(score - m) : REAL(-1.0);
    }
}

/* sums[n] += sum_j exp(score[j] - m) * value[j, c + n], for `columns` columns. */
CALLED void
add_values(const row_state *row, real m, ca_int64 c, int columns, weight_block *block, real *sums)
{
    const ca_attention_params *params = row->call->params;
    PLAIN_FOR (ca_int64 j0 = row->first; j0 <= row->last && !is_stopped(row->call); j0 += BLOCK) {
        real block_sums[CA_REFERENCE_COLUMNS] = {REAL(0.0)};
        find_weights(row, m, j0, block);
        PLAIN_FOR (ca_int64 j = j0; j <= min(j0 + BLOCK - 1, row->last); j++) {
            const real weight = block->weights[j - j0];
            if (weight < REAL(0.0)) {
                continue;
            }
            key_run key;
            find_key_run(&key, row->call, row->batch, j);
            const real scaled = weight * value_scale_of(params, &key, 0);
            PLAIN_FOR (int n = 0; n < columns; n++) {
#if HAS_INT4
                const real x = int4_of_value(params, &key, 0, c + n);
#else
                const real x = load_value(key.value + (c + n) * key.value_strides.column);
#endif
                block_sums[n] = fma(scaled, x, block_sums[n]);
            }
        }
        PLAIN_FOR (int n = 0; n < columns; n++) {
            sums[n] += block_sums[n];
        }
    }
}

/* Computes row i of a batch and writes its result, lse and scores. */
INLINED void
attend(const attention_call *call, const ca_int64 *batch, ca_int64 i)
{
    const ca_attention_params *params = call->params;
    row_state row;
    find_row(&row, call, batch, i);
    real m;
    real l;
    const bool attends = sum_weights(&row, &m, &l);
    if (params->flags & CA_HAS_LSE) {
        const ca_int64 at = ca_offset(&params->lse, batch, i, 0);
        const bool splits = (params->flags & CA_SPLITS_LSE) != 0;
        call->lse[at] = splits ? m : m + log(l);
        if (splits) {
            call->lse[at + params->lse.column] = l;
        }
    }
    if (USES(params, SCORES)) {
        write_scores(&row, m, l);
    }
    __global storage *output_i = call->output + ca_offset(&params->output, batch, i, 0);
    weight_block block;
    block.first = -1;
    PLAIN_FOR (ca_int64 c = 0; c < params->Ev; c += CA_REFERENCE_COLUMNS) {
        const int columns = (int)min((ca_int64)CA_REFERENCE_COLUMNS, params->Ev - c);
        real sums[CA_REFERENCE_COLUMNS] = {REAL(0.0)};
        add_values(&row, m, c, columns, &block, sums);
        PLAIN_FOR (int n = 0; n < columns; n++) {
            const real mean = sums[n] / l * ca_kept_scale(params);
            store(attends ? mean : REAL(0.0), output_i + (c + n) * params->output.column);
        }
    }
}

/* True if every element of row i is finite. */
INLINED bool
is_finite_row(const attention_call *call, const ca_int64 *batch, ca_int64 i)
{
    const ca_attention_params *params = call->params;
    bool finite = true;
    PLAIN_FOR (ca_int64 c = 0; c < params->Ev; c++) {
        const real x = load(call->output + ca_offset(&params->output, batch, i, c));
        finite = finite && is_finite(x);
    }
    return finite;
}

/* The vector hint keeps compilers from vectorising over work-items, which builds slower. */
__kernel __attribute__((vec_type_hint(float4))) void
attention_reference(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
    const bool redoes = (params.flags & CA_REDOES) != 0;
    const ca_int64 rows = params.batch[0] * params.batch[1] * params.batch[2] * params.L;
    if (redoes && redo[params.redo_slot] < params.redo_mark) {
        return;
    }
    const ca_int64 items = ca_divide(rows + params.tiles - 1, params.tiles);
    const ca_int64 item = item_of(&params);
    PLAIN_FOR (ca_int64 row = item; item < items && row < rows; row += items) {
        ca_int64 batch[CA_BATCH_DIMS];
        const ca_int64 i = row_of_index(&params, row, batch);
        find_sequence(&call, i, batch);
        if (!redoes || !is_finite_row(&call, batch, i)) {
            attend(&call, batch, i);
        }
    }
}
