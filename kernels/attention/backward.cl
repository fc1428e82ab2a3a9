/* SPDX-License-Identifier: MIT
 *
 * Gradients of attention, of any problem on any device. The backward pass launches this kernel once for each
 * step. params.own says what the step computes. A step writes to its `output`, and all steps share `lse`:
 *
 *     rows        lse[i]     = base, sum, 1 or 0: does the row attend to a key
 *     deltas      lse[i, 2]  = dot(grad_output[i], forward[i]) - grad_lse[i]
 *
 *     weight[i, j]     = exp(score[i, j] - base[i]) / sum[i]        1 in all, with the sink's
 *     kept[i, j]       = 0 where dropout drops the weight, else 1 / (1 - dropout)
 *     grad_score[i, j] = weight * (kept * dot(grad_output[i], value[j]) - delta[i])
 *
 *     value       output[j] = sum_i kept * weight * grad_output[i]
 *     key         output[j] = sum_i grad_score * slope * query[i]   slope: of the score by its product
 *     query       output[i] = sum_j grad_score * slope * key[j]
 *     mask        output[i, j] = grad_score
 *     sinks       output[h] = - sum_i exp(sink[h] - base) / sum * delta[i]
 *
 * Three steps compute the gradient of an array that the user's score_mod reads. In the second one, each
 * work-item goes over its share of the rows, and adds what each pair of query and key gives to a copy of the
 * gradient. A copy has two numbers for an element: the sum, and what its additions have lost. Work-items that
 * share a copy never add to the same element.
 *
 *     clear       output[copy] = 0
 *     captured    output[copy, n] += grad_score * slope * derivative of the score by element n
 *     total       output[n] = sum of lse[copy, n]
 *
 * A result is summed over each dimension along which its stride is 0. The base and the sum are computed
 * anew, because a float's log-sum-exp of large scores has no room for the logarithm of the sum. The
 * kernel never reads an excluded key.
 *
 *     work-item n  of rows and deltas: row n; of captured: share n; else result n, or COLUMNS results side by
 *                  side
 *
 * Macros: DTYPE, VALUE_DTYPE and REAL64, see support/common.clh.
 */
#define IS_BACKWARD
#include "kernels/attention/gradients.clh" /* divide_batch, store_result */
#include "kernels/attention/rows.clh"      /* find_row, sum_weights */
#include "kernels/support/long_sum.clh"    /* add_term */

#define COLUMNS CA_REFERENCE_COLUMNS /* of a query's, a key's or a value's gradient */

/* --- one pair of query and key ------------------------------------------------------ */

DEFINE_DOT(dot_values, value_storage, load_value)

/* A row, the numbers of its softmax, and the gradient of its output. */
typedef struct {
    row_state row;
    real base;
    real sum;
    real delta;
    __global const storage *grad_output;
} gradient_row;

INLINED void
find_gradient_row(gradient_row *state, const attention_call *call, const ca_int64 *batch,
                  ca_int64 i)
{
    const ca_attention_params *params = call->params;
    __global const real *numbers = call->lse + ca_offset(&params->lse, batch, i, 0);
    find_row(&state->row, call, batch, i);
    state->base = numbers[0];
    state->sum = numbers[params->lse.column];
    state->delta = numbers[2 * params->lse.column];
    state->grad_output = call->grad_output + ca_offset(VIEW(params, GRAD_OUTPUT), batch, i, 0);
}

/* The weight of a pair, the factor by which dropout keeps it, and the slope of its score: that of the softcap.
   `product` is the score before the user's score_mod. */
typedef struct {
    real weight;
    real kept;
    real slope;
    real product;
} pair_state;

/* Computes these for key j. False if the key is excluded. */
CALLED bool
find_pair(const gradient_row *state, ca_int64 j, pair_state *pair)
{
    const row_state *row = &state->row;
    const ca_attention_params *params = row->call->params;
    real added = addend_at(row, j);
    if (added == -INFINITY) {
        return false;
    }
    pair->product = product_with(row, j);
    const real score = MODIFY_SCORE(row->call, &row->addends.mod, (int)j, pair->product, &added);
    const real capped = cap_score(params, score);
    const real share = capped * ca_inverse_softcap(params); /* tanh, where there is a softcap */
    const bool drops = USES(params, DROPOUT) && ca_drops(params, row->number, j);
    pair->weight = exp(add_to_score(params, capped, added) - state->base) / state->sum;
    pair->kept = drops ? REAL(0.0) : ca_kept_scale(params);
    pair->slope = USES(params, SOFTCAP) ? REAL(1.0) - share * share : REAL(1.0);
    return added != -INFINITY;
}

/* Returns the gradient of the score of key j, after the softcap. If dropout drops the weight, the function does
   not read the value. */
