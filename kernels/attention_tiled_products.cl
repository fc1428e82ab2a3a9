/* SPDX-License-Identifier: MIT
 *
 * The two matrix products of attention_tiled.cl, from local memory to registers. Work-
 * item (tx, ty) owns
 *
 *     scores [MI][NJ]   of rows ty + TY * m and keys tx + TX * n
 *     result [MI][NC]   of the same rows and columns VC * (tx + TX * n) + 0 … VC - 1
 *
 * so that what neighbours read together lies side by side.
 */
#ifndef CLATTN_ATTENTION_TILED_PRODUCTS_CL
#define CLATTN_ATTENTION_TILED_PRODUCTS_CL

#include "attention_tiled_loads.cl"

/* Columns of a load, and those that are summed in one pass over a block's keys: their
   sums have registers of their own beside the result's. */
#if NC % 4 == 0
#define VC 4
#elif NC % 2 == 0
#define VC 2
#else
#define VC 1
#endif
#define MAX_SUMS 48
#if MI * NC <= MAX_SUMS
#define PC NC
#elif NC % 16 == 0 && MI * 16 <= MAX_SUMS
#define PC 16
#elif NC % 8 == 0 && MI * 8 <= MAX_SUMS
#define PC 8
#else
#define PC VC
#endif

typedef JOIN(real, VC) column_vector;
typedef JOIN(real, MI) row_vector;

/* scores[m][n] += queries[ty + TY * m] . keys[tx + TX * n], over EC elements. */
static inline void
multiply_keys(__local const real4 *queries, __local const real4 *keys, int tx, int ty,
              real *scores)
{
#pragma unroll 1
    for (int e = 0; e < EC / 4; e++) {
        real4 query[MI];
#pragma unroll
        for (int m = 0; m < MI; m++) {
            query[m] = queries[(ty + TY * m) * STRIDE_E + e];
        }
#pragma unroll
        for (int n = 0; n < NJ; n++) {
            const real4 key = keys[(tx + TX * n) * STRIDE_E + e];
#pragma unroll
            for (int m = 0; m < MI; m++) {
                real sum = scores[m * NJ + n];
                sum = fma(query[m].s0, key.s0, sum);
                sum = fma(query[m].s1, key.s1, sum);
                sum = fma(query[m].s2, key.s2, sum);
                scores[m * NJ + n] = fma(query[m].s3, key.s3, sum);
            }
        }
    }
}

/* result[m][c] += sum of weights[k][ty * MI + m] * values[k][c], over `keys` keys. Each
   sum is of one chunk of keys: a long plain sum loses a digit. */
static inline void
multiply_values(__local const real4 *weights, __local const real4 *values, int keys,
                int tx, int ty, real *result)
{
    __local const row_vector *rows = (__local const row_vector *)weights + ty;
    __local const column_vector *columns = (__local const column_vector *)values + tx;
#pragma unroll
    for (int c0 = 0; c0 < NC; c0 += PC) {
        real sums[MI * PC];
#pragma unroll
        for (int n = 0; n < MI * PC; n++) {
            sums[n] = REAL(0.0);
        }
#pragma unroll 2
        for (int k = 0; k < keys; k++) {
            const row_vector weight = rows[k * (STRIDE_M * 4 / MI)];
#pragma unroll
            for (int c = 0; c < PC; c += VC) {
                const column_vector value =
                    columns[k * (STRIDE_C * 4 / VC) + (c0 + c) / VC * TX];
#pragma unroll
                for (int n = 0; n < MI * VC; n++) {
                    const int at = n / VC * PC + c + n % VC;
                    sums[at] = fma(((const real *)&weight)[n / VC],
                                   ((const real *)&value)[n % VC], sums[at]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < MI * PC; n++) {
            result[n / PC * NC + c0 + n % PC] += sums[n];
        }
    }
}

#endif
