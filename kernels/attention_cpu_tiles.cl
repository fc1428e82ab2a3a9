/* SPDX-License-Identifier: MIT
 *
 * What attention_cpu.cl moves between strided arrays and its tiles, by register
 * transposes where a row is contiguous and element by element elsewhere. Its macros,
 * which attention_cpu.cl describes, have their defaults here.
 */
#ifndef CLATTN_ATTENTION_CPU_TILES_CL
#define CLATTN_ATTENTION_CPU_TILES_CL

#include "lanes.cl"

#ifndef KEY_DIRECT
#define KEY_DIRECT 0
#endif
#ifndef VALUE_DIRECT
#define VALUE_DIRECT 0
#endif
#ifndef BFLOAT16_PAIRS
#define BFLOAT16_PAIRS 0
#endif

#ifndef NV /* vectors of queries: 1 where there are few rows, else 2 or 4 */
#define NV 2
#endif
#ifndef HEADS
#define HEADS 1
#endif
#ifndef MR /* keys whose scores are summed together, an even number */
#if LANES * REAL_SIZE == 64 && NV == 1
#define MR 16
#elif NV == 4 && BFLOAT16_PAIRS
#define MR 4
#elif NV == 4
#define MR 6
#elif LANES * REAL_SIZE == 64
#define MR 12
#else
#define MR 6
#endif
#endif
#ifndef BN /* keys per block, a multiple of MR; their values stay in the L2 cache */
#if NV == 4
#define BN 96
#elif HEAD_EV <= 64 && !HAS_ADDENDS
#define BN (16 * MR)
#elif HEAD_EV <= 128
#define BN (8 * MR)
#else
#define BN (4 * MR)
#endif
#endif

/* With one vector of queries, and no pairs, the result is kept by rows,
   result[lane][Ev / LANES]: then it needs no transpose. */
#define ROW_VECTORS (HEAD_EV / LANES)
#define BY_ROWS     (NV == 1 && HEAD_EV % LANES == 0 && !BFLOAT16_PAIRS)

#define BM (NV * LANES)

/* Terms of a product: reals, or pairs of bfloat16 that are neighbours in its sum. */
#define TERMS(elements) (BFLOAT16_PAIRS ? ((elements) + 1) / 2 : (elements))
#define TERMS_E         TERMS(HEAD_E)

/* output[lane][c] = x[c][lane] for the first `rows` lanes. */
static inline void
store_columns(const realv *x, int columns, __global storage *output,
              const ca_view *view, int rows)
{
    for (int v = 0; v < NV; v++) {
        int c = 0;
        if (view->column == 1) {
            for (; c + LANES <= columns; c += LANES) {
                realv tile[LANES];
                for (int n = 0; n < LANES; n++) {
                    tile[n] = x[(c + n) * NV + v];
                }
                transpose(tile);
                __global storage *at = output + v * LANES * view->row + c;
                if (rows >= (v + 1) * LANES) {
                    for (int n = 0; n < LANES; n++) {
                        store_lanes(tile[n], at + n * view->row);
                    }
                    continue;
                }
                for (int n = 0; n < LANES && v * LANES + n < rows; n++) {
                    store_lanes(tile[n], at + n * view->row);
                }
            }
        }
        for (; c < columns; c++) {
            for (int n = 0; n < LANES && v * LANES + n < rows; n++) {
                store(((const real *)&x[c * NV + v])[n],
                      output + (v * LANES + n) * view->row + c * view->column);
            }
        }
    }
}

/* output[lane][c] = x[lane][c] for the first `rows` lanes of a result kept by rows. */
static inline void
store_rows(const realv *x, __global storage *output, const ca_view *view, int rows)
{
    for (int n = 0; n < rows; n++) {
        const realv *from = x + n * ROW_VECTORS;
        __global storage *to = output + n * view->row;
        for (int c = 0; c < ROW_VECTORS && view->column == 1; c++) {
            store_lanes(from[c], to + c * LANES);
        }
        for (int c = 0; c < HEAD_EV && view->column != 1; c++) {
            store(((const real *)from)[c], to + c * view->column);
        }
    }
}

/* --- masks and biases ------------------------------------------------------------- */

