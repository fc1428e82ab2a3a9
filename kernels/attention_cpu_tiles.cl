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

#ifndef NV /* vectors of queries: 1 where L <= LANES, else 2 */
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
#if HEAD_EV <= 64 && !HAS_MASK
#define BN (16 * MR)
#elif HEAD_EV <= 128
#define BN (8 * MR)
#else
#define BN (4 * MR)
#endif
#endif

#define BM (NV * LANES)

/* --- packing ---------------------------------------------------------------------- */

/* Rows first … first + count - 1 of a matrix as reals, contiguous. */
static inline void
pack_rows(real *packed, __global const storage *matrix, const ca_view *view,
          ca_int64 first, int count, int columns)
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
static inline void
load_queries(realv *queries, __global const storage *query, const ca_view *view,
             int rows, real scale)
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
static inline void
store_result(const realv *result, __global storage *output, const ca_view *view,
             int rows)
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
/* weights[j][lane] = mask[lane][j] for a block of keys; false if all are excluded. */
static inline bool
load_mask_block(realv *weights, __global const mask_storage *mask, const ca_view *view,
                int rows, int keys)
{
    intv attends = (intv)0;
    int j = 0;
    if (view->row == 0) { /* one row for all queries */
        for (; j < keys; j++) {
            const realv x = (realv)load_mask(mask + j * view->column);
            attends |= as_intv(x) ^ as_intv((realv)(-INFINITY));
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
                    attends |= as_intv(x[n]) ^ as_intv((realv)(-INFINITY));
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
            attends |= as_intv(weights[j * NV + v]) ^ as_intv((realv)(-INFINITY));
        }
    }
    for (; j % MR != 0; j++) { /* the last keys that are scored, but not there */
        for (int v = 0; v < NV; v++) {
            weights[j * NV + v] = (realv)(-INFINITY);
        }
    }
    return any_lane(attends);
}
#endif

#endif
