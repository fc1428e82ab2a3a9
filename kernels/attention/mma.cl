/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units, many rows: tiles of 16 x 16, held by warps of 32
 * work-items.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM) * THREADS, local size
 *                  THREADS
 *     work-group   WARPS warps, which own BM = WARPS * MT * 16 rows of one batch
 *     warp         MT * 16 rows; all keys that one of the group's rows may see, with an
 *                  online softmax
 *
 * A warp keeps its result in registers, as the fragments of support/warp.clh, and its
 * queries there or in local memory. Keys and values pass through local memory in blocks
 * of BN keys, STAGES blocks in a ring: while one block is multiplied, the next ones are
 * on their way. The warp takes CHUNK keys of a block at a time:
 *
 *     scores   = queries (16 MT x E) * keys (CHUNK x E) transposed
 *     weights  = exp2(scores - base), rounded to the half type
 *     result  += weights * values (CHUNK x Ev)
 *
 * The fragments of scores that the first product gives are, rounded, the fragments of
 * weights that the second product takes, so only maxima and sums move between lanes.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, filled up with zeros to a multiple of 16
 *     -DALIGNED           1: rows of query, key and value are whole aligned 16 bytes
 *     -DOUTPUT_ALIGNED    1: so are rows of output
 *     -DQUERIES           where queries stay: CA_QUERIES_IN_REGISTERS, or
 *                         CA_QUERIES_IN_LOCAL_MEMORY, which leaves registers for a larger
 *                         CHUNK
 *     -DBN                keys of a block, a multiple of CHUNK
 *     -DSTAGES            blocks of the ring, at least 2
 *     -DWARPS -DMT -DCHUNK -DLSE  see mma/softmax.clh
 *     and the macros of support/warp.clh
 */
#define CAP            warp_tanh
#define SCORES_IN_LOG2 1
#define EV_TILES       (HEAD_EV / 8) /* of 8 columns */
#include "kernels/support/warp.clh"

#include "kernels/attention/mma/softmax.clh" /* MT, WARPS, softmax_state, gather_chunk */

#if ALIGNED
#define LOAD_FOR WARP_FOR
typedef int row_step; /* strides are at most 2^22 */
#else
#define LOAD_FOR _Pragma("nounroll") for
typedef ca_int64 row_step;
#endif

#define WARP_ROWS (MT * 16)
#define BM        (WARPS * WARP_ROWS)

#define E_CHUNKS  (HEAD_E / 8)
#define EV_CHUNKS (HEAD_EV / 8)

/* A tile in local memory is an array of rows of chunks. A chunk is 8 numbers, 16 bytes.
   The chunks of one column in eight rows below each other are loaded at once, so they
   must lie in different banks. For that the chunks of a row change their order: chunk c
   of a row lies at c ^ MIX(row). Rows of a multiple of 8 chunks all begin in the same
   bank, rows of an odd multiple of 4 in two banks, rows of an odd multiple of 2 in four.
   So many low bits of a row's number need no mixing. */
#define MIX_SHIFT(chunks) ((chunks) % 8 == 0 ? 0 : (chunks) % 4 == 0 ? 1 : 2)
#define MIX_MASK(chunks)  ((chunks) % 8 == 0 ? 7 : (chunks) % 4 == 0 ? 3 : 1)
#define MIX(row, chunks)  ((row) >> MIX_SHIFT(chunks) & MIX_MASK(chunks))

#define CHUNK_BYTES 16
/* Bytes from the start of a tile to a chunk of a row. */
#define CHUNK_OFFSET(row, chunk, chunks)                                                           \
    (((row) * (chunks) + ((chunk) ^ MIX(row, chunks))) * CHUNK_BYTES)

/* The offset of the chunk that is `chunk` chunks, an even number, behind chunk 0 or 1
   of a row, whose offset is given. Mixing changes the low bits of `chunk` only. */
#define CHUNK_OFFSET_FROM(offset, chunk, chunks)                                                   \
    (((offset) ^ ((chunk) & MIX_MASK(chunks)) * CHUNK_BYTES) +                                     \
     ((chunk) & ~MIX_MASK(chunks)) * CHUNK_BYTES)

/* Local memory, in chunks: first the queries, then behind them, or in their place, the
   stages of keys and values. */
