/* SPDX-License-Identifier: MIT
 *
 * Attention on CPUs, many rows: the lanes of a vector are rows of queries.
 *
 *     global size  heads / key_heads * ceil(rows / (tiles * BM)), local size 1
 *     work-item    params.key_heads heads, which share mask and bias, and of each head
 *                  params.tiles tiles, which share its keys. A tile is BM = NV * LANES rows
 *
 * A work-item goes over all keys of its rows, with an online softmax. params.heads query
 * heads share their keys. They count as one head: row 0 of each, row 1 of each, …
 *
 * One vector holds one number of LANES rows, so the softmax needs no step across lanes:
 *
 *     queries  [E][NV]   scaled; a score is the sum of key[j][e] * queries[e]
 *     weights  [keys][NV]  exp of the scores of one block of keys
 *     result   [BM][vectors of Ev]  the sum of weights[j] * value[j]. At the end the kernel
 *                        divides each row by the sum of its weights
 *
 * Vectors of queries, scores and weights have a row in each lane. The second product
 * multiplies a vector of values, whose lanes are columns, by one weight. So the kernel transposes neither
 * values nor results. The inner loop of each product keeps up to 24 vectors of sums in
 * registers.
 *
 * Head sizes, 1 … CA_CPU_HEAD_SIZE, and all options but scores and a late softcap are data. If
 * LANES does not divide a row, the row's last vector begins early, and repeats columns of the
 * vector before. csrc/attention/plan_cpu.c says how many tiles a work-item has, how many
 * vectors a tile has, and when keys and values are packed.
 *
 *     -DBFLOAT16_PAIRS  1: products of pairs of bfloat16, cpu/pairs.clh
 *     -DAMX             1: AMX multiplies these pairs, cpu/amx.clh
 *     -DNV              vectors of queries of a tile
 *     -DMR              keys that are scored together: 32 with AMX, else 6, 8, 12 or 16, whose
 *                       NV * MR sums fill the registers
 *     -DUSUAL           1: the call has no options and asks for no log-sum-exp. The rows of its
 *                       arrays are contiguous, and have at least LANES terms. 2: such a call
 *                       with a bool mask of all keys. It has no band and no key counts,
 *                       and its keys lie in a cache
 *     LANES of support/lanes.clh and the macros of support/common.clh
 */
#define SCORE_LANES LANES_ARE_ROWS
#include "kernels/attention/cpu/tiles.clh" /* tile_state, store_rows */

#include "kernels/attention/cpu/addends.clh"  /* find_added */
#include "kernels/attention/cpu/dropout.clh"  /* drop_weights */
#include "kernels/attention/cpu/products.clh" /* start_block, multiply_values */
#include "kernels/attention/cpu/softmax.clh"  /* score_keys, softmax_state */
#include "kernels/attention/keys.clh"         /* find_key_run */

/* --- tiles of a work-item --------------------------------------------------------- */

/* A tile and what it has summed so far. */
typedef struct {
    tile_state tile;
    softmax_state softmax;
    termv *queries;
    realv *result;
    bool has_result; /* false: no block has written the result yet */
} tile_sums;

/* With each strip of its first block, a tile prefetches FETCHED_ROWS rows of the next tile's queries. A core
   that prefetches all these rows at once has to wait for them. */
#define FETCHED_ROWS 5

