/* SPDX-License-Identifier: MIT
 *
 * Attention on GPUs without matrix units, many rows: tiles in local memory, sums in
 * registers.
 *
 *     global size   batch[0] * batch[1] * batch[2] * ceil(L / BM) * THREADS, local size
 *                   THREADS
 *     work-group    BM = TY * MI rows of one batch; all their keys, with an online
 *                   softmax; THREADS = TX * TY work-items
 *     work-item     MI of the rows: in each row NJ scores of a block of BN = TX * NJ
 *                   keys, and NC columns of the result
 *     local memory  queries [BM][EC], keys [BN][EC], values [KC][TX * NC]; weights
 *                   [BN][BM] replace the keys
 *
 *     -DHEAD_E -DHEAD_EV  head sizes E and Ev, 1 … 512
 *     -DTX -DTY           work-items along keys and columns, a power of 2; and along
 *                         rows
 *     -DMI -DNJ -DNC      what a work-item owns: rows, 1, 2 or 4; keys; columns, at least
 *                         Ev / TX
 *     -DEC                elements of queries and keys in local memory, a multiple of 8
 *     -DKC                keys whose values are in local memory, a divisor of BN
 *     -DENDS_IN_LOCAL     1: local memory holds the offsets and strides of the output. Some
 *                         compilers load params when the kernel starts, and hold them in registers
 *     -DSUB_GROUP         see support/sub_group.clh
 *     and the macros of support/common.clh
 *
 * L and T are at most 2^28, so that an int holds the sum of a few of them.
 */
#define SCORES_IN_LOG2 1
#include "kernels/attention/keys.clh"        /* find_key_run */
#include "kernels/attention/score.clh"       /* finish_score, store_lse */
#include "kernels/attention/tiled/tiles.clh" /* load_tile, multiply_keys, multiply_values */
#include "kernels/support/philox.clh"        /* ca_drops */
#include "kernels/support/sub_group.clh"     /* SUB_GROUP_ATTRIBUTE */

/* True if scores are written when they are computed: stages 0 … 2, of all keys. */
#define KEEPS_SCORES(params) (USES(params, SCORES) && !WRITES_STAGE(params, 3))

/* Where a tile's first row is written, and how far its rows and columns are apart. */
typedef struct {
    ca_int64 output;
    ca_int64 output_row;
    ca_int64 output_column;
    ca_int64 lse;
    ca_int64 lse_row;
} row_ends;

/* The rows of a work-group, and this work-item. */
typedef struct {
    const attention_call *call;
    __local real4 *queries;
    __local real4 *shared; /* keys or weights, and values */
    __local int *highest;  /* [BM], of the scores of each row: see raise_bases */
#if ENDS_IN_LOCAL
    __local row_ends *ends;
#endif
    ca_int64 batch[CA_BATCH_DIMS];
    int i0;
    int rows;
    score_bounds bounds; /* counted from row i0 and key 0 */
    addend_row addends;  /* of row i0 */
    int item;
    int tx;
    int ty;
} tile_state;

/* A block of keys in one run. */
typedef struct {
    int j0;
    int keys;            /* that exist */
    score_bounds bounds; /* counted from row i0 and key j0 */
    int known;           /* CA_BLOCK_…: what the user's mask does to it */
} tile_block;

/* Returns the block of keys from j0 on, which ends before key `end`. */
INLINED tile_block
block_at(const tile_state *tile, int j0, int end)
{
    tile_block block = {j0, min(BN, end - j0), tile->bounds};
    recount(&block.bounds, 0, j0);
    block.bounds.limit = min(block.bounds.limit, block.keys);
    block.known =
        mask_block_at(tile->call, tile->batch, 1, tile->addends.mod.q, tile->rows, j0, block.keys);
    return block;
}

/* --- scores ----------------------------------------------------------------------- */

/* Loads EC elements of the tile's queries, from element e0 on. */
INLINED void
load_queries(const tile_state *tile, int e0)
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    const row_strides strides = CA_STRIDES(&params->query);
    load_tile(tile->queries, STRIDE_E, BM, EC / 4,
              call->query + ca_offset(&params->query, tile->batch, tile->i0, 0), &strides,
              tile->rows, e0, HEAD_E, tile->item);
}

