/* SPDX-License-Identifier: MIT
 *
 * The steps of attention_decode.cl on a block of keys: scores, what is added to them,
 * the product with the values. Its own macros, which it describes, have their
 * defaults here.
 */
#ifndef CLATTN_ATTENTION_DECODE_STEPS_CL
#define CLATTN_ATTENTION_DECODE_STEPS_CL

#include "attention_decode_rows.cl" /* COLUMN, EV_CHUNKS */
#include "attention_keys.cl"        /* SCORE_UNIT */
#include "lanes.cl"

#ifndef KEYS_ADJOIN
#define KEYS_ADJOIN 0
#endif
#ifndef RT
#define RT 1
#endif
#ifndef BN
#define BN 128 /* their keys and values stay in the L2 cache */
#endif

#define ROWS (8 * RT) /* of a work-item at most; the host's plan knows it too */

/* Columns whose sums stay in registers, for RT rows each. */
#define CT (RT <= 2 ? 8 : 4)

#define E_CHUNKS ((HEAD_E + LANES - 1) / LANES)
#define EV_PARTS ((EV_CHUNKS + CT - 1) / CT)
#define PART     ((EV_CHUNKS + EV_PARTS - 1) / EV_PARTS)
#define EV_SLOTS (EV_PARTS * PART) /* chunks after the last one repeat it */

/* Keys whose values are taken together, where that is in parts. */
#define VALUES_AT_ONCE (EV_PARTS > 1 ? 16 : BN)

/* One row: where its mask and bias are, which keys it may see, its softmax so far. */
typedef struct {
    ca_int64 batch[CA_BATCH_DIMS];
    ca_int64 i;
    __global const mask_storage *mask;
    __global const storage *bias;
    ca_int64 first; /* keys first … last */
    ca_int64 last;
    real highest; /* score */
    real sum;     /* of the weights */
} decode_row;

static inline real
highest_lane(realv x)
{
    real lanes[LANES];
    WIDE(vstore)(x, 0, lanes);
    real highest = lanes[0];
#pragma unroll
    for (int n = 1; n < LANES; n++) {
        highest = lanes[n] > highest ? lanes[n] : highest;
    }
    return highest;
}

static inline real
sum_of_lanes(realv x)
{
    real lanes[LANES];
    WIDE(vstore)(x, 0, lanes);
    real sum = REAL(0.0);
#pragma unroll
    for (int n = 0; n < LANES; n++) {
        sum += lanes[n];
    }
    return sum;
}

/* Lane k of the result is the sum of x[k]'s lanes, in LANES - 1 folds of two vectors
   into one. */
static inline realv
sums_of_lanes(realv *x)
{
#pragma unroll
    for (int count = LANES / 2; count > 0; count /= 2) {
#pragma unroll
        for (int n = 0; n < count; n++) {
            x[n] = INTERLEAVE_LOW(x[n], x[n + count]) +
                   INTERLEAVE_HIGH(x[n], x[n + count]);
        }
    }
    return x[0];
}

/* queries[n * RT] is chunk n of a row, scaled. What the last chunk shares with the one
   before is 0 there. */
static inline void
load_query(realv *queries, __global const storage *query, const ca_view *view,
           real scale)
{
    for (int n = 0; n < E_CHUNKS; n++) {
        real chunk[LANES];
        for (int k = 0; k < LANES; k++) {
            const int e = COLUMN(n, HEAD_E) + k;
            chunk[k] = e < n * LANES ? REAL(0.0) : load(query + e * view->column);
        }
        queries[n * RT] = WIDE(vload)(0, chunk) * scale;
    }
}

/* Chunk n of a key. */
static inline realv
load_key(__global const storage *key, int n)
{
    const realv x = load_lanes(key + COLUMN(n, HEAD_E));
#if HEAD_E % LANES
    if (n == E_CHUNKS - 1) { /* not a product with 0, which a NaN would survive */
        const intv seen = lane_indices() >= (realv)(LANES - HEAD_E % LANES);
        return as_realv(as_intv(x) & seen);
    }
#endif
    return x;
}

/* scores[r] of LANES keys from `key`, of which `present` exist; the others repeat the
   last one. One key after the other, though their sums could be interleaved: memory is
   read at full speed only in its order. */
