/* SPDX-License-Identifier: MIT
 *
 * The backward pass of attention with matrix units: gradients of query, key and value of half types.
 * attention/backward.cl has the formulas. The first step, the numbers of rows, is that of
 * attention/tiled_backward.cl. Two steps follow, each a program:
 *
 *     -DSTEP=CA_BACKWARD_…
 *     QUERY    gradient of query              a work-group owns BM rows, and goes over keys in blocks of BN
 *     KEY      gradients of key and value     a work-group owns BM keys, and goes over rows in blocks of BN
 *
 * Both steps multiply two matrices of the tile that a work-group owns, and two of a block:
 *
 *     step     first, second of the tile    first, second of the block
 *     QUERY    query, grad_output           key, value
 *     KEY      key, value                   query, grad_output
 *
 * A warp owns 16 MT lines of the tile: rows or keys. It takes STRIP lines of a block at a time:
 *
 *     scores              = first of the tile (16 MT x E) * first of the block (STRIP x E) transposed
 *     grad_weights        = second of the tile (16 MT x Ev) * second of the block (STRIP x Ev) transposed
 *     gradient of first  += grad_products, rounded to the half type * first of the block
 *     gradient of second += weights, rounded to the half type * second of the block          KEY alone
 *
 * The fragments that the first two products give are, rounded, the fragments that the other two take. So nothing
 * moves between lanes, and no two work-groups add to a number.
 *
 *     global size   the product of the leading dimensions that the gradient has, and of tiles, and of THREADS
 *     local memory  the tile, and STAGES blocks in a ring: while one is multiplied, the next one is on its way
 *     registers     the gradients, as fragments
 *
 *     -DOUTPUT_ALIGNED    1: rows of the gradients are whole aligned 16 bytes
 *     and the macros of attention/mma.cl, but LSE, QUERIES and TOGETHER; ALIGNED says so of the matrices
 *
 * L and T are at most 2^28.
 */
#define IS_BACKWARD
#define GROUPED         0
#define PAGED           0
#define CAP             warp_tanh
#define EXP2            score_exp2
#define LOCAL_ALIGNMENT 128

#include "kernels/attention/mma/chunks.clh" /* load_stage, multiply_rows, add_rows; defines warp_tanh */

/* Pair (own, other) of a lane is number FRAGMENT_AT (own, other) of its scores. */
#define FRAGMENT_AT(own, other)                                                                    \
    (((own) / 2 * KEY_TILES + (other) / 2) * 4 + (own) % 2 * 2 + (other) % 2)
#define OWN_BEHIND(own)     (8 * (own))
#define OTHER_BEHIND(other) ((other) / 2 * 8 + (other) % 2)

#define PAIR_ROWS     (OWNS_KEYS ? OWN_KEYS : ROWS)
#define PAIR_KEYS     (OWNS_KEYS ? ROWS : OWN_KEYS)
#define PAIR_AT(a, b) (OWNS_KEYS ? FRAGMENT_AT(b, a) : FRAGMENT_AT(a, b))
#define ROW_BEHIND(a) (OWNS_KEYS ? OTHER_BEHIND(a) : OWN_BEHIND(a))
#define KEY_BEHIND(b) (OWNS_KEYS ? OWN_BEHIND(b) : OTHER_BEHIND(b))

#include "kernels/attention/pairs.clh" /* find_own_tile, pair_block, differentiate */

/* Local memory, in chunks: the two matrices of the tile, then the ring. */
#define SECOND_CHUNKS (BM * E_CHUNKS)
#define RING_START    (BM * (E_CHUNKS + EV_CHUNKS))
#define LOCAL_CHUNKS  (RING_START + STAGES * STAGE_CHUNKS)

/* Fragments of a gradient that the step has not take no registers. */
#define FIRST_SUMS(params)  (DIFFERS(params) ? MT * E_CHUNKS : 1)
#define SECOND_SUMS(params) (USES(params, GRAD_VALUE) ? MT * EV_CHUNKS : 1)

/* --- matrices ------------------------------------------------------------------------- */

/* Queries and gradients of the output, or keys and values. */
typedef struct {
    tile_source first;
    tile_source second;
} matrix_pair;