CALLED real
grad_score_of(const gradient_row *state, ca_int64 j, const pair_state *pair)
{
    const ca_attention_params *params = state->row.call->params;
    const ca_int64 column = VIEW(params, GRAD_OUTPUT)->column;
    key_run key;
    find_key_run(&key, state->row.call, state->row.batch, j);
    const real sum = pair->kept == REAL(0.0) ? REAL(0.0)
                                             : dot_values(state->grad_output, column, key.value,
                                                          key.value_strides.column, params->Ev);
    return pair->weight * (pair->kept * sum - state->delta);
}

/* Returns the gradient of the product of a query and key j. */
INLINED real
grad_product_of(const gradient_row *state, ca_int64 j, const pair_state *pair)
{
    const attention_call *call = state->row.call;
    real slope = pair->slope;
#if HAS_SCORE_MOD
    slope *= mod_score_slope(call, &state->row.addends.mod, (int)j, pair->product);
#endif
    return grad_score_of(state, j, pair) * slope * ca_scale(call->params);
}

/* --- sums over keys, and over rows --------------------------------------------------- */

/* sums[n] += sum_j grad_product[j] * key[j, c + n] */
CALLED void
add_keys(const gradient_row *state, ca_int64 c, int columns, real *sums)
{
    const row_state *row = &state->row;
    PLAIN_FOR (ca_int64 j0 = row->first; j0 <= row->last && !is_stopped(row->call); j0 += BLOCK) {
        real block_sums[COLUMNS] = {REAL(0.0)};
        PLAIN_FOR (ca_int64 j = j0; j <= min(j0 + BLOCK - 1, row->last); j++) {
            pair_state pair;
            if (!find_pair(state, j, &pair)) {
                continue;
            }
            const real factor = grad_product_of(state, j, &pair);
            key_run key;
            find_key_run(&key, row->call, row->batch, j);
            PLAIN_FOR (int n = 0; n < columns; n++) {
                const real x = load(key.key + (c + n) * key.key_strides.column);
                block_sums[n] = fma(factor, x, block_sums[n]);
            }
        }
        PLAIN_FOR (int n = 0; n < columns; n++) {
            sums[n] += block_sums[n];
        }
    }
}

/* sums[n] += sum_i grad_product[i] * query[i, c + n], of the rows that attend to key j; for values
   sum_i kept * weight * grad_output[i, c + n]. */
CALLED void
add_rows(const attention_call *call, const ca_int64 *batch, ca_int64 j, ca_int64 c, int columns,
         real *sums)
{
    const ca_attention_params *params = call->params;
    const bool values = STEP_OF(params) == CA_BACKWARD_VALUE;
    const ca_int64 column = values ? VIEW(params, GRAD_OUTPUT)->column : params->query.column;
    const batch_sequence sequence = sequence_of(call, batch);
    const ca_int64 first = max((ca_int64)0, j - sequence.upper);
    const ca_int64 last = j < sequence.limit ? min(params->L - 1, j - sequence.lower) : -1;
    PLAIN_FOR (ca_int64 i0 = first; i0 <= last && !is_stopped(call); i0 += BLOCK) {
        real block_sums[COLUMNS] = {REAL(0.0)};
        PLAIN_FOR (ca_int64 i = i0; i <= min(i0 + BLOCK - 1, last); i++) {
            gradient_row state;
            pair_state pair;
            find_gradient_row(&state, call, batch, i);
            if (!find_pair(&state, j, &pair) || (values && pair.kept == REAL(0.0))) {
                continue;
            }
            const real factor =
                values ? pair.kept * pair.weight : grad_product_of(&state, j, &pair);
            __global const storage *from = values ? state.grad_output : state.row.query;
            PLAIN_FOR (int n = 0; n < columns; n++) {
                block_sums[n] = fma(factor, load(from + (c + n) * column), block_sums[n]);
            }
        }
        PLAIN_FOR (int n = 0; n < columns; n++) {
            sums[n] += block_sums[n];
        }
    }
}

/* Adds the gradients of the scores of row i and key j, or of all keys for a mask of one column. */
CALLED void
add_scores(const attention_call *call, const ca_int64 *batch, ca_int64 i, ca_int64 j,
           long_sum *total)
{
    gradient_row state;
    find_gradient_row(&state, call, batch, i);
    const bool all = call->params->output.column == 0;
    const ca_int64 first = all ? state.row.first : max(j, state.row.first);
    const ca_int64 last = all ? state.row.last : min(j, state.row.last);
    PLAIN_FOR (ca_int64 at = first; at <= last && !is_stopped(call); at++) {
        pair_state pair;
        if (find_pair(&state, at, &pair)) {
            add_term(total, grad_score_of(&state, at, &pair));
        }
    }
}