/* Loads the values of KC keys of a block, from its key k0 on. */
INLINED void
load_values(const tile_state *tile, const key_run *run, __global const value_storage *values,
            const tile_block *block, int k0)
{
    const row_strides strides = STRIDES_OF_RUN(run, tile->call->params, value);
    load_value_tile(tile->shared + VALUES_AT, STRIDE_C, KC, STRIDE_C, values + k0 * strides.row,
                    &strides, block->keys - k0, 0, HEAD_EV, tile->item);
}

/* A product of more terms is the sum of shorter ones: a long plain sum loses a
   digit. */
#define LONG_SUM 128

/* Adds the products of the work-item's rows and keys of the block to its scores. The
   first values, unless NULL, come with the first keys, so that only one load is waited
   for. */
INLINED void
score_block(const tile_state *tile, const key_run *run, __global const storage *keys,
            __global const value_storage *values, const tile_block *block, real *scores)
{
    PLAIN_FOR (int e0 = 0; e0 < HEAD_E; e0 += EC) {
        barrier(CLK_LOCAL_MEM_FENCE); /* reads of the pass before: these writes */
        if (E_PASSES > 1) {
            load_queries(tile, e0);
        }
        const row_strides strides = STRIDES_OF_RUN(run, tile->call->params, key);
        load_tile(tile->shared, STRIDE_E, BN, EC / 4, keys, &strides, block->keys, e0, HEAD_E,
                  tile->item);
        if (e0 == 0 && values != 0) {
            load_values(tile, run, values, block, 0);
        }
        barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads */
#if HEAD_E > LONG_SUM
        real products[MI * NJ] = {REAL(0.0)};
        multiply_keys(tile->queries, tile->shared, tile->tx, tile->ty, products);
        UNROLLED_FOR (int n = 0; n < MI * NJ; n++) {
            scores[n] += products[n];
        }
#else
        multiply_keys(tile->queries, tile->shared, tile->tx, tile->ty, scores);
#endif
    }
}

/* Writes score n of the work-item, or a weight, as `x`. */
INLINED void
write_score(const tile_state *tile, const tile_block *block, int n, real x)
{
    const ca_view *view = VIEW(tile->call->params, SCORES);
    const int r = tile->ty + TY * (n / NJ);
    const int k = tile->tx + TX * (n % NJ);
    if (r < tile->rows && k < block->keys) {
        store(x, tile->call->scores + ca_offset(view, tile->batch, tile->i0 + r, block->j0 + k));
    }
}

/* Turns products into scores, -inf where the row does not attend to the key. Returns bits: bit m is set
   if row m of the work-item attends to a key. */
INLINED uint
finish_scores(const tile_state *tile, const tile_block *block, real *scores)
{
    const ca_attention_params *params = tile->call->params;
    const score_bounds bounds = count_from(block->bounds, tile->ty, tile->tx);
    const real scale = score_scale(params);
    const bool plain = SCORE_IS_PLAIN(params) && block->known == CA_BLOCK_FULL &&
                       sees_all(&block->bounds, 0, BM, 0, BN);
    uint seen = plain ? ~0u : 0u;
    if (plain) {
        UNROLLED_FOR (int n = 0; n < MI * NJ; n++) {
            scores[n] *= scale;
        }
        return seen;
    }
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        const int r = TY * m;
        const bool is_row = r < tile->rows - tile->ty;
        const addend_row row = addend_row_behind(tile->call, tile->addends, tile->ty + r);
        UNROLLED_FOR (int n = m * NJ; n < (m + 1) * NJ; n++) {
            const int k = TX * (n % NJ);
            const int key = block->j0 + tile->tx + k;
            real score = scores[n] * scale;
            real added = -INFINITY;
            real kept;
            if (is_row) {
                added = addend_of(tile->call, &row, key, &bounds, k - r, k);
                score = MODIFY_SCORE(tile->call, &row.mod, key, score, &added);
            }
            score = finish_score(params, score, added, &kept);
            if (KEEPS_SCORES(params)) {
                write_score(tile, block, n, kept);
            }
            const bool weighs = added != -INFINITY;
            scores[n] = weighs ? score : -INFINITY;
            seen |= weighs ? 1u << m : 0u;
        }
    }
    return seen;
}

