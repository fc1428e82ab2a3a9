/* SPDX-License-Identifier: MIT
 *
 * One row of attention by one work-item, in two passes over its keys and O(1) memory:
 *
 *     m, l      = max_j score[j], sum_j exp(score[j] - m)     pass 1, online
 *     output[c] = sum_j exp(score[j] - m) / l * value[j, c]   pass 2, by chunks of c
 *
 * and a third one where scores are asked for. It is all of attention_reference.cl, and
 * in the fast kernels it redoes the few rows in which a NaN or infinity of an excluded
 * key got through: this code never reads one.
 *
 *     -DROW_IS_CALLED  0 or 1: the fast kernels call it instead of inlining it
 */
#ifndef CLATTN_ATTENTION_ROW_CL
#define CLATTN_ATTENTION_ROW_CL

#include "common.cl"
#include "philox.cl"

#ifndef ROW_IS_CALLED
#define ROW_IS_CALLED 0
#endif
#if ROW_IS_CALLED
#define ROW_FUNCTION static __attribute__((noinline))
#else
#define ROW_FUNCTION static inline
#endif

#define ROW_CHUNK 64  /* output columns summed at once */
#define ROW_BLOCK 128 /* terms of a partial sum: a long plain sum loses a digit */

/* Everything row [batch, i] needs, resolved once. */
typedef struct {
    const ca_attention_params *params;
    __global const storage *query; /* row i */
    __global const storage *key;   /* row 0 */
    __global const value_storage *value;
    __global const storage *past_key;
    __global const value_storage *past_value;
    __global const storage *input_bias;
    __global const mask_storage *mask; /* row i */
    __global const storage *bias;      /* row i */
    ca_int64 number;                   /* of the row, over all batches */
    ca_int64 first;                    /* keys first … last may be attended to */
    ca_int64 last;
    bool caps_excluded; /* an excluded key has a score, of -softcap */
} attention_row_state;

static inline attention_row_state
row_at(const attention_call *call, const ca_int64 *batch, ca_int64 i)
{
    const ca_attention_params *params = call->params;
    attention_row_state row;
    row.params = params;
    row.query = call->query + ca_offset(&params->query, batch, i, 0);
    row.key = call->key + ca_offset(&params->key, batch, 0, 0);
    row.value = call->value + ca_offset(&params->value, batch, 0, 0);
    row.past_key = call->past_key + ca_offset(&params->past_key, batch, 0, 0);
    row.past_value = call->past_value + ca_offset(&params->past_value, batch, 0, 0);
    row.input_bias = call->input_bias + ca_offset(&params->input_bias, batch, 0, 0);
    row.mask = call->mask + ca_offset(&params->mask, batch, i, 0);
    row.bias = call->bias + ca_offset(&params->bias, batch, i, 0);
    row.number = i;
    ca_int64 rows = params->L;
    for (int n = CA_BATCH_DIMS - 1; n >= 0; n--) {
        row.number += batch[n] * rows;
        rows *= params->batch[n];
    }
    row.number += params->first_row;
    const key_band band = ca_band(call, batch);
    row.first = max((ca_int64)0, i + band.lower);
    row.last = min(band.limit - 1, i + band.upper);
    row.caps_excluded = SOFTCAP_LAST && ca_softcap(params) > REAL(0.0);
    return row;
}

/* The scaled product of the row's query and key j. */
static inline real
row_product(const attention_row_state *row, ca_int64 j)
{
    const ca_attention_params *params = row->params;
    const bool past = PAST && j < params->P;
    const ca_view *view = past ? &params->past_key : &params->key;
    __global const storage *key_j =
        past ? row->past_key + j * view->row : row->key + (j - params->P) * view->row;
    real sum = REAL(0.0);
    for (ca_int64 e0 = 0; e0 < params->E; e0 += ROW_BLOCK) {
        real part = REAL(0.0);
        for (ca_int64 e = e0; e < min(e0 + ROW_BLOCK, params->E); e++) {
            real q = load(row->query + e * params->query.column);
            real k = load(key_j + e * view->column);
#if INPUT_BIAS
            q += load(row->input_bias + e);
            k += past ? REAL(0.0) : load(row->input_bias + params->E + e);
#endif
            part = fma(q, k, part);
        }
        sum += part;
    }
    return sum * ca_scale(params);
}

static inline real
row_cap(const attention_row_state *row, real score)
{
    const real softcap = ca_softcap(row->params);
    return softcap > REAL(0.0) ? softcap * tanh(score / softcap) : score;
}

/* What mask and bias add to the score of key j; false where it is excluded. */
static inline bool
row_addend(const attention_row_state *row, ca_int64 j, real *addend)
{
    const ca_attention_params *params = row->params;
    *addend = REAL(0.0);
    if (j < row->first || j > row->last) {
        return false;
    }
#if HAS_MASK
    *addend = load_mask(row->mask + j * params->mask.column, ca_filter(params));
#endif
#if BIAS
    *addend = add_addends(*addend, load(row->bias + j * params->bias.column));
#endif
    return *addend != -INFINITY;
}

