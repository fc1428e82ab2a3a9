/* SPDX-License-Identifier: MIT
 *
 * The backward pass of attention on CPUs, many rows: the lanes of a vector are rows of queries, as in
 * attention/cpu.cl. attention/backward.cl has the formulas. Three steps:
 *
 *     numbers    lse[i] = base, sum, delta       a work-item has a tile of rows
 *     gradients  of query, key and value         a work-item has the keys of a head, or a part of them
 *     parts      the query's gradient is the sum of the parts' ones    a work-item has a tile of rows
 *
 * In the second step a work-item goes over its keys in blocks, and for each block over the rows of all heads
 * that share the keys. Of a block and a tile of rows it computes five products:
 *
 *     product[k][v]      = sum_e key[k][e] * queries[e][v]           a score is made of it, and a weight
 *     grad_weight[k][v]  = sum_c value[k][c] * grads[c][v]
 *     grad_value[k][c]  += sum_row kept * weight[k][row] * grad_output[row][c]
 *     grad_key[k][e]    += sum_row grad_product[k][row] * query[row][e]
 *     grad_query[row][e] += sum_k grad_product[k][row] * key[k][e]
 *
 * The gradients of a block's keys and values stay in a cache, and nothing else adds to them. Those of queries
 * lie in `output` from one block to the next. So no two work-items add to a number, and a result has the
 * same bits each time.
 *
 * The base of a row is its log-sum-exp, and the sum is 1. A row without a key has the base +inf, so its weights
 * are 0. If the log-sum-exp is large, a float has no room for
 * the logarithm of the sum. Then the first step computes base and sum anew.
 *
 * Macros: those of attention/cpu.cl. Terms are reals, and USUAL is 0.
 */
#define IS_BACKWARD
#define SCORE_LANES    LANES_ARE_ROWS
#define SCORES_IN_LOG2 0
#include "kernels/attention/cpu/tiles.clh" /* tile_state, store_rows */

#include "kernels/attention/cpu/dropout.clh"          /* drop_weights */
#include "kernels/attention/cpu_backward/numbers.clh" /* write_numbers, start_rows */
#include "kernels/attention/cpu_backward/panels.clh"  /* gradient_tile, load_tile */

/* The host divides keys into blocks so that packed keys and values, and the panels of their gradients, fit. */
#define BLOCK_REALS (MR * CA_BACKWARD_COLUMNS)

/* --- one strip of keys ---------------------------------------------------------------- */

/* The products of a strip of MR keys, which become what the gradients are sums of. */
typedef struct {
    realv
        scores[MR * NV]; /* the products of queries and keys; then the weights that dropout keeps */
    realv grads[MR * NV];   /* of the weights; then of the products */
    realv bounded[MR * NV]; /* what is added to the scores */
} gradient_strip;

/* Finishes `keys` keys of a strip. The others become 0. `added` is what is added to their scores, and `kept` is
   what dropout makes of their weights. They are NULL where nothing is. */
CALLED void
differentiate(gradient_strip *strip, const gradient_tile *of, int keys, const realv *added,
              const realv *kept)
{
    const ca_attention_params *params = of->tile.call->params;
    const bool caps = USES(params, SOFTCAP);
    const realv scale = (realv)ca_scale(params);
    PLAIN_FOR (int n0 = 0; n0 < keys * NV; n0 += NV) {
        UNROLLED_FOR (int v = 0; v < NV; v++) {
            const int n = n0 + v;
            const realv capped = cap_score(params, strip->scores[n]);
            const realv score = sum_score(params, &capped, added != 0 ? added + n : 0, 0);
            realv weight = weight_in(false, score - of->base[v]) * of->inverse[v];
            realv grad = strip->grads[n];
            realv kept_weight = weight;
            if (kept != 0) {
                kept_weight = weight * kept[n];
                grad *= kept[n];
            }
            grad = weight * (grad - of->delta[v]) * scale;
            if (caps) {
                const realv share = capped * (realv)ca_inverse_softcap(params); /* tanh */
                grad *= (realv)REAL(1.0) - share * share;
            }
            if (added != 0) { /* what is excluded adds 0, even if it is not finite */
                const intv excluded = added[n] == (realv)(-INFINITY);
                kept_weight = excluded ? (realv)REAL(0.0) : kept_weight;
                grad = excluded ? (realv)REAL(0.0) : grad;
            }
            strip->scores[n] = kept_weight;
            strip->grads[n] = grad;
        }
    }
    PLAIN_FOR (int n = keys * NV; n < MR * NV; n++) {
        strip->scores[n] = (realv)REAL(0.0);
        strip->grads[n] = (realv)REAL(0.0);
    }
}

