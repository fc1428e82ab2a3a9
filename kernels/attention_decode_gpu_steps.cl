/* SPDX-License-Identifier: MIT
 *
 * The steps of attention_decode_gpu.cl on a block of keys: loads, scores, the product
 * with the values. Its own macros, which it describes, have their defaults here.
 */
#ifndef CLATTN_ATTENTION_DECODE_GPU_STEPS_CL
#define CLATTN_ATTENTION_DECODE_GPU_STEPS_CL

#include "common.cl"

#ifndef WG
#define WG 128
#endif
#ifndef WIDE_KEYS
#define WIDE_KEYS 0
#endif
#ifndef WIDE_VALUES
#define WIDE_VALUES 0
#endif
#ifndef KEY_LANES
#define KEY_LANES 1
#endif
#ifndef RT
#define RT 1
#endif
#ifndef BN
#define BN (WG / KEY_LANES)
#endif

/* A load is 16 bytes: so many elements. */
#define ELEMENTS_1 8
#define ELEMENTS_2 8
#define ELEMENTS_3 4
#define ELEMENTS_4 2
#define KEY_CHUNK  JOIN(ELEMENTS_, DTYPE)
#define CHUNK      JOIN(ELEMENTS_, VALUE_DTYPE)

/* Chunks of a key in one lane, KEY_LANES chunks apart, and keys of a block in one. */
#define KEY_CHUNKS    ((HEAD_E + KEY_CHUNK - 1) / KEY_CHUNK)
#define KEY_PER_LANE  ((KEY_CHUNKS + KEY_LANES - 1) / KEY_LANES)
#define KEYS_AT_ONCE  (WG / KEY_LANES)
#define KEYS_PER_LANE (BN / KEYS_AT_ONCE)
#define TERMS         (KEYS_PER_LANE * RT)

#include "attention_decode_gpu_lanes.cl"  /* sums_over_lanes */
#include "attention_decode_gpu_places.cl" /* row_place, addend_of, is_aligned */
#include "attention_decode_gpu_rows.cl"   /* slice_state, SLICES, ROW_LANES, PIECE */

#define VALUES_PER_LANE ((BN + SLICES - 1) / SLICES)

/* The queries' pieces in local memory: neighbours are those of neighbouring lanes. */
#define KEY_PIECES   (KEY_CHUNK / PIECE)
#define QUERY_PIECES (KEY_PER_LANE * KEY_PIECES * KEY_LANES)

/* --- 16 bytes of a row ------------------------------------------------------------ */

/* raw_1 is 16 bytes of elements of dtype 1, given x(n) that reads element n as bits;
   unpack_1 makes them reals. */
typedef ushort bits_1;
typedef ushort bits_2;
typedef uint bits_3;
typedef ulong bits_4;

#define raw_2(x) as_uint4((ushort8)(x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7)))
#define raw_1(x) raw_2(x)
#define raw_3(x) ((uint4)(x(0), x(1), x(2), x(3)))
#define raw_4(x) as_uint4((ulong2)(x(0), x(1)))

/* Word by word: of an array of four, clang keeps the whole in memory. */
static inline void
unpack_1(uint4 raw, real *x)
{
    const uint words[4] = {raw.s0, raw.s1, raw.s2, raw.s3};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const uint word = words[n];
        x[2 * n] = (real)vload_half(0, (const half *)&word);
        x[2 * n + 1] = (real)vload_half(1, (const half *)&word);
    }
}

static inline void
unpack_2(uint4 raw, real *x)
{
    const uint words[4] = {raw.s0, raw.s1, raw.s2, raw.s3};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        x[2 * n] = (real)as_float(words[n] << 16);
        x[2 * n + 1] = (real)as_float(words[n] & 0xffff0000u);
    }
}

static inline void
unpack_3(uint4 raw, real *x)
{
    x[0] = (real)as_float(raw.s0);
    x[1] = (real)as_float(raw.s1);
    x[2] = (real)as_float(raw.s2);
    x[3] = (real)as_float(raw.s3);
}

#if REAL64
static inline void
unpack_4(uint4 raw, real *x)
{
    x[0] = as_double(raw.lo);
    x[1] = as_double(raw.hi);
}
#endif

