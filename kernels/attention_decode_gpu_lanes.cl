/* SPDX-License-Identifier: MIT
 *
 * Sums over the KEY_LANES neighbouring work-items that share a key, of TERMS numbers
 * each: of a key's products with RT rows, for each key that they have at once.
 *
 *     KEY_LANES, WG, RT, TERMS (attention_decode_gpu_steps.cl)
 *
 * A sum is wanted once, not in every lane. So with each step the lanes of a pair divide
 * what they still have: each hands the other's half over, and adds what it gets to its
 * own. TERMS numbers take TERMS - 1 exchanges, not TERMS * log2(KEY_LANES).
 *
 *     lane         0          1          2          3
 *     2 apart      a b        a b        c d        c d
 *     1 apart      a          b          c          d
 */
#ifndef CLATTN_ATTENTION_DECODE_GPU_LANES_CL
#define CLATTN_ATTENTION_DECODE_GPU_LANES_CL

#include "attention_decode_gpu_forms.cl"

/* Sums that a lane ends up with, and lanes that end up with the same ones. */
#if TERMS > KEY_LANES
#define OWN_SUMS   (TERMS / KEY_LANES)
#define SAME_LANES 1
#else
#define OWN_SUMS   1
#define SAME_LANES (KEY_LANES / TERMS)
#endif

/* The term whose sum n lane `lane` ends up with. */
static inline int
own_term(int lane, int n)
{
    return lane / SAME_LANES * OWN_SUMS + n;
}

#if FORM == FORM_LOCAL

#define EXCHANGE_SIZE (RT * WG) /* reals of local memory */

/* The terms of one key at a time, so that they take little local memory. */
static inline void
sums_over_lanes(real *own, real *terms, int lane, __local real *scratch)
{
    const int item = (int)get_local_id(0);
#pragma unroll
    for (int t0 = 0; t0 < TERMS; t0 += RT) {
#pragma unroll
        for (int r = 0; r < RT; r++) {
            scratch[r * WG + item] = terms[t0 + r];
        }
        barrier(CLK_LOCAL_MEM_FENCE); /* terms, before they are summed */
#pragma unroll
        for (int n = 0; n < OWN_SUMS; n++) {
            const int t = own_term(lane, n) - t0;
            if (t >= 0 && t < RT) {
                own[n] = REAL(0.0);
                for (int k = 0; k < KEY_LANES; k++) {
                    own[n] += scratch[t * WG + item - lane + k];
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE); /* sums, before the next terms */
    }
}

#else

#define EXCHANGE_SIZE 1

static inline void
sums_over_lanes(real *own, real *terms, int lane, __local real *scratch)
{
#pragma unroll
    for (int apart = KEY_LANES / 2; apart > 0; apart /= 2) {
        const int kept = TERMS * apart / KEY_LANES; /* 0: there is one, for both */
        const bool upper = (lane & apart) != 0;
#pragma unroll
        for (int n = 0; n < (TERMS + 1) / 2; n++) {
            if (n < kept) {
                const real low = terms[n];
                const real high = terms[n + kept];
                terms[n] = (upper ? high : low) + exchange(upper ? low : high, apart);
            }
        }
        if (kept == 0) {
            terms[0] += exchange(terms[0], apart);
        }
    }
#pragma unroll
    for (int n = 0; n < OWN_SUMS; n++) {
        own[n] = terms[n];
    }
}

#endif

#endif
