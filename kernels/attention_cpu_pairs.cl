/* SPDX-License-Identifier: MIT
 *
 * The terms of attention_cpu.cl's products are pairs of bfloat16, two neighbours of the
 * summed dimension in 32 bits, the first in the low half. One instruction multiplies
 * such pairs exactly and adds both products to a float. It takes numbers below 2^-126
 * as 0.
 *
 * The host asks for pairs only where the processor has that instruction and the
 * compiler takes it (kernels/probe_pairs.cl).
 */
#ifndef CLATTN_ATTENTION_CPU_PAIRS_CL
#define CLATTN_ATTENTION_CPU_PAIRS_CL

#include "attention_cpu_tiles.cl"
#include "bfloat16_pairs.cl" /* add_pair_products */

typedef uint term;
typedef uintv termv;
typedef uint unaligned_term __attribute__((aligned(2)));
typedef uintv unaligned_termv __attribute__((aligned(4)));
typedef __global const unaligned_term *term_rows;

static inline realv
multiply_add(term a, termv b, realv sum)
{
    return add_pair_products(sum, (termv)a, b);
}

static inline term
pair_of(ushort first, ushort second)
{
    return (term)first | (term)second << 16;
}

/* Elements 2 * n and 2 * n + 1 of a row, which may end between them. */
static inline term
load_pair(__global const storage *row, int n, int columns, ca_int64 stride)
{
    const int c = 2 * n;
    return pair_of(row[c * stride], c + 1 < columns ? row[(c + 1) * stride] : 0);
}

/* Rows first … first + count - 1 of a matrix, in pairs along the row. */
static inline void
pack_keys(term *packed, __global const storage *matrix, const ca_view *view,
          ca_int64 first, int count, int columns, __global const storage *bias)
{
    const int pairs = (columns + 1) / 2;
    for (int r = 0; r < count; r++) {
        __global const storage *row = matrix + (first + r) * view->row;
        int n = 0;
        if (view->column == 1) {
            for (; 2 * (n + LANES) <= columns; n += LANES) {
                *(unaligned_termv *)(packed + r * pairs + n) = load_pairs(row + 2 * n);
            }
        }
        for (; n < pairs; n++) {
            packed[r * pairs + n] = load_pair(row, n, columns, view->column);
        }
    }
}

/* The same rows in pairs of rows, packed[r][c]; an odd one has zeros for a partner. */
static inline void
pack_values(term *packed, __global const storage *matrix, const ca_view *view,
            ca_int64 first, int count, int columns, __global const storage *bias)
{
    for (int r = 0; r < count; r += 2) {
        __global const storage *row = matrix + (first + r) * view->row;
        __global const storage *next = row + (r + 1 < count ? view->row : 0);
        const ushort second = r + 1 < count ? 0xffff : 0;
        int c = 0;
        if (view->column == 1) {
            for (; c + LANES <= columns; c += LANES) {
                const termv low = convert_uintv(WIDE(vload)(0, row + c));
                const termv high =
                    convert_uintv(WIDE(vload)(0, next + c) & (WIDE(ushort))second);
                *(unaligned_termv *)(packed + r / 2 * columns + c) = low | high << 16;
            }
        }
        for (; c < columns; c++) {
            const ca_int64 at = c * view->column;
            packed[r / 2 * columns + c] = pair_of(row[at], next[at] & second);
        }
    }
}

/* queries[n][lane] = elements 2 * n and 2 * n + 1 of query[lane]; lanes beyond the last
   row repeat it. They are not scaled, which would round them: the scores are. */
static inline void
load_queries(termv *queries, __global const storage *query, const ca_view *view,
             int rows, __global const storage *bias, real scale)
{
    for (int v = 0; v < NV; v++) {
        int n = 0;
        if (view->column == 1) {
            for (; 2 * (n + LANES) <= HEAD_E; n += LANES) {
                realv x[LANES]; /* only moved */
                for (int lane = 0; lane < LANES; lane++) {
                    const int row = min(v * LANES + lane, rows - 1);
                    x[lane] = as_realv(load_pairs(query + row * view->row + 2 * n));
                }
                transpose(x);
                for (int m = 0; m < LANES; m++) {
                    queries[(n + m) * NV + v] = as_uintv(x[m]);
                }
            }
        }
        for (; n < TERMS_E; n++) {
            for (int lane = 0; lane < LANES; lane++) {
                const int row = min(v * LANES + lane, rows - 1);
                ((term *)&queries[n * NV + v])[lane] =
                    load_pair(query + row * view->row, n, HEAD_E, view->column);
            }
        }
    }
}

/* Two weights, rounded; ties, one weight in 65536, are rounded up. */
static inline termv
round_to_pair(realv first, realv second)
{
    const termv low = as_uintv(first) + 0x8000u;
    const termv high = as_uintv(second) + 0x8000u;
    return low >> 16 | (high & 0xffff0000u);
}

/* weights[k / 2][v] = exact[k][v] and exact[k + 1][v], rounded, for MR keys */
static inline void
put_weights(termv *weights, const realv *exact)
{
#pragma unroll
    for (int n = 0; n < MR / 2 * NV; n++) {
        const int first = n / NV * 2 * NV + n % NV;
        weights[n] = round_to_pair(exact[first], exact[first + NV]);
    }
}

static inline termv
scale_weights(termv weights, realv factor)
{
    return round_to_pair(as_realv(weights << 16) * factor,
                         as_realv(weights & 0xffff0000u) * factor);
}

/* The sum of MR keys' weights as they are multiplied, of one vector of rows. */
static inline realv
sum_pairs(const termv *weights)
{
    const term ones = 0x3f803f80u;
    realv sum = (realv)REAL(0.0);
#pragma unroll
    for (int n = 0; n < MR / 2; n++) {
        sum = multiply_add(ones, weights[n * NV], sum);
    }
    return sum;
}

#endif
