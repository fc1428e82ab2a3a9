/* SPDX-License-Identifier: MIT
 *
 * What attention_cpu.cl moves between strided arrays and its tiles, by register
 * transposes where a row is contiguous and element by element elsewhere. Its macros,
 * which attention_cpu.cl describes, have their defaults here.
 */
#ifndef CLATTN_ATTENTION_CPU_TILES_CL
#define CLATTN_ATTENTION_CPU_TILES_CL

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

#ifndef NV /* vectors of queries: 1 where there are few rows, else 2 */
#define NV 2
#endif
#ifndef MR /* keys whose scores are summed together */
#if LANES * REAL_SIZE == 64 && NV == 1
#define MR 16
#elif LANES * REAL_SIZE == 64
#define MR 12
#else
#define MR 6
#endif
#endif
#ifndef BN /* keys per block, a multiple of MR; their values stay in the L2 cache */
#if HEAD_EV <= 64 && !HAS_ADDENDS
#define BN (16 * MR)
#elif HEAD_EV <= 128
#define BN (8 * MR)
#else
#define BN (4 * MR)
#endif
#endif

/* With one vector of queries the result is kept by rows, result[lane][Ev / LANES]: then
   it needs no transpose. */
#define ROW_VECTORS (HEAD_EV / LANES)
#define BY_ROWS     (NV == 1 && HEAD_EV % LANES == 0)

#define BM (NV * LANES)

/* --- packing ---------------------------------------------------------------------- */

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
                    WIDE(vstore)(x, 0, packed_row + c);                                \
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
