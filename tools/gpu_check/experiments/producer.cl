/* SPDX-License-Identifier: MIT
 *
 * Attention in which some warps copy, and others multiply. float16, contiguous, no masks.
 *
 *     query, output  (heads, L, HEAD_E)
 *     key, value     (heads, S, HEAD_E)
 *     factor         the scale of scores, times log2(e)
 *     causal         1: row i attends to keys 0 … i
 *     global size    at most heads * ceil(L / BM) * local size; local size 32 * (WARPS + 4)
 *
 * The first WARPS warps are groups of four. Each group has 64 of the work-group's BM rows. The last four warps, or
 * one of them, copy tiles of BN keys, or of their values, in the order in which groups multiply them:
 *
 *     keys 0, keys 1, values 0, keys 2, values 1, … keys n, values n - 1, … values of the last block
 *
 * Tile t lies in stage t % STAGES. Each stage has two barriers: `full` when its copies are done, and `empty`
 * when all warps have multiplied it. So no warp that multiplies computes addresses of copies, and groups wait
 * neither for each other nor, with enough stages, for memory.
 *
 * BM rows of a head are a piece of work. A work-group takes every so many pieces, as work-groups are launched.
 * While warps that multiply end one piece, the others copy the first tiles of the next one.
 *
 *     -DWARPS           that multiply: 8, or 12
 *     -DHEAD_E          64 or 128
 *     -DBN              keys of a block, 64 or 128
 *     -DSTAGES          a power of two, at least 4; 8 if producers show copies
 *     -DPRODUCER_WARPS  that copy: 1 or 4
 *     -DQUERY_TILES     in local memory: 1, or 2, so that the next piece's queries come while this one's are read
 *     -DSHOWN_BY        who shows copies to products: MULTIPLIERS, behind their waits for a tile; or PRODUCERS,
 *                       which then wait for their copies, two tiles later. UNIT: nobody has to, because one
 *                       work-item asks the unit that copies tensors, by maps of query, key and value, for boxes
 *                       of 64 columns and BM or BN rows
 *     -DREGISTERS       of a work-item that multiplies, by setmaxnreg; 0: as many as the others
 *     -DORDER           when a group begins the scores of the next block:
 *                       BEHIND, with the result of the last block, behind the weights of the last block
 *                       AHEAD, before the weights of this block. The group has two blocks of scores
 *     -DTURNS           1, in the order BEHIND, of two groups: a group begins products only after the other group has begun its
 *                       own, so that one computes weights while the other multiplies
 *     -DCLOCK           1: the first numbers of a group's first row are cycles, of all blocks but the first one
 */
#define BEHIND 0
#define AHEAD  1

#define MULTIPLIERS 0
#define PRODUCERS   1
#define UNIT        2

#define DTYPE           CA_KERNEL_FLOAT16
#define KEY_DTYPE       DTYPE
#define VALUE_DTYPE     DTYPE
#define REAL64          0
#define OPTIONS         0
#define ARRAYS          0
#define MASK_DTYPE      0
#define LSE             0
#define SCORES_IN_LOG2  1
#define OWN_CONDITIONS  1
#define GROUPED         1
#define CAP             warp_tanh
#define WARP            CA_WARP_PTX_GROUPS
#define LOCAL_ALIGNMENT GROUP_PANEL_BYTES
#define MT              1
#define STRIP           BN
#define HEAD_EV         HEAD_E
#define EV_TILES        (HEAD_EV / 8)
#include "tools/gpu_check/experiments/barriers.clh" /* phase_wait */

#include "kernels/attention/mma/softmax.clh" /* softmax_state */

#define BM             (WARPS * 16)
#define COPYING        (SHOWN_BY == UNIT ? 1 : PRODUCER_WARPS * WARP_LANES)
#define E_CHUNKS       (HEAD_E / 8)
#define ROW_CHUNKS     8 /* of a panel */
#define TILE_BYTES(n)  ((n) * HEAD_E * 2)
#define RING_START     (QUERY_TILES * TILE_BYTES(BM))
#define BARRIERS_START (RING_START + STAGES * TILE_BYTES(BN))
#define LOCAL_CHUNKS                                                                               \
    ((BARRIERS_START + 2 * STAGES * PHASE_BYTES + QUERY_TILES * PHASE_BYTES + 15) / 16)