/* sums[panel][k][v] += sum_row of strip[k][row] * rows[panel][row][v]. Panels of sums lie `step` vectors
   apart. */
SMALL void
add_rows(realv *sums, int step, const realv *strip, const realv *rows, int count, int columns)
{
    PLAIN_FOR (int p = 0; p < PANELS(columns); p++) {
        realv part[MR * NV];
        multiply_strip(part, rows, (term_rows)strip, BM, count, REAL(1.0));
        UNROLLED_FOR (int n = 0; n < MR * NV; n++) {
            sums[n] += part[n];
        }
        sums += step;
        rows += BM * NV;
    }
}

/* --- one block of keys ------------------------------------------------------------------ */

/* A block of keys: packed rows of keys and values, and their gradients in panels. */
typedef struct {
    ca_int64 j0;
    int keys;
    int most; /* keys of a panel of gradients */
    term_rows key;
    term_rows value;
    int key_stride;
    int value_stride;
    realv *grad_key;
    realv *grad_value;
} key_block;

/* Memory for a block, and for a tile's part in it. */
typedef struct {
    realv packed[BLOCK_REALS / LANES + 1]; /* zeros end with a whole vector */
    realv sums[BLOCK_REALS / LANES];
    realv added[MAX_KEYS * NV];
    realv kept[MAX_KEYS * NV];
    realv grads[MAX_KEYS * NV];                      /* of the products of queries and keys */
    realv result[BM * VECTORS_OF(CA_BACKWARD_SIZE)]; /* of a tile: the query's gradient */
} block_memory;

/* Packs keys j0 … j0 + keys - 1 of a batch and their values. Strips are filled up with zeros. */
OUTER void
start_key_block(key_block *block, const attention_call *call, const ca_int64 *batch, ca_int64 j0,
                int keys, block_memory *memory)
{
    const ca_attention_params *params = call->params;
    const int E = (int)params->E;
    const int Ev = (int)params->Ev;
    const int ends = (keys + MR - 1) / MR * MR;
    real *key = (real *)memory->packed;
    key_run run;
    find_key_run(&run, call, batch, j0);
    block->j0 = j0;
    block->keys = keys;
    block->most = (int)params->tiles;
    block->key_stride = VALUE_STRIDE(E);
    block->value_stride = VALUE_STRIDE(Ev);
    real *value = key + block->most * block->key_stride;
    block->key = key;
    block->value = value;
    block->grad_key = memory->sums;
    block->grad_value = memory->sums + PANELS(E) * block->most * NV;
    pack_keys(key, run.key, &run.key_strides, keys, E, block->key_stride);
    clear_terms(key + keys * block->key_stride, (ends - keys) * block->key_stride);
    pack_values(value, run.value, &run.value_strides, keys, Ev, block->value_stride);
    clear_terms(value + keys * block->value_stride, (ends - keys) * block->value_stride);
    PLAIN_FOR (int n = 0; n < (PANELS(E) + PANELS(Ev)) * block->most * NV; n++) {
        memory->sums[n] = (realv)REAL(0.0);
    }
}

/* Adds what a tile of rows gives to the gradients of a block, and of the rows' queries. */
OUTER void
add_tile(gradient_tile *of, const key_block *block, const attended_keys *attended, bool is_first,
         block_memory *memory)
{
    const tile_state *tile = &of->tile;
    const ca_attention_params *params = tile->call->params;
    const int E = (int)params->E;
    const int Ev = (int)params->Ev;
    const int first = attended->first;
    const bool differs = USES(params, GRAD_QUERY) || USES(params, GRAD_KEY);
    const bool drops = USES(params, DROPOUT);
    PLAIN_FOR (int n = first * NV; drops && n < attended->end * NV; n++) {
        memory->kept[n] = (realv)ca_kept_scale(params);
    }
    if (drops) {
        drop_weights(tile, block->j0 + first, attended->end - first, memory->kept + first * NV);
    }
    PLAIN_FOR (int k0 = first; k0 < attended->end; k0 += MR) {
        const int keys = min(block->keys - k0, MR);
        gradient_strip strip;
        multiply_keys(strip.scores, of->queries, block->key + k0 * block->key_stride,
                      block->key_stride, keys, E, REAL(1.0));
        if (differs) {
            multiply_keys(strip.grads, of->grads, block->value + k0 * block->value_stride,
                          block->value_stride, keys, Ev, REAL(1.0));
        }
        const realv *added = attended->added != 0 ? attended->added + k0 * NV : 0;
        added = bounded_addends(strip.bounded, added, tile, block->j0 + k0, keys);
        differentiate(&strip, of, min(keys, attended->end - k0), added,
                      drops ? memory->kept + k0 * NV : 0);
        if (USES(params, GRAD_VALUE)) {
            add_rows(block->grad_value + k0 * NV, block->most * NV, strip.scores, of->grad_rows,
                     tile->rows, Ev);
        }
        if (USES(params, GRAD_KEY)) {
            add_rows(block->grad_key + k0 * NV, block->most * NV, strip.grads, of->query_rows,
                     tile->rows, E);
        }
        if (USES(params, GRAD_QUERY)) {
            UNROLLED_FOR (int n = 0; n < MR * NV; n++) {
                memory->grads[k0 * NV + n] = strip.grads[n];
            }
        }
    }
    if (USES(params, GRAD_QUERY)) {
        multiply_values(memory->result, memory->grads + first * NV,
                        block->key + first * block->key_stride, block->key_stride,
                        attended->end - first, E, tile->rows, is_first);
    }
}

