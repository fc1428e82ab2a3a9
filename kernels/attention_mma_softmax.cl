/* SPDX-License-Identifier: MIT
 *
 * The online softmax of attention_mma.cl, on fragments: a lane holds 2 rows of each tile
 * of 16, and of every 8 keys two, which the other lanes of its four complete.
 */
#ifndef CLATTN_ATTENTION_MMA_SOFTMAX_CL
#define CLATTN_ATTENTION_MMA_SOFTMAX_CL

#include "attention_keys.cl"      /* TO_LOG2, TO_NATURAL, SCORE_UNIT */
#include "attention_mma_tiles.cl" /* MT, HEAD_EV */
#include "warp.cl"

#ifndef LSE
#define LSE 0
#endif
#ifndef CHUNK
#define CHUNK 16
#endif

#define WORD_OF_ONES (DTYPE == CA_KERNEL_BFLOAT16 ? 0x3f803f80u : 0x3c003c00u)

#define ROWS      (2 * MT)    /* of a lane: g and g + 8 of each tile */
#define KEY_TILES (CHUNK / 8) /* of 8 keys, in a chunk */
#ifndef EV_TILES
#define EV_TILES (HEAD_EV / 8) /* of 8 columns */
#endif

/* Scores as they come from the product, which the exponent scales: where nothing is
   done to them before. */
#define SCALED_LATE (!SOFTCAP && !MASK_ADDS && !FILTER && !BIAS)

/* Where the sign of the scale would turn the order of such scores, it goes into the
   queries: what a word of two numbers is joined with. */
#define SIGNS 0x80008000u

/* Weights are 2^(score - base): the base need not be the highest score so far, only not
   far below it, so it is raised, and all sums with it, when a score exceeds it by
   HEADROOM. Weights have to stay within half's range. */
#define HEADROOM 8.0f

/* The rows of a lane, in order. What is added to a base to be the lowest float keeps
   its exponent finite. */
typedef struct {
    float base[ROWS];
    float sum[ROWS];    /* LSE: of this lane's weights */
    float4 rounded[MT]; /* of all weights as they are multiplied, as a product's tile */
    uint seen;          /* bit r: row r attends to a key of this lane */
} softmax_state;

static inline void
start_softmax(softmax_state *softmax)
{
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        softmax->base[r] = -FLT_MAX;
        softmax->sum[r] = 0.0f;
    }
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        softmax->rounded[m] = (float4)0.0f;
    }
    softmax->seen = 0u;
}

/* tanh, by an odd polynomial near 0 (Cephes') where the other form, (1 - q) / (1 + q)
   with q = exp(-2 |x|), cancels. */
static inline float
cap_score(float x)
{
    const float size = fabs(x);
    const float q = warp_exp2(size * (-2.0f * LOG2_E));
    const float z = x * x;
    float p = fma(-5.70498873e-3f, z, 2.06390888e-2f);
    p = fma(p, z, -5.37397156e-2f);
    p = fma(p, z, 0.133314422f);
    p = fma(p, z, -0.333332819f);
    return size < 0.625f ? fma(x * z, p, x) : copysign((1.0f - q) / (1.0f + q), x);
}

static inline float
scale_score(const ca_attention_params *params, float score)
{
#if SOFTCAP
    const float softcap = ca_softcap(params);
    return cap_score(score * ca_scale(params) / softcap) * (softcap * SCORE_UNIT);
#elif SCALED_LATE
    return score;
#else
    return score * ca_scale(params);
#endif
}

static inline void
scale_scores(const ca_attention_params *params, float4 (*scores)[KEY_TILES])
{
#if !SCALED_LATE
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        WARP_UNROLL
        for (int n = 0; n < KEY_TILES; n++) {
            float4 *x = &scores[m][n];
            *x = (float4)(scale_score(params, x->x), scale_score(params, x->y),
                          scale_score(params, x->z), scale_score(params, x->w));
        }
    }
#endif
}