#define FULL(start, t)  ((start) + BARRIERS_START + (t) % STAGES * PHASE_BYTES)
#define EMPTY(start, t) (FULL(start, t) + STAGES * PHASE_BYTES)
#define PARITY(t)       ((t) / STAGES & 1u)
#define QUERIES(start, turn)                                                                       \
    ((start) + BARRIERS_START + 2 * STAGES * PHASE_BYTES + (turn) % QUERY_TILES * PHASE_BYTES)
#define QUERY_PARITY(turn)      ((turn) / QUERY_TILES & 1u)
#define QUERY_TILE(start, turn) ((start) + (turn) % QUERY_TILES * TILE_BYTES(BM))
#define KEY_STEPS               (BN / 16)
#define RESULT_COLUMNS          HEAD_E

/* BM rows of a head. */
typedef struct {
    int head;
    int i0;
    int end;    /* of the keys that a row may attend to */
    int blocks; /* of these keys */
} work_piece;

/* Returns the number of the next piece, and sets the piece of a number. */
INLINED int
find_piece(int number, int L, int S, int causal, work_piece *piece)
{
    const int tiles = (L + BM - 1) / BM;
    piece->head = number / tiles;
    /* The last rows come first: they have the most keys if rows are causal. */
    piece->i0 = (tiles - 1 - (number - piece->head * tiles)) * BM;
    piece->end = causal ? min(S, piece->i0 + BM) : S;
    piece->blocks = (piece->end + BN - 1) / BN;
    return number + (int)get_num_groups(0);
}

#if SHOWN_BY == UNIT
#include "tools/gpu_check/experiments/producer_boxes.clh" /* copy_boxes */
#define MAPS , __global const uchar *maps
#else
#include "tools/gpu_check/experiments/producer_copies.clh" /* copy_all */
#define MAPS
#endif

/* How many cycles each part of the work took, summed over all blocks. */
#define PARTS 6
typedef struct {
    uint before;
    uint parts[PARTS];
} part_clock;

INLINED uint
clock_now(void)
{
    uint now;
    __asm__ volatile("mov.u32 %0, %%clock;" : "=r"(now) : : "memory");
    return now;
}

/* Adds the cycles since the last call to those of a part. */
INLINED void
end_part(part_clock *clock, int part)
{
    if (CLOCK) {
        const uint now = clock_now();
        clock->parts[part] += now - clock->before;
        clock->before = now;
    }
}

INLINED void
start_clock(part_clock *clock)
{
    if (CLOCK) {
        WARP_FOR (int n = 0; n < PARTS; n++) {
            clock->parts[n] = 0u;
        }
        clock->before = clock_now();
    }
}

INLINED void
write_clock(const part_clock *clock, int blocks, __global uint *to)
{
    WARP_FOR (int n = 0; n < PARTS; n++) {
        to[n] = clock->parts[n] / (uint)max(blocks - 1, 1);
    }
}

/* The rows of a lane, and the keys that they attend to. */
typedef struct {
    int row;    /* of the first one, counted from the head's row 0 */
    int column; /* of its first key in a block */
    int end;    /* keys */
    int causal;
    float factor;
    uint tile; /* the first one of the piece */
    uint turn; /* pieces before */
} attended_rows;

/* Waits for tile t. The wait is a loop, and ptxas moves no weights over a loop. */
INLINED void
wait_for_tile(const warp_state *warp, uint t)
{
    phase_wait(FULL(warp->start, t), PARITY(t));
}

/* Shows the tiles that have been waited for to products, which read local memory by another way. */
INLINED void
show_tiles(void)
{
    if (SHOWN_BY == MULTIPLIERS) {
        group_copies_arrive();
    }
}

/* The warp has multiplied tile t. */
INLINED void
release(const warp_state *warp, uint t)
{
    if (warp->lane == 0u) {
        phase_arrive(EMPTY(warp->start, t));
    }
}

/* A group begins products when the other one has begun its own. */
INLINED void
begin_turn(const warp_state *warp)
{
    if (TURNS) {
        NAMED_WAIT(1u + warp->index / GROUP_WARPS, THREADS);
    }
}

