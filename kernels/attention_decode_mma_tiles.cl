/* SPDX-License-Identifier: MIT
 *
 * What attention_decode_mma.cl loads of keys and values, and multiplies as it comes from
 * memory.
 */
#ifndef CLATTN_ATTENTION_DECODE_MMA_TILES_CL
#define CLATTN_ATTENTION_DECODE_MMA_TILES_CL

#include "common.cl"

#define TILE_ROWS   16
#define KEY_LOADS   ((HEAD_E + 31) / 32)  /* of a lane, for each of its keys */
#define VALUE_LOADS ((HEAD_EV + 63) / 64) /* for each of its values */
#define EV_TILES    (8 * VALUE_LOADS)     /* of 8 columns */

#include "attention_decode_gpu_places.cl" /* row_place */
#include "attention_mma_softmax.cl"       /* round_weights */
#include "warp.cl"

/* The keys of the group's part, and what this lane reads of them. */
typedef struct {
    const attention_call *call;
    const __local row_place *places; /* of the rows */
    __global const storage *keys;
    __global const storage *values;
    ca_int64 start; /* the first key's number */
    int count;
    int g;
    int t;
} part_source;

/* Chunk `chunk` of a row; zeros behind its end. */
static inline uint4
load_chunk(__global const storage *row, int chunk, int columns)
{
    return chunk * 8 < columns ? ((__global const uint4 *)row)[chunk] : (uint4)0u;
}

/* The lane's keys of the 16 from j on. Those behind the end repeat the last one. */
static inline void
load_keys(uint4 (*keys)[KEY_LOADS], const part_source *part, int j)
{
    const ca_attention_params *params = part->call->params;
    WARP_UNROLL
    for (int k = 0; k < 2; k++) {
        const int key = min(j + part->g + 8 * k, part->count - 1);
        __global const storage *row = part->keys + key * params->key.row;
        WARP_UNROLL
        for (int n = 0; n < KEY_LOADS; n++) {
            keys[k][n] = load_chunk(row, part->t + 4 * n, HEAD_E);
        }
    }
}

/* The number, from j on, of a lane's key n: the columns of scores that it has. */
static inline int
key_of(const part_source *part, int n)
{
    return 2 * part->t + n % 2 + n / 2 * 8;
}

/* The values of these keys. */
static inline void
load_values(uint4 (*values)[VALUE_LOADS], const part_source *part, int j)
{
    const ca_attention_params *params = part->call->params;
    WARP_UNROLL
    for (int k = 0; k < 4; k++) {
        const int key = min(j + key_of(part, k), part->count - 1);
        __global const storage *row = part->values + key * params->value.row;
        WARP_UNROLL
        for (int n = 0; n < VALUE_LOADS; n++) {
            values[k][n] = load_chunk(row, part->g + 8 * n, HEAD_EV);
        }
    }
}

/* Products of the rows and 16 keys. */
static inline void
multiply_keys(const warp_state *warp, __local const uint4 *queries,
              uint4 (*keys)[KEY_LOADS], float4 *scores)
{
    scores[0] = (float4)0.0f;
    scores[1] = (float4)0.0f;
    WARP_UNROLL
    for (int n = 0; n < KEY_LOADS; n++) {
        const uint4 low = queries[2 * n * WARP_LANES + warp->lane];
        const uint4 high = queries[(2 * n + 1) * WARP_LANES + warp->lane];
        const uint4 a0 = (uint4)(low.x, high.x, low.y, high.y);
        const uint4 a1 = (uint4)(low.z, high.z, low.w, high.w);
        WARP_UNROLL
        for (int k = 0; k < 2; k++) {
            scores[k] = warp_multiply(warp, scores[k], a0, keys[k][n].xy);
            scores[k] = warp_multiply(warp, scores[k], a1, keys[k][n].zw);
        }
    }
}

/* Column c of 8 in two rows, in a word. */
static inline uint
pair_of(uint4 low, uint4 high, int c)
{
    const uint a[4] = {low.x, low.y, low.z, low.w};
    const uint b[4] = {high.x, high.y, high.z, high.w};
    return c % 2 == 0 ? warp_lower_halves(a[c / 2], b[c / 2])
                      : warp_upper_halves(a[c / 2], b[c / 2]);
}

/* result += weights * values of 16 keys. Values that no row attends to may be anything,
   so zeros are multiplied instead. */
static inline void
multiply_values(const warp_state *warp, uint4 (*values)[VALUE_LOADS], uint used,
                const float4 *weights, softmax_state *softmax, float4 *result)
{
    const uint4 a = round_weights(warp, softmax, 0, weights[0], weights[1]);
    if (used != 15u) {
        WARP_UNROLL
        for (int k = 0; k < 4; k++) {
            WARP_UNROLL
            for (int n = 0; n < VALUE_LOADS; n++) {
                values[k][n] = used >> k & 1u ? values[k][n] : (uint4)0u;
            }
        }
    }
    WARP_UNROLL
    for (int c = 0; c < EV_TILES; c++) {
        const int n = c / 8;
        const uint2 b = (uint2)(pair_of(values[0][n], values[1][n], c % 8),
                                pair_of(values[2][n], values[3][n], c % 8));
        result[c] = warp_multiply(warp, result[c], a, b);
    }
}

#endif
