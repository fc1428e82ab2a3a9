/* SPDX-License-Identifier: MIT
 *
 * The tile of attention_tiled.cl, and the scores of a block of keys: which keys its rows
 * attend to, the products, what is added to them.
 */
#ifndef CLATTN_ATTENTION_TILED_SCORES_CL
#define CLATTN_ATTENTION_TILED_SCORES_CL

#include "attention_keys.cl"           /* key_segment, SCORE_UNIT */
#include "attention_tiled_products.cl" /* multiply_keys */

/* Scores of stages 0 … 2 are written when they are at hand, and those of all keys. */
#define KEEPS_SCORES (SCORES >= 0 && SCORES <= 2)

/* Then, or where excluded keys have a score too, no block is left out. */
#define ALL_BLOCKS (KEEPS_SCORES || SOFTCAP_LAST)
#define ADDS       (MASK_ADDS || FILTER || BIAS)
#define ALL_SCORES (MI * NJ == 32 ? 0xffffffffu : (1u << (MI * NJ % 32)) - 1u)

/* What a work-group has in local memory. */
typedef struct {
    __local real4 *queries;
    __local real4 *shared; /* keys, or weights and values */
    __local int *highest;  /* [BM], of the scores of each row: see raise_bases */
    __local int *attended; /* [3], of which three blocks take turns */
} tile_memory;

/* The rows of a work-group, and this work-item's place among them. */
typedef struct {
    const attention_call *call;
    tile_memory memory;
    ca_int64 batch[CA_BATCH_DIMS];
    int i0;
    int rows;
    int first; /* keys first … end - 1 may be attended to */
    int end;
    int lower; /* row i0 + r attends to keys of lower + r … upper + r */
    int upper;
    int limit; /* below this one */
    int item;
    int tx;
    int ty;
} tile_state;

/* A block of keys in one segment. */
typedef struct {
    int j0;
    int keys; /* those there are */
    int above; /* key j0 + k is in the band of row i0 + r where below <= k - r <= above */
    int below;
    int limit; /* … and k < limit */
} key_block;

/* The keys from j0 on, of those before `end`. */
static inline key_block
block_at(const tile_state *tile, int j0, int end)
{
    key_block block;
    block.j0 = j0;
    block.keys = min(BN, end - j0);
    block.above = tile->upper - j0;
    block.below = tile->lower - j0;
    block.limit = min(end, tile->limit) - j0;
    return block;
}

/* --- masks and biases ------------------------------------------------------------- */

#if HAS_ADDENDS
static inline real
addend_at(const tile_state *tile, int r, int j)
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    real addend = REAL(0.0);
#if HAS_MASK
    addend =
        load_mask(call->mask + ca_offset(&params->mask, tile->batch, tile->i0 + r, j),
                  ca_filter(params));
#endif
#if BIAS
    addend = add_addends(addend, load(call->bias + ca_offset(&params->bias, tile->batch,
                                                             tile->i0 + r, j)));
#endif
    return addend;
}
#endif

/* Bit m * NJ + n: row m attends to key n of those that the work-item owns. */
static inline uint
find_attended(const tile_state *tile, const key_block *block)
{
    if (!HAS_ADDENDS && block->limit >= BN && block->above >= BN - 1 &&
        block->below <= 1 - BM) {
        return ALL_SCORES;
    }
    /* Bounds of what is constant in the places of its rows and keys. */
    const int above = block->above - tile->tx + tile->ty;
    const int below = block->below - tile->tx + tile->ty;
    const int limit = block->limit - tile->tx;
    const int rows = tile->rows - tile->ty;
    uint attended = 0;
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        const int r = TY * (n / NJ);
        const int k = TX * (n % NJ);
        bool attends = k - r <= above && k - r >= below && k < limit && r < rows;
#if HAS_ADDENDS
        attends = attends &&
                  addend_at(tile, tile->ty + r, block->j0 + tile->tx + k) != -INFINITY;
#endif
        attended |= attends ? 1u << n : 0u;
    }
    return attended;
}

/* Bit m * NJ + n: the key has a weight in the row. Those that are not attended to have
   one, of a score of -softcap, where the softcap comes last. */
static inline uint
find_weighed(const tile_state *tile, const key_block *block, uint attended)
{
#if SOFTCAP_LAST
    const int keys = block->keys - tile->tx;
    const int rows = tile->rows - tile->ty;
    uint weighed = 0;
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        weighed |= TX * (n % NJ) < keys && TY * (n / NJ) < rows ? 1u << n : 0u;
    }
    return weighed;
#else
    return attended;
#endif
}

#if HAS_ADDENDS
/* Does any work-item of the group attend to a key of the block? Each third block finds
   its number at 0: it has been set back between the barriers of the two blocks before,
   when all have read it and none has written it yet. */