INLINED void
end_turn(const warp_state *warp)
{
    if (TURNS) {
        NAMED_ARRIVE(2u - warp->index / GROUP_WARPS, THREADS);
    }
}

INLINED group_panels
tile_panels(const warp_state *warp, uint t)
{
    return group_panels_at(warp->start + RING_START + t % STAGES * TILE_BYTES(BN),
                           BN * GROUP_ROW_BYTES);
}

/* All warps of a group have multiplied the piece's last tiles, and its queries. */
INLINED void
release_piece(const warp_state *warp, const attended_rows *rows, int blocks)
{
    release(warp, rows->tile + 2 * (uint)blocks - 2);
    release(warp, rows->tile + 2 * (uint)blocks - 1);
    if (warp->lane == 0u) {
        phase_arrive(QUERIES(warp->start, rows->turn));
    }
}

/* Starts scores = queries * keys of tile t, transposed. */
INLINED void
start_scores(const warp_state *warp, const attended_rows *rows, uint t, float4 *scores)
{
    const group_panels queries =
        group_panels_at(QUERY_TILE(warp->start, rows->turn) +
                            warp->index / GROUP_WARPS * (GROUP_ROWS * GROUP_ROW_BYTES),
                        BM * GROUP_ROW_BYTES);
    const group_panels keys = tile_panels(warp, t);
    WARP_FOR (uint e = 0; e < HEAD_E / 16; e++) {
        group_multiply_tiles(
            warp, scores, BN, group_behind(queries, e / 4 * (BM * GROUP_ROW_BYTES) + e % 4 * 32),
            group_behind(keys, e / 4 * (BN * GROUP_ROW_BYTES) + e % 4 * 32), e == 0);
    }
    group_end();
}

/* Starts result += weights * values of tile t. */
INLINED void
start_result(const warp_state *warp, uint t, const uint4 *weights, float4 *result)
{
    const group_panels values = tile_panels(warp, t);
    WARP_FOR (uint k = 0; k < KEY_STEPS; k++) {
        group_multiply_rows(warp, result, RESULT_COLUMNS, weights[k],
                            group_behind(values, k * 16 * GROUP_ROW_BYTES));
    }
    group_end();
}

/* Excludes keys from key j on that a row does not attend to. */
INLINED void
exclude(const attended_rows *rows, int j, float4 (*scores)[KEY_TILES])
{
    WARP_FOR (int r = 0; r < ROWS; r++) {
        const int row = rows->row + 8 * r;
        const int keys = (rows->causal ? min(rows->end, row + 1) : rows->end) - j - rows->column;
        WARP_FOR (int n = 0; n < OWN_KEYS; n++) {
            float *score = score_at(scores, r, n);
            *score = n / 2 * 8 + n % 2 < keys ? *score : -INFINITY;
        }
    }
}

/* Turns products with the keys of block n into weights. True if bases rise: then `decay` scales the result. */
INLINED bool
weigh(const warp_state *warp, const attended_rows *rows, int n, softmax_state *softmax,
      float4 (*scores)[KEY_TILES], float *decay)
{
    const int seen = rows->causal ? min(rows->end, rows->row - (int)warp->lane / 4 + 1) : rows->end;
    if ((n + 1) * BN > seen) {
        exclude(rows, n * BN, scores);
    }
    float highest[ROWS];
    const bool raised = bases_are_low(warp, softmax, scores, rows->factor, highest);
    if (raised) {
        raise_bases(warp, 0, softmax, highest, rows->factor, decay);
    }
    weigh_scores(0, softmax, scores, rows->factor);
    return raised;
}

/* Waits until all but the last `left` sets of products are done, and scales the result if bases have risen.
   Rounds the weights of the next product. */
#define FINISH_RESULT(left, softmax, raised, decay, scores, result, weights)                       \
    GROUP_WAIT(left);                                                                              \
    group_keep((result)[0], HEAD_EV);                                                              \
    if (raised) {                                                                                  \
        scale_result(softmax, decay, result);                                                      \
    }                                                                                              \
    WARP_FOR (int k = 0; k < KEY_STEPS; k++) {                                                     \
        (weights)[k] = pack_weights((scores)[0][2 * k], (scores)[0][2 * k + 1]);                   \
    }

#if ORDER == BEHIND

