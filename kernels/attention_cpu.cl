/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: queries in vector lanes.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM), local size 1
 *     work-item    BM = NV * LANES rows of one batch, all their keys, online softmax
 *
 * One vector holds one number of LANES rows, so the softmax needs no step across lanes:
 *
 *     queries  [E][NV]   scaled; a score is a sum of key[j][e] * queries[e]
 *     weights  [BN][NV]  exp2 of the scores of one block of keys
 *     result   [Ev][NV]  unnormalised, a sum of value[j][c] * weights[j]
 *
 * Both products keep about 2 * 12 vectors of sums in registers over their inner loop.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DSOFTCAP           0 or 1
 *     -DKEY_DIRECT        1: keys are `real` and contiguous (key.column 1, key.row E)
 *     -DVALUE_DIRECT      1: values are `real` with value.column 1
 *     -DNV                vectors of queries: 2, or 1 where L <= LANES
 *     -DMR                keys scored together: 12, or 16 of one vector of queries each,
 *                         or 6 where there are 16 registers
 *     -DBN                keys in a block, a multiple of MR
 *     LANES (lanes.cl), DTYPE, MASK (common.cl)
 */
#include "attention_cpu_tiles.cl" /* the macros' defaults, load_… and store_… */
#include "attention_row.cl"       /* attention_row */

/* Result columns summed together: Ev cut into equal parts of at most MR + 1. */
#define PARTS   ((HEAD_EV + MR) / (MR + 1))
#define COLUMNS ((HEAD_EV + PARTS - 1) / PARTS)

/* Scores are in units of log 2, so that exp2 needs no factor; but natural under a float
   mask, so that adding the lowest float does not overflow to -inf. */
#if HAS_FLOAT_MASK
#define SCORE_UNIT    REAL(1.0) /* what a natural score is multiplied by */
#define TO_LOG2(x)    ((x) * LOG2_E)
#define TO_NATURAL(x) (x)
#else
#define SCORE_UNIT    LOG2_E
#define TO_LOG2(x)    (x)
#define TO_NATURAL(x) ((x) * LN_2)
#endif

/* --- the two products ------------------------------------------------------------- */

#define UNROLL _Pragma("unroll") /* as #pragma cannot stand in a macro */

/* scores[k][v] = sum_e key[k][e] * queries[e][v] for MR keys, in either address space.
   Sums of many terms are made of shorter ones, which round less. */
#define DOT_PART 128
#define DEFINE_DOT_KEYS(name, address_space)                                           \
    static inline void name(realv *scores, const realv *queries,                       \
                            address_space const real *key)                             \
    {                                                                                  \
        UNROLL for (int n = 0; n < MR * NV; n++)                                       \
        {                                                                              \
            scores[n] = (realv)REAL(0.0);                                              \
        }                                                                              \
        for (int e0 = 0; e0 < HEAD_E; e0 += DOT_PART) {                                \
            realv sums[MR * NV];                                                       \
            UNROLL for (int n = 0; n < MR * NV; n++)                                   \
            {                                                                          \
                sums[n] = (realv)REAL(0.0);                                            \
            }                                                                          \
            for (int e = e0; e < min(e0 + DOT_PART, HEAD_E); e++) {                    \
                UNROLL for (int n = 0; n < MR * NV; n++)                               \
                {                                                                      \
                    sums[n] = fma((realv)key[n / NV * HEAD_E + e],                     \
                                  queries[e * NV + n % NV], sums[n]);                  \
                }                                                                      \
            }                                                                          \
            UNROLL for (int n = 0; n < MR * NV; n++)                                   \
            {                                                                          \
                scores[n] += sums[n];                                                  \
            }                                                                          \
        }                                                                              \
    }

DEFINE_DOT_KEYS(dot_packed_keys, __private)
#if KEY_DIRECT
DEFINE_DOT_KEYS(dot_keys, __global)
#endif

#if VALUE_DIRECT
typedef __global const real *value_rows;
#else
typedef const real *value_rows;
#endif