/* --- results ---------------------------------------------------------------------------- */

/* Writes a block's gradients, which lie in panels, to `array`. True if a number is not finite. */
SMALL bool
store_panels(const key_block *block, const realv *panels, __global storage *array,
             const ca_view *view, const ca_int64 *batch, int columns)
{
    intv odd = (intv)0;
    PLAIN_FOR (int k = 0; k < block->keys; k++) {
        __global storage *to = array + ca_offset(view, batch, block->j0 + k, 0);
        PLAIN_FOR (int n = 0; n < VECTORS_OF(columns); n++) {
            const realv x = panels[(n / NV * block->most + k) * NV + n % NV];
            const int count = min(LANES, columns - n * LANES);
            odd |= is_not_finite(x);
            if (view->column == 1 && count == LANES) {
                store_lanes(x, to + n * LANES);
                continue;
            }
            PLAIN_FOR (int lane = 0; lane < count; lane++) {
                store(((const real *)&x)[lane], to + (n * LANES + lane) * view->column);
            }
        }
    }
    return any_lane(odd);
}

/* Where the sums of a tile's queries lie between the blocks, in part `part`: [row][vectors]. */
INLINED __global real *
sums_of_tile(const tile_state *tile, ca_int64 part)
{
    const ca_attention_params *params = tile->call->params;
    const ca_int64 rows = params->batch[0] * params->batch[1] * params->batch[2] * params->L;
    const ca_int64 row = row_index(params, tile->batch, tile->i0);
    return (__global real *)tile->call->output +
           (part * rows + row) * LINE_VECTORS(params->E) * LANES;
}

/* Adds the numbers of a part to the sums of a tile, or replaces these. */
SMALL void
load_sums(realv *result, const tile_state *tile, ca_int64 part, bool adds)
{
    __global const real *from = sums_of_tile(tile, part);
    PLAIN_FOR (int n = 0; n < tile->rows * LINE_VECTORS(tile->call->params->E); n++) {
        const realv x = *(__global const unaligned_realv *)(from + n * LANES);
        result[n] = adds ? result[n] + x : x;
    }
}

SMALL void
keep_sums(const realv *result, const tile_state *tile, ca_int64 part)
{
    __global real *to = sums_of_tile(tile, part);
    PLAIN_FOR (int n = 0; n < tile->rows * LINE_VECTORS(tile->call->params->E); n++) {
        *(__global unaligned_realv *)(to + n * LANES) = result[n];
    }
}

/* Writes the gradient of a tile's queries. True if a number is not finite. */
INLINED bool
store_queries(const realv *result, const tile_state *tile)
{
    const ca_attention_params *params = tile->call->params;
    realv ones[NV];
    for (int v = 0; v < NV; v++) {
        ones[v] = (realv)REAL(1.0);
    }
    return store_rows(result, ones, tile, tile->call->grad_query, VIEW(params, GRAD_QUERY),
                      (int)params->E);
}

/* --- the steps ---------------------------------------------------------------------------- */

/* A part of the keys of a head, and the heads that share them: the leading dimensions that the gradients of
   key and value have, and those that these are summed over. */
typedef struct {
    ca_int64 shared[CA_BATCH_DIMS];
    ca_int64 own[CA_BATCH_DIMS]; /* place */
    ca_int64 part;
    key_range keys;
} key_share;

INLINED void
find_share(key_share *share, const ca_attention_params *params, ca_int64 number)
{
    const ca_int64 head = ca_divide(number, params->splits);
    ca_int64 sizes[CA_BATCH_DIMS];
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        const bool is_shared =
            (USES(params, GRAD_KEY) && VIEW(params, GRAD_KEY)->batch[d] == 0) ||
            (USES(params, GRAD_VALUE) && VIEW(params, GRAD_VALUE)->batch[d] == 0);
        share->shared[d] = is_shared ? params->batch[d] : 1;
        sizes[d] = is_shared ? 1 : params->batch[d];
    }
    ca_unravel(head, sizes, share->own);
    share->part = number - head * params->splits;
    share->keys = part_of_keys(0, params->T - 1, share->part, params->splits);
}