INLINED void
attend(const warp_state *warp, const attended_rows *rows, int blocks, softmax_state *softmax,
       float4 (*result)[EV_TILES], part_clock *clock)
{
    float4 scores[1][KEY_TILES] = {{(float4)0.0f}};
    uint4 weights[KEY_STEPS];
    float decay[ROWS];
    wait_for_tile(warp, rows->tile);
    show_tiles();
    begin_turn(warp);
    group_begin();
    start_scores(warp, rows, rows->tile, scores[0]);
    end_turn(warp);
    GROUP_WAIT(0);
    group_keep(scores[0], BN);
    bool raised = weigh(warp, rows, 0, softmax, scores, decay);
    start_clock(clock);
    for (int n = 1; n < blocks; n++) {
        const uint t = rows->tile + 2 * (uint)n;
        wait_for_tile(warp, t - 1); /* keeps the weights before it */
        end_part(clock, 0);
        FINISH_RESULT(0, softmax, raised, decay, scores, result, weights);
        release(warp, t - 2); /* values of block n - 2, or keys 0 */
        end_part(clock, 1);
        wait_for_tile(warp, t);
        show_tiles();
        begin_turn(warp);
        end_part(clock, 2);
        group_begin();
        start_scores(warp, rows, t - 1, scores[0]);
        start_result(warp, t, weights, result[0]);
        end_turn(warp);
        end_part(clock, 3);
        GROUP_WAIT(1);
        group_keep(scores[0], BN);
        release(warp, t - 1);
        end_part(clock, 4);
        raised = weigh(warp, rows, n, softmax, scores, decay);
        end_part(clock, 5);
    }
    wait_for_tile(warp, rows->tile + 2 * (uint)blocks - 1);
    show_tiles();
    FINISH_RESULT(0, softmax, raised, decay, scores, result, weights);
    group_begin();
    start_result(warp, rows->tile + 2 * (uint)blocks - 1, weights, result[0]);
    GROUP_WAIT(0);
    group_keep(result[0], HEAD_EV);
}

#else

/* Block n has scores, and another one behind it begins. Then the result of block n begins. */
INLINED void
attend_block(const warp_state *warp, const attended_rows *rows, int n, softmax_state *softmax,
             float4 (*scores)[KEY_TILES], float4 (*next)[KEY_TILES], float4 (*result)[EV_TILES],
             part_clock *clock)
{
    uint4 weights[KEY_STEPS];
    float decay[ROWS];
    const uint t = rows->tile + 2 * (uint)n + 1;
    wait_for_tile(warp, t);
    wait_for_tile(warp, t + 1);
    show_tiles();
    end_part(clock, 0);
    group_begin();
    start_scores(warp, rows, t, next[0]);
    end_part(clock, 1);
    const bool raised = weigh(warp, rows, n, softmax, scores, decay);
    wait_for_tile(warp, t + 1); /* keeps the weights before it */
    end_part(clock, 2);
    FINISH_RESULT(1, softmax, raised, decay, scores, result, weights);
    release(warp, t - 1); /* values of block n - 1, or keys 0 */
    end_part(clock, 3);
    group_begin();
    start_result(warp, t + 1, weights, result[0]);
    end_part(clock, 4);
    GROUP_WAIT(1);
    group_keep(next[0], BN);
    release(warp, t);
    end_part(clock, 5);
}

INLINED void
attend_last(const warp_state *warp, const attended_rows *rows, int n, softmax_state *softmax,
            float4 (*scores)[KEY_TILES], float4 (*result)[EV_TILES])
{
    uint4 weights[KEY_STEPS];
    float decay[ROWS];
    const bool raised = weigh(warp, rows, n, softmax, scores, decay);
    wait_for_tile(warp, rows->tile + 2 * (uint)n + 1);
    show_tiles();
    FINISH_RESULT(0, softmax, raised, decay, scores, result, weights);
    group_begin();
    start_result(warp, rows->tile + 2 * (uint)n + 1, weights, result[0]);
    GROUP_WAIT(0);
    group_keep(result[0], HEAD_EV);
}