static inline bool
group_attends(const tile_state *tile, uint attended, int turn)
{
    __local int *turns = tile->memory.attended;
    if (attended != 0) {
        atomic_or(&turns[turn], 1);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the read */
    if (tile->item == 0) {
        turns[turn == 0 ? 2 : turn - 1] = 0;
    }
    return turns[turn] != 0;
}
#endif

/* --- scores ----------------------------------------------------------------------- */

static inline void
load_queries(const tile_state *tile, int e0)
{
    const attention_call *call = tile->call;
    const ca_attention_params *params = call->params;
    load_tile(tile->memory.queries, STRIDE_E, BM, EC / 4,
              call->query + ca_offset(&params->query, tile->batch, tile->i0, 0),
              &params->query, tile->rows, e0, HEAD_E,
              INPUT_BIAS
                  ? call->input_bias + ca_offset(&params->input_bias, tile->batch, 0, 0)
                  : 0,
              tile->item);
}

/* Terms of a product above which its parts are summed apart: a long plain sum loses a
   digit. */
#define LONG_SUM 128

/* Products of all rows and keys of the block. */
static inline void
score_block(const tile_state *tile, const key_segment *segment, const key_block *block,
            real *scores)
{
    const ca_int64 row = block->j0 - segment->start;
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        scores[n] = REAL(0.0);
    }
#pragma unroll 1
    for (int e0 = 0; e0 < HEAD_E; e0 += EC) {
        barrier(CLK_LOCAL_MEM_FENCE); /* readers of the part before: these writes */
        if (PARTS_E > 1) {
            load_queries(tile, e0);
        }
        load_tile(tile->memory.shared, STRIDE_E, BN, EC / 4,
                  segment->key + row * segment->key_view->row, segment->key_view,
                  block->keys, e0, HEAD_E, segment->key_bias, tile->item);
        barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads */
#if HEAD_E > LONG_SUM
        real part[MI * NJ];
#pragma unroll
        for (int n = 0; n < MI * NJ; n++) {
            part[n] = REAL(0.0);
        }
#else
        real *part = scores;
#endif
        multiply_keys(tile->memory.queries, tile->memory.shared, tile->tx, tile->ty,
                      part);
#if HEAD_E > LONG_SUM
#pragma unroll
        for (int n = 0; n < MI * NJ; n++) {
            scores[n] += part[n];
        }
#endif
    }
}

#if SCORES >= 0
/* Scores at a stage, or weights, of the work-item's rows and keys. */
static inline void
write_scores(const tile_state *tile, const key_block *block, const real *scores)
{
    const ca_view *view = &tile->call->params->scores;
    __global storage *to =
        tile->call->scores + ca_offset(view, tile->batch, tile->i0, block->j0);
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        const int r = tile->ty + TY * (n / NJ);
        const int k = tile->tx + TX * (n % NJ);
        if (r < tile->rows && k < block->keys) {
            store(scores[n], to + r * view->row + k * view->column);
        }
    }
}
#endif

/* Add mask and bias to the scores of keys that are attended to. */
static inline void
add_addends_to(const tile_state *tile, const key_block *block, uint attended,
               real *scores)
{
#if ADDS
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        if (attended >> n & 1u) {
            scores[n] += addend_at(tile, tile->ty + TY * (n / NJ),
                                   block->j0 + tile->tx + TX * (n % NJ));
        }
    }
#endif
}

/* Scores, and a number in their place where `bits` are 0. */
static inline void
choose_scores(real *scores, uint bits, real other)
{
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        scores[n] = bits >> n & 1u ? scores[n] : other;
    }
}

/* Products become scores, -inf where a key has no weight. */
static inline void
finish_scores(const tile_state *tile, const key_block *block, uint attended,
              uint weighed, real *scores)
{
    const ca_attention_params *params = tile->call->params;
    const real scale = ca_scale(params) * (SOFTCAP ? REAL(1.0) : SCORE_UNIT);
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        scores[n] *= scale;
    }
#if SCORES == 0
    write_scores(tile, block, scores);
#endif
#if SOFTCAP_LAST
    add_addends_to(tile, block, attended, scores);
#if SCORES == 1
    choose_scores(scores, attended, -INFINITY);
    write_scores(tile, block, scores);
#endif
#endif
#if SOFTCAP
    const real softcap = ca_softcap(params);
#pragma unroll
    for (int n = 0; n < MI * NJ; n++) {
        scores[n] = tanh(scores[n] / softcap) * (softcap * SCORE_UNIT);
    }
#endif
#if SOFTCAP_LAST
    choose_scores(scores, attended, ca_softcap(params) * -SCORE_UNIT);
#else
#if SCORES == 1
    write_scores(tile, block, scores);
#endif
    add_addends_to(tile, block, attended, scores);
#endif
    choose_scores(scores, weighed, -INFINITY);
#if SCORES == 2
    write_scores(tile, block, scores);
#endif
}

#endif