/* Adds what the sink's gradient gets from row i. */
INLINED void
add_sink_term(const attention_call *call, const ca_int64 *batch, ca_int64 i, long_sum *total)
{
    const ca_attention_params *params = call->params;
    __global const real *numbers = call->lse + ca_offset(&params->lse, batch, i, 0);
    const real sink = sink_of(call, batch);
    if (sink != -INFINITY) {
        const real weight = exp(sink - numbers[0]) / numbers[params->lse.column];
        add_term(total, -weight * numbers[2 * params->lse.column]);
    }
}

/* --- arrays that the score_mod reads ---------------------------------------------------- */

#if HAS_SCORE_MOD

/* Adds to a copy of the gradient what the pairs of row i give. */
CALLED void
add_row_captured(const attention_call *call, const ca_int64 *batch, ca_int64 i, int which,
                 __global real *sums)
{
    gradient_row state;
    find_gradient_row(&state, call, batch, i);
    const row_state *row = &state.row;
    PLAIN_FOR (ca_int64 j0 = row->first; j0 <= row->last && !is_stopped(call); j0 += BLOCK) {
        PLAIN_FOR (ca_int64 j = j0; j <= min(j0 + BLOCK - 1, row->last); j++) {
            pair_state pair;
            if (find_pair(&state, j, &pair)) {
                add_captured(call, &row->addends.mod, (int)j, pair.product,
                             grad_score_of(&state, j, &pair) * pair.slope, which, sums);
            }
        }
    }
}

/* Share `item` of the rows. */
INLINED void
write_captured(const attention_call *call, ca_int64 item)
{
    captured_share share;
    find_captured_share(&share, call, item);
    PLAIN_FOR (ca_int64 n = share.first; n < share.end; n++) {
        ca_int64 batch[CA_BATCH_DIMS];
        const ca_int64 i = find_captured_row(&share, call->params, n, batch);
        add_row_captured(call, batch, i, share.which, share.sums);
    }
}

#endif

/* --- results ------------------------------------------------------------------------- */

/* True if some columns of row r of a result are finite. */
INLINED bool
are_finite(const attention_call *call, const ca_int64 *own, ca_int64 r, ca_int64 c, int columns)
{
    const ca_attention_params *params = call->params;
    const uint dtype = params->own / CA_BACKWARD_DTYPE % CA_BACKWARD_DTYPES;
    bool finite = true;
    PLAIN_FOR (int n = 0; n < columns; n++) {
        finite &= is_finite(
            load_of_dtype(call->output, ca_offset(&params->output, own, r, c + n), dtype));
    }
    return finite;
}

/* Some columns of row r of the gradient of query, key or value. The host may ask for those alone that are not
   finite: another kernel has computed the others. */
INLINED void
write_columns(const attention_call *call, const divided_batch *divided, const ca_int64 *own,
              ca_int64 r, ca_int64 c, ca_int64 size)
{
    const ca_attention_params *params = call->params;
    const int columns = (int)min((ca_int64)COLUMNS, size - c);
    const ca_int64 entries = count_of(divided->shared);
    real sums[COLUMNS] = {REAL(0.0)};
    if ((params->flags & CA_REDOES) != 0 && are_finite(call, own, r, c, columns)) {
        return;
    }
    PLAIN_FOR (ca_int64 n = 0; n < entries && !is_stopped(call); n++) {
        ca_int64 batch[CA_BATCH_DIMS];
        find_entry(divided, own, n, batch);
        if (STEP_OF(params) == CA_BACKWARD_QUERY) {
            gradient_row state;
            find_gradient_row(&state, call, batch, r);
            add_keys(&state, c, columns, sums);
        } else {
            add_rows(call, batch, r, c, columns, sums);
        }
    }
    PLAIN_FOR (int n = 0; n < columns; n++) {
        store_result(call, sums[n], ca_offset(&params->output, own, r, c + n));
    }
}

/* One number of a mask's gradient, or of the sinks'. */
INLINED void
write_number(const attention_call *call, const divided_batch *divided, const ca_int64 *own,
             ca_int64 r, ca_int64 c, ca_int64 rows)
{
    const ca_attention_params *params = call->params;
    const ca_int64 entries = count_of(divided->shared);
    const ca_int64 summed = ca_divide(params->L, max(rows, (ca_int64)1)); /* L or 1 */
    long_sum total = {REAL(0.0), REAL(0.0)};
    PLAIN_FOR (ca_int64 n = 0; n < entries && !is_stopped(call); n++) {
        ca_int64 batch[CA_BATCH_DIMS];
        find_entry(divided, own, n, batch);
        PLAIN_FOR (ca_int64 i = r; i < r + summed; i++) {
            if (STEP_OF(params) == CA_BACKWARD_MASK) {
                add_scores(call, batch, i, c, &total);
            } else {
                add_sink_term(call, batch, i, &total);
            }
        }
    }
    store_result(call, total.sum, ca_offset(&params->output, own, r, c));
}