/* added[j][lane] = combine(itself, source[lane][j]) for a block of keys; false if what
   it loads excludes them all. */
#define DEFINE_LOAD_BLOCK(name, type, load_one, load_some, combine)                    \
    static inline bool name(realv *added, __global const type *source,                 \
                            const ca_view *view, int rows, int keys, real filter)      \
    {                                                                                  \
        intv attends = (intv)0;                                                        \
        int j = 0;                                                                     \
        if (view->row == 0) { /* one row for all queries */                            \
            for (; j < keys; j++) {                                                    \
                const realv x = (realv)load_one(source + j * view->column, filter);    \
                attends |= as_intv(x) ^ as_intv((realv)(-INFINITY));                   \
                for (int v = 0; v < NV; v++) {                                         \
                    added[j * NV + v] = combine(added[j * NV + v], x);                 \
                }                                                                      \
            }                                                                          \
        } else if (view->column == 1) {                                                \
            for (; j + LANES <= keys; j += LANES) {                                    \
                for (int v = 0; v < NV; v++) {                                         \
                    realv x[LANES];                                                    \
                    for (int n = 0; n < LANES; n++) {                                  \
                        const int row = min(v * LANES + n, rows - 1);                  \
                        x[n] = load_some(source + row * view->row + j, filter);        \
                        attends |= as_intv(x[n]) ^ as_intv((realv)(-INFINITY));        \
                    }                                                                  \
                    transpose(x);                                                      \
                    for (int n = 0; n < LANES; n++) {                                  \
                        added[(j + n) * NV + v] =                                      \
                            combine(added[(j + n) * NV + v], x[n]);                    \
                    }                                                                  \
                }                                                                      \
            }                                                                          \
        }                                                                              \
        for (; j < keys; j++) {                                                        \
            realv x[NV];                                                               \
            for (int n = 0; n < BM; n++) {                                             \
                const int row = min(n, rows - 1);                                      \
                ((real *)x)[n] =                                                       \
                    load_one(source + row * view->row + j * view->column, filter);     \
            }                                                                          \
            for (int v = 0; v < NV; v++) {                                             \
                attends |= as_intv(x[v]) ^ as_intv((realv)(-INFINITY));                \
                added[j * NV + v] = combine(added[j * NV + v], x[v]);                  \
            }                                                                          \
        }                                                                              \
        return any_lane(attends);                                                      \
    }

#define SECOND(a, b) (b)

#if HAS_MASK
DEFINE_LOAD_BLOCK(load_mask_block, mask_storage, load_mask, load_mask_lanes, SECOND)
#endif

#if BIAS
#define LOAD_BIAS(x, filter)       load(x)
#define LOAD_BIAS_LANES(x, filter) load_lanes(x)
#if HAS_MASK
DEFINE_LOAD_BLOCK(load_bias_block, storage, LOAD_BIAS, LOAD_BIAS_LANES,
                  add_addends_lanes)
#else
DEFINE_LOAD_BLOCK(load_bias_block, storage, LOAD_BIAS, LOAD_BIAS_LANES, SECOND)
#endif
#endif

#if HAS_ADDENDS
/* added[j][lane] = mask[lane][j0 + j] + bias[lane][j0 + j] for a block of keys, -inf
   for those that are scored after its end; false if they are all excluded. */
static inline bool
load_added(realv *added, const attention_call *call, const ca_int64 *batch, ca_int64 i0,
           ca_int64 j0, int rows, int keys)
{
    const ca_attention_params *params = call->params;
    bool attends = true;
#if HAS_MASK
    attends =
        load_mask_block(added, call->mask + ca_offset(&params->mask, batch, i0, j0),
                        &params->mask, rows, keys, ca_filter(params));
#endif
#if BIAS
    load_bias_block(added, call->bias + ca_offset(&params->bias, batch, i0, j0),
                    &params->bias, rows, keys, REAL(0.0));
#endif
    for (int j = keys; j % MR != 0; j++) {
        for (int v = 0; v < NV; v++) {
            added[j * NV + v] = (realv)(-INFINITY);
        }
    }
    return attends;
}
#endif

#endif