#define STAGE_CHUNKS (BN * (E_CHUNKS + EV_CHUNKS))
#define RING_CHUNKS  (STAGES * STAGE_CHUNKS)
#define QUERY_CHUNKS (BM * E_CHUNKS)
#if QUERIES == CA_QUERIES_IN_LOCAL_MEMORY
#define RING_START      QUERY_CHUNKS
#define LOCAL_CHUNKS    (QUERY_CHUNKS + RING_CHUNKS)
#define QUERY_FRAGMENTS 1 /* not used: a fragment is loaded where it is multiplied */
#define QUERY_AT(warp, lane, queries, m, e) load_query(warp, lane, m, e)
#else
#define RING_START      0
#define LOCAL_CHUNKS    (RING_CHUNKS > QUERY_CHUNKS ? RING_CHUNKS : QUERY_CHUNKS)
#define QUERY_FRAGMENTS (HEAD_E / 16)
#define QUERY_AT(warp, lane, queries, m, e) queries[m][e]
#endif

/* Rows of a tensor. `from` is this work-item's chunk of the next rows. */
typedef struct {
    __global const ushort *from;
    ca_int64 row; /* strides */
    ca_int64 column;
    int columns;
} tile_source;

/* A work-item copies one chunk of a row, in every ITEM_ROWS-th row. */
#define ITEM_ROWS(chunks) (THREADS / (chunks))

/* Returns the rows from row `first` on. */
INLINED tile_source
source_at(__global const storage *tensor, const ca_view *view, const ca_int64 *batch, int first,
          ca_int64 columns, int chunks)
{
    const int row = (int)get_local_id(0) / chunks;
    const int chunk = (int)get_local_id(0) - row * chunks;
    const ca_int64 own = row * view->row + chunk * 8 * view->column;
    const tile_source source = {(__global const ushort *)tensor + ca_offset(view, batch, first, 0) +
                                    own,
                                view->row, view->column, (int)columns};
    return source;
}

/* Fills the tile at chunk `tile` of local memory with the next rows of a source, which
   has `present` of them, and with zeros behind these. With ALIGNED the rows arrive
   later. */
INLINED void
load_tile(const warp_state *warp, __local uint4 *memory, int tile, tile_source *source, int present,
          int rows, int chunks)
{
    int item = (int)get_local_id(0);
    WARP_COMPUTE_AGAIN(item);
    const int first = item / chunks;
    const int chunk = item - first * chunks;
    const row_step step = ITEM_ROWS(chunks) * (row_step)source->row;
    const int columns = source->columns - chunk * 8;
    __global const ushort *from = source->from;
    present = columns > 0 ? present : 0;
    LOAD_FOR (int n = 0; n * ITEM_ROWS(chunks) < rows; n++) {
        const int row = n * ITEM_ROWS(chunks) + first;
        const int to = tile * CHUNK_BYTES + CHUNK_OFFSET(row, chunk, chunks);
        if ((THREADS % chunks == 0 || first < ITEM_ROWS(chunks)) &&
            (rows % ITEM_ROWS(chunks) == 0 || row < rows)) {
#if ALIGNED
            warp_copy(warp, warp->start + (uint)to, from, row < present ? CHUNK_BYTES : 0u);
#else
            memory[to / CHUNK_BYTES] =
                gather_chunk(from, source->column, row < present ? columns : 0);
#endif
        }
        from += step;
    }
    source->from += rows * source->row;
}

/* BM rows of one batch, and the keys that they may see: first … end - 1. */
typedef struct {
    const attention_call *call;
    const ca_int64 *batch;
    int i0;
    int rows;
    int first;
    int end;
    score_bounds bounds; /* counted from row 0 and key 0 */
    addend_row addends;  /* of row i0 */
} mma_tile;

/* The rows, columns and offsets of a lane. */
typedef struct {
    int row;    /* in the tile, of its first fragment row */
    int column; /* 2 t */
    /* Bytes from the start of a tile to the row that the lane passes to warp_load. */
    uint query_offset;
    uint value_offset;
    uint key_offset; /* a fragment has both chunks of a key */
} mma_lane;

