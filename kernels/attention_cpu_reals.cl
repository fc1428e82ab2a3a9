/* SPDX-License-Identifier: MIT
 *
 * The terms of attention_cpu.cl's products are reals: half types are converted.
 */
#ifndef CLATTN_ATTENTION_CPU_REALS_CL
#define CLATTN_ATTENTION_CPU_REALS_CL

#include "attention_cpu_tiles.cl"

typedef real term;
typedef realv termv;
typedef __global const real *term_rows;

static inline realv
multiply_add(term a, termv b, realv sum)
{
    return fma((realv)a, b, sum);
}

/* Rows first … first + count - 1 of a matrix as reals, contiguous, plus a bias of one
   row (NULL: none). */
#define DEFINE_PACK_ROWS(name, type, load_one, load_some)                              \
    static inline void name(real *packed, __global const type *matrix,                 \
                            const ca_view *view, ca_int64 first, int count,            \
                            int columns, __global const storage *bias)                 \
    {                                                                                  \
        for (int r = 0; r < count; r++) {                                              \
            __global const type *row = matrix + (first + r) * view->row;               \
            real *packed_row = packed + r * columns;                                   \
            int c = 0;                                                                 \
            if (view->column == 1) {                                                   \
                for (; c + LANES <= columns; c += LANES) {                             \
                    realv x = load_some(row + c);                                      \
                    if (INPUT_BIAS && bias != 0) {                                     \
                        x += load_lanes(bias + c);                                     \
                    }                                                                  \
                    *(unaligned_realv *)(packed_row + c) = x;                          \
                }                                                                      \
            }                                                                          \
            for (; c < columns; c++) {                                                 \
                packed_row[c] = load_one(row + c * view->column);                      \
                if (INPUT_BIAS && bias != 0) {                                         \
                    packed_row[c] += load(bias + c);                                   \
                }                                                                      \
            }                                                                          \
        }                                                                              \
    }

DEFINE_PACK_ROWS(pack_keys, storage, load, load_lanes)
DEFINE_PACK_ROWS(pack_values, value_storage, load_value, load_value_lanes)

/* queries[e][lane] = scale * (query[lane][e] + bias[e]); lanes beyond the last row
   repeat it. */
static inline void
load_queries(realv *queries, __global const storage *query, const ca_view *view,
             int rows, __global const storage *bias, real scale)
{
    for (int v = 0; v < NV; v++) {
        int e = 0;
        if (view->column == 1) {
            for (; e + LANES <= HEAD_E; e += LANES) {
                realv x[LANES];
                for (int n = 0; n < LANES; n++) {
                    const int row = min(v * LANES + n, rows - 1);
                    x[n] = load_lanes(query + row * view->row + e);
#if INPUT_BIAS
                    x[n] += load_lanes(bias + e);
#endif
                }
                transpose(x);
                for (int n = 0; n < LANES; n++) {
                    queries[(e + n) * NV + v] = x[n] * scale;
                }
            }
        }
        for (; e < HEAD_E; e++) {
            for (int n = 0; n < LANES; n++) {
                const int row = min(v * LANES + n, rows - 1);
                real x = load(query + row * view->row + e * view->column);
#if INPUT_BIAS
                x += load(bias + e);
#endif
                ((real *)&queries[e * NV + v])[n] = x * scale;
            }
        }
    }
}

static inline void
put_weights(termv *weights, const realv *exact)
{
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        weights[n] = exact[n];
    }
}

static inline termv
scale_weights(termv weights, realv factor)
{
    return weights * factor;
}

#endif
