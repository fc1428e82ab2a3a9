/* SPDX-License-Identifier: MIT
 *
 * Scores or weights on CPUs, in a step behind attention. The kernel computes them from queries and keys. It
 * reads no values, and nothing that the kernel before it has computed.
 *
 *     global size  that of attention/cpu.cl, local size 1
 *     work-item    the tiles of attention/cpu.cl, one after the other
 *
 * Weights take two passes over the keys: the first one finds the base and the sum of each row. Those of
 * the kernel before would not do: its base comes from products in another order, and differs by roundings
 * of the largest score, as each weight of the row would. Dropout does not change the weights.
 *
 * Macros: those of attention/cpu.cl. USUAL is 0.
 */
#define SCORE_LANES   LANES_ARE_ROWS
#define WRITES_SCORES 1
#include "kernels/attention/cpu/tiles.clh" /* tile_state, find_rows_of_item */

#include "kernels/attention/cpu/addends.clh"  /* find_attended */
#include "kernels/attention/cpu/products.clh" /* start_block, load_queries */
#include "kernels/attention/cpu/softmax.clh"  /* score_keys, softmax_state */
#include "kernels/attention/keys.clh"         /* find_key_run */

/* A tile, and memory for one block of keys. */
typedef struct {
    tile_state tile;
    softmax_state softmax;
    termv *queries;
    realv *added;   /* [MAX_KEYS][NV] */
    realv *written; /* [MAX_KEYS][NV] */
    term *packed;
} scored_tile;

/* Writes the numbers of a block of `keys` keys: scores[row][j0 + k] = block[k][lane of the row]. */
SMALL void
store_scores(const tile_state *tile, ca_int64 j0, int keys, const realv *block)
{
    const attention_call *call = tile->call;
    const ca_view *view = VIEW(call->params, SCORES);
    __global storage *scores = call->scores + j0 * view->column;
    ca_int64 offsets[BM];
    find_rows(offsets, tile, view, 0);
    const bool whole = view->column == 1 && keys >= LANES;
    PLAIN_FOR (int v = 0; v * LANES < tile->rows; v++) {
        const int count = min(LANES, tile->rows - v * LANES);
        PLAIN_FOR (int n = 0; n < VECTORS_OF(keys) && whole; n++) {
            const int k = COLUMN(n, keys);
            realv rows[LANES];
            transpose_block(rows, 1, block + k * NV + v, NV);
            PLAIN_FOR (int r = 0; r < count; r++) {
                store_lanes(rows[r], scores + offsets[v * LANES + r] + k);
            }
        }
        PLAIN_FOR (int k = 0; k < keys && !whole; k++) {
            PLAIN_FOR (int r = 0; r < count; r++) {
                store(((const real *)&block[k * NV + v])[r],
                      scores + offsets[v * LANES + r] + k * view->column);
            }
        }
    }
}

/* Sums the weights of a strip. */
INLINED void
sum_strip(softmax_state *softmax, const ca_attention_params *params, const scored_strip *strip)
{
    weightv weights[WEIGHTS(MR) * NV];
    realv decay[NV];
    (void)weigh_scores(params, softmax, strip->scores, strip->added, weights, decay);
}

/* Keeps the scores of a strip, which are final, or, unless `factors` is NULL, its weights. */
CALLED void
keep_strip(realv *written, const scored_tile *of, const scored_strip *strip, const realv *factors)
{
    const ca_attention_params *params = of->tile.call->params;
    PLAIN_FOR (int n0 = 0; n0 < MR * NV; n0 += NV) {
        UNROLLED_FOR (int v = 0; v < NV; v++) {
            const realv score = sum_score(params, strip->scores, strip->added, n0 + v);
            written[n0 + v] =
                factors == 0 ? score : weight_of(params, score - of->softmax.base[v]) * factors[v];
        }
    }
}

/* Makes a pass over the keys of a tile. The pass sums the weights if `sums` is true. Otherwise it writes
   scores, or weights if `factors` is not NULL. */
OUTER void
pass_over_keys(scored_tile *of, bool sums, const realv *factors)
{
    const tile_state *tile = &of->tile;
    const ca_attention_params *params = tile->call->params;
    const realv excluded = factors != 0 ? (realv)REAL(0.0) : (realv)(-INFINITY);
    const ca_int64 start = sums ? tile->first : 0;
    const ca_int64 end = sums ? tile->last + 1 : params->T;
    int keys;
    PLAIN_FOR (ca_int64 j0 = start; j0 < end && !is_stopped(tile->call); j0 += keys) {
        key_run run;
        find_key_run(&run, tile->call, tile->batch, j0);
        keys = (int)min((ca_int64)keys_of_block(params), min(end - j0, run.count));
        attended_keys attended = {true, 0, keys, 0};
        if (!WRITES_EXCLUDED(params)) {
            find_attended(&attended, of->added, tile, j0, keys);
        }
        term_block block;
        if (attended.any) {
            start_block(&block, params, &run, j0, keys, of->packed);
        }
        const int first = attended.any ? attended.first : 0;
        int k0 = first;
        PLAIN_FOR (; k0 < attended.end; k0 += MR) {
            scored_strip strip;
            score_keys(&strip, tile, &block, of->queries, k0, attended.added, of->softmax.seen);
            if (sums) {
                sum_strip(&of->softmax, params, &strip);
            } else {
                keep_strip(of->written + k0 * NV, of, &strip, factors);
            }
        }
        if (sums) {
            (void)end_block(&of->softmax);
            continue;
        }
        PLAIN_FOR (int n = 0; n < first * NV; n++) {
            of->written[n] = excluded;
        }
        PLAIN_FOR (int n = k0 * NV; n < keys * NV; n++) {
            of->written[n] = excluded;
        }
        store_scores(tile, j0, keys, of->written);
    }
}

/* Writes the scores or weights of a tile's rows. */
OUTER void
write_tile(scored_tile *of)
{
    const tile_state *tile = &of->tile;
    const ca_attention_params *params = tile->call->params;
    load_queries(of->queries, tile, AMX ? REAL(1.0) : score_scale(params));
    start_softmax(&of->softmax);
    if (!WRITES_STAGE(params, 3)) {
        pass_over_keys(of, false, 0);
        return;
    }
    realv factors[NV];
    pass_over_keys(of, true, 0);
    if (USES(params, SINKS)) {
        add_sinks(&of->softmax, tile);
    }
    find_factors(factors, &of->softmax, of->softmax.sum, REAL(1.0));
    pass_over_keys(of, false, factors);
}

/* The kernel only calls functions, and has the vector hint, as attention/cpu.cl. */
OUTER void
write_tiles(const attention_call *call, ca_int64 number)
{
    const ca_attention_params *params = call->params;
    item_rows rows;
    find_rows_of_item(&rows, params, number);

    realv memory[MEMORY_VECTORS];
    realv added[MAX_KEYS * NV];
    realv written[MAX_KEYS * NV];
    term packed[PACKED_TERMS] __attribute__((aligned(CACHE_LINE)));
    scored_tile of;
    of.queries = (termv *)memory;
    of.added = added;
    of.written = written;
    of.packed = packed;
    PLAIN_FOR (int h = 0; h < HEADS_OF_ITEM(params); h++) {
        PLAIN_FOR (ca_int64 row = rows.first; row < rows.end; row += BM) {
            start_tile(&of.tile, call, rows.head + h * params->heads, row);
            write_tile(&of);
        }
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu_scores(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
#if AMX
    amx_start();
#endif
    write_tiles(&call, group_of(&params));
#if AMX
    amx_end();
#endif
}
