/* SPDX-License-Identifier: MIT
 *
 * Attention in which some warps copy, and others multiply. float16, contiguous, no masks.
 *
 *     query, output  (heads, L, HEAD_E)
 *     key, value     (heads, S, HEAD_E)
 *     factor         the scale of scores, times log2(e)
 *     causal         1: row i attends to keys 0 … i
 *     global size    heads * ceil(L / BM) * local size; local size 32 * (WARPS + 4)
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
 *     -DWARPS           that multiply: 8, or 12
 *     -DHEAD_E          64 or 128
 *     -DBN              keys of a block, 64 or 128
 *     -DSTAGES          a power of two, at least 4
 *     -DPRODUCER_WARPS  that copy: 1 or 4
 *     -DSHOWN_BY        who shows copies to products: MULTIPLIERS, behind their waits for a tile, or PRODUCERS,
 *                       which then wait for their copies, two tiles later
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

#define BM              (WARPS * 16)
#define COPYING         (PRODUCER_WARPS * WARP_LANES)
#define E_CHUNKS        (HEAD_E / 8)
#define ROW_CHUNKS      8 /* of a panel */
#define PANELS          (HEAD_E / 64)
#define TILE_BYTES(n)   ((n) * HEAD_E * 2)
#define RING_START      TILE_BYTES(BM)
#define BARRIERS_START  (RING_START + STAGES * TILE_BYTES(BN))
#define LOCAL_CHUNKS    ((BARRIERS_START + 2 * STAGES * PHASE_BYTES) / 16)
#define FULL(start, t)  ((start) + BARRIERS_START + (t) % STAGES * PHASE_BYTES)
#define EMPTY(start, t) (FULL(start, t) + STAGES * PHASE_BYTES)
#define PARITY(t)       ((t) / STAGES & 1u)
#define KEY_STEPS       (BN / 16)
#define RESULT_COLUMNS  HEAD_E

/* --- warps that copy -------------------------------------------------------------------------- */

#define STEP_ROWS (COPYING / E_CHUNKS) /* that are copied at once */
#define MIXES     (STEP_ROWS < 8 ? 8 / STEP_ROWS : 1)

#define BEHIND_COPIES 2 /* tiles that are on their way when a tile is shown */

/* A work-item's chunk of the first STEP_ROWS rows of a tile: bytes from the tile's start, by the order of
   chunks in rows that are STEP_ROWS apart. */
typedef struct {
    int row;
    uint chunk;
    uint places[MIXES];
} copied_chunk;

INLINED copied_chunk
chunk_of(uint item)
{
    copied_chunk own;
    own.row = (int)(item / E_CHUNKS);
    own.chunk = item % E_CHUNKS;
    WARP_FOR (int n = 0; n < MIXES; n++) {
        own.places[n] = (own.chunk ^ ((uint)own.row + n * STEP_ROWS)) % ROW_CHUNKS * 16u +
                        (uint)own.row * GROUP_ROW_BYTES;
    }
    return own;
}

/* Begins to copy `rows` rows to the tile at an address. Of these `present` are there; others are zeros. */
INLINED void
copy_tile(const warp_state *warp, const copied_chunk *own, uint tile, __global const uint4 *from,
          int present, int rows)
{
    const uint panel = own->chunk / ROW_CHUNKS * (uint)(rows * GROUP_ROW_BYTES);
    if (present >= rows) {
        WARP_FOR (int n = 0; n < rows / STEP_ROWS; n++) {
            const uint to = tile + panel + own->places[n % MIXES];
            warp_copy(warp, to + n * STEP_ROWS * GROUP_ROW_BYTES, from + n * STEP_ROWS * E_CHUNKS,
                      16u);
        }
        return;
    }
    WARP_FOR (int n = 0; n < rows / STEP_ROWS; n++) {
        const bool there = own->row + n * STEP_ROWS < present;
        const uint to = tile + panel + own->places[n % MIXES];
        warp_copy(warp, to + n * STEP_ROWS * GROUP_ROW_BYTES, from + n * STEP_ROWS * E_CHUNKS,
                  there ? 16u : 0u);
    }
}

/* Tile t is full when this work-item's copies are done. */
INLINED void
tile_is_copied(const warp_state *warp, uint t)
{
#if SHOWN_BY == MULTIPLIERS
    phase_arrive_copied(FULL(warp->start, t));
#else
    warp_copies_end(warp);
    if (t >= BEHIND_COPIES) {
        WARP_COPIES_WAIT(warp, BEHIND_COPIES);
        group_copies_arrive();
        phase_arrive(FULL(warp->start, t - BEHIND_COPIES));
    }
#endif
}

/* The last tiles are full. */
INLINED void
all_are_copied(const warp_state *warp, uint tiles)
{
#if SHOWN_BY == PRODUCERS
    WARP_COPIES_WAIT(warp, 0);
    group_copies_arrive();
    for (uint t = tiles - min(tiles, (uint)BEHIND_COPIES); t < tiles; t++) {
        phase_arrive(FULL(warp->start, t));
    }
#endif
}

/* Copies the queries, and then all tiles. Tile 0 is full when the queries are there, too, because an arrival
   stands behind all copies before it. */