INLINED mma_lane
lane_of(const warp_state *warp)
{
    const int n = (int)warp->lane;
    mma_lane lane;
    lane.row = (int)warp->index * WARP_ROWS + n / 4;
    lane.column = 2 * (n & 3);
    lane.query_offset = (uint)CHUNK_OFFSET(n & 15, n >> 4, E_CHUNKS);
    lane.value_offset = (uint)CHUNK_OFFSET(n & 15, n >> 4, EV_CHUNKS);
    lane.key_offset = (uint)CHUNK_OFFSET((n & 7) + (n >> 4) * 8, n >> 3 & 1, E_CHUNKS);
    return lane;
}

INLINED mma_tile
tile_at(const attention_call *call, const ca_int64 *batch, ca_int64 row_of_tiles)
{
    const ca_attention_params *params = call->params;
    const key_band band = ca_band(call, batch);
    const ca_int64 i0 = row_of_tiles * BM;
    mma_tile tile = {call, batch, (int)i0};
    tile.rows = (int)min((ca_int64)BM, params->L - i0);
    tile.first = (int)max((ca_int64)0, i0 + band.lower);
    tile.end = (int)min(band.limit, i0 + tile.rows + band.upper);
    tile.bounds = bounds_of(call, batch, &band);
    tile.bounds.limit = tile.end;
    tile.addends = addend_row_at(call, batch, i0);
    return tile;
}

/* Starts to load the next keys and values, at most `left` of them, into a stage. */
INLINED void
load_block(const warp_state *warp, __local uint4 *memory, int stage, tile_source *key,
           tile_source *value, int left)
{
    const int tile = RING_START + stage * STAGE_CHUNKS;
    if (left > 0) {
        load_tile(warp, memory, tile, key, left, BN, E_CHUNKS);
        load_tile(warp, memory, tile + BN * E_CHUNKS, value, left, BN, EV_CHUNKS);
    }
    warp_copies_end(warp);
}

/* Loads columns 16 e … 16 e + 15 of tile m of the warp's queries from local memory. */
INLINED uint4
load_query(const warp_state *warp, const mma_lane *lane, int m, int e)
{
    const uint rows =
        warp->start + lane->query_offset + warp->index * (WARP_ROWS * E_CHUNKS * CHUNK_BYTES);
    return warp_load(warp,
                     CHUNK_OFFSET_FROM(rows, 2 * e, E_CHUNKS) + m * 16 * E_CHUNKS * CHUNK_BYTES);
}

/* Copies the group's queries into local memory. If queries stay in registers, the function also loads
   the warp's rows from there. */
