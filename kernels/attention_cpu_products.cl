/* SPDX-License-Identifier: MIT
 *
 * The two matrix products of attention_cpu.cl, on one tile of queries.
 */
#ifndef CLATTN_ATTENTION_CPU_PRODUCTS_CL
#define CLATTN_ATTENTION_CPU_PRODUCTS_CL

#include "attention_cpu_tiles.cl"

#if BFLOAT16_PAIRS
#include "attention_cpu_pairs.cl" /* term, multiply_add, load_queries, pack_… */
#else
#include "attention_cpu_reals.cl"
#endif

/* Result columns summed together: Ev cut into equal parts of at most MR + 1. */
#define PARTS   ((HEAD_EV + MR) / (MR + 1))
#define COLUMNS ((HEAD_EV + PARTS - 1) / PARTS)

#define UNROLL _Pragma("unroll") /* as #pragma cannot stand in a macro */

/* scores[k][v] = sum_e key[k][e] * queries[e][v] for MR keys, in either address space.
   Sums of many terms are made of shorter ones, which round less. */
#define DOT_PART 128
#define DEFINE_DOT_KEYS(name, rows)                                                    \
    static inline void name(realv *scores, const termv *queries, rows key)             \
    {                                                                                  \
        UNROLL for (int n = 0; n < MR * NV; n++)                                       \
        {                                                                              \
            scores[n] = (realv)REAL(0.0);                                              \
        }                                                                              \
        for (int e0 = 0; e0 < TERMS_E; e0 += DOT_PART) {                               \
            realv sums[MR * NV];                                                       \
            UNROLL for (int n = 0; n < MR * NV; n++)                                   \
            {                                                                          \
                sums[n] = (realv)REAL(0.0);                                            \
            }                                                                          \
            for (int e = e0; e < min(e0 + DOT_PART, TERMS_E); e++) {                   \
                UNROLL for (int n = 0; n < MR * NV; n++)                               \
                {                                                                      \
                    sums[n] = multiply_add(key[n / NV * TERMS_E + e],                  \
                                           queries[e * NV + n % NV], sums[n]);         \
                }                                                                      \
            }                                                                          \
            UNROLL for (int n = 0; n < MR * NV; n++)                                   \
            {                                                                          \
                scores[n] += sums[n];                                                  \
            }                                                                          \
        }                                                                              \
    }

DEFINE_DOT_KEYS(dot_packed_keys, const term *)
#if KEY_DIRECT
DEFINE_DOT_KEYS(dot_keys, term_rows)
#endif

#if VALUE_DIRECT
typedef term_rows value_rows;
#else
typedef const term *value_rows;
#endif

/* result[c][v] += sum_j value[j][c] * weights[j][v] for so many terms j and columns c; a
   macro, as the sums stay in registers only where the latter is a constant. */
#define DEFINE_ADD_VALUES(name, columns)                                               \
    static inline void name(realv *result, const termv *weights, value_rows value,     \
                            ca_int64 stride, int terms)                                \
    {                                                                                  \
        realv sums[(columns) * NV];                                                    \
        UNROLL for (int n = 0; n < (columns) * NV; n++)                                \
        {                                                                              \
            sums[n] = (realv)REAL(0.0);                                                \
        }                                                                              \
        for (int j = 0; j < terms; j++) {                                              \
            UNROLL for (int n = 0; n < (columns) * NV; n++)                            \
            {                                                                          \
                sums[n] = multiply_add(value[j * stride + n / NV],                     \
                                       weights[j * NV + n % NV], sums[n]);             \
            }                                                                          \
        }                                                                              \
        UNROLL for (int n = 0; n < (columns) * NV; n++)                                \
        {                                                                              \
            result[n] += sums[n];                                                      \
        }                                                                              \
    }

#if BY_ROWS
/* result[lane][c] += sum_j weights[j][lane] * value[j][c], LANES columns at a time. */
static inline void
add_values_by_rows(realv *result, const realv *weights, value_rows value,
                   ca_int64 stride, int keys)
{
    for (int c = 0; c < ROW_VECTORS; c++) {
        realv sums[LANES];
        UNROLL for (int n = 0; n < LANES; n++)
        {
            sums[n] = (realv)REAL(0.0);
        }
        const real *weight = (const real *)weights;
        for (int j = 0; j < keys; j++) {
            const realv x = WIDE(vload)(c, value + j * stride);
            UNROLL for (int n = 0; n < LANES; n++)
            {
                sums[n] = fma((realv)weight[j * LANES + n], x, sums[n]);
            }
        }
        UNROLL for (int n = 0; n < LANES; n++)
        {
            result[n * ROW_VECTORS + c] += sums[n];
        }
    }
}
#else
DEFINE_ADD_VALUES(add_values, COLUMNS)
#if HEAD_EV % COLUMNS
DEFINE_ADD_VALUES(add_last_values, HEAD_EV % COLUMNS)
#endif
#endif

#endif
