/* SPDX-License-Identifier: MIT
 *
 * From products to scores in attention_mma.cl: scale, softcap, what masks add and which
 * keys they and the band exclude.
 */
#ifndef CLATTN_ATTENTION_MMA_SCORES_CL
#define CLATTN_ATTENTION_MMA_SCORES_CL

#include "attention_mma_softmax.cl" /* SCALED_LATE, cap_score, softmax_state */

/* Mask and bias of one row, if there are any. */
typedef struct {
    __global const mask_storage *mask;
    __global const storage *bias;
} addends_row;

static inline addends_row
addends_at(const mma_tile *tile, int row)
{
    const attention_call *call = tile->call;
    int last = tile->rows - 1;
#if HAS_ADDENDS
    WARP_COMPUTE_AGAIN(last);
#endif
    const ca_int64 i = tile->i0 + min(row, last);
    addends_row addends;
    addends.mask = call->mask + ca_offset(&call->params->mask, tile->batch, i, 0);
    addends.bias = call->bias + ca_offset(&call->params->bias, tile->batch, i, 0);
    return addends;
}

/* What they add to the score of key j, which the row may see; -inf excludes. */
static inline float
addend_of(const attention_call *call, const addends_row *row, int j)
{
    const ca_attention_params *params = call->params;
    float addend = 0.0f;
#if HAS_MASK
    addend = load_mask(row->mask + j * params->mask.column, ca_filter(params));
#endif
#if BIAS
    addend = add_addends(addend, load(row->bias + j * params->bias.column));
#endif
    return addend;
}

/* A key's score, with what is added to it where the band lets it be seen: -inf where it
   is excluded. */
static inline float
finish_score(const attention_call *call, const addends_row *addends, int j,
             bool in_band, float score, bool *seen)
{
#if HAS_ADDENDS
    float addend = -INFINITY;
    if (in_band) {
        addend = addend_of(call, addends, j);
    }
    in_band = addend != -INFINITY;
    score += addend;
#endif
    *seen = *seen || in_band;
    return in_band ? score : -INFINITY;
}

/* Scores of keys j … j + CHUNK - 1 and the warp's rows, the first of which is i. */
static inline void
finish_scores(const mma_tile *tile, const mma_lane *lane, int i, int j,
              float4 (*scores)[KEY_TILES], softmax_state *softmax)
{
    scale_scores(tile->call->params, scores);
    if (!HAS_ADDENDS && j + CHUNK <= tile->end && j + CHUNK - 1 <= i + tile->upper &&
        j >= i + WARP_ROWS - 1 + tile->lower) {
        softmax->seen = ~0u;
        return;
    }
    /* From the lane's first key to the bounds of its first row; those of other keys and
       rows differ by constants. */
    const int key = j + lane->column;
    const int lowest = tile->i0 + lane->row + tile->lower - key;
    const int highest = tile->i0 + lane->row + tile->upper - key;
    const int end = tile->end - key;
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        const addends_row addends = addends_at(tile, lane->row + 8 * r);
        bool seen = false;
        WARP_UNROLL
        for (int n = 0; n < KEY_TILES; n++) {
            float4 *x = &scores[r / 2][n];
            float pair[2] = {r % 2 == 0 ? x->x : x->z, r % 2 == 0 ? x->y : x->w};
            WARP_UNROLL
            for (int k = 0; k < 2; k++) {
                const int step = 8 * n + k - 8 * r;
                const bool in_band =
                    lowest <= step && step <= highest && 8 * n + k < end;
                pair[k] = finish_score(tile->call, &addends, key + 8 * n + k, in_band,
                                       pair[k], &seen);
            }
            *x = r % 2 == 0 ? (float4)(pair[0], pair[1], x->zw)
                            : (float4)(x->xy, pair[0], pair[1]);
        }
        softmax->seen |= seen ? 1u << r : 0u;
    }
}

#endif
