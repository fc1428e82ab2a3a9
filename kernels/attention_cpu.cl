/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: queries in vector lanes.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM), local size 1
 *     work-item    BM = NV * LANES rows of one batch, all their keys, online softmax
 *
 * One vector holds one number of LANES rows, so the softmax needs no step across lanes:
 *
 *     queries  [E][NV]     scaled        score  = fma(key[j][e] to all lanes, queries[e])
 *     weights  [BN][NV]   scores, then their exp2, of one block of BN keys (in L1)
 *     result   [Ev][NV]   unnormalised  result = fma(value[j][c] to all lanes, weights[j])
 *
 * Both products keep 2 * NV * 12 or so sums in registers over their inner loop. Scores
 * are in units of log 2, unless a float mask is added: then they stay natural, so that
 * a mask as low as the lowest float does not overflow.
 *
 *     -DHEAD_E -DHEAD_EV         head sizes, 1 … 512
 *     -DSOFTCAP         0 or 1
 *     -DKEY_DIRECT      1: keys are `real` and contiguous (key.column 1, key.row E)
 *     -DVALUE_DIRECT    1: values are `real` with value.column 1
 *     -DNV -DMR -DCOLUMNS -DBN   tiles; see below
 *     DTYPE, MASK (common.cl), LANES (lanes.cl)
 */
#include "attention_row.cl"
#include "lanes.cl"

#ifndef HEAD_E
#define HEAD_E 64
#endif
#ifndef HEAD_EV
#define HEAD_EV HEAD_E
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef KEY_DIRECT
#define KEY_DIRECT 0
#endif
#ifndef VALUE_DIRECT
#define VALUE_DIRECT 0
#endif

#ifndef NV /* vectors of queries: 1 where L <= LANES, else 2 */
#define NV 2
#endif
#ifndef MR /* keys whose scores are summed together */
#if LANES * REAL_SIZE == 64
#define MR 12
#else
#define MR 6
#endif
#endif
#ifndef BN /* keys per block, a multiple of MR */
#if VALUE_DIRECT
#define BN (8 * MR)
#else
#define BN (4 * MR)
#endif
#endif

/* Result columns summed together: Ev cut into equal parts of at most MR + 1. */
#define PARTS   ((HEAD_EV + MR) / (MR + 1))
#define COLUMNS ((HEAD_EV + PARTS - 1) / PARTS)

#define BM (NV * LANES)

#if HAS_FLOAT_MASK
#define SCORE_UNIT   REAL(1.0) /* what a natural score is multiplied by */
#define TO_LOG2(x)   ((x) * LOG2_E)
#define TO_NATURAL(x) (x)
#else
#define SCORE_UNIT   LOG2_E
#define TO_LOG2(x)   (x)
#define TO_NATURAL(x) ((x) * LN_2)
#endif

/* --- packing ---------------------------------------------------------------------- */

/* Rows first … first + count - 1 of a matrix as reals, contiguous. */
static inline void pack_rows(real *packed, __global const storage *matrix,
                             const ca_view *view, ca_int64 first, int count, int columns)
{
    for (int r = 0; r < count; r++) {
        __global const storage *row = matrix + (first + r) * view->row;
        real *packed_row = packed + r * columns;
        int c = 0;
        if (view->column == 1) {
            for (; c + LANES <= columns; c += LANES) {
                WIDE(vstore)(load_lanes(row + c), 0, packed_row + c);
            }
        }
        for (; c < columns; c++) {
            packed_row[c] = load(row + c * view->column);
        }
    }
}

