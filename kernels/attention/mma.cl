/* SPDX-License-Identifier: MIT
 *
 * Attention with matrix units, many rows: tiles of 16 x 16, held by warps of 32
 * work-items.
 *
 *     global size  batch[0] * batch[1] * batch[2] * ceil(L / BM) * THREADS, local size
 *                  THREADS; with sequences, ranges * heads * THREADS
 *     work-group   WARPS warps, which own BM = WARPS * MT * 16 rows of one batch
 *     warp         MT * 16 rows; all keys that one of the group's rows may see, with an
 *                  online softmax
 *
 * A warp keeps its result in registers, as the fragments of support/warp.clh, and its
 * queries there or in local memory. Keys and values pass through local memory in blocks
 * of BN keys, STAGES blocks in a ring: while one block is multiplied, the next ones are
 * on their way. The warp takes STRIP keys of a block at a time:
 *
 *     scores   = queries (16 MT x E) * keys (STRIP x E) transposed
 *     weights  = exp2(scores - base), rounded to the half type
 *     result  += weights * values (STRIP x Ev)
 *
 * The fragments of scores that the first product gives are, rounded, the fragments of
 * weights that the second product takes, so only maxima and sums move between lanes.
 *
 * float32 is left to attention/tiled.cl. A product could be three products of TF32, of numbers
 * split in two. But the kernel would split each number again for each tile of rows. And matrix units
 * truncate their sums, so the kernel would have to add up many keys outside of them.
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, filled up with zeros to a multiple of 16
 *     -DALIGNED           1: rows of query, key and value are whole aligned 16 bytes
 *     -DOUTPUT_ALIGNED    1: so are rows of output
 *     -DQUERIES           where queries stay: CA_QUERIES_IN_REGISTERS, or
 *                         CA_QUERIES_IN_LOCAL_MEMORY, which leaves registers for a larger
 *                         STRIP
 *     -DPAGED             where the keys of sequences lie: CA_BLOCKS_IN_PAGES, where pages hold a multiple
 *                         of BN keys, CA_ROWS_IN_PAGES, or 0, not in pages
 *     -DTOGETHER          warps that multiply together: 1, or 4, with queries in local memory,
 *                         head sizes that are multiples of 64, MT 1 and STRIP BN
 *     -DBN                keys of a block, a multiple of STRIP
 *     -DSTAGES            blocks of the ring, at least 2
 *     -DWARPS -DMT -DSTRIP -DLSE  see mma/softmax.clh
 *     and the macros of support/warp.clh
 */
#define GROUPED         (TOGETHER > 1)
#define CAP             warp_tanh
#define OWN_CONDITIONS  1
#define SCORES_IN_LOG2  1
#define EV_TILES        (HEAD_EV / 8) /* of 8 columns */
#define LOCAL_ALIGNMENT (GROUPED ? GROUP_PANEL_BYTES : 128)
#include "kernels/attention/mma/tiles.clh" /* mma_tile, mma_lane, load_tile */
#if GROUPED
#include "kernels/attention/mma/groups.clh" /* attend */
#else
#include "kernels/attention/mma/warps.clh" /* attend */
#endif

/* Copies the group's queries into local memory. If queries stay in registers, the function also loads
   the warp's rows from there. */
INLINED void
load_queries(const warp_state *warp, __local uint4 *memory, const mma_tile *tile,
             const mma_lane *lane, uint4 (*queries)[QUERY_FRAGMENTS])
{
    const ca_attention_params *params = tile->call->params;
    const row_strides strides = CA_STRIDES(&params->query);
    tile_source source =
        source_at(tile->call->query + ca_offset(&params->query, tile->batch, tile->i0, 0), &strides,
                  params->E, E_CHUNKS);
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
        const float sum = SUMS ? sum_of_four(warp, softmax->sum[r]) : 0.0f;
        const float factor = factor_of_row(call, tile->batch, softmax->base[r],
                                           GROUPED ? sum : rounded_sum(softmax, r), seen);
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
    DEFINE_CALL(call);
#if RAGGED
    ca_int64 batch[CA_BATCH_DIMS];
    const ca_int64 place = find_range(&call, batch);
#else
    /* The last rows come first: below a causal diagonal they have the most keys. */
    const ca_int64 tiles = (params.L + BM - 1) / BM;
    const ca_int64 group = group_of(&params);
    const ca_int64 linear = ca_divide(group, tiles);
    ca_int64 batch[CA_BATCH_DIMS];
    ca_unravel(linear, params.batch, batch);
    const ca_int64 place = tiles - 1 - (group - linear * tiles);
#endif
    const mma_tile tile = tile_at(&call, batch, place, memory);
    const mma_lane lane = lane_of(&warp);
    const float factor = late_factor(&params);

    uint4 queries[MT][QUERY_FRAGMENTS];
    float4 result[MT][EV_TILES] = {{(float4)0.0f}};
    softmax_state softmax;
    start_softmax(&softmax);
    load_queries(&warp, memory, &tile, &lane, queries);

    attend(&warp, memory, &tile, &lane, queries, factor, &softmax, result);
    write_rows(&warp, &tile, &lane, &softmax, result);
}