#define unpack_key   JOIN(unpack_, DTYPE)
#define unpack_value JOIN(unpack_, VALUE_DTYPE)

/* Chunk c of a row; zeros behind its end, where a lane has none. */
static inline uint4
load_key_chunk(__global const storage *row, ca_int64 column, int c)
{
#if WIDE_KEYS
    return c < KEY_CHUNKS ? ((__global const uint4 *)row)[c] : (uint4)0;
#else
    __global const JOIN(bits_, DTYPE) *bits = (__global const JOIN(bits_, DTYPE) *)row;
#define ELEMENT(n)                                                                     \
    (c * KEY_CHUNK + (n) < HEAD_E ? bits[(c * KEY_CHUNK + (n)) * column]               \
                                  : (JOIN(bits_, DTYPE))0)
    return JOIN(raw_, DTYPE)(ELEMENT);
#undef ELEMENT
#endif
}

static inline uint4
load_value_chunk(__global const value_storage *row, ca_int64 column, int c)
{
#if WIDE_VALUES
    return c < ROW_CHUNKS ? ((__global const uint4 *)row)[c] : (uint4)0;
#else
    __global const JOIN(bits_, VALUE_DTYPE) *bits =
        (__global const JOIN(bits_, VALUE_DTYPE) *)row;
#define ELEMENT(n)                                                                     \
    (c * CHUNK + (n) < HEAD_EV ? bits[(c * CHUNK + (n)) * column]                      \
                               : (JOIN(bits_, VALUE_DTYPE))0)
    return JOIN(raw_, VALUE_DTYPE)(ELEMENT);
#undef ELEMENT
#endif
}

/* x[k * KEY_PER_LANE + n]: chunk n of this lane, of key k of this lane. Keys from
   `count` on repeat the last one. */
static inline void
load_keys(uint4 *x, __global const storage *keys, const ca_view *view, int key,
          int lane, int count)
{
#pragma unroll
    for (int k = 0; k < KEYS_PER_LANE; k++) {
        __global const storage *row =
            keys + min(k * KEYS_AT_ONCE + key, count - 1) * view->row;
#pragma unroll
        for (int n = 0; n < KEY_PER_LANE; n++) {
            x[k * KEY_PER_LANE + n] =
                load_key_chunk(row, view->column, n * KEY_LANES + lane);
        }
    }
}

/* The same of the values of this slice. */
static inline void
load_values(uint4 *x, __global const value_storage *values, const ca_view *view,
            int slice, int lane, int count)
{
#pragma unroll
    for (int k = 0; k < VALUES_PER_LANE; k++) {
        __global const value_storage *row =
            values + min(k * SLICES + slice, count - 1) * view->row;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) {
            x[k * PER_LANE + n] =
                load_value_chunk(row, view->column, n * ROW_LANES + lane);
        }
    }
}

/* --- scores ----------------------------------------------------------------------- */

/* Element e of a query is in `queries` at the place of its piece, times the scale. */
static inline void
share_query(__local real_piece *queries, __global const storage *query, ca_int64 column,
            real scale)
{
    for (int p = (int)get_local_id(0); p < QUERY_PIECES; p += WG) {
        const int row = p / KEY_LANES;
        const int c = row / KEY_PIECES * KEY_LANES + p - row * KEY_LANES;
        const int e0 = c * KEY_CHUNK + row % KEY_PIECES * PIECE;
        real x[PIECE];
#pragma unroll
        for (int n = 0; n < PIECE; n++) {
            const int e = e0 + n;
            x[n] = e < HEAD_E ? load(query + e * column) * scale : REAL(0.0);
        }
        queries[p] = JOIN(vload, PIECE)(0, x);
    }
}