INLINED tile_source
rows_from(__global const storage *array, const ca_view *view, const ca_int64 *batch, int row,
          ca_int64 columns, int chunks)
{
    const row_strides strides = CA_STRIDES(view);
    return source_at(array + ca_offset(view, batch, row, 0), &strides, columns, chunks);
}

/* Returns the matrices of rows, or those of keys, from a certain one on. */
INLINED matrix_pair
matrices_from(const attention_call *call, const ca_int64 *batch, bool keys, int row)
{
    const ca_attention_params *params = call->params;
    const matrix_pair pair = {
        rows_from(keys ? call->key : call->query, keys ? &params->key : &params->query, batch, row,
                  params->E, E_CHUNKS),
        rows_from(keys ? call->value : call->grad_output,
                  keys ? &params->value : VIEW(params, GRAD_OUTPUT), batch, row, params->Ev,
                  EV_CHUNKS),
    };
    return pair;
}

/* --- one strip ------------------------------------------------------------------------ */

/* The tile of a work-group, and this lane. */
typedef struct {
    const attention_call *call;
    line_range range;
    int line;   /* of the tile, of the lane's first fragment row */
    int column; /* of a strip, the lane's first */
    /* Bytes from the start of a tile to the chunk that the lane passes: of rows for warp_load as `a`, and for
       warp_load_columns; of rows for warp_load as `b`. */
    uint first_a;
    uint second_a;
    uint first_b;
    uint second_b;
} own_tile;

INLINED void
start_lane(own_tile *own, const warp_state *warp)
{
    const int n = (int)warp->lane;
    own->line = (int)warp->index * WARP_ROWS + n / 4;
    own->column = 2 * (n & 3);
    own->first_a = (uint)CHUNK_OFFSET(n & 15, n >> 4, E_CHUNKS, 0);
    own->second_a = (uint)CHUNK_OFFSET(n & 15, n >> 4, EV_CHUNKS, 0);
    own->first_b = (uint)CHUNK_OFFSET((n & 7) + (n >> 4) * 8, n >> 3 & 1, E_CHUNKS, 0);
    own->second_b = (uint)CHUNK_OFFSET((n & 7) + (n >> 4) * 8, n >> 3 & 1, EV_CHUNKS, 0);
}

/* products += lines of the tile * strip of a block transposed, both at addresses. */
INLINED void
multiply_lines(const warp_state *warp, uint lines, uint strip, int chunks,
               float4 (*products)[KEY_TILES])
{
    WARP_FOR (int e = 0; e < chunks / 2; e++) {
        uint4 a[MT];
        WARP_FOR (int m = 0; m < MT; m++) {
            a[m] = warp_load(warp, CHUNK_OFFSET_FROM(lines, 2 * e, chunks) +
                                       m * 16 * chunks * CHUNK_BYTES);
        }
        multiply_rows(warp, a, strip, e, chunks, products);
    }
}

/* sums += factors, rounded, * strip of a block at an address. */
INLINED void
add_strip(const warp_state *warp, float4 (*factors)[KEY_TILES], uint strip, int chunks,
          float4 *sums)
{
    WARP_FOR (int k = 0; k < KEY_TILES; k += 2) {
        uint4 a[MT];
        WARP_FOR (int m = 0; m < MT; m++) {
            a[m] = pack_weights(factors[m][k], factors[m][k + 1]);
        }
        add_rows(warp, a, strip, 8 * k, chunks, sums);
    }
}

/* Loads the numbers of the lane's rows, the first of which is row i. Behind the last row, its numbers stand in for
   those of rows that are not there. */
INLINED void
load_numbers(const attention_call *call, __global const real *numbers, int i, row_numbers *of_rows)
{
    const ca_attention_params *params = call->params;
    const int last = (int)params->L - 1;
    WARP_FOR (int a = 0; a < PAIR_ROWS; a++) {
        __global const real *row = numbers + min(i + ROW_BEHIND(a), last) * params->lse.row;
        of_rows[a].base = row[0];
        of_rows[a].inverse = 1.0f / row[params->lse.column];
        of_rows[a].delta = row[2 * params->lse.column];
    }
}