/* Element n of a gradient, of all copies. */
INLINED void
write_total(const attention_call *call, ca_int64 n)
{
    const ca_attention_params *params = call->params;
    __global const real *sums = call->lse + params->lse.offset + 2 * n;
    long_sum total = {REAL(0.0), REAL(0.0)};
    PLAIN_FOR (ca_int64 copy = 0; copy < params->splits; copy++) {
        add_term(&total, sums[copy * params->lse.row]);
        add_term(&total, -sums[copy * params->lse.row + 1]);
    }
    store_result(call, total.sum, params->output.offset + n);
}

/* A step of the gradient of an array that the score_mod reads. */
INLINED void
write_step_of_captured(const attention_call *call, ca_int64 item)
{
    const ca_attention_params *params = call->params;
    const uint step = STEP_OF(params);
    if (step == CA_BACKWARD_CLEAR) {
        if (item < params->splits * params->output.row) {
            ((__global real *)call->output)[item] = REAL(0.0);
        }
    } else if (step == CA_BACKWARD_TOTAL) {
        if (item < ca_divide(params->lse.row, 2)) {
            write_total(call, item);
        }
    }
#if HAS_SCORE_MOD
    else {
        write_captured(call, item);
    }
#endif
}

/* The result of work-item `item`. */
INLINED void
write_result(const attention_call *call, ca_int64 item)
{
    const ca_attention_params *params = call->params;
    const uint step = STEP_OF(params);
    const bool wide = step != CA_BACKWARD_MASK && step != CA_BACKWARD_SINKS;
    const ca_int64 size = step == CA_BACKWARD_VALUE ? params->Ev : params->E;
    const ca_int64 mask_rows = params->output.row != 0 ? params->L : 1;
    const ca_int64 mask_columns = params->output.column != 0 ? params->T : 1;
    const ca_int64 rows = step == CA_BACKWARD_QUERY   ? params->L
                          : wide                      ? params->T
                          : step == CA_BACKWARD_SINKS ? 1
                                                      : mask_rows;
    const ca_int64 parts = wide                        ? ca_divide(size + COLUMNS - 1, COLUMNS)
                           : step == CA_BACKWARD_SINKS ? 1
                                                       : mask_columns;
    divided_batch divided;
    ca_int64 own[CA_BATCH_DIMS];
    divide_batch(params, &divided);
    if (item >= count_of(divided.own) * rows * parts) {
        return;
    }
    const ca_int64 row = ca_divide(item, parts);
    const ca_int64 part = item - row * parts;
    const ca_int64 entry = ca_divide(row, rows);
    ca_unravel(entry, divided.own, own);
    if (wide) {
        write_columns(call, &divided, own, row - entry * rows, part * COLUMNS, size);
    } else {
        write_number(call, &divided, own, row - entry * rows, part, rows);
    }
}

/* The base, the sum and the delta of a row. */
INLINED void
write_row(const attention_call *call, ca_int64 index)
{
    const ca_attention_params *params = call->params;
    const ca_int64 column = params->lse.column;
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 i = row_of_index(params, index, batch);
    __global real *numbers = call->lse + ca_offset(&params->lse, batch, i, 0);
    if (STEP_OF(params) == CA_BACKWARD_ROWS) {
        row_state row;
        real base;
        real sum;
        find_row(&row, call, batch, i);
        numbers[2 * column] = sum_weights(&row, &base, &sum) ? REAL(1.0) : REAL(0.0);
        numbers[0] = base;
        numbers[column] = sum;
        return;
    }
    real delta = REAL(0.0);
    if (numbers[2 * column] !=
        REAL(0.0)) { /* else the row attends to no key, and its output is 0 */
        const ca_view *grad = VIEW(params, GRAD_OUTPUT);
        const ca_view *forward = VIEW(params, FORWARD);
        __global const storage *g = call->grad_output + ca_offset(grad, batch, i, 0);
        __global const storage *o = call->forward + ca_offset(forward, batch, i, 0);
        delta = dot(g, grad->column, o, forward->column, params->Ev);
    }
    if (USES(params, GRAD_LSE)) {
        delta -= call->grad_lse[ca_offset(VIEW(params, GRAD_LSE), batch, i, 0)];
    }
    numbers[2 * column] = delta;
}

__kernel __attribute__((vec_type_hint(float4))) void
attention_backward(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
    const ca_int64 item = item_of(&params);
    if (STEP_OF(&params) > CA_BACKWARD_SINKS) {
        write_step_of_captured(&call, item);
    } else if (STEP_OF(&params) > CA_BACKWARD_DELTAS) {
        write_result(&call, item);
    } else if (item < count_of(params.batch) * params.L) {
        write_row(&call, item);
    }
}
