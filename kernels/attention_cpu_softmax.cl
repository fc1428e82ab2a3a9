/* SPDX-License-Identifier: MIT
 *
 * The online softmax of attention_cpu.cl, one row a lane.
 */
#ifndef CLATTN_ATTENTION_CPU_SOFTMAX_CL
#define CLATTN_ATTENTION_CPU_SOFTMAX_CL

#include "attention_cpu_products.cl" /* termv, … */
#include "attention_keys.cl"         /* TO_LOG2 */

/* Weights are exp2(score - base): base need not be the highest score so far, only not
   far below it, so it is raised, and all sums with it, when a score exceeds it by
   HEADROOM. */
#define HEADROOM REAL(4.0)

typedef struct {
    realv base[NV];
    realv limit[NV]; /* base + HEADROOM; -inf, and base 0, before the first key */
    realv sum[NV];   /* of the weights of earlier blocks */
    realv block[NV]; /* and of this one */
#if BFLOAT16_PAIRS
    realv rounded[NV]; /* of the weights as they are multiplied */
#endif
} softmax_state;

/* What a result is divided by: if weights are rounded, so are those of its sum. */
#if BFLOAT16_PAIRS
#define DIVISOR rounded
#else
#define DIVISOR sum
#endif

/* result[lane v * LANES + n] *= factor[n] */
static inline void
scale_result(realv *result, int v, realv factor)
{
#if BY_ROWS
    real factors[LANES];
    WIDE(vstore)(factor, 0, factors);
    for (int n = 0; n < LANES * ROW_VECTORS; n++) {
        result[n] *= factors[n / ROW_VECTORS];
    }
#else
    for (int c = 0; c < HEAD_EV; c++) {
        result[c * NV + v] *= factor;
    }
#endif
}

static inline void
raise_base(softmax_state *softmax, const realv *highest, termv *weights, int count,
           realv *result)
{
    for (int v = 0; v < NV; v++) {
        const intv fresh = softmax->limit[v] == (realv)(-INFINITY);
        const realv old = fresh ? (realv)(-INFINITY) : softmax->base[v];
        const realv raised = larger(highest[v], old);
        const realv base = raised == (realv)(-INFINITY) ? (realv)REAL(0.0) : raised;
        const realv decay = exp2_lanes(TO_LOG2(old - base));
        softmax->base[v] = base;
        softmax->limit[v] = raised + HEADROOM;
        softmax->sum[v] *= decay;
        softmax->block[v] *= decay;
#if BFLOAT16_PAIRS
        softmax->rounded[v] *= decay;
#endif
        for (int n = v; n < count; n += NV) {
            weights[n] = scale_weights(weights[n], decay);
        }
        if (any_lane(~fresh)) { /* else it is all zeros */
            scale_result(result, v, decay);
        }
    }
}

/* weights[k][v] = exp2(scores[k][v] - base[v]) for MR keys, of which `before` came
   before in this block. Replaces the scores by the weights too. */
static inline void
weigh_scores(softmax_state *softmax, realv *scores, termv *weights, int before,
             realv *result)
{
    intv too_high = (intv)0;
    realv highest[NV];
#pragma unroll
    for (int v = 0; v < NV; v++) {
        highest[v] = scores[v];
#pragma unroll
        for (int k = 1; k < MR; k++) {
            highest[v] = larger(scores[k * NV + v], highest[v]);
        }
        too_high |= highest[v] > softmax->limit[v];
    }
    if (any_lane(too_high)) {
        raise_base(softmax, highest, weights, TERMS(before) * NV, result);
    }
    realv sums[NV]; /* of these keys alone: short sums round less */
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        scores[n] = exp2_lanes(TO_LOG2(scores[n] - softmax->base[n % NV]));
        sums[n % NV] = n < NV ? scores[n] : sums[n % NV] + scores[n];
    }
    put_weights(weights + TERMS(before) * NV, scores);
#pragma unroll
    for (int v = 0; v < NV; v++) {
        softmax->block[v] += sums[v];
#if BFLOAT16_PAIRS
        softmax->rounded[v] += sum_pairs(weights + TERMS(before) * NV + v);
#endif
    }
}

/* Not 0 in the lanes of x that are infinite or, where keys are excluded, not finite. */
static inline intv
mark_lanes(realv x, bool excluding)
{
    const realv infinite = fabs(x) == (realv)INFINITY ? x : (realv)REAL(0.0);
    return as_intv(excluding ? x * REAL(0.0) : infinite);
}

/* The marks of `count` vectors, joined by their bits: a chain of additions would take
   longer than all else that is done to a result. */
static inline intv
join_marks(const realv *x, int count, int step, bool excluding)
{
    intv marks = (intv)0;
    for (int n = 0; n < count; n++) {
        marks |= mark_lanes(x[n * step], excluding);
    }
    return marks;
}

static inline bool
any_mark(intv marks)
{
    return any_lane(as_realv(marks) != (realv)REAL(0.0));
}

/* Multiplies by factor / sum and marks the rows that attention_row has to redo, by
   other than 0 in redo[lane]; false if there is none. Where keys are excluded: a row
   that is not finite, since it may have met a NaN or infinity of an excluded key, as
   0 * NaN; and one whose sum is 0, of no keys or of scores of -inf only. Elsewhere: a
   row with an infinity, as a lagging base makes sums overflow too early. */
static inline bool
normalise(const softmax_state *softmax, real factor, bool excluding, realv *result,
          real *redo)
{
    bool marked = false;
    for (int v = 0; v < NV; v++) {
        const realv inverse = factor / softmax->DIVISOR[v];
        intv marks = excluding ? as_intv(inverse * REAL(0.0)) : (intv)0;
        scale_result(result, v, inverse);
#if BY_ROWS
        const int count = LANES * ROW_VECTORS;
        const bool in_rows = any_mark(join_marks(result, count, 1, excluding));
#else
        const bool in_rows = false;
        marks |= join_marks(result + v, HEAD_EV, NV, excluding);
#endif
        WIDE(vstore)(as_realv(marks), v, redo);
#if BY_ROWS
        for (int n = 0; in_rows && n < LANES; n++) {
            const realv *row = result + n * ROW_VECTORS;
            if (any_mark(join_marks(row, ROW_VECTORS, 1, excluding))) {
                redo[n] = REAL(1.0);
            }
        }
#endif
        marked = marked || in_rows || any_mark(marks);
    }
    return marked;
}

#endif