/* result[c][v] += sum_j value[j][c] * weights[j][v] for so many columns c; a macro, as
   the sums stay in registers only where that is a constant. */
#define DEFINE_ADD_VALUES(name, columns)                                               \
    static inline void name(realv *result, const realv *weights, value_rows value,     \
                            ca_int64 stride, int keys)                                 \
    {                                                                                  \
        realv sums[(columns) * NV];                                                    \
        UNROLL for (int n = 0; n < (columns) * NV; n++)                                \
        {                                                                              \
            sums[n] = (realv)REAL(0.0);                                                \
        }                                                                              \
        for (int j = 0; j < keys; j++) {                                               \
            UNROLL for (int n = 0; n < (columns) * NV; n++)                            \
            {                                                                          \
                sums[n] = fma((realv)value[j * stride + n / NV],                       \
                              weights[j * NV + n % NV], sums[n]);                      \
            }                                                                          \
        }                                                                              \
        UNROLL for (int n = 0; n < (columns) * NV; n++)                                \
        {                                                                              \
            result[n] += sums[n];                                                      \
        }                                                                              \
    }

DEFINE_ADD_VALUES(add_values, COLUMNS)
#if HEAD_EV % COLUMNS
DEFINE_ADD_VALUES(add_last_values, HEAD_EV % COLUMNS)
#endif

/* --- softmax ---------------------------------------------------------------------- */

/* Weights are exp2(score - base): base need not be the highest score so far, only not
   far below it, so it is raised, and all sums with it, when a score exceeds it by
   HEADROOM. */
#define HEADROOM REAL(4.0)

typedef struct {
    realv base[NV];
    realv limit[NV]; /* base + HEADROOM; -inf, and base 0, before the first key */
    realv sum[NV];   /* of the weights of earlier blocks */
    realv block[NV]; /* and of this one */
} softmax_state;

static inline void
raise_base(softmax_state *softmax, const realv *highest, realv *weights, int count,
           realv *result)
{
    for (int v = 0; v < NV; v++) {
        const intv fresh = softmax->limit[v] == (realv)(-INFINITY);
        const realv old = fresh ? (realv)(-INFINITY) : softmax->base[v];
        const realv raised = larger(highest[v], old);
        const realv base = raised == (realv)(-INFINITY) ? (realv)REAL(0.0) : raised;
        const realv decay = exp2_lanes(TO_LOG2(old - base));
        softmax->base[v] = base;
        softmax->limit[v] = raised + HEADROOM;
        softmax->sum[v] *= decay;
        softmax->block[v] *= decay;
        for (int n = v; n < count; n += NV) {
            weights[n] *= decay;
        }
        for (int c = 0; c < HEAD_EV; c++) {
            result[c * NV + v] *= decay;
        }
    }
}

/* --- the kernel ------------------------------------------------------------------- */

/* BM rows of one batch, and the keys they see: first … last. */
typedef struct {
    const ca_attention_params *params;
    __global const storage *key; /* row 0 */
    ca_int64 i0;
    int rows;
    ca_int64 first;
    ca_int64 last;
} tile_state;

/* scores[k][v] of keys j … j + MR - 1, -inf where excluded; `added` is the mask. */
static inline void
score_keys(const tile_state *tile, const realv *queries, const realv *added, ca_int64 j,
           realv *scores)
{
    const ca_attention_params *params = tile->params;
#if KEY_DIRECT
    if (j + MR <= params->S) {
        dot_keys(scores, queries, tile->key + j * HEAD_E);
    } else
#endif
    {
        real packed[MR * HEAD_E];
        const int present = (int)min((ca_int64)MR, params->S - j);
        pack_rows(packed, tile->key, &params->key, j, present, HEAD_E);
        for (int n = present * HEAD_E; n < MR * HEAD_E; n++) {
            packed[n] = REAL(0.0);
        }
        dot_packed_keys(scores, queries, packed);
    }
#if SOFTCAP
    const real softcap = ca_softcap(params);
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        scores[n] = tanh_lanes(scores[n] / softcap) * (softcap * SCORE_UNIT);
    }