/* queries[e][lane] = scale * query[lane][e]; lanes beyond the last row repeat it. */
static inline void load_queries(realv *queries, __global const storage *query,
                                const ca_view *view, int rows, real scale)
{
    for (int v = 0; v < NV; v++) {
        int e = 0;
        if (view->column == 1) {
            for (; e + LANES <= HEAD_E; e += LANES) {
                realv x[LANES];
                for (int n = 0; n < LANES; n++) {
                    const int row = min(v * LANES + n, rows - 1);
                    x[n] = load_lanes(query + row * view->row + e);
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
                ((real *)&queries[e * NV + v])[n] =
                    load(query + row * view->row + e * view->column) * scale;
            }
        }
    }
}

/* output[lane][c] = result[c][lane], the first `rows` lanes. */
static inline void store_result(const realv *result, __global storage *output,
                                const ca_view *view, int rows)
{
    for (int v = 0; v < NV; v++) {
        int c = 0;
        if (view->column == 1) {
            for (; c + LANES <= HEAD_EV; c += LANES) {
                realv x[LANES];
                for (int n = 0; n < LANES; n++) {
                    x[n] = result[(c + n) * NV + v];
                }
                transpose(x);
                for (int n = 0; n < LANES; n++) {
                    if (v * LANES + n < rows) {
                        store_lanes(x[n], output + (v * LANES + n) * view->row + c);
                    }
                }
            }
        }
        for (; c < HEAD_EV; c++) {
            for (int n = 0; n < LANES && v * LANES + n < rows; n++) {
                store(((const real *)&result[c * NV + v])[n],
                      output + (v * LANES + n) * view->row + c * view->column);
            }
        }
    }
}

/* --- masks ------------------------------------------------------------------------ */

#if HAS_MASK
/* weights[j][lane] = mask[lane][j] for a block of keys; false if it excludes them all. */
static inline bool load_mask_block(realv *weights, __global const mask_storage *mask,
                                   const ca_view *view, int rows, int keys)
{
    intv attends = (intv)0;
    int j = 0;
    if (view->row == 0) { /* one row for all queries */
        for (; j < keys; j++) {
            const realv x = (realv)load_mask(mask + j * view->column);
            attends |= x != (realv)(-INFINITY);
            for (int v = 0; v < NV; v++) {
                weights[j * NV + v] = x;
            }
        }
    } else if (view->column == 1) {
        for (; j + LANES <= keys; j += LANES) {
            for (int v = 0; v < NV; v++) {
                realv x[LANES];
                for (int n = 0; n < LANES; n++) {
                    const int row = min(v * LANES + n, rows - 1);
                    x[n] = load_mask_lanes(mask + row * view->row + j);
                    attends |= x[n] != (realv)(-INFINITY);
                }
                transpose(x);
                for (int n = 0; n < LANES; n++) {
                    weights[(j + n) * NV + v] = x[n];
                }
            }
        }
    }
    for (; j < keys; j++) {
        for (int n = 0; n < BM; n++) {
            const int row = min(n, rows - 1);
            ((real *)&weights[j * NV])[n] =
                load_mask(mask + row * view->row + j * view->column);
        }
        for (int v = 0; v < NV; v++) {
            attends |= weights[j * NV + v] != (realv)(-INFINITY);
        }
    }
    return any(attends);
}
#endif

/* --- the two products ------------------------------------------------------------- */

/* scores[k][v] = sum_e key[k][e] * queries[e][v] for MR keys, in either address space. */
#define DEFINE_DOT_KEYS(name, address_space)                                             \
    static inline void name(realv *scores, const realv *queries,                         \
                            address_space const real *key)                               \
    {                                                                                    \
        UNROLL for (int k = 0; k < MR * NV; k++) { scores[k] = (realv)REAL(0.0); }       \
        for (int e = 0; e < HEAD_E; e++) {                                                    \
            UNROLL for (int k = 0; k < MR; k++)                                          \
            {                                                                            \
                UNROLL for (int v = 0; v < NV; v++)                                      \
                {                                                                        \
                    scores[k * NV + v] = fma((realv)key[k * HEAD_E + e], queries[e * NV + v], \
                                             scores[k * NV + v]);                        \
                }                                                                        \
            }                                                                            \
        }                                                                                \
    }
#define UNROLL _Pragma("unroll")

DEFINE_DOT_KEYS(dot_packed_keys, __private)
#if KEY_DIRECT
DEFINE_DOT_KEYS(dot_keys, __global)
#endif

#if VALUE_DIRECT
typedef __global const real *value_rows;
#else
typedef const real *value_rows;
#endif

/* result[c][v] = decay[v] * result[c][v] + sum_j value[j][c] * weights[j][v] for so many
   columns c; a macro, as the sums stay in registers only where that is a constant. */
#define DEFINE_ADD_VALUES(name, columns)                                                 \
    static inline void name(realv *result, const realv *decay, const realv *weights,     \
                            value_rows value, ca_int64 stride, int keys)                 \
    {                                                                                    \
        realv sums[(columns)*NV];                                                        \
        UNROLL for (int n = 0; n < (columns)*NV; n++)                                    \
        {                                                                                \
            sums[n] = result[n] * decay[n % NV];                                         \
        }                                                                                \
        for (int j = 0; j < keys; j++) {                                                 \
            UNROLL for (int c = 0; c < (columns); c++)                                   \
            {                                                                            \
                UNROLL for (int v = 0; v < NV; v++)                                      \
                {                                                                        \
                    sums[c * NV + v] = fma((realv)value[j * stride + c],                 \
                                           weights[j * NV + v], sums[c * NV + v]);       \
                }                                                                        \
            }                                                                            \
        }                                                                                \
        UNROLL for (int n = 0; n < (columns)*NV; n++) { result[n] = sums[n]; }           \
    }

DEFINE_ADD_VALUES(add_values, COLUMNS)
#if HEAD_EV % COLUMNS
DEFINE_ADD_VALUES(add_last_values, HEAD_EV % COLUMNS)
#endif

/* --- the kernel ------------------------------------------------------------------- */

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
attention_cpu(__global const storage *query, __global const storage *key,
              __global const storage *value, __global const mask_storage *mask,
              __global storage *output, __global real *lse,
              const ca_attention_params params)
{
    /* The last rows first: below a causal diagonal they have the most keys. */
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 item = (ca_int64)get_global_id(0);
    const ca_int64 i0 = (tiles - 1 - item % tiles) * BM;
    const int rows = (int)min((ca_int64)BM, params.L - i0);
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(item / tiles, &params, batch);

    __global const storage *key_0 = key + ca_offset(&params.key, batch, 0, 0);
    __global const storage *value_0 = value + ca_offset(&params.value, batch, 0, 0);
    const ca_int64 first = max((ca_int64)0, i0 + params.lower);
    const ca_int64 last = min(params.S - 1, i0 + rows - 1 + params.upper);

    realv queries[HEAD_E * NV];
    realv weights[BN * NV];
    realv result[HEAD_EV * NV];
    real packed_keys[MR * HEAD_E];
#if !VALUE_DIRECT
    real packed_values[BN * HEAD_EV];
#endif
    realv m[NV];
    realv l[NV];
    load_queries(queries, query + ca_offset(&params.query, batch, i0, 0), &params.query,
                 rows, ca_scale(&params) * (SOFTCAP ? REAL(1.0) : SCORE_UNIT));
    for (int c = 0; c < HEAD_EV * NV; c++) {
        result[c] = (realv)REAL(0.0);
    }
    for (int v = 0; v < NV; v++) {
        m[v] = (realv)(-INFINITY);
        l[v] = (realv)REAL(0.0);
    }

    const realv lanes = lane_indices();
    for (ca_int64 j0 = first; j0 <= last; j0 += BN) {
        const int keys = (int)min((ca_int64)BN, last + 1 - j0);
#if HAS_MASK
        if (!load_mask_block(weights, mask + ca_offset(&params.mask, batch, i0, j0),
                             &params.mask, rows, keys)) {
            continue;
        }
#endif
        realv m_block[NV];
        for (int v = 0; v < NV; v++) {
            m_block[v] = m[v];
        }
        for (int k0 = 0; k0 < keys; k0 += MR) {
            const ca_int64 j = j0 + k0;
            realv scores[MR * NV];
#if KEY_DIRECT
            if (j + MR <= params.S) {
                dot_keys(scores, queries, key_0 + j * HEAD_E);
            } else
#endif
            {
                const int present = (int)min((ca_int64)MR, params.S - j);
                pack_rows(packed_keys, key_0, &params.key, j, present, HEAD_E);
                for (int n = present * HEAD_E; n < MR * HEAD_E; n++) {
                    packed_keys[n] = REAL(0.0);
                }
                dot_packed_keys(scores, queries, packed_keys);
            }
#if SOFTCAP
            const real softcap = ca_softcap(&params);
#pragma unroll
            for (int n = 0; n < MR * NV; n++) {
                scores[n] = tanh_lanes(scores[n] / softcap) * (softcap * SCORE_UNIT);
            }
#endif
#if HAS_MASK
#pragma unroll
            for (int n = 0; n < MR * NV; n++) {
                const realv addend = weights[k0 * NV + n];
                scores[n] = addend == (realv)(-INFINITY) ? addend : scores[n] + addend;
            }
#endif
            /* Lanes in which key k is in the band: k - above <= lane <= k - below. */
            const ca_int64 above = i0 + params.upper - j;
            const ca_int64 below = i0 + params.lower - j;
            if (k0 + MR > keys || above < MR - 1 || below > 1 - BM) {
                const real low = -(real)clamp(above, (ca_int64)-BM, (ca_int64)MR);
                const real high = -(real)clamp(below, (ca_int64)-BM, (ca_int64)MR);
#pragma unroll
                for (int k = 0; k < MR; k++) {
#pragma unroll
                    for (int v = 0; v < NV; v++) {
                        const realv lane = lanes + (realv)(v * LANES - k);
                        const intv attends = (lane >= low) & (lane <= high) &
                                             (intv)(k0 + k < keys ? -1 : 0);
                        scores[k * NV + v] =
                            attends ? scores[k * NV + v] : (realv)(-INFINITY);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < MR * NV; n++) {
                m_block[n % NV] = larger(scores[n], m_block[n % NV]);
                weights[k0 * NV + n] = scores[n];
            }
        }

        realv decay[NV];
        for (int v = 0; v < NV; v++) {
            /* Rows without a key so far subtract 0: -inf minus -inf would be NaN. */
            const realv base =
                m_block[v] == (realv)(-INFINITY) ? (realv)REAL(0.0) : m_block[v];
            realv sum = (realv)REAL(0.0);
            decay[v] = exp2_lanes(TO_LOG2(m[v] - base));
            for (int j = 0; j < keys; j++) {
                const realv p = exp2_lanes(TO_LOG2(weights[j * NV + v] - base));
                weights[j * NV + v] = p;
                sum += p;
            }
            l[v] = l[v] * decay[v] + sum;
            m[v] = m_block[v];
        }

#if VALUE_DIRECT
        value_rows block = value_0 + j0 * params.value.row;
        const ca_int64 stride = params.value.row;
#else
        value_rows block = packed_values;
        const ca_int64 stride = HEAD_EV;
        pack_rows(packed_values, value_0, &params.value, j0, keys, HEAD_EV);
#endif
        int c = 0;
        for (; c + COLUMNS <= HEAD_EV; c += COLUMNS) {
            add_values(result + c * NV, decay, weights, block + c, stride, keys);
        }
#if HEAD_EV % COLUMNS
        add_last_values(result + c * NV, decay, weights, block + c, stride, keys);
#endif
    }

    /* A row whose sum is 0 has no key, or only scores of -inf; one that is not finite may
       have met a NaN or infinity of an excluded key, as 0 * NaN. */
    real suspect[BM];
    for (int v = 0; v < NV; v++) {
        const realv inverse = REAL(1.0) / l[v];
        realv zero = (realv)REAL(0.0);
        for (int c = 0; c < HEAD_EV; c++) {
            result[c * NV + v] *= inverse;
            zero = fma(result[c * NV + v], zero, zero);
        }
        WIDE(vstore)(zero + inverse * REAL(0.0), v, suspect);
    }
    store_result(result, output + ca_offset(&params.output, batch, i0, 0), &params.output,
                 rows);
    if (params.has_lse) {
        for (int n = 0; n < rows; n++) {
            lse[ca_offset(&params.lse, batch, i0 + n, 0)] =
                TO_NATURAL(((const real *)m)[n]) + log(((const real *)l)[n]);
        }
    }
    const bool excluding = HAS_MASK || params.lower > 1 - params.L ||
                           params.upper < params.S - 1;
    if (excluding || params.S == 0) {
        for (int n = 0; n < rows; n++) {
            if (suspect[n] != REAL(0.0)) {
                attention_row(query, key, value, mask, output, lse, &params, batch, i0 + n);
            }
        }
    }
}