INLINED void
copy_all(const warp_state *warp, __global const uint4 *query, __global const uint4 *key,
         __global const uint4 *value, int rows, int S, int blocks)
{
    const uint item = (uint)get_local_id(0) - THREADS;
    const copied_chunk own = chunk_of(item);
    copy_tile(warp, &own, warp->start, query + item, rows, BM);
    __global const uint4 *keys = key + item;
    __global const uint4 *values = value + item;
    int keys_left = S;
    int values_left = S;
    for (uint t = 0; t < 2 * (uint)blocks; t++) {
        const bool is_key = t == 0 || (t % 2 != 0 && t < 2 * (uint)blocks - 1);
        phase_wait(EMPTY(warp->start, t), PARITY(t) ^ 1u);
        copy_tile(warp, &own, warp->start + RING_START + t % STAGES * TILE_BYTES(BN),
                  is_key ? keys : values, is_key ? keys_left : values_left, BN);
        tile_is_copied(warp, t);
        keys += is_key ? BN * E_CHUNKS : 0;
        keys_left -= is_key ? BN : 0;
        values += is_key ? 0 : BN * E_CHUNKS;
        values_left -= is_key ? 0 : BN;
    }
    all_are_copied(warp, 2 * (uint)blocks);
}

/* --- warps that multiply ---------------------------------------------------------------------- */

/* Cycles of a part of the work, over all blocks. */
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

/* A part of the work ends here. */
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

/* The rows of a lane, and the keys that they attend to. */
typedef struct {
    int row;    /* of the first one, counted from the head's row 0 */
    int column; /* of its first key in a block */
    int end;    /* keys */
    int causal;
    float factor;
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

/* Starts scores = queries * keys of tile t, transposed. */
INLINED void
start_scores(const warp_state *warp, uint t, float4 *scores)
{
    const group_panels queries =
        group_panels_at(warp->start + warp->index / GROUP_WARPS * (GROUP_ROWS * GROUP_ROW_BYTES),
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
    wait_for_tile(warp, 0);
    show_tiles();
    begin_turn(warp);
    group_begin();
    start_scores(warp, 0, scores[0]);
    end_turn(warp);
    GROUP_WAIT(0);
    group_keep(scores[0], BN);
    bool raised = weigh(warp, rows, 0, softmax, scores, decay);
    start_clock(clock);
    for (int n = 1; n < blocks; n++) {
        const uint t = 2 * (uint)n;
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
        start_scores(warp, t - 1, scores[0]);
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
    wait_for_tile(warp, 2 * (uint)blocks - 1);
    show_tiles();
    FINISH_RESULT(0, softmax, raised, decay, scores, result, weights);
    group_begin();
    start_result(warp, 2 * (uint)blocks - 1, weights, result[0]);
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
    const uint t = 2 * (uint)n + 1;
    wait_for_tile(warp, t);
    wait_for_tile(warp, t + 1);
    show_tiles();
    end_part(clock, 0);
    group_begin();
    start_scores(warp, t, next[0]);
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
    wait_for_tile(warp, 2 * (uint)n + 1);
    show_tiles();
    FINISH_RESULT(0, softmax, raised, decay, scores, result, weights);
    group_begin();
    start_result(warp, 2 * (uint)n + 1, weights, result[0]);
    GROUP_WAIT(0);
    group_keep(result[0], HEAD_EV);
}

INLINED void
attend(const warp_state *warp, const attended_rows *rows, int blocks, softmax_state *softmax,
       float4 (*result)[EV_TILES], part_clock *clock)
{
    float4 even[1][KEY_TILES] = {{(float4)0.0f}};
    float4 odd[1][KEY_TILES] = {{(float4)0.0f}};
    wait_for_tile(warp, 0);
    show_tiles();
    group_begin();
    start_scores(warp, 0, even[0]);
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
                                          int S, float factor, int causal)
{
    WARP_DECLARE(warp, WARPS + 4, memory, LOCAL_CHUNKS);
    const int tiles = (L + BM - 1) / BM;
    const int head = (int)get_group_id(0) / tiles;
    /* The last rows come first: they have the most keys if rows are causal. */
    const int i0 = (tiles - 1 - ((int)get_group_id(0) - head * tiles)) * BM;
    const int end = causal ? min(S, i0 + BM) : S;
    const int blocks = (end + BN - 1) / BN;
    if (get_local_id(0) == 0) {
        WARP_FOR (uint t = 0; t < STAGES; t++) {
            phase_start(FULL(warp.start, t), COPYING);
            phase_start(EMPTY(warp.start, t), WARPS);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* the barriers' starts: their uses */
    if (warp.index >= WARPS) {
#if REGISTERS > 0
        REGISTERS_DOWN(24);
#endif
        if (warp.index < WARPS + PRODUCER_WARPS) {
            const size_t first = (size_t)head * S * E_CHUNKS;
            copy_all(&warp, query + ((size_t)head * L + i0) * E_CHUNKS, key + first, value + first,
                     L - i0, end, blocks);
        }
        return;
    }
#if REGISTERS > 0
    REGISTERS_UP(REGISTERS);
#endif
    float4 result[1][EV_TILES] = {{(float4)0.0f}};
    softmax_state softmax;
    start_softmax(&softmax);
    const attended_rows rows = {i0 + (int)warp.index * 16 + (int)warp.lane / 4,
                                (int)warp.lane % 4 * 2, end, causal, factor};
    if (TURNS && warp.index >= GROUP_WARPS) {
        end_turn(&warp); /* the first group begins */
    }
    part_clock clock;
    attend(&warp, &rows, blocks, &softmax, result, &clock);
    output += (size_t)head * L * (HEAD_E / 2);
    write_rows(&warp, &rows, L, &softmax, result, output);
    if (CLOCK && warp.lane == 0u && warp.index % GROUP_WARPS == 0u && rows.row < L) {
        WARP_FOR (int n = 0; n < PARTS; n++) {
            output[rows.row * (HEAD_E / 2) + n] = clock.parts[n] / (uint)max(blocks - 1, 1);
        }
    }
}