INLINED void
attend(const warp_state *warp, const attended_rows *rows, int blocks, softmax_state *softmax,
       float4 (*result)[EV_TILES], part_clock *clock)
{
    float4 even[1][KEY_TILES] = {{(float4)0.0f}};
    float4 odd[1][KEY_TILES] = {{(float4)0.0f}};
    wait_for_tile(warp, rows->tile);
    show_tiles();
    group_begin();
    start_scores(warp, rows, rows->tile, even[0]);
    GROUP_WAIT(0);
    group_keep(even[0], BN);
    int n = 0;
    start_clock(clock);
    for (; n + 2 < blocks; n += 2) {
        attend_block(warp, rows, n, softmax, even, odd, result, clock);
        attend_block(warp, rows, n + 1, softmax, odd, even, result, clock);
    }
    if (n + 1 < blocks) {
        attend_block(warp, rows, n, softmax, even, odd, result, clock);
        attend_last(warp, rows, n + 1, softmax, odd, result);
    } else {
        attend_last(warp, rows, n, softmax, even, result);
    }
}

#endif

/* Divides each row by the sum of its weights, and writes the rows that are there. */
INLINED void
write_rows(const warp_state *warp, const attended_rows *rows, int L, const softmax_state *softmax,
           float4 (*result)[EV_TILES], __global uint *output)
{
    WARP_FOR (int r = 0; r < ROWS; r++) {
        const int row = rows->row + 8 * r;
        const float factor = 1.0f / sum_of_four(warp, softmax->sum[r]);
        if (row < L) {
            __global uint *to = output + row * (HEAD_E / 2) + rows->column / 2;
            WARP_FOR (int c = 0; c < EV_TILES; c++) {
                const float2 x = (r == 0 ? result[0][c].xy : result[0][c].zw) * factor;
                to[4 * c] = warp_pack(x.x, x.y);
            }
        }
    }
}

__kernel
WARP_KERNEL(THREADS +
            4 * WARP_LANES) void producer(__global const uint4 *query, __global const uint4 *key,
                                          __global const uint4 *value, __global uint *output, int L,
                                          int S, float factor, int causal, int pieces MAPS)
{
    WARP_DECLARE(warp, WARPS + 4, memory, LOCAL_CHUNKS);
    if (get_local_id(0) == 0) {
        WARP_FOR (uint t = 0; t < STAGES; t++) {
            phase_start(FULL(warp.start, t), COPYING);
            phase_start(EMPTY(warp.start, t), WARPS);
        }
        WARP_FOR (uint turn = 0; turn < QUERY_TILES; turn++) {
            phase_start(QUERIES(warp.start, turn), WARPS);
        }
        group_copies_arrive(); /* shows the barriers to the unit that copies tensors */
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* the barriers' starts: their uses */
    if (warp.index >= WARPS) {
#if REGISTERS > 0
        REGISTERS_DOWN(24);
#endif
        if (warp.index < WARPS + PRODUCER_WARPS) {
#if SHOWN_BY == UNIT
            copy_boxes(&warp, maps, L, S, causal, pieces);
#else
            copy_all(&warp, query, key, value, L, S, causal, pieces);
#endif
        }
        return;
    }
#if REGISTERS > 0
    REGISTERS_UP(REGISTERS);
#endif
    if (TURNS && warp.index >= GROUP_WARPS) {
        end_turn(&warp); /* the first group begins */
    }
    attended_rows rows = {0, (int)warp.lane % 4 * 2, 0, causal, factor, 0u, 0u};
    work_piece piece;
    for (int n = (int)get_group_id(0); n < pieces; rows.turn++) {
        n = find_piece(n, L, S, causal, &piece);
        rows.row = piece.i0 + (int)warp.index * 16 + (int)warp.lane / 4;
        rows.end = piece.end;
        float4 result[1][EV_TILES] = {{(float4)0.0f}};
        softmax_state softmax;
        start_softmax(&softmax);
        part_clock clock;
        attend(&warp, &rows, piece.blocks, &softmax, result, &clock);
        release_piece(&warp, &rows, piece.blocks);
        rows.tile += 2 * (uint)piece.blocks;
        __global uint *to = output + (size_t)piece.head * L * (HEAD_E / 2);
        write_rows(&warp, &rows, L, &softmax, result, to);
        if (CLOCK && warp.lane == 0u && warp.index % GROUP_WARPS == 0u && rows.row < L) {
            write_clock(&clock, piece.blocks, to + rows.row * (HEAD_E / 2));
        }
    }
}
