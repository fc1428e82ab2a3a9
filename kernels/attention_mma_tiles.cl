/* SPDX-License-Identifier: MIT
 *
 * What attention_mma.cl moves between memory and its tiles in local memory, and the
 * macros' defaults, which it describes.
 *
 * A tile is an array of rows of chunks, 8 numbers or 16 bytes each. Eight rows one below
 * the other, whose chunks of one column are loaded at once, must lie in different banks
 * of local memory. So the chunks of a row change places among themselves: chunk c of a
 * row is found at c ^ MIX(row).
 */
#ifndef CLATTN_ATTENTION_MMA_TILES_CL
#define CLATTN_ATTENTION_MMA_TILES_CL

#include "common.cl"
#include "warp.cl"

#ifndef ALIGNED
#define ALIGNED 0
#endif
#ifndef OUTPUT_ALIGNED
#define OUTPUT_ALIGNED 0
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef MT
#define MT 1
#endif
#ifndef BN
#define BN 32
#endif
#ifndef STAGES
#define STAGES 3
#endif

#define THREADS   (WARPS * WARP_LANES)
#define WARP_ROWS (MT * 16)
#define BM        (WARPS * WARP_ROWS)

#define E_CHUNKS  (HEAD_E / 8)
#define EV_CHUNKS (HEAD_EV / 8)

/* Rows of a multiple of 8 chunks begin in the same bank, those of an odd multiple of 4
   in two, of 2 in four; as many bits of a row's number are spared. */
#define MIX_SHIFT(chunks) ((chunks) % 8 == 0 ? 0 : (chunks) % 4 == 0 ? 1 : 2)
#define MIX_MASK(chunks)  ((chunks) % 8 == 0 ? 7 : (chunks) % 4 == 0 ? 3 : 1)
#define MIX(row, chunks)  ((row) >> MIX_SHIFT(chunks) & MIX_MASK(chunks))

/* Bytes from the start of a tile to a chunk of a row. */
#define CHUNK_BYTES 16
#define PLACE(row, chunk, chunks)                                                      \
    (((row) * (chunks) + ((chunk) ^ MIX(row, chunks))) * CHUNK_BYTES)

/* Given the place of chunk 0 or 1 of a row, that of the chunk that is `chunk` further,
   an even number: what mixing can change, and what it cannot. */
#define PLACE_FROM(place, chunk, chunks)                                               \
    (((place) ^ ((chunk) & MIX_MASK(chunks)) * CHUNK_BYTES) +                          \
     ((chunk) & ~MIX_MASK(chunks)) * CHUNK_BYTES)

/* In local memory, in chunks: the stages of keys and values; before them the queries,
   and after them the result and a word for each row. */
#define STAGE_CHUNKS  (BN * (E_CHUNKS + EV_CHUNKS))
#define RING_CHUNKS   (STAGES * STAGE_CHUNKS)
#define QUERY_CHUNKS  (BM * E_CHUNKS)
#define RESULT_CHUNKS (BM * EV_CHUNKS)
#define LARGER(a, b)  ((a) > (b) ? (a) : (b))
#define LOCAL_CHUNKS  LARGER(LARGER(RING_CHUNKS, QUERY_CHUNKS), RESULT_CHUNKS + BM / 4)

/* Rows of a tensor as a work-item sees them: with ALIGNED from its own chunk of the first
   rows on, else from the first element. */
typedef struct {
    __global const ushort *from;
    ca_int64 row; /* strides */
    ca_int64 column;
    int columns;
} tile_source;

/* Where a work-item copies chunks: it keeps to one of a row, in every ITEM_ROWS-th row. */
#define ITEM_ROWS(chunks)  (THREADS / (chunks))
#define ITEM_ROW(chunks)   ((uint)get_local_id(0) / (chunks))
#define ITEM_CHUNK(chunks) ((uint)get_local_id(0) - ITEM_ROW(chunks) * (chunks))

/* `offset` is where the first row begins, which `view` describes. Elements are bits:
   half is no type to compute with. */
static inline tile_source
source_at(__global const storage *tensor, ca_int64 offset, const ca_view *view,
          ca_int64 columns, int chunks)
{
    tile_source source;
    source.from = (__global const ushort *)(tensor + offset);
    source.row = view->row;
    source.column = view->column;
    source.columns = (int)columns;
#if ALIGNED
    source.from += ITEM_ROW(chunks) * view->row + ITEM_CHUNK(chunks) * 8;
#endif
    return source;
}

/* Fill the tile that begins at chunk `tile` of local memory with the next rows of a
   source, of which `present` are there, and with zeros where it has none. With ALIGNED
   they arrive later. */
static inline void
load_tile(warp_state *warp, __local uint4 *memory, int tile, tile_source *source,
          int present, int rows, int chunks)
{
#if ALIGNED
    const int first = (int)ITEM_ROW(chunks);
    const int chunk = (int)ITEM_CHUNK(chunks);
    const int step = ITEM_ROWS(chunks) * (int)source->row;
    const uint place = warp->start + (uint)tile * CHUNK_BYTES;
    present = chunk * 8 < source->columns ? present : 0;
    __global const ushort *from = source->from;
    WARP_UNROLL
    for (int n = 0; n * ITEM_ROWS(chunks) < rows; n++) {
        const int row = n * ITEM_ROWS(chunks) + first;
        if ((THREADS % chunks == 0 || first < ITEM_ROWS(chunks)) &&
            (rows % ITEM_ROWS(chunks) == 0 || row < rows)) {
            warp_copy(warp, place + (uint)PLACE(row, chunk, chunks), from,
                      row < present ? CHUNK_BYTES : 0u);
        }
        from += step;
    }
#else
    __local ushort *to = (__local ushort *)(memory + tile);
    for (int n = (int)get_local_id(0); n < rows * chunks * 8; n += THREADS) {
        const int row = n / (chunks * 8);
        const int column = n - row * (chunks * 8);
        ushort x = 0;
        if (row < present && column < source->columns) {
            x = source->from[row * source->row + column * source->column];
        }
        to[PLACE(row, column >> 3, chunks) / 2 + (column & 7)] = x;
    }
#endif
    source->from += rows * source->row;
}

/* Write the rows of a tile of results that are not marked, which are done again. */
static inline void
store_tile(const attention_call *call, const ca_int64 *batch, ca_int64 i0, int rows,
           __local const uint4 *tile, __local const uint *marks)
{
    const ca_view *view = &call->params->output;
    __global ushort *to =
        (__global ushort *)(call->output + ca_offset(view, batch, i0, 0));
    const int columns = (int)call->params->Ev;
    const int item = (int)get_local_id(0);
    for (int n = item; n < rows * EV_CHUNKS; n += THREADS) {
        const int row = n / EV_CHUNKS;
        const int chunk = n - row * EV_CHUNKS;
        if (marks[row] != 0u || chunk * 8 >= columns) {
            continue;
        }
        __local const uint4 *from = tile + PLACE(row, chunk, EV_CHUNKS) / CHUNK_BYTES;
        __global ushort *to_row = to + row * view->row;
#if OUTPUT_ALIGNED
        *(__global uint4 *)(to_row + chunk * 8) = *from;
#else
        const int count = min(8, columns - chunk * 8);
        for (int k = 0; k < count; k++) {
            to_row[(chunk * 8 + k) * view->column] = ((__local const ushort *)from)[k];
        }
#endif
    }
}

#endif