/* Adds what a strip of a block gives to the gradients. `stage` is the address of the block in local memory, and
   `at` the strip's first line in the block. */
INLINED void
add_pairs(const warp_state *warp, const own_tile *own, const pair_block *block, uint stage, int at,
          __global const real *numbers, row_numbers *of_rows, float4 *first, float4 *second)
{
    const attention_call *call = own->call;
    const ca_attention_params *params = call->params;
    const int lines = (int)warp->index * WARP_ROWS;
    const int row = OWNS_KEYS ? at : lines;
    const int rows = OWNS_KEYS ? STRIP : WARP_ROWS;
    const int key = OWNS_KEYS ? lines : at;
    const int keys = OWNS_KEYS ? WARP_ROWS : STRIP;
    if (WARP_SKIPS && (row >= block->rows || sees_none(&block->bounds, row, rows, key, keys))) {
        return;
    }
    const int own_row = OWNS_KEYS ? at + own->column : own->line;
    const int own_key = OWNS_KEYS ? own->line : at + own->column;
    if (OWNS_KEYS) {
        load_numbers(call, numbers, block->i0 + own_row, of_rows);
    }
    const uint tile = warp->start + lines * E_CHUNKS * CHUNK_BYTES;
    const uint second_tile = warp->start + (SECOND_CHUNKS + lines * EV_CHUNKS) * CHUNK_BYTES;
    const uint strip = stage + at * E_CHUNKS * CHUNK_BYTES;
    const uint second_strip = stage + (BN * E_CHUNKS + at * EV_CHUNKS) * CHUNK_BYTES;
    float4 scores[MT][KEY_TILES] = {{(float4)0.0f}};
    float4 grads[MT][KEY_TILES] = {{(float4)0.0f}};
    multiply_lines(warp, tile + own->first_a, strip + own->first_b, E_CHUNKS, scores);
    if (DIFFERS(params)) {
        multiply_lines(warp, second_tile + own->second_a, second_strip + own->second_b, EV_CHUNKS,
                       grads);
    }
    /* Two texts, so that the first one asks nothing of single pairs. */
    if (is_plain(block, params, row, rows, key, keys)) {
        differentiate(call, block, own_row, own_key, true, of_rows, (float *)scores,
                      (float *)grads);
    } else {
        differentiate(call, block, own_row, own_key, false, of_rows, (float *)scores,
                      (float *)grads);
    }
    if (USES(params, GRAD_VALUE)) {
        add_strip(warp, scores, second_strip + own->second_a, EV_CHUNKS, second);
    }
    if (DIFFERS(params)) {
        add_strip(warp, grads, strip + own->first_a, E_CHUNKS, first);
    }
}

/* --- one head ------------------------------------------------------------------------- */