static inline void
score_lanes(realv *scores, const realv *queries, __global const storage *key,
            ca_int64 stride, int present)
{
    realv products[RT * LANES];
#if KEYS_ADJOIN
    stride = HEAD_E;
#endif
#pragma unroll 1
    for (int k = 0; k < LANES; k++) {
        __global const storage *key_k = key + min(k, present - 1) * stride;
        realv sums[RT];
#pragma unroll
        for (int r = 0; r < RT; r++) {
            sums[r] = (realv)REAL(0.0);
        }
#pragma unroll
        for (int n = 0; n < E_CHUNKS; n++) {
            const realv x = load_key(key_k, n);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                sums[r] = fma(x, queries[n * RT + r], sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < RT; r++) {
            products[r * LANES + k] = sums[r];
        }
    }
#pragma unroll
    for (int r = 0; r < RT; r++) {
        scores[r] = sums_of_lanes(products + r * LANES);
    }
}

#if HAS_ADDENDS
/* added[n] is what mask and bias add to keys j0 + n * LANES on, -inf after the last of
   them; false if all are excluded. */
static inline bool
load_addends(realv *added, const attention_call *call, const decode_row *row,
             ca_int64 j0, int keys)
{
    const ca_attention_params *params = call->params;
    const ca_int64 mask_column = params->mask.column;
    const ca_int64 bias_column = params->bias.column;
    /* keys from a short mask's end on are excluded, and are not in it */
    const int here = (int)clamp(row->last + 1 - j0, (ca_int64)0, (ca_int64)keys);
    intv attends = (intv)0;
    for (int k = 0; k < keys; k += LANES) {
        realv sum;
        const bool whole = k + LANES <= here;
        real lanes[LANES];
        for (int n = 0; n < LANES; n++) {
            lanes[n] = k + n < here ? REAL(0.0) : -INFINITY;
        }
        sum = WIDE(vload)(0, lanes);
#if HAS_MASK
        if (whole && mask_column == 1) {
            sum = load_mask_lanes(row->mask + j0 + k, ca_filter(params));
        } else {
            for (int n = 0; n < min(LANES, here - k); n++) {
                lanes[n] = load_mask(row->mask + (j0 + k + n) * mask_column,
                                     ca_filter(params));
            }
            sum = WIDE(vload)(0, lanes);
        }
#endif
#if BIAS
        if (whole && bias_column == 1) {
            sum = add_addends_lanes(sum, load_lanes(row->bias + j0 + k));
        } else {
            for (int n = 0; n < min(LANES, here - k); n++) {
                lanes[n] = load(row->bias + (j0 + k + n) * bias_column);
            }
            sum = add_addends_lanes(sum, WIDE(vload)(0, lanes));
        }
#endif
        added[k / LANES] = sum;
        attends |= as_intv(sum) ^ as_intv((realv)(-INFINITY));
    }
    return any_lane(attends);
}
#endif

/* result[r] = result[r] * decay[r] + sum_j weights[r][j] * value[j]. Where the columns
   are taken in parts, a few keys' parts follow each other: memory is read at full speed
   only in its order. */
static inline void
add_values(realv *result, const realv *decay, const realv *weights,
           __global const value_storage *value, ca_int64 stride, int keys)
{
    realv sums[RT * EV_SLOTS];
#pragma unroll
    for (int n = 0; n < RT * EV_SLOTS; n++) {
        sums[n] = (realv)REAL(0.0);
    }
    for (int j0 = 0; j0 < keys; j0 += VALUES_AT_ONCE) {
        const int end = min(j0 + VALUES_AT_ONCE, keys);
#pragma unroll
        for (int p = 0; p < EV_PARTS; p++) {
            realv part[RT * PART];
#pragma unroll
            for (int n = 0; n < RT * PART; n++) {
                part[n] = sums[p * RT * PART + n];
            }
            for (int j = j0; j < end; j++) {
                __global const value_storage *row = value + j * stride;
#pragma unroll
                for (int n = 0; n < PART; n++) {
                    const int chunk = min(p * PART + n, EV_CHUNKS - 1);
                    const realv x = load_value_lanes(row + COLUMN(chunk, HEAD_EV));
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        const real weight = ((const real *)weights)[r * BN + j];
                        part[r * PART + n] = fma((realv)weight, x, part[r * PART + n]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < RT * PART; n++) {
                sums[p * RT * PART + n] = part[n];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < RT * EV_SLOTS; n++) {
        const int r = n / PART % RT;
        realv *slot = &result[r * EV_SLOTS + n / (RT * PART) * PART + n % PART];
        *slot = fma(*slot, decay[r], sums[n]);
    }
}

#endif