/* --- softmax ---------------------------------------------------------------------- */

/* The base need not be the highest score so far, only not far below it. It is raised
   when a score exceeds it by HEADROOM. The work-items of a row always have the same
   base. */
#define HEADROOM    REAL(4.0)
#define LOWEST_BASE (-FLT_MAX) /* of a row without a score so far */

typedef struct {
    real base[MI]; /* floats, also where scores are doubles */
    real sum[MI];  /* of the weights of this work-item's keys */
    uint seen;     /* bit m: row m attends to one of these keys */
} softmax_state;

INLINED void
start_softmax(softmax_state *softmax)
{
    softmax->seen = 0;
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        softmax->base[m] = LOWEST_BASE;
        softmax->sum[m] = REAL(0.0);
    }
}

/* Sums x[m] over the work-items of row m. `scratch` has BM * TX reals. */
INLINED void
sum_rows(real *x, __local real *scratch, int tx, int ty)
{
    barrier(CLK_LOCAL_MEM_FENCE); /* reads of `scratch` so far: these writes */
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        scratch[(ty * MI + m) * TX + tx] = x[m];
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads */
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        x[m] = REAL(0.0);
        PLAIN_FOR (int n = 0; n < TX; n++) { /* unrolled, it would load all at once */
            x[m] += scratch[(ty * MI + m) * TX + n];
        }
    }
}

/* Maps the bits of floats to integers in the same order. The function is its own
   inverse. */
INLINED int
order_bits(int bits)
{
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* Raises the bases that a score of this block exceeds by HEADROOM, and scales what has
   been summed. Most blocks have no such score: then no work-item writes. A barrier
   orders the reads of the keys before the writes of the weights. */
INLINED void
raise_bases(const ca_attention_params *params, softmax_state *softmax, const real *scores,
            real *result, __local int *highest, int ty)
{
    real raised[MI];
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        real high = -INFINITY;
        UNROLLED_FOR (int n = 0; n < NJ; n++) {
            high = scores[m * NJ + n] > high ? scores[m * NJ + n] : high;
        }
        if (high > softmax->base[m] + HEADROOM) {
            atomic_max(&highest[ty * MI + m], order_bits(as_int((float)high)));
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads; keys: weights */
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        raised[m] = as_float(order_bits(highest[ty * MI + m]));
    }
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        if (raised[m] != softmax->base[m]) {
            const real decay = exp2(TO_LOG2(params, softmax->base[m] - raised[m]));
            softmax->base[m] = raised[m];
            softmax->sum[m] *= decay;
            UNROLLED_FOR (int c = 0; c < NC; c++) {
                result[m * NC + c] *= decay;
            }
        }
    }
}

/* Replaces scores by weights, and sums them. */
INLINED void
weigh_scores(const ca_attention_params *params, softmax_state *softmax, real *scores)
{
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        real sum = REAL(0.0); /* over this block alone: short sums round less */
        UNROLLED_FOR (int n = 0; n < NJ; n++) {
            const real weight = exp2(TO_LOG2(params, scores[m * NJ + n] - softmax->base[m]));
            scores[m * NJ + n] = weight;
            sum += weight;
        }
        softmax->sum[m] += sum;
    }
}

/* --- weights and values ----------------------------------------------------------- */

/* Makes zeros of the weights that dropout drops, in a block of keys. The sums of the rows
   include these weights already. */
INLINED void
drop_weights(const tile_state *tile, const tile_block *block, real *weights)
{
    const ca_attention_params *params = tile->call->params;
    const ca_int64 row = row_index(params, tile->batch, tile->i0) + params->first_row;
    uint dropped = 0;
    PLAIN_FOR (int n = 0; n < MI * NJ; n++) {
        const bool drops =
            ca_drops(params, row + tile->ty + TY * (n / NJ), block->j0 + tile->tx + TX * (n % NJ));
        dropped |= drops ? 1u << n : 0u;
    }
    UNROLLED_FOR (int n = 0; n < MI * NJ; n++) {
        weights[n] = dropped >> n & 1u ? REAL(0.0) : weights[n];
    }
}