#endif
#if HAS_MASK
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        scores[n] = added[n] == (realv)(-INFINITY) ? added[n] : scores[n] + added[n];
    }
#endif
    /* Key j + k is in the band of lanes k - above … k - below. */
    const ca_int64 above = tile->i0 + params->upper - j;
    const ca_int64 below = tile->i0 + params->lower - j;
    if (above < MR - 1 || below > 1 - BM) {
        const realv lanes = lane_indices();
        const realv low = (realv)(-(real)clamp(above, (ca_int64)-BM, (ca_int64)MR));
        const realv high = (realv)(-(real)clamp(below, (ca_int64)-BM, (ca_int64)MR));
#pragma unroll
        for (int n = 0; n < MR * NV; n++) {
            const realv lane = lanes + (realv)(n % NV * LANES - n / NV);
            const intv attends = (lane >= low) & (lane <= high);
            scores[n] = attends ? scores[n] : (realv)(-INFINITY);
        }
    }
    if (j + MR > params->S) {
#pragma unroll
        for (int n = 0; n < MR * NV; n++) {
            if (j + n / NV >= params->S) {
                scores[n] = (realv)(-INFINITY);
            }
        }
    }
}

/* weights[k][v] = exp2(scores[k][v] - base[v]) for MR keys, of which `before` came
   before in this block. */
static inline void
weigh_scores(softmax_state *softmax, const realv *scores, realv *weights, int before,
             realv *result)
{
    intv too_high = (intv)0;
    realv highest[NV];
#pragma unroll
    for (int v = 0; v < NV; v++) {
        highest[v] = scores[v];
#pragma unroll
        for (int k = 1; k < MR; k++) {
            highest[v] = larger(scores[k * NV + v], highest[v]);
        }
        too_high |= highest[v] > softmax->limit[v];
    }
    if (any_lane(too_high)) {
        raise_base(softmax, highest, weights, before * NV, result);
    }
    weights += before * NV;
    realv sums[NV]; /* of these keys alone: short sums round less */
#pragma unroll
    for (int n = 0; n < MR * NV; n++) {
        weights[n] = exp2_lanes(TO_LOG2(scores[n] - softmax->base[n % NV]));
        sums[n % NV] = n < NV ? weights[n] : sums[n % NV] + weights[n];
    }
#pragma unroll
    for (int v = 0; v < NV; v++) {
        softmax->block[v] += sums[v];
    }
}

/* result[c][v] += weights * values of a block of keys from j0. */
static inline void
add_block(const ca_attention_params *params, __global const storage *value, ca_int64 j0,
          int keys, const realv *weights, realv *result)
{
#if VALUE_DIRECT
    value_rows block = value + j0 * params->value.row;
    const ca_int64 stride = params->value.row;
#else
    real block[BN * HEAD_EV];
    const ca_int64 stride = HEAD_EV;
    pack_rows(block, value, &params->value, j0, keys, HEAD_EV);
#endif
    int c = 0;
    for (; c + COLUMNS <= HEAD_EV; c += COLUMNS) {
        add_values(result + c * NV, weights, block + c, stride, keys);
    }
#if HEAD_EV % COLUMNS
    add_last_values(result + c * NV, weights, block + c, stride, keys);
#endif
}

/* Divides by the sums and marks the rows that attention_row has to redo, by other than 0
   in redo[lane]. Where keys are excluded: a row that is not finite, since it may have met
   a NaN or infinity of an excluded key, as 0 * NaN; and one whose sum is 0, of no keys or
   of scores of -inf only. Elsewhere: a row with an infinity, as a lagging base makes sums
   overflow too early. */
static inline void
normalise(const softmax_state *softmax, bool excluding, realv *result, real *redo)
{
    for (int v = 0; v < NV; v++) {
        const realv inverse = REAL(1.0) / softmax->sum[v];
        realv nonzero = excluding ? inverse * REAL(0.0) : (realv)REAL(0.0);
        for (int c = 0; c < HEAD_EV; c++) {
            const realv x = result[c * NV + v] * inverse;
            result[c * NV + v] = x;
            const realv infinite = fabs(x) == (realv)INFINITY ? x : (realv)REAL(0.0);
            nonzero += excluding ? x * REAL(0.0) : infinite;
        }
        WIDE(vstore)(nonzero, v, redo);
    }
}

