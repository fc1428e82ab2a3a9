/* SPDX-License-Identifier: MIT
 *
 * What attention_decode.cl and attention_merge.cl do with a row at its end.
 *
 *     -DHEAD_EV  head size Ev, LANES … 512
 *     LANES (lanes.cl)
 */
#ifndef CLATTN_ATTENTION_DECODE_ROWS_CL
#define CLATTN_ATTENTION_DECODE_ROWS_CL

#include "attention_keys.cl"  /* TO_NATURAL */
#include "attention_parts.cl" /* base_of, partial_row */
#include "attention_row.cl"   /* attention_row */
#include "lanes.cl"

/* The first column of vector n of a row of `size` columns; where LANES does not divide
   it, the last vector begins early and shares columns with the one before. */
#define COLUMN(n, size) min((n) * LANES, (size) - LANES)
#define EV_CHUNKS       ((HEAD_EV + LANES - 1) / LANES)

/* Write row i from the sum of its weights and that of weights times values. A row that
   is not finite is computed again: it may have met a NaN or infinity of an excluded
   key, as 0 * NaN, or overflowed under an early base, or it has no keys. */
static inline void
finish_row(const attention_call *call, const ca_int64 *batch, ca_int64 i,
           const realv *result, real highest, real sum)
{
    const ca_attention_params *params = call->params;
    const ca_int64 column = params->output.column;
    __global storage *row = call->output + ca_offset(&params->output, batch, i, 0);
    const real inverse = REAL(1.0) / sum;
    realv nonzero = (realv)(inverse * REAL(0.0));
    for (int n = 0; n < EV_CHUNKS; n++) {
        const realv x = result[n] * inverse;
        nonzero += x * REAL(0.0);
        if (column == 1) {
            store_lanes(x, row + COLUMN(n, HEAD_EV));
        } else {
            real lanes[LANES];
            WIDE(vstore)(x, 0, lanes);
            for (int k = 0; k < LANES; k++) {
                store(lanes[k], row + (COLUMN(n, HEAD_EV) + k) * column);
            }
        }
    }
    if (params->flags & CA_HAS_LSE) {
        call->lse[ca_offset(&params->lse, batch, i, 0)] =
            TO_NATURAL(base_of(highest)) + log(sum);
    }
    if (any_lane(nonzero != (realv)REAL(0.0))) {
        attention_row(call, batch, i);
    }
}

/* --- rows of a part of the keys: Ev sums, the highest score, the sum of weights ----- */

#define PARTIAL_SIZE (HEAD_EV + 2)

static inline void
store_partial(__global real *partial, const realv *result, real highest, real sum)
{
    for (int n = 0; n < EV_CHUNKS; n++) {
        WIDE(vstore)(result[n], 0, partial + COLUMN(n, HEAD_EV));
    }
    partial[HEAD_EV] = highest;
    partial[HEAD_EV + 1] = sum;
}

#endif
