/* SPDX-License-Identifier: MIT
 *
 * The backward pass of attention on CPUs, many rows: the lanes of a vector are rows of queries, as in
 * attention/cpu.cl. attention/backward.cl has the formulas. The steps, and what a work-item has:
 *
 *     numbers    lse[i] = base, sum, delta               a tile of rows
 *     gradients  of query, key and value                 the keys of a head, or a part of them
 *     parts      the sum of the parts' query gradients   a tile of rows
 *     mask       the gradient of a mask                  a tile of rows and a block of keys
 *     captured   that of an array of the score_mod       a share of the rows
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
 * are 0. If the log-sum-exp is large, a float has no room for the logarithm of the sum. Then the first step
 * computes base and sum anew.
 *
 * Macros: those of attention/cpu.cl. Terms are reals, and USUAL is 0.
 */
#define IS_BACKWARD
#define SCORE_LANES    LANES_ARE_ROWS
#define SCORES_IN_LOG2 0
#include "kernels/attention/cpu/tiles.clh" /* tile_state, store_rows */

#include "kernels/attention/cpu_backward/blocks.clh"  /* start_key_block, start_strip */
#include "kernels/attention/cpu_backward/numbers.clh" /* write_numbers, start_rows */
#include "kernels/attention/cpu_backward/scores.clh"  /* write_mask, write_captured */

/* Starts the gradients of a block. */
INLINED void
clear_gradients(const key_block *block, const ca_attention_params *params)
{
    const int panels = PANELS(params->E) + PANELS(params->Ev);
    PLAIN_FOR (int n = 0; n < panels * block->most * NV; n++) {
        block->grad_key[n] = (realv)REAL(0.0); /* grad_value lies behind */
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
    find_kept(memory->kept, tile, block, attended);
    PLAIN_FOR (int k0 = first; k0 < attended->end; k0 += MR) {
        gradient_strip strip;
        start_strip(&strip, of, block, attended, memory, k0, OF_PRODUCTS, differs);
        if (USES(params, GRAD_VALUE)) {
            add_rows(block->grad_value + k0 * NV, block->most * NV, strip.weights, of->grad_rows,
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

/* Returns where a tile keeps the sums of its query gradients from one block to the next. Each part of the keys has
   such sums: [row][vectors]. */
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
        bool is_shared = USES(params, GRAD_KEY) && VIEW(params, GRAD_KEY)->batch[d] == 0;
        if (USES(params, GRAD_VALUE)) {
            is_shared |= VIEW(params, GRAD_VALUE)->batch[d] == 0;
        }
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
        start_tile(tile, call, head, i, params->L);
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
        clear_gradients(&block, params);
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
    switch (STEP_OF(&params)) {
    case CA_BACKWARD_NUMBERS:
        write_numbers(&call, number);
        break;
    case CA_BACKWARD_GRADIENTS:
        write_gradients(&call, number);
        break;
    case CA_BACKWARD_MASK:
        write_mask(&call, number);
        break;
#if HAS_SCORE_MOD
    case CA_BACKWARD_CAPTURED:
        write_captured(&call, number);
        break;
#endif
    default:
        sum_parts(&call, number);
    }
}