/* The final score of key j; false where it is excluded. */
static inline bool
row_score(const attention_row_state *row, ca_int64 j, real *score)
{
    real addend;
    if (!row_addend(row, j, &addend)) {
        *score = row->caps_excluded ? -ca_softcap(row->params) : -INFINITY;
        return row->caps_excluded;
    }
#if SOFTCAP_LAST
    *score = row_cap(row, row_product(row, j) + addend);
#else
    *score = row_cap(row, row_product(row, j)) + addend;
#endif
    return true;
}

#if SCORES >= 0
/* Scores of all keys, at the stage that is asked for. */
static inline void
row_write_scores(const attention_row_state *row, __global storage *scores, real m,
                 real l)
{
    const ca_attention_params *params = row->params;
    for (ca_int64 j = 0; j < params->T; j++) {
        real score;
#if SCORES == 0
        score = row_product(row, j);
#elif SCORES == 1 && SOFTCAP_LAST
        real addend;
        score = row_addend(row, j, &addend) ? row_product(row, j) + addend : -INFINITY;
#elif SCORES == 1
        score = row_cap(row, row_product(row, j));
#elif SCORES == 2
        row_score(row, j, &score);
#else
        score = row_score(row, j, &score) ? exp(score - m) / l : REAL(0.0);
#endif
        store(score, scores + j * params->scores.column);
    }
}
#endif

/* The online softmax's maximum and sum; false in an empty row. A NaN stays, and so does
   one that an infinite score makes of itself. */
static inline bool
row_sum(const attention_row_state *row, ca_int64 first, ca_int64 last, real *m, real *l)
{
    bool attends = false;
    *m = -INFINITY;
    *l = REAL(0.0);
    for (ca_int64 j0 = first; j0 <= last; j0 += ROW_BLOCK) {
        real part = REAL(0.0);
        for (ca_int64 j = j0; j <= min(j0 + ROW_BLOCK - 1, last); j++) {
            real score;
            if (!row_score(row, j, &score)) {
                continue;
            }
            attends = true;
            if (score > *m) {
                const real decay = exp(*m - score);
                *l *= decay;
                part = part * decay + (REAL(1.0) + (score - score));
                *m = score;
            } else if (score != -INFINITY) {
                part += exp(score - *m);
            }
        }
        *l += part;
    }
    return attends;
}

/* sums[n] = sum_j exp(score[j] - m) * value[j, c + n] for so many columns. */
static inline void
row_add_values(const attention_row_state *row, ca_int64 first, ca_int64 last, real m,
               ca_int64 c, int columns, real *sums)
{
    const ca_attention_params *params = row->params;
    for (int n = 0; n < columns; n++) {
        sums[n] = REAL(0.0);
    }
    for (ca_int64 j0 = first; j0 <= last; j0 += ROW_BLOCK) {
        real parts[ROW_CHUNK];
        for (int n = 0; n < columns; n++) {
            parts[n] = REAL(0.0);
        }
        for (ca_int64 j = j0; j <= min(j0 + ROW_BLOCK - 1, last); j++) {
            real score;
            if ((DROPOUT && ca_drops(params, row->number, j)) ||
                !row_score(row, j, &score)) {
                continue;
            }
            const real weight = exp(score - m);
            const bool past = PAST && j < params->P;
            const ca_view *view = past ? &params->past_value : &params->value;
            __global const value_storage *value_j =
                past ? row->past_value + j * view->row
                     : row->value + (j - params->P) * view->row;
            for (int n = 0; n < columns; n++) {
                real x = load_value(value_j + (c + n) * view->column);
#if INPUT_BIAS
                x += past ? REAL(0.0) : load(row->input_bias + 2 * params->E + c + n);
#endif
                parts[n] = fma(weight, x, parts[n]);
            }
        }
        for (int n = 0; n < columns; n++) {
            sums[n] += parts[n];
        }
    }
}

ROW_FUNCTION void
attention_row(const attention_call *call, const ca_int64 *batch, ca_int64 i)
{
    const ca_attention_params *params = call->params;
    const attention_row_state row = row_at(call, batch, i);
    const ca_int64 first = row.caps_excluded ? 0 : row.first;
    const ca_int64 last = row.caps_excluded ? params->T - 1 : row.last;
    real m;
    real l;
    const bool attends = row_sum(&row, first, last, &m, &l);
    if (params->flags & CA_HAS_LSE) {
        call->lse[ca_offset(&params->lse, batch, i, 0)] = m + log(l);
    }
#if SCORES >= 0
    row_write_scores(&row, call->scores + ca_offset(&params->scores, batch, i, 0), m,
                     l);
#endif
    __global storage *output_i = call->output + ca_offset(&params->output, batch, i, 0);
    for (ca_int64 c = 0; c < params->Ev; c += ROW_CHUNK) {
        const int columns = (int)min((ca_int64)ROW_CHUNK, params->Ev - c);
        real sums[ROW_CHUNK];
        row_add_values(&row, first, last, m, c, columns, sums);
        for (int n = 0; n < columns; n++) {
            const real mean = sums[n] / l * ca_kept_scale(params);
            store(attends ? mean : REAL(0.0),
                  output_i + (c + n) * params->output.column);
        }
    }
}

#endif