/* A tile attends to some keys of a block. */
SMALL void
attend_block(tile_sums *sums, const term_block *block, const attended_keys *attended,
             weightv *weights)
{
    const int first = attended->first;
    const int end = attended->end;
    const realv *added = attended->added;
    const tile_state *tile = &sums->tile;
    const ca_attention_params *params = tile->call->params;
    const int Ev = (int)params->Ev;
    realv decays[CA_CPU_STRIPS * NV];
    const int heads = (int)params->heads;
    /* In a small call each work-item has one tile, and no tile follows. */
    int next_rows = params->tiles > 1 && sums->softmax.is_new ? tile->rows / heads : 0;
    const ca_int64 next_i0 = tile->i0 + BM / heads;
    __global const storage *next = tile->call->query;
    next += next_rows > 0 ? ca_offset(&params->query, tile->batch, next_i0, 0) : 0;
    bool any_decay = false;
    int strips = 0;
    PLAIN_FOR (int k0 = first; k0 < end; k0 += MR) {
        scored_strip strip;
        score_keys(&strip, tile, block, sums->queries, k0, added, sums->softmax.seen);
        realv *decay = decays + strips * NV;
        UNROLLED_FOR (int v = 0; v < NV; v++) {
            decay[v] = (realv)REAL(1.0);
        }
        PLAIN_FOR (int n = 0; n < FETCHED_ROWS && next_rows > 0; n++, next_rows--) {
            prefetch_bytes_to_second((__global const char *)next,
                                     (int)params->E * (int)sizeof(storage));
            next += params->query.row;
        }
        any_decay |= weigh_scores(params, &sums->softmax, strip.scores, strip.added,
                                  weights + WEIGHTS(k0 - first) * NV, decay);
        strips++;
    }
    const bool weighs = end_block(&sums->softmax);
    if (any_decay) {
        settle_block(decays, strips, weights, sums->result, Ev, sums->has_result ? tile->rows : 0);
    }
    if (USES(params, DROPOUT)) {
        drop_weights(tile, block->j0 + first, end - first, weights);
    }
    const term_rows value = block->value.at + TERMS(first) * block->value.stride;
    const ca_int64 stride = block->value.stride;
    /* Weights that are all 0 change the result only if a value is not finite. */
    const bool changes =
        !ADDS_NUMBERS(params) || weighs || !are_finite(value, stride, TERMS(end - first), Ev);
    if (first < end && changes) {
        multiply_values(sums->result, weights, value, stride, end - first, Ev, tile->rows,
                        !sums->has_result);
        sums->has_result = true;
    }
}

/* The tiles of a work-item: `count` tiles of each of params->key_heads heads, whose masks
   and biases are the same or lie side by side. The tiles of a head share their keys. */
typedef struct {
    tile_sums tiles[CA_CPU_TILES];
    int count;
    key_range keys; /* that some row may see */
} item_state;

/* Starts a tile and its sums. `memory` receives the tile's queries and result. */
INLINED void
start_sums(tile_sums *sums, const attention_call *call, ca_int64 linear, ca_int64 first_row,
           ca_int64 end_row, realv *memory)
{
    start_tile(&sums->tile, call, linear, first_row, end_row);
    sums->queries = (termv *)memory;
    sums->result = memory + ROW_TERMS(call->params->E) * NV;
    sums->has_result = false;
    start_softmax(&sums->softmax);
}

/* Writes the rows of a tile. */
OUTER void
finish_tile(tile_sums *sums)
{
    const tile_state *tile = &sums->tile;
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    softmax_state *softmax = &sums->softmax;
#if AMX
    realv turned[BM * VECTORS_OF(CA_CPU_HEAD_SIZE)];
#endif
    if (WRITES_LSE(params)) {
        PLAIN_FOR (int n = 0; n < tile->rows; n++) {
            ca_int64 batch[CA_BATCH_DIMS];
            const ca_int64 i = row_of_tile(tile, n, batch);
            write_lse(call, batch, i, ((const real *)softmax->base)[n],
                      ((const real *)softmax->sum)[n], ((const INT_NAME *)softmax->seen)[n] != 0);
        }
    }
    if (USES(params, SINKS)) {
        add_sinks(softmax, tile);
    }
    const int unwritten = sums->has_result ? 0 : BM * LINE_VECTORS(params->Ev);
    PLAIN_FOR (int n = 0; n < unwritten; n++) {
        sums->result[n] = (realv)REAL(0.0);
    }
    realv factors[NV];
    find_factors(factors, softmax, softmax->DIVISOR, ca_kept_scale(params));
    const realv *result = sums->result;
#if AMX
    turn_result(turned, result, (int)params->Ev);
    result = turned;
#endif
    if (store_rows(result, factors, tile, call->output, &params->output, (int)params->Ev)) {
        ask_to_redo(call);
    }
}

/* All tiles attend to their keys. Each tile loads its queries just before its first block, and is finished
   right after its last one. So memory moves some rows at a time, between the products. Returns
   false if the tiles still have to be finished. */