/* What a score is in the unit of bases. */
static inline float
height_of(float score, float factor)
{
    return SCALED_LATE ? score * factor : score;
}

static inline float
weight_of(float score, float factor, float base)
{
#if SCALED_LATE
    return warp_exp2(fma(score, factor, -base));
#else
    return warp_exp2(TO_LOG2(score - base));
#endif
}

/* Rows g of a tile have the first two numbers of a lane, rows g + 8 the last two. */
static inline float4
scale_rows(float4 x, float low, float high)
{
    return (float4)(x.x * low, x.y * low, x.z * high, x.w * high);
}

/* Raise each row's base to the highest score so far; `highest` is this lane's. */
static inline void
raise_bases(const warp_state *warp, softmax_state *softmax, const float *highest,
            float4 (*result)[EV_TILES])
{
    float decay[ROWS];
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        float high = fmax(highest[r], softmax->base[r]);
        high = fmax(high, warp_exchange(warp, high, 1u));
        high = fmax(high, warp_exchange(warp, high, 2u));
        decay[r] = warp_exp2(TO_LOG2(softmax->base[r] - high));
        softmax->base[r] = high;
        softmax->sum[r] *= decay[r];
    }
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        const float low = decay[2 * m];
        const float high = decay[2 * m + 1];
        softmax->rounded[m] = scale_rows(softmax->rounded[m], low, high);
        WARP_UNROLL
        for (int c = 0; c < EV_TILES; c++) {
            result[m][c] = scale_rows(result[m][c], low, high);
        }
    }
}

/* Replace the scores of a chunk by their weights. */
static inline void
weigh_scores(const warp_state *warp, softmax_state *softmax,
             float4 (*scores)[KEY_TILES], float factor, float4 (*result)[EV_TILES])
{
    float highest[ROWS];
    bool too_high = false;
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        float4 high = scores[m][0];
        WARP_UNROLL
        for (int n = 1; n < KEY_TILES; n++) {
            high = fmax(high, scores[m][n]);
        }
        highest[2 * m] = height_of(fmax(high.x, high.y), factor);
        highest[2 * m + 1] = height_of(fmax(high.z, high.w), factor);
    }
    WARP_UNROLL
    for (int r = 0; r < ROWS; r++) {
        too_high |= highest[r] > softmax->base[r] + HEADROOM;
    }
    if (warp_any(warp, too_high)) {
        raise_bases(warp, softmax, highest, result);
    }
    WARP_UNROLL
    for (int m = 0; m < MT; m++) {
        const float low = softmax->base[2 * m];
        const float high = softmax->base[2 * m + 1];
        float4 sum = (float4)0.0f; /* of these keys alone: short sums round less */
        WARP_UNROLL
        for (int n = 0; n < KEY_TILES; n++) {
            float4 *x = &scores[m][n];
            x->x = weight_of(x->x, factor, low);
            x->y = weight_of(x->y, factor, low);
            x->z = weight_of(x->z, factor, high);
            x->w = weight_of(x->w, factor, high);
            sum += *x;
        }
#if LSE
        softmax->sum[2 * m] += sum.x + sum.y;
        softmax->sum[2 * m + 1] += sum.z + sum.w;
#endif
    }
}

/* A tile's weights of 16 keys as a factor of the product with their values, and their
   sums. */
static inline uint4
round_weights(const warp_state *warp, softmax_state *softmax, int tile, float4 low,
              float4 high)
{
    const uint4 weights = (uint4)(warp_pack(low.x, low.y), warp_pack(low.z, low.w),
                                  warp_pack(high.x, high.y), warp_pack(high.z, high.w));
    softmax->rounded[tile] =
        warp_multiply(warp, softmax->rounded[tile], weights, (uint2)WORD_OF_ONES);
    return weights;
}

/* x of a lane's four, joined. */
static inline float
sum_of_four(const warp_state *warp, float x)
{
    x += warp_exchange(warp, x, 1u);
    return x + warp_exchange(warp, x, 2u);
}

#endif