/* Goes over the rows of one head for a block of keys. True if a number is not finite. */
OUTER bool
add_head(gradient_tile *of, const key_share *share, const key_block *block, ca_int64 head,
         const attention_call *call, block_memory *memory)
{
    const ca_attention_params *params = call->params;
    const bool is_first = block->j0 == share->keys.start;
    const bool is_last = block->j0 + block->keys == share->keys.end;
    bool odd = false;
    PLAIN_FOR (ca_int64 i = 0; i < params->L && !is_stopped(call); i += BM) {
        tile_state *tile = &of->tile;
        attended_keys attended;
        start_tile(tile, call, head, i);
        of->excluding |= tile->excluding;
        find_attended(&attended, memory->added, tile, block->j0, block->keys);
        const bool any = attended.any && attended.first < attended.end;
        if (!any && !is_first && !is_last) {
            continue;
        }
        const bool sums = USES(params, GRAD_QUERY);
        if (sums && !is_first) {
            load_sums(memory->result, tile, share->part, false);
        }
        if (any) {
            load_tile(of);
            add_tile(of, block, &attended, is_first, memory);
        }
        PLAIN_FOR (int n = 0; sums && !any && is_first && n < BM * LINE_VECTORS(params->E); n++) {
            memory->result[n] = (realv)REAL(0.0);
        }
        if (sums && is_last && params->splits == 1) {
            odd |= store_queries(memory->result, tile);
        } else if (sums) {
            keep_sums(memory->result, tile, share->part);
        }
    }
    return odd;
}

/* Writes the gradients of work-item `number`. */
OUTER void
write_gradients(const attention_call *call, ca_int64 number)
{
    const ca_attention_params *params = call->params;
    key_share share;
    find_share(&share, params, number);
    gradient_tile of;
    block_memory memory;
    const int most = (int)params->tiles;
    const ca_int64 heads = share.shared[0] * share.shared[1] * share.shared[2];
    bool odd = false;
    of.excluding = false;
    PLAIN_FOR (ca_int64 j0 = share.keys.start; j0 < share.keys.end && !is_stopped(call);
               j0 += most) {
        key_block block;
        start_key_block(&block, call, share.own, j0, (int)min((ca_int64)most, share.keys.end - j0),
                        &memory);
        PLAIN_FOR (ca_int64 n = 0; n < heads; n++) {
            ca_int64 batch[CA_BATCH_DIMS];
            ca_unravel(n, share.shared, batch);
            ca_int64 head = 0;
            for (int d = 0; d < CA_BATCH_DIMS; d++) {
                head = head * params->batch[d] + share.own[d] + batch[d];
            }
            odd |= add_head(&of, &share, &block, head, call, &memory);
        }
        if (USES(params, GRAD_KEY)) {
            odd |= store_panels(&block, block.grad_key, call->grad_key, VIEW(params, GRAD_KEY),
                                share.own, (int)params->E);
        }
        if (USES(params, GRAD_VALUE)) {
            odd |= store_panels(&block, block.grad_value, call->grad_value,
                                VIEW(params, GRAD_VALUE), share.own, (int)params->Ev);
        }
    }
    if (odd && of.excluding) { /* perhaps by 0 * NaN, of what is excluded */
        ask_to_redo(call);
    }
}

/* Sums the parts of a tile's gradient. */
OUTER void
sum_parts(const attention_call *call, ca_int64 number)
{
    tile_state tile;
    realv result[BM * VECTORS_OF(CA_BACKWARD_SIZE)];
    start_rows(&tile, call, number);
    PLAIN_FOR (ca_int64 part = 0; part < call->params->splits; part++) {
        load_sums(result, &tile, part, part > 0);
    }
    if (store_queries(result, &tile)) {
        ask_to_redo(call);
    }
}

/* The kernel only calls functions, and has the vector hint, as attention/cpu.cl. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(realv))) void
attention_cpu_backward(ATTENTION_ARGUMENTS)
{
    DEFINE_CALL(call);
    const ca_int64 number = group_of(&params);
    switch (params.own & CA_BACKWARD_STEPS) {
    case CA_BACKWARD_NUMBERS:
        write_numbers(&call, number);
        break;
    case CA_BACKWARD_GRADIENTS:
        write_gradients(&call, number);
        break;
    default:
        sum_parts(&call, number);
    }
}