INLINED bool
attend(item_state *item, realv *added, weightv *weights, term *packed)
{
    const tile_state *tile = &item->tiles[0].tile;
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    bool shared = !HAS_MASK_MOD; /* heads have the same mask and bias */
    if (USES(params, MASK)) {
        shared &= VIEW(params, MASK)->batch[CA_BATCH_DIMS - 1] == 0;
    }
    if (USES(params, BIAS)) {
        shared &= VIEW(params, BIAS)->batch[CA_BATCH_DIMS - 1] == 0;
    }
    const int most = keys_of_block(params);
    const int packed_terms = reads_in_place(params) ? MR * ROW_TERMS(params->E) + LANES
                                                    : most * TERMS(PACKED_COLUMNS(params));
    const ca_int64 start = item->keys.start;
    const ca_int64 end = item->keys.end;
    term_block blocks[CA_CPU_TILES];
    bool is_last = false;
    int keys;
    PLAIN_FOR (ca_int64 j0 = start; j0 < end && !is_stopped(call); j0 += keys) {
        key_run first_run;
        find_key_run(&first_run, call, tile->batch, j0);
        keys = (int)min((ca_int64)most, min(end - j0, keys_together(params, &first_run)));
        is_last = j0 + keys == end;
        uint started = 0; /* bit h: the block of head h is there */
        PLAIN_FOR (int t = 0; t < item->count; t++) {
            attended_keys attended;
            PLAIN_FOR (int h = 0; h < HEADS_OF_ITEM(params); h++) {
                tile_sums *sums = &item->tiles[h * item->count + t];
                if (j0 == start) {
                    load_queries(sums->queries, &sums->tile, AMX ? REAL(1.0) : score_scale(params));
                }
                if (!shared || h == 0) {
                    find_attended(&attended, added, &sums->tile, j0, keys);
                }
                if (attended.any) {
                    if ((started >> h & 1) == 0) {
                        start_block(&blocks[h], call, sums->tile.batch, j0, keys,
                                    packed + h * packed_terms);
                        started |= 1u << h;
                    }
                    attend_block(sums, &blocks[h], &attended, weights);
                    blocks[h].is_new = false;
                }
                if (is_last) {
                    finish_tile(sums);
                }
            }
        }
    }
    return is_last;
}

/* Attends to the keys of a work-item's tiles. */
OUTER void
attend_tiles(const attention_call *call, ca_int64 number)
{
    const ca_attention_params *params = call->params;
    const int heads = HEADS_OF_ITEM(params);
    item_rows rows;
    find_rows_of_item(&rows, call, number);

    item_state item;
    realv memory[MEMORY_VECTORS];
    weightv weights[WEIGHTS(MAX_KEYS) * NV];
    realv added[MAX_KEYS * NV];
    /* The array begins with a line of the cache, so no whole vector of packed values lies in two
       lines. */
    term packed[PACKED_TERMS] __attribute__((aligned(CACHE_LINE)));
    /* If all keys are one block, each tile is finished before the next one begins. Then all tiles use the
       same memory. */
    const bool in_turn = keys_are_one_block(call);
    const int size = in_turn ? 0 : ROW_TERMS(params->E) * NV + BM * LINE_VECTORS(params->Ev);
    item.count = (int)((rows.end - rows.first + BM - 1) / BM);
    const int count = heads * item.count;
    PLAIN_FOR (int n = 0; n < count; n++) {
        const int h = n / item.count;
        start_sums(&item.tiles[n], call, rows.head + h * params->heads,
                   rows.first + (n - h * item.count) * BM, rows.end, memory + n * size);
    }
    const tile_state *first = &item.tiles[0].tile;
    const tile_state *last = &item.tiles[item.count - 1].tile;
    item.keys.start = first->first;
    item.keys.end = last->last + 1;
#if HAS_MASK_MOD
    const key_range band = item.keys;
    item.keys.start = band.end;
    item.keys.end = band.start;
    PLAIN_FOR (int h = 0; h < heads; h++) {
        const key_range keys = keys_of_tiles(&item.tiles[h * item.count].tile,
                                             &item.tiles[(h + 1) * item.count - 1].tile, band);
        item.keys.start = min(item.keys.start, keys.start);
        item.keys.end = max(item.keys.end, keys.end);
    }
#endif
    item.keys.end = max(item.keys.start, item.keys.end);
    if (!attend(&item, added, weights, packed)) {
        PLAIN_FOR (int n = 0; n < count; n++) {
            finish_tile(&item.tiles[n]);
        }
    }
}

/* The kernel only calls a function, because some compilers take longer for the text of a
   kernel than for that of a function. The vector hint keeps compilers from vectorising over
   work-items too. A group has only one, and building would take up to ten times as long. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
#if AMX
    amx_start();
#endif
    attend_tiles(&call, group_of(&params));
#if AMX
    amx_end();
#endif
}