/* result += weights * values of a block. The weights replace the keys in local memory. */
INLINED void
add_block(const tile_state *tile, const key_run *run, __global const value_storage *values,
          const tile_block *block, const real *weights, real *result)
{
    __local real4 *shared = tile->shared;
    __local row_vector *to = (__local row_vector *)shared + tile->ty;
    UNROLLED_FOR (int n = 0; n < NJ; n++) {
        row_vector column;
        UNROLLED_FOR (int m = 0; m < MI; m++) {
            ((real *)&column)[m] = weights[m * NJ + n];
        }
        to[(tile->tx + TX * n) * (STRIDE_M * 4 / MI)] = column;
    }
    PLAIN_FOR (int k0 = 0; k0 < block->keys; k0 += KC) {
        if (k0 > 0) {
            /* reads of the values before: these writes */
            barrier(CLK_LOCAL_MEM_FENCE);
            load_values(tile, run, values, block, k0);
        }
        barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads */
        multiply_values(shared + k0 * STRIDE_M, shared + VALUES_AT, KC, tile->tx, tile->ty, result);
    }
}

/* Weighs a block of keys and adds its values, or on the second pass, whose sums include the
   sinks, writes its weights. */
INLINED __attribute__((always_inline)) void
attend_block(const tile_state *tile, const key_run *run, int row, const tile_block *block,
             bool again, softmax_state *softmax, real *result)
{
    const ca_attention_params *params = tile->call->params;
    real scores[MI * NJ] = {REAL(0.0)};
    __global const value_storage *values = again ? 0 : run->value + row * run->value_strides.row;
    score_block(tile, run, run->key + row * run->key_strides.row, values, block, scores);
    softmax->seen |= finish_scores(tile, block, scores);
    if (again) {
        UNROLLED_FOR (int n = 0; n < MI * NJ; n++) {
            const real weight = exp2(TO_LOG2(params, scores[n] - softmax->base[n / NJ]));
            write_score(tile, block, n,
                        scores[n] != -INFINITY ? weight / softmax->sum[n / NJ] : REAL(0.0));
        }
        return;
    }
    raise_bases(params, softmax, scores, result, tile->highest, tile->ty);
    weigh_scores(params, softmax, scores);
    if (USES(params, DROPOUT)) {
        drop_weights(tile, block, scores);
    }
    add_block(tile, run, values, block, scores, result);
}

/* The tile attends to its keys. A second pass, over all keys, writes weights: they need
   the sums. */
INLINED __attribute__((always_inline)) void
attend(const tile_state *tile, bool again, softmax_state *softmax, real *result)
{
    const ca_attention_params *params = tile->call->params;
    const bool all = again || KEEPS_SCORES(params); /* excluded keys are written too */
    const score_bounds *bounds = &tile->bounds;
    const int end = all ? (int)params->T : min(bounds->limit, bounds->upper + tile->rows);
    int run_end;
    for (int first = all ? 0 : max(0, bounds->lower); first < end; first = run_end) {
        key_run run;
        find_key_run(&run, tile->call, tile->batch, first);
        run_end = USES(params, PAST_KEY) ? min(end, first + (int)run.count) : end;
        PLAIN_FOR (int j0 = first; j0 < run_end; j0 += BN) {
            const tile_block block = block_at(tile, j0, run_end);
            if (block.known == CA_BLOCK_EMPTY && !all) { /* so it is for the whole group */
                continue;
            }
            attend_block(tile, &run, j0 - first, &block, again, softmax, result);
        }
    }
}

#if ENDS_IN_LOCAL
#define OUTPUT_AT(tile, r)  ((tile)->ends->output + (r) * (tile)->ends->output_row)
#define OUTPUT_COLUMN(tile) ((tile)->ends->output_column)
#define LSE_AT(tile, r)     ((tile)->ends->lse + (r) * (tile)->ends->lse_row)
#else
#define OUTPUT_AT(tile, r)                                                                         \
    ca_offset(&(tile)->call->params->output, (tile)->batch, (tile)->i0 + (r), 0)
#define OUTPUT_COLUMN(tile) ((tile)->call->params->output.column)
#define LSE_AT(tile, r) ca_offset(&(tile)->call->params->lse, (tile)->batch, (tile)->i0 + (r), 0)
#endif