/* Adds what the pairs of a batch give to the gradients. */
INLINED void
add_head(const warp_state *warp, __local uint4 *memory, const own_tile *own, const ca_int64 *batch,
         float4 *first, float4 *second)
{
    const attention_call *call = own->call;
    const ca_attention_params *params = call->params;
    const line_range tile = own->range;
    barrier(CLK_LOCAL_MEM_FENCE); /* reads of local memory so far: these writes */
    const batch_sequence sequence = sequence_of_group(call, batch, (__local batch_shift *)memory);
    const score_bounds bounds = bounds_of(&sequence);
    const line_range others = others_of(tile, params, &bounds);
    if (others.first >= others.end) { /* so it is for the whole group */
        return;
    }
    matrix_pair lines = matrices_from(call, batch, OWNS_KEYS, tile.first);
    load_tile(warp, memory, 0, &lines.first, tile.end - tile.first, BM, E_CHUNKS);
    load_tile(warp, memory, SECOND_CHUNKS, &lines.second, tile.end - tile.first, BM, EV_CHUNKS);
    matrix_pair next = matrices_from(call, batch, !OWNS_KEYS, others.first);
    PLAIN_FOR (int n = 0; n < STAGES - 1; n++) {
        load_stage(warp, memory, RING_START, n, &next.first, &next.second,
                   others.end - others.first - n * BN);
    }
    __global const real *numbers = call->lse + ca_offset(&params->lse, batch, 0, 0);
    row_numbers of_rows[PAIR_ROWS];
    if (!OWNS_KEYS) {
        load_numbers(call, numbers, tile.first + own->line, of_rows);
    }
    int stage = 0;
    for (int at = others.first; at < others.end; at += BN) {
        WARP_COPIES_WAIT(warp, STAGES - 2);
        /* the copies of the tile and the block: their reads; reads of the last block: the next copies over it */
        barrier(CLK_LOCAL_MEM_FENCE);
        load_stage(warp, memory, RING_START, stage == 0 ? STAGES - 1 : stage - 1, &next.first,
                   &next.second, others.end - at - (STAGES - 1) * BN);
        pair_block block;
        const line_range these = {at, min(at + BN, others.end)};
        find_block(&block, call, batch, &sequence, tile, these);
        if (block.known != CA_BLOCK_EMPTY) { /* for the whole group */
            for (int n = 0; n < BN; n += STRIP) {
                int k = n;
                WARP_COMPUTE_AGAIN(k);
                add_pairs(warp, own, &block,
                          warp->start + (RING_START + stage * STAGE_CHUNKS) * CHUNK_BYTES, k,
                          numbers, of_rows, first, second);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

/* Writes the lane's part of a gradient. Returns true if its numbers are finite. */
INLINED bool
write_sums(const own_tile *own, __global storage *array, const ca_view *view, const ca_int64 *batch,
           ca_int64 size, int chunks, const float4 *sums)
{
    const int columns = (int)size - own->column;
    bool finite = true;
    WARP_FOR (int r = 0; r < ROWS; r++) {
        const int line = own->line + OWN_BEHIND(r);
        if (own->range.first + line >= own->range.end) {
            continue;
        }
        __global ushort *to =
            (__global ushort *)array + ca_offset(view, batch, own->range.first + line, own->column);
        WARP_FOR (int c = 0; c < chunks; c++) {
            const float4 both = sums[r / 2 * chunks + c];
            const float2 x = r % 2 == 0 ? both.xy : both.zw;
            write_pair(to + 8 * c * view->column, view->column, warp_pack(x.x, x.y),
                       columns - 8 * c);
            finite = finite && is_finite(x.x) && is_finite(x.y);
        }
    }
    return finite;
}

__kernel
WARP_KERNEL(THREADS) void attention_mma_backward(ATTENTION_ARGUMENTS)
{
    WARP_DECLARE(warp, WARPS, memory, LOCAL_CHUNKS);
    DEFINE_CALL(call);
    own_tile own = {.call = &call};
    ca_int64 own_batch[CA_BATCH_DIMS];
    divided_batch divided;
    float4 first[FIRST_SUMS(&params)] = {(float4)0.0f};
    float4 second[SECOND_SUMS(&params)] = {(float4)0.0f};
    start_lane(&own, &warp);
    PLAIN_FOR (ca_int64 n = 0;; n++) {
        ca_int64 batch[CA_BATCH_DIMS];
        ca_int64 group = group_of(&params);
        WARP_COMPUTE_NOW(group);
        own.range = find_own_tile(&params, group, BM, own_batch, &divided);
        if (n >= count_of(divided.shared)) {
            break;
        }
        find_entry(&divided, own_batch, n, batch);
        add_head(&warp, memory, &own, batch, first, second);
    }
    bool finite = true;
    if (USES(&params, GRAD_VALUE)) {
        finite &= write_sums(&own, call.grad_value, VIEW(&params, GRAD_VALUE), own_batch, params.Ev,
                             EV_CHUNKS, second);
    }
    if (USES(&params, GRAD_QUERY)) {
        finite &= write_sums(&own, call.grad_query, VIEW(&params, GRAD_QUERY), own_batch, params.E,
                             E_CHUNKS, first);
    }
    if (USES(&params, GRAD_KEY)) {
        finite &= write_sums(&own, call.grad_key, VIEW(&params, GRAD_KEY), own_batch, params.E,
                             E_CHUNKS, first);
    }
    if (!finite) { /* perhaps by 0 * NaN, of what is excluded, or by a factor beyond the half type */
        ask_to_redo(&call);
    }
}
