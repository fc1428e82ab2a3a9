/* SPDX-License-Identifier: MIT
 *
 * The online softmax of attention_tiled.cl. The TX work-items of a row lie side by side;
 * what they know of it they share by shuffles where they are in one sub-group, else by
 * way of local memory.
 */
#ifndef CLATTN_ATTENTION_TILED_SOFTMAX_CL
#define CLATTN_ATTENTION_TILED_SOFTMAX_CL

#include "attention_keys.cl" /* TO_LOG2 */
#include "attention_tiled_loads.cl"

#if SUB_GROUP
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#endif

/* Weights are exp2(score - base): base need not be the highest score so far, only not
   far below it, so it is raised when a score exceeds it by HEADROOM. The work-items of
   a row always have the same. */
#define HEADROOM REAL(4.0)

#define LOWEST_BASE (-FLT_MAX) /* of a row that has no score yet */

typedef struct {
    real base[MI]; /* floats, also where scores are doubles */
    real sum[MI];  /* of the weights of this work-item's keys */
    uint seen;     /* bit m: row m attends to one of them */
} softmax_state;

static inline void
start_softmax(softmax_state *softmax)
{
    softmax->seen = 0;
#pragma unroll
    for (int m = 0; m < MI; m++) {
        softmax->base[m] = LOWEST_BASE;
        softmax->sum[m] = REAL(0.0);
    }
}

/* x[m] = sum of x[m] of all work-items of the row. `scratch` has BM * TX reals. */
static inline void
sum_rows(real *x, __local real *scratch, int tx, int ty)
{
#if SUB_GROUP
#pragma unroll
    for (int m = 0; m < MI; m++) {
#pragma unroll
        for (uint step = 1; step < TX; step *= 2) {
            x[m] += sub_group_shuffle_xor(x[m], step);
        }
    }
#else
    barrier(CLK_LOCAL_MEM_FENCE); /* readers of `scratch` so far: these writes */
#pragma unroll
    for (int m = 0; m < MI; m++) {
        scratch[(ty * MI + m) * TX + tx] = x[m];
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads below */
#pragma unroll
    for (int m = 0; m < MI; m++) {
        x[m] = REAL(0.0);
#pragma unroll
        for (int n = 0; n < TX; n++) {
            x[m] += scratch[(ty * MI + m) * TX + n];
        }
    }
#endif
}

/* The bits of floats as integers in the same order; its own inverse. */
static inline int
order_bits(int bits)
{
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline void
clear_highest(__local int *highest, int item)
{
    for (int n = item; n < (SUB_GROUP ? 0 : BM); n += THREADS) {
        highest[n] = order_bits(as_int(LOWEST_BASE));
    }
}

/* Raise what is below the highest of this block's scores by more than HEADROOM, and
   scale what has been summed with it. Contains a barrier: of the readers of the keys
   before it, and the writers of the weights after it. */
static inline void
raise_bases(softmax_state *softmax, const real *scores, real *result,
            __local int *highest, int ty)
{
    real raised[MI];
#pragma unroll
    for (int m = 0; m < MI; m++) {
        real high = -INFINITY;
#pragma unroll
        for (int n = 0; n < NJ; n++) {
            high = scores[m * NJ + n] > high ? scores[m * NJ + n] : high;
        }
        raised[m] = high;
    }
#if SUB_GROUP
#pragma unroll
    for (int m = 0; m < MI; m++) {
#pragma unroll
        for (uint step = 1; step < TX; step *= 2) {
            const real other = sub_group_shuffle_xor(raised[m], step);
            raised[m] = other > raised[m] ? other : raised[m];
        }
        const bool exceeds = raised[m] > softmax->base[m] + HEADROOM;
        raised[m] = exceeds ? raised[m] : softmax->base[m];
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* readers of keys: writers of weights */
#else
    /* Most blocks have no such score, and nobody writes here. */
#pragma unroll
    for (int m = 0; m < MI; m++) {
        if (raised[m] > softmax->base[m] + HEADROOM) {
            atomic_max(&highest[ty * MI + m], order_bits(as_int((float)raised[m])));
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads; also as above */
#pragma unroll
    for (int m = 0; m < MI; m++) {
        raised[m] = as_float(order_bits(highest[ty * MI + m]));
    }
#endif
#pragma unroll
    for (int m = 0; m < MI; m++) {
        if (raised[m] != softmax->base[m]) {
            const real decay = exp2(TO_LOG2(softmax->base[m] - raised[m]));
            softmax->base[m] = raised[m];
            softmax->sum[m] *= decay;
#pragma unroll
            for (int c = 0; c < NC; c++) {
                result[m * NC + c] *= decay;
            }
        }
    }
}

/* Replaces scores by weights. */
static inline void
weigh_scores(softmax_state *softmax, real *scores)
{
#pragma unroll
    for (int m = 0; m < MI; m++) {
        real sum = REAL(0.0); /* of this block alone: short sums round less */
#pragma unroll
        for (int n = 0; n < NJ; n++) {
            const real weight = exp2(TO_LOG2(scores[m * NJ + n] - softmax->base[m]));
            scores[m * NJ + n] = weight;
            sum += weight;
        }
        softmax->sum[m] += sum;
    }
}

#endif