/* Writes the rows. It is inlined so that the result stays in registers. */
INLINED __attribute__((always_inline)) void
write_rows(const tile_state *tile, const softmax_state *softmax, const real *seen,
           const real *result)
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        const int r = tile->ty + TY * m;
        const bool attends = seen[m] > REAL(0.0);
        const real factor =
            factor_of_row(call, tile->batch, softmax->base[m], softmax->sum[m], attends);
        bool finite = true;
        if (r >= tile->rows) {
            continue;
        }
        __global storage *to = call->output + OUTPUT_AT(tile, r);
        UNROLLED_FOR (int n = 0; n < NC; n++) {
            const int c = VC * (tile->tx + TX * (n / VC)) + n % VC;
            const real x = attends ? result[m * NC + n] * factor : REAL(0.0);
            if (c < HEAD_EV) {
                finite = finite && is_finite(x);
                store(x, to + c * OUTPUT_COLUMN(tile));
            }
        }
        if (tile->tx == 0 && (params->flags & CA_HAS_LSE) != 0) {
            store_lse(call, tile->batch, LSE_AT(tile, r), softmax->base[m], softmax->sum[m],
                      attends);
        }
        if (!finite) {
            ask_to_redo(call);
        }
    }
}

__kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
SUB_GROUP_ATTRIBUTE(float4) void attention_tiled(ATTENTION_ARGUMENTS)
{
    __local real4 queries[BM * STRIDE_E];
    __local real4 shared[SHARED_SIZE];
    __local int highest[BM];
    __local batch_shift shift;
#if ENDS_IN_LOCAL
    __local row_ends ends;
#endif

    DEFINE_CALL(call);
    tile_state tile = {&call, queries, shared, highest};
#if ENDS_IN_LOCAL
    tile.ends = &ends;
#endif
    tile.item = (int)get_local_id(0);
    tile.ty = tile.item / TX;
    tile.tx = tile.item - tile.ty * TX;

    /* The last rows come first: below a causal diagonal they have the most keys. */
    const int tiles = ((int)params.L + BM - 1) / BM;
    const ca_int64 group = group_of(&params);
    const ca_int64 linear = ca_divide(group, tiles);
    const int row_of_tiles = tiles - 1 - (int)(group - linear * tiles);
    ca_unravel(linear, params.batch, tile.batch);
    tile.i0 = row_of_tiles * BM;
    tile.rows = min(BM, (int)params.L - tile.i0);

    for (int n = tile.item; n < BM; n += THREADS) {
        highest[n] = order_bits(as_int(LOWEST_BASE));
    }
#if ENDS_IN_LOCAL
    if (tile.item == 0) {
        ends.output = ca_offset(&params.output, tile.batch, tile.i0, 0);
        ends.output_row = params.output.row;
        ends.output_column = params.output.column;
        ends.lse = ca_offset(&params.lse, tile.batch, tile.i0, 0);
        ends.lse_row = params.lse.row;
    }
#endif
#if E_PASSES == 1
    load_queries(&tile, 0);
#endif
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: their reads */
    const batch_sequence sequence = sequence_of_group(&call, tile.batch, &shift);
    tile.bounds = count_from(bounds_of(&sequence), tile.i0, 0);
    tile.addends = addend_row_at(&call, &sequence, tile.batch, tile.i0);

    softmax_state softmax;
    real result[MI * NC] = {REAL(0.0)};
    start_softmax(&softmax);
    attend(&tile, false, &softmax, result);

    /* Not a cast of the array's name: some compilers then give all work-groups the same
       array. */
    __local real *scratch = (__local real *)tile.shared;
    real seen[MI];
    UNROLLED_FOR (int m = 0; m < MI; m++) {
        seen[m] = softmax.seen >> m & 1u ? REAL(1.0) : REAL(0.0);
    }
    sum_rows(softmax.sum, scratch, tile.tx, tile.ty);
    sum_rows(seen, scratch, tile.tx, tile.ty);
    if (WRITES_STAGE(&params, 3)) {
        softmax_state again = softmax;
        UNROLLED_FOR (int m = 0; m < MI && USES(&params, SINKS); m++) {
            again.sum[m] += weight_of_sink(&call, tile.batch, softmax.base[m]);
        }
        attend(&tile, true, &again, result);
    }
    write_rows(&tile, &softmax, seen, result);
}
