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

#include "kernels/attention/cpu/row_sums.clh" /* scored_tile, sum_rows */

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

/* Writes the scores of a tile's rows, or their weights if `factors` is not NULL. `written` has room for the
   numbers of a block, [MAX_KEYS][NV]. */
OUTER void
write_keys(scored_tile *of, const realv *factors, realv *written)
{
    const tile_state *tile = &of->tile;
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    const realv excluded = factors != 0 ? (realv)REAL(0.0) : (realv)(-INFINITY);
    int keys;
    PLAIN_FOR (ca_int64 j0 = 0; j0 < params->T && !is_stopped(call); j0 += keys) {
        attended_keys attended;
        term_block block;
        keys = start_keys(of, j0, params->T, &attended, &block);
        const int first = attended.any ? attended.first : 0;
        int k0 = first;
        PLAIN_FOR (; k0 < attended.end; k0 += MR) {
            scored_strip strip;
            score_keys(&strip, tile, &block, of->queries, k0, attended.added, of->softmax.seen);
            keep_strip(written + k0 * NV, of, &strip, factors);
        }
        PLAIN_FOR (int n = 0; n < first * NV; n++) {
            written[n] = excluded;
        }
        PLAIN_FOR (int n = k0 * NV; n < keys * NV; n++) {
            written[n] = excluded;
        }
        store_block(tile, call->scores, VIEW(params, SCORES), j0, keys, written);
    }
}

/* Writes the scores or weights of a tile's rows. */
OUTER void
write_tile(scored_tile *of, realv *written)
{
    const tile_state *tile = &of->tile;
    const ca_attention_params *params = tile->call->params;
    load_queries(of->queries, tile, AMX ? REAL(1.0) : score_scale(params));
    if (!WRITES_STAGE(params, 3)) {
        start_softmax(&of->softmax);
        write_keys(of, 0, written);
        return;
    }
    realv factors[NV];
    sum_rows(of);
    find_factors(factors, &of->softmax, of->softmax.sum, REAL(1.0));
    write_keys(of, factors, written);
}

/* The kernel only calls functions, and has the vector hint, as attention/cpu.cl. */
OUTER void
write_tiles(const attention_call *call, ca_int64 number)
{
    const ca_attention_params *params = call->params;
    item_rows rows;
    find_rows_of_item(&rows, call, number);

    realv memory[MEMORY_VECTORS];
    realv added[MAX_KEYS * NV];
    realv written[MAX_KEYS * NV];
    term packed[PACKED_TERMS] __attribute__((aligned(CACHE_LINE)));
    scored_tile of;
    of.queries = (termv *)memory;
    of.added = added;
    of.packed = packed;
    PLAIN_FOR (int h = 0; h < HEADS_OF_ITEM(params); h++) {
        PLAIN_FOR (ca_int64 row = rows.first; row < rows.end; row += BM) {
            start_tile(&of.tile, call, rows.head + h * params->heads, row, rows.end);
            write_tile(&of, written);
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
