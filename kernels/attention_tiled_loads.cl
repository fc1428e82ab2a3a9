/* SPDX-License-Identifier: MIT
 *
 * The tiles of attention_tiled.cl: their sizes, and how they get from strided arrays to
 * local memory, four elements of a row at a time. The macros, which attention_tiled.cl
 * describes, have their defaults here.
 */
#ifndef CLATTN_ATTENTION_TILED_LOADS_CL
#define CLATTN_ATTENTION_TILED_LOADS_CL

#include "common.cl"

#ifndef SUB_GROUP
#define SUB_GROUP 0
#endif
#ifndef TX
#define TX 8
#endif
#ifndef TY
#define TY 16
#endif
#ifndef MI
#define MI 4
#endif
#ifndef NJ
#define NJ 8
#endif
#ifndef NC
#define NC ((HEAD_EV + TX - 1) / TX)
#endif
#ifndef EC
#define EC HEAD_E
#endif
#ifndef KC
#define KC 32
#endif

#define THREADS (TX * TY)
#define BM      (TY * MI) /* rows of a tile */
#define BN      (TX * NJ) /* keys of a block */
#define PARTS_E ((HEAD_E + EC - 1) / EC)

/* Vectors, of which local memory is made: no load of one begins at an odd place. */
#if REAL64
#define real1 double
#define real2 double2
#define real4 double4
#else
#define real1 float
#define real2 float2
#define real4 float4
#endif
#define convert_real4 JOIN(convert_, real4)

/* Strides of the tiles in local memory, in vectors of four. One vector more than a row
   has: then neighbours, which read the same place of neighbouring rows, do not meet in
   one bank. */
#define STRIDE_E (EC / 4 + 1)        /* of queries [BM][EC] and keys [BN][EC] */
#define STRIDE_M (BM / 4 + 1)        /* of weights [BN][BM] */
#define STRIDE_C ((TX * NC + 3) / 4) /* of values [KC][TX * NC] */

/* Keys, and later the weights and values that are made of and with them. */
#define KEYS_SIZE    (BN * STRIDE_E)
#define WEIGHTS_SIZE (BN * STRIDE_M)
#define AFTER_SIZE   (WEIGHTS_SIZE + KC * STRIDE_C)
#define SHARED_SIZE  (KEYS_SIZE > AFTER_SIZE ? KEYS_SIZE : AFTER_SIZE)

/* --- four elements ---------------------------------------------------------------- */

/* From an address that is a multiple of their size together. */
#define DEFINE_LOAD_FOUR(dtype, value)                                                 \
    static inline real4 load_four_##dtype(__global const storage_##dtype *x)           \
    {                                                                                  \
        return convert_real4(value);                                                   \
    }

DEFINE_LOAD_FOUR(1, vloada_half4(0, x))
DEFINE_LOAD_FOUR(2, as_float4(convert_uint4(*(__global const ushort4 *)x) << 16))
DEFINE_LOAD_FOUR(3, *(__global const float4 *)x)
#if REAL64
DEFINE_LOAD_FOUR(4, *(__global const double4 *)x)
#endif

/* Elements e … e + 3 of a row of `size`, 0 behind its end. */
#define DEFINE_LOAD_PIECE(name, dtype)                                                 \
    static inline real4 name(__global const JOIN(storage_, dtype) * row,               \
                             ca_int64 column, int e, int size)                         \
    {                                                                                  \
        real x[4];                                                                     \
        for (int n = 0; n < 4; n++) {                                                  \
            x[n] =                                                                     \
                e + n < size ? JOIN(load_, dtype)(row + (e + n) * column) : REAL(0.0); \
        }                                                                              \
        return (real4)(x[0], x[1], x[2], x[3]);                                        \
    }

DEFINE_LOAD_PIECE(load_piece, DTYPE)
DEFINE_LOAD_PIECE(load_value_piece, VALUE_DTYPE)

/* --- tiles ------------------------------------------------------------------------ */

/* to[r][c] = from[r][first + c], for `pieces` pieces of `tile_rows` rows, 0 beyond the
   `rows` there are. Work-items take pieces in turn, so that neighbours read side by
   side; `bias`, of one row, is added unless it is NULL. */
#define DEFINE_LOAD_TILE(name, load_one, dtype)                                        \
    static inline void name(__local real4 *to, int stride, int tile_rows, int pieces,  \
                            __global const JOIN(storage_, dtype) * from,               \
                            const ca_view *view, int rows, int first, int size,        \
                            __global const storage *bias, int item)                    \
    {                                                                                  \
        const size_t bytes = sizeof(JOIN(storage_, dtype));                            \
        const size_t places = (size_t)from | (size_t)view->row * bytes;                \
        if (!INPUT_BIAS && view->column == 1 && size % 4 == 0 &&                       \
            (places & (4 * bytes - 1)) == 0) {                                         \
            _Pragma("unroll 4") for (int n = item; n < tile_rows * pieces;             \
                                     n += THREADS)                                     \
            {                                                                          \
                const int r = n / pieces;                                              \
                const int piece = n - r * pieces;                                      \
                real4 x = (real4)REAL(0.0);                                            \
                if (r < rows && first + 4 * piece < size) {                            \
                    x = JOIN(load_four_,                                               \
                             dtype)(from + r * view->row + first + 4 * piece);         \
                }                                                                      \
                to[r * stride + piece] = x;                                            \
            }                                                                          \
            return;                                                                    \
        }                                                                              \
        _Pragma("unroll 1") for (int n = item; n < tile_rows * pieces; n += THREADS)   \
        {                                                                              \
            const int r = n / pieces;                                                  \
            const int piece = n - r * pieces;                                          \
            const int e = first + 4 * piece;                                           \
            real4 x = (real4)REAL(0.0);                                                \
            if (r < rows) {                                                            \
                x = load_one(from + r * view->row, view->column, e, size);             \
                if (INPUT_BIAS && bias != 0) {                                         \
                    x += load_piece(bias, 1, e, size);                                 \
                }                                                                      \
            }                                                                          \
            to[r * stride + piece] = x;                                                \
        }                                                                              \
    }

DEFINE_LOAD_TILE(load_tile, load_piece, DTYPE)
DEFINE_LOAD_TILE(load_value_tile, load_value_piece, VALUE_DTYPE)

#endif