/* terms[k * RT + r]: what this lane's chunks of key k add to its product with row r. */
static inline void
multiply_keys(real *terms, const uint4 *keys, const __local real_piece *queries,
              int lane)
{
#pragma unroll
    for (int t = 0; t < TERMS; t++) {
        terms[t] = REAL(0.0);
    }
#pragma unroll
    for (int n = 0; n < KEY_PER_LANE; n++) {
        real x[KEYS_PER_LANE * KEY_CHUNK];
#pragma unroll
        for (int k = 0; k < KEYS_PER_LANE; k++) {
            unpack_key(keys[k * KEY_PER_LANE + n], x + k * KEY_CHUNK);
        }
#pragma unroll
        for (int r = 0; r < RT; r++) {
#pragma unroll
            for (int p = 0; p < KEY_PIECES; p++) {
                real q[PIECE];
                JOIN(vstore, PIECE)(
                    queries[r * QUERY_PIECES + (n * KEY_PIECES + p) * KEY_LANES + lane],
                    0, q);
#pragma unroll
                for (int k = 0; k < KEYS_PER_LANE; k++) {
#pragma unroll
                    for (int e = 0; e < PIECE; e++) {
                        terms[k * RT + r] = fma(x[k * KEY_CHUNK + p * PIECE + e], q[e],
                                                terms[k * RT + r]);
                    }
                }
            }
        }
    }
}

/* One of -inf that is attended to becomes no number: write_row takes rows without any
   score above it for rows without keys. */
static inline real
finish_score(const ca_attention_params *params, real score, real added)
{
#if SOFTCAP
    const real softcap = ca_softcap(params);
    score = tanh(score / softcap) * (softcap * SCORE_UNIT);
#endif
#if HAS_ADDENDS
    score += added;
#endif
    return added == -INFINITY ? added : score == -INFINITY ? NAN : score;
}

/* --- values ----------------------------------------------------------------------- */

/* All rows' scores of one key lie side by side. */
#if RT == 1
typedef real row_scores;
#elif REAL64
typedef JOIN(double, RT) row_scores;
#else
typedef JOIN(float, RT) row_scores;
#endif

/* The scores of this slice's key k; none where the block has no such key. */
static inline void
load_scores(real *x, const __local row_scores *scores, int k, int slice)
{
    const int j = k * SLICES + slice;
#if RT == 1
    x[0] = scores[min(j, BN - 1)];
#else
    JOIN(vstore, RT)(scores[min(j, BN - 1)], 0, x);
#endif
#if BN % SLICES || WG % ROW_LANES
#pragma unroll
    for (int r = 0; r < RT; r++) {
        x[r] = j < BN ? x[r] : -INFINITY;
    }
#endif
}

/* The softmax of each row goes on with this slice's keys of a block. A key without
   weight in all rows is passed over: its value, of a key that is masked, may be
   anything. */
static inline void
add_values(slice_state *state, const uint4 *values, const __local row_scores *scores,
           int slice)
{
    real highest[RT];
    real decay[RT];
    bool rises = false;
#pragma unroll
    for (int r = 0; r < RT; r++) {
        highest[r] = state->highest[r];
    }
#pragma unroll
    for (int k = 0; k < VALUES_PER_LANE; k++) {
        real x[RT];
        load_scores(x, scores, k, slice);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            highest[r] = x[r] > highest[r] ? x[r] : highest[r];
        }
    }
#pragma unroll
    for (int r = 0; r < RT; r++) {
        decay[r] = score_exp2(TO_LOG2(state->highest[r] - base_of(highest[r])));
        rises = rises || highest[r] > state->highest[r];
        state->highest[r] = highest[r];
        state->sum[r] *= decay[r];
    }
    if (rises) {
#pragma unroll
        for (int n = 0; n < RT * COLUMNS; n++) {
            state->columns[n] *= decay[n / COLUMNS];
        }
    }
#pragma unroll
    for (int k = 0; k < VALUES_PER_LANE; k++) {
        real weights[RT];
        bool weighs = false;
        load_scores(weights, scores, k, slice);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            weights[r] = score_exp2(TO_LOG2(weights[r] - base_of(highest[r])));
            weighs = weighs || weights[r] != REAL(0.0);
            state->sum[r] += weights[r];
        }
        if (!weighs) {
            continue;
        }
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) {
            real x[CHUNK];
            unpack_value(values[k * PER_LANE + n], x);
#pragma unroll
            for (int r = 0; r < RT; r++) {
#pragma unroll
                for (int e = 0; e < CHUNK; e++) {
                    real *sum = &state->columns[r * COLUMNS + n * CHUNK + e];
                    *sum = fma(weights[r], x[e], *sum);
                }
            }
        }
    }
}

#endif
