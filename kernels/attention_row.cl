/* SPDX-License-Identifier: MIT
 *
 * One row of attention by one work-item, in two passes over its keys and O(1) memory:
 *
 *     m, l      = max_j score[j], sum_j exp(score[j] - m)     pass 1, online
 *     output[c] = sum_j exp(score[j] - m) / l * value[j, c]   pass 2, by chunks of c
 *
 * It is all of attention_reference.cl, and in the fast kernels it redoes the few rows
 * in which a NaN or infinity of an excluded key got through: this code never reads one.
 */
#ifndef CLATTN_ATTENTION_ROW_CL
#define CLATTN_ATTENTION_ROW_CL

#include "common.cl"

#define ROW_CHUNK 64  /* output columns summed at once */
#define ROW_BLOCK 128 /* terms of a partial sum: a long plain sum loses a digit */

/* Everything row [batch, i] needs, resolved once. */
typedef struct {
    const ca_attention_params *params;
    __global const storage *query;     /* row i */
    __global const storage *key;       /* row 0 */
    __global const storage *value;     /* row 0 */
    __global const mask_storage *mask; /* row i */
    ca_int64 first;                    /* keys first … last lie in the band */
    ca_int64 last;
} attention_row_state;

/* The scaled, capped and masked score of key j; false where the mask excludes it. */
static inline bool
row_score(const attention_row_state *row, ca_int64 j, real *score)
{
    const ca_attention_params *params = row->params;
    real addend = REAL(0.0);
#if HAS_MASK
    addend = load_mask(row->mask + j * params->mask.column);
    if (addend == -INFINITY) {
        return false;
    }
#endif
    __global const storage *key_j = row->key + j * params->key.row;
    real sum = REAL(0.0);
    for (ca_int64 e0 = 0; e0 < params->E; e0 += ROW_BLOCK) {
        real part = REAL(0.0);
        for (ca_int64 e = e0; e < min(e0 + ROW_BLOCK, params->E); e++) {
            part = fma(load(row->query + e * params->query.column),
                       load(key_j + e * params->key.column), part);
        }
        sum += part;
    }
    sum *= ca_scale(params);
    const real softcap = ca_softcap(params);
    if (softcap > REAL(0.0)) {
        sum = softcap * tanh(sum / softcap);
    }
    *score = sum + addend;
    return true;
}

static inline void
attention_row(__global const storage *query, __global const storage *key,
              __global const storage *value, __global const mask_storage *mask,
              __global storage *output, __global real *lse,
              const ca_attention_params *params, const ca_int64 *batch, ca_int64 i)
{
    attention_row_state row;
    row.params = params;
    row.query = query + ca_offset(&params->query, batch, i, 0);
    row.key = key + ca_offset(&params->key, batch, 0, 0);
    row.value = value + ca_offset(&params->value, batch, 0, 0);
#if HAS_MASK
    row.mask = mask + ca_offset(&params->mask, batch, i, 0);
#endif
    row.first = max((ca_int64)0, i + params->lower);
    row.last = min(params->S - 1, i + params->upper);

    bool empty = true;
    real m = -INFINITY;
    real l = REAL(0.0);
    for (ca_int64 j0 = row.first; j0 <= row.last; j0 += ROW_BLOCK) {
        real part = REAL(0.0);
        for (ca_int64 j = j0; j <= min(j0 + ROW_BLOCK - 1, row.last); j++) {
            real score;
            if (!row_score(&row, j, &score)) {
                continue;
            }
            empty = false;
            if (score > m) {
                const real decay = exp(m - score);
                l *= decay;
                part = part * decay + REAL(1.0);
                m = score;
            } else if (score != -INFINITY) { /* a NaN comes here and stays */
                part += exp(score - m);
            }
        }
        l += part;
    }
    if (params->has_lse) {
        lse[ca_offset(&params->lse, batch, i, 0)] = m + log(l);
    }

    __global storage *output_i = output + ca_offset(&params->output, batch, i, 0);
    for (ca_int64 c0 = 0; c0 < params->Ev; c0 += ROW_CHUNK) {
        const int columns = (int)min((ca_int64)ROW_CHUNK, params->Ev - c0);
        real sums[ROW_CHUNK];
        for (int c = 0; c < columns; c++) {
            sums[c] = REAL(0.0);
        }
        for (ca_int64 j0 = row.first; j0 <= row.last; j0 += ROW_BLOCK) {
            real parts[ROW_CHUNK];
            for (int c = 0; c < columns; c++) {
                parts[c] = REAL(0.0);
            }
            for (ca_int64 j = j0; j <= min(j0 + ROW_BLOCK - 1, row.last); j++) {
                real score;
                if (!row_score(&row, j, &score)) {
                    continue;
                }
                const real weight = exp(score - m);
                __global const storage *value_j = row.value + j * params->value.row;
                for (int c = 0; c < columns; c++) {
                    const ca_int64 column = (c0 + c) * params->value.column;
                    parts[c] = fma(weight, load(value_j + column), parts[c]);
                }
            }
            for (int c = 0; c < columns; c++) {
                sums[c] += parts[c];
            }
        }
        for (int c = 0; c < columns; c++) {
            store(empty ? REAL(0.0) : sums[c] / l,
                  output_i + (c0 + c) * params->output.column);
        }
    }
}

#endif