INLINED void
load_queries(const warp_state *warp, __local uint4 *memory, const mma_tile *tile,
             const mma_lane *lane, uint4 (*queries)[QUERY_FRAGMENTS])
{
    const ca_attention_params *params = tile->call->params;
    tile_source source =
        source_at(tile->call->query, &params->query, tile->batch, tile->i0, params->E, E_CHUNKS);
    const uint signs = query_signs(params);
    load_tile(warp, memory, 0, &source, tile->rows, BM, E_CHUNKS);
    warp_copies_end(warp);
#if QUERIES == CA_QUERIES_IN_LOCAL_MEMORY
    /* The wait for the first block of keys is a wait for the queries too. */
    if (signs != 0u) {
        WARP_COPIES_WAIT(warp, 0);
        barrier(CLK_LOCAL_MEM_FENCE); /* the copies: their reads */
        for (int n = (int)get_local_id(0); n < QUERY_CHUNKS; n += THREADS) {
            memory[n] ^= signs;
        }
    }
#else
    WARP_COPIES_WAIT(warp, 0);
    barrier(CLK_LOCAL_MEM_FENCE); /* the copies: their reads */
    WARP_FOR (int m = 0; m < MT; m++) {
        WARP_FOR (int e = 0; e < HEAD_E / 16; e++) {
            queries[m][e] = load_query(warp, lane, m, e) ^ signs;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these reads: the copies of keys over them */
#endif
}

/* Adds the products of the warp's queries and CHUNK keys to the scores. `keys` is the address of the
   first key. A tile's product waits for the product before it in the same tile, so tiles take turns. */
INLINED void
multiply_keys(const warp_state *warp, const mma_lane *lane, uint keys,
              uint4 (*queries)[QUERY_FRAGMENTS], float4 (*scores)[KEY_TILES])
{
    WARP_FOR (int e = 0; e < HEAD_E / 16; e++) {
        uint4 a[MT];
        WARP_FOR (int m = 0; m < MT; m++) {
            a[m] = QUERY_AT(warp, lane, queries, m, e);
        }
        WARP_FOR (int k = 0; k < KEY_TILES; k += 2) {
            const uint4 b =
                warp_load(warp, CHUNK_OFFSET_FROM(keys + lane->key_offset, 2 * e, E_CHUNKS) +
                                    k * 8 * E_CHUNKS * CHUNK_BYTES);
            WARP_FOR (int m = 0; m < MT; m++) {
                scores[m][k] = warp_multiply(warp, scores[m][k], a[m], b.xy);
                scores[m][k + 1] = warp_multiply(warp, scores[m][k + 1], a[m], b.zw);
            }
        }
    }
}

/* Turns products with keys j … j + CHUNK - 1 into scores. */
INLINED void
finish_scores(const mma_tile *tile, const mma_lane *lane, int j, float4 (*scores)[KEY_TILES],
              softmax_state *softmax)
{
    /* The bounds of other rows and keys differ by constants. */
    int key = j + lane->column;
    WARP_COMPUTE_AGAIN(key);
    const score_bounds bounds = count_from(tile->bounds, tile->i0 + lane->row, key);
    WARP_FOR (int r = 0; r < ROWS; r++) {
        int last = tile->rows - 1;
        if (HAS_ADDENDS(tile->call->params)) {
            WARP_COMPUTE_AGAIN(last);
        }
        const addend_row addends =
            addend_row_behind(tile->call, tile->addends, min(lane->row + 8 * r, last));
        const uint attended = finish_row(tile->call, &addends, key, &bounds, 8 * r, r, scores);
        softmax->seen |= attended != 0u ? 1u << r : 0u;
    }
}

/* result += weights * values of the CHUNK keys from an address on. */
INLINED void
multiply_values(const warp_state *warp, const mma_lane *lane, uint values,
                float4 (*weights)[KEY_TILES], softmax_state *softmax, float4 (*result)[EV_TILES])
{
    WARP_FOR (int k = 0; k < KEY_TILES; k += 2) {
        uint4 a[MT];
        WARP_FOR (int m = 0; m < MT; m++) {
            a[m] = round_weights(warp, softmax, m, weights[m][k], weights[m][k + 1]);
        }
        WARP_FOR (int c = 0; c < EV_TILES; c += 2) {
            const uint4 b = warp_load_columns(
                warp, CHUNK_OFFSET_FROM(values + lane->value_offset, c, EV_CHUNKS) +
                          k * 8 * EV_CHUNKS * CHUNK_BYTES);
            WARP_FOR (int m = 0; m < MT; m++) {
                result[m][c] = warp_multiply(warp, result[m][c], a[m], b.xy);
                result[m][c + 1] = warp_multiply(warp, result[m][c + 1], a[m], b.zw);
            }
        }
    }
}

/* The warp attends to the block at an address, whose first key is j0. */
INLINED void
attend_block(const warp_state *warp, const mma_tile *tile, const mma_lane *lane, int j0,
             uint address, uint4 (*queries)[QUERY_FRAGMENTS], float factor, softmax_state *softmax,
             float4 (*result)[EV_TILES])
{
    const ca_attention_params *params = tile->call->params;
    const int first = (int)warp->index * WARP_ROWS;
    const int i = tile->i0 + first;
    for (int n = 0; n < BN; n += CHUNK) {
        int k = n;
        WARP_COMPUTE_AGAIN(k);
        const int j = j0 + k;
        if (WARP_SKIPS && (j >= tile->end || j > i + WARP_ROWS - 1 + tile->bounds.upper ||
                           j + CHUNK <= i + tile->bounds.lower)) {
            continue;
        }
        const int known = mask_block_at(tile->call, tile->batch, 1, tile->addends.mod.q + first,
                                        min(WARP_ROWS, tile->rows - first), j, CHUNK);
        if (WARP_SKIPS && known == CA_BLOCK_EMPTY) {
            continue;
        }
        float4 scores[MT][KEY_TILES] = {{(float4)0.0f}};
        multiply_keys(warp, lane, address + k * E_CHUNKS * CHUNK_BYTES, queries, scores);
        if (SCORE_IS_PLAIN(params) && known == CA_BLOCK_FULL &&
            sees_all(params, &tile->bounds, i, WARP_ROWS, j, CHUNK)) {
            softmax->seen = ~0u;
        } else {
            finish_scores(tile, lane, j, scores, softmax);
        }
        weigh_scores(warp, params, softmax, scores, factor, result);
        multiply_values(warp, lane, address + (BN * E_CHUNKS + k * EV_CHUNKS) * CHUNK_BYTES, scores,
                        softmax, result);
    }
}

/* Writes a pair of numbers to two columns of a row, those that are among `columns`. */
INLINED void
write_pair(__global ushort *to, ca_int64 stride, uint pair, int columns)
{
    if (OUTPUT_ALIGNED && columns > 0) {
        *(__global uint *)to = pair;
    } else if (columns > 0) {
        to[0] = (ushort)pair;
        if (columns > 1) {
            to[stride] = (ushort)(pair >> 16);
        }
    }
}

/* Divides each row of a warp by the sum of the row's weights, and writes the row. */
INLINED void
write_rows(const warp_state *warp, const mma_tile *tile, const mma_lane *lane,
           const softmax_state *softmax, float4 (*result)[EV_TILES])
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    const ca_view *view = &params->output;
    WARP_FOR (int r = 0; r < ROWS; r++) {
        const int row = lane->row + 8 * r;
        const bool seen = row_is_seen(warp, softmax, r);
        const float factor =
            factor_of_row(call, tile->batch, softmax->base[r], rounded_sum(softmax, r), seen);
        const float sum = LSE ? sum_of_four(warp, softmax->sum[r]) : 0.0f;
        if (row < tile->rows) {
            __global ushort *to = (__global ushort *)call->output +
                                  ca_offset(view, tile->batch, tile->i0 + row, lane->column);
            const int columns = (int)params->Ev - lane->column;
            float bad = 0.0f; /* a NaN if a number is not finite */
            WARP_FOR (int c = 0; c < EV_TILES; c++) {
                const float4 sums = result[r / 2][c];
                const float2 x = (r % 2 == 0 ? sums.xy : sums.zw) * factor;
                write_pair(to + 8 * c * view->column, view->column, seen ? warp_pack(x.x, x.y) : 0u,
                           columns - 8 * c);
                bad += x.x * 0.0f + x.y * 0.0f;
            }
            if (seen && bad != 0.0f) {
                ask_to_redo(call);
            }
            if (LSE && lane->column == 0) {
                write_lse(call, tile->batch, tile->i0 + row, softmax->base[r], sum, seen);
            }
        }
    }
}

__kernel
WARP_KERNEL(THREADS) void attention_mma(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_CHUNKS);
    const attention_call call = ATTENTION_CALL;
    /* The last rows come first: below a causal diagonal they have the most keys. */
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 group = group_of(&params);
    const ca_int64 linear = ca_divide(group, tiles);
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params.batch, batch);
    const mma_tile tile = tile_at(&call, batch, tiles - 1 - (group - linear * tiles));
    const mma_lane lane = lane_of(&warp);
    const float factor = late_factor(&params);

    uint4 queries[MT][QUERY_FRAGMENTS];
    float4 result[MT][EV_TILES] = {{(float4)0.0f}};
    softmax_state softmax;
    start_softmax(&softmax);
    load_queries(&warp, memory, &tile, &lane, queries);

    tile_source keys = source_at(key, &params.key, batch, tile.first, params.E, E_CHUNKS);
    tile_source values = source_at(value, &params.value, batch, tile.first, params.Ev, EV_CHUNKS);
    PLAIN_FOR (int n = 0; n < STAGES - 1; n++) {
        load_block(&warp, memory, n, &keys, &values, tile.end - tile.first - n * BN);
    }
    int stage = 0;
    for (int j = tile.first; j < tile.end; j += BN) {
        WARP_COPIES_WAIT(&warp, STAGES - 2);
        /* the copies of keys, values and queries: their reads; reads of the last block: the next
           copies over it */
        barrier(CLK_LOCAL_MEM_FENCE);
        load_block(&warp, memory, stage == 0 ? STAGES - 1 : stage - 1, &keys, &values,
                   tile.end - j - (STAGES - 1) * BN);
        attend_block(&warp, &tile, &lane, j,
                     warp.start + (RING_START + stage * STAGE_CHUNKS) * CHUNK_BYTES, queries,
                     factor, &softmax, result);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    write_rows(&warp, &tile, &lane, &softmax, result);
}