/* The vector hint keeps compilers from vectorising over work-items as well: there is one
   a group, and building took up to ten times as long. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu(__global const storage *query, __global const storage *key,
              __global const storage *value, __global const mask_storage *mask,
              __global storage *output, __global real *lse,
              const ca_attention_params params)
{
    /* The last rows first: below a causal diagonal they have the most keys. Heads that
       share a mask run side by side, while its rows are in the cache. */
    ca_int64 heads = 1;
#if HAS_MASK
    heads = params.mask.batch[2] == 0 ? params.batch[2] : 1;
#endif
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 column = item / heads; /* of tiles, one head beside the other */
    const ca_int64 group = column / tiles;
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(group * heads + item - column * heads, &params, batch);

    tile_state tile;
    tile.params = &params;
    tile.key = key + ca_offset(&params.key, batch, 0, 0);
    tile.i0 = (tiles - 1 - (column - group * tiles)) * BM;
    tile.rows = (int)min((ca_int64)BM, params.L - tile.i0);
    tile.first = max((ca_int64)0, tile.i0 + params.lower);
    tile.last = min(params.S - 1, tile.i0 + tile.rows - 1 + params.upper);

    realv queries[HEAD_E * NV];
    realv weights[BN * NV];
    realv result[HEAD_EV * NV];
    softmax_state softmax;
    load_queries(queries, query + ca_offset(&params.query, batch, tile.i0, 0),
                 &params.query, tile.rows,
                 ca_scale(&params) * (SOFTCAP ? REAL(1.0) : SCORE_UNIT));
    for (int n = 0; n < HEAD_EV * NV; n++) {
        result[n] = (realv)REAL(0.0);
    }
    for (int v = 0; v < NV; v++) {
        softmax.base[v] = (realv)REAL(0.0);
        softmax.limit[v] = (realv)(-INFINITY);
        softmax.sum[v] = (realv)REAL(0.0);
        softmax.block[v] = (realv)REAL(0.0);
    }

    for (ca_int64 j0 = tile.first; j0 <= tile.last; j0 += BN) {
        const int keys = (int)min((ca_int64)BN, tile.last + 1 - j0);
#if HAS_MASK
        if (!load_mask_block(weights,
                             mask + ca_offset(&params.mask, batch, tile.i0, j0),
                             &params.mask, tile.rows, keys)) {
            continue;
        }
#endif
        for (int k0 = 0; k0 < keys; k0 += MR) {
            realv scores[MR * NV];
            score_keys(&tile, queries, weights + k0 * NV, j0 + k0, scores);
            weigh_scores(&softmax, scores, weights, k0, result);
        }
        for (int v = 0; v < NV; v++) {
            softmax.sum[v] += softmax.block[v];
            softmax.block[v] = (realv)REAL(0.0);
        }
        add_block(&params, value + ca_offset(&params.value, batch, 0, 0), j0, keys,
                  weights, result);
    }

#if HAS_MASK
    const bool excluding = true;
#else
    const bool excluding = params.lower > 1 - params.L || params.upper < params.S - 1;
#endif
    real redo[BM];
    normalise(&softmax, excluding, result, redo);
    store_result(result, output + ca_offset(&params.output, batch, tile.i0, 0),
                 &params.output, tile.rows);
    for (int n = 0; n < tile.rows; n++) {
        if (params.has_lse) {
            lse[ca_offset(&params.lse, batch, tile.i0 + n, 0)] =
                TO_NATURAL(((const real *)softmax.base)[n]) +
                log(((const real *)softmax.sum)[n]);
        }
        if (redo[n] != REAL(0.0)) {
            attention_row(query, key, value, mask, output, lse, &params, batch,
                          tile.i0 + n);
        }
    }
}
