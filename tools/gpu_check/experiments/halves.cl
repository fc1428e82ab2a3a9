/* SPDX-License-Identifier: MIT
 *
 * Attention of float32 by products of groups of warps. Each number is a sum of two halves, and a product
 * of two numbers is three products of halves; that of both low halves is left out.
 *
 *     x = high + low                       22 bits of 24
 *     a b = a.low b.high + a.high b.low + a.high b.high
 *
 * Sums of products begin with the small ones. The unit truncates when it adds, so it adds up no more than
 * the products of a block: blocks are added in float32.
 *
 *     HEAD  E, 64 or 128
 *
 *     split_halves   (heads, rows, HEAD) to tiles of 64 rows: panels of the high halves, then of the low ones.
 *                    Numbers are `scale` times as large, low halves also `lift` times; behind the rows are
 *                    zeros. A work-item has 8 numbers
 *     attend_halves  tiles of query, key and value to (heads, L, HEAD). A group of 4 warps has 64 rows, and
 *                    passes over the keys in blocks of 64. `factor` turns products into scores in log2;
 *                    `unscale` is 1 / (scale of the values). The low halves of values are lifted by LIFT
 *
 * Tiles lie in memory as in local memory, so one work-item copies a tile by one instruction. Local memory has the
 * group's queries, a block of keys and a block of values. The next keys are copied while the group weighs these, the
 * next values while it multiplies the next keys. A second group on the same unit multiplies while this one weighs.
 */
#define DTYPE           CA_KERNEL_FLOAT16
#define VALUE_DTYPE     DTYPE
#define REAL64          0
#define WARP            CA_WARP_PTX_GROUPS
#define LOCAL_ALIGNMENT GROUP_PANEL_BYTES
#include "tools/gpu_check/experiments/tensor_copies.clh"

#define BLOCK      64
#define CHUNKS     (HEAD / 8)
#define TILE_BYTES (BLOCK * HEAD * 2)
#define PANEL      (BLOCK * GROUP_ROW_BYTES)
#define THREADS    128
#define KEY_TILES  (BLOCK / 8)
#define TILES      (HEAD / 8)
#define LIFT       2048.0f
#define LOWERED    0x10001000u /* 1 / LIFT, twice, as halves */

/* Weights are at most 2^(HEADROOM + RAISED), within the range of half; the lowest number that keeps its
   bits is as low as it can be. */
#define HEADROOM 8.0f
#define RAISED   7.0f

INLINED float2
halves_to_floats(uint word)
{
    return vload_half2(0, (const half *)&word);
}

/* Rounds two numbers to halves; then what is left of them, `lift` times as large. */
INLINED uint2
split_pair(float2 x, float lift)
{
    const uint high = warp_pack(x.x, x.y);
    const float2 left = (x - halves_to_floats(high)) * lift;
    return (uint2)(high, warp_pack(left.x, left.y));
}

__kernel void
split_halves(__global const float4 *x, __global uint4 *tiles, float scale, float lift, int rows,
             int heads)
{
    const int chunk = (int)get_global_id(0) % CHUNKS;
    const int row = (int)get_global_id(0) / CHUNKS % BLOCK;
    const int tile = (int)get_global_id(0) / (CHUNKS * BLOCK);
    const int of_head = (rows + BLOCK - 1) / BLOCK;
    const int head = tile / of_head;
    const int from = tile % of_head * BLOCK + row;
    if (head >= heads) {
        return;
    }
    float4 a = (float4)0.0f;
    float4 b = (float4)0.0f;
    if (from < rows) {
        x += ((size_t)head * rows + from) * (HEAD / 4) + 2 * chunk;
        a = x[0] * scale;
        b = x[1] * scale;
    }
    const uint2 p = split_pair(a.xy, lift);
    const uint2 q = split_pair(a.zw, lift);
    const uint2 r = split_pair(b.xy, lift);
    const uint2 s = split_pair(b.zw, lift);
    const uint at = chunk / 8 * PANEL + row * GROUP_ROW_BYTES + chunk % 8 * 16;
    tiles += (size_t)tile * (2 * TILE_BYTES / 16) + GROUP_AT(at) / 16;
    tiles[0] = (uint4)(p.x, q.x, r.x, s.x);
    tiles[TILE_BYTES / 16] = (uint4)(p.y, q.y, r.y, s.y);
}

/* Starts to copy tile n to an address. The first work-item does, behind a barrier of the group. */
INLINED void
copy_tile(uint to, __global const uint4 *tiles, int n, uint phase)
{
    if (get_local_id(0) == 0) {
        phase_expect(phase, 2 * TILE_BYTES);
        bulk_copy(to, tiles + (size_t)n * (2 * TILE_BYTES / 16), 2 * TILE_BYTES, phase);
    }
}

/* Starts scores = queries * keys transposed, of tiles of high and low halves. */
INLINED void
start_scores(const warp_state *warp, uint queries, uint keys, float4 *scores)
{
    const group_panels q = group_panels_at(queries, PANEL);
    const group_panels k = group_panels_at(keys, PANEL);
    WARP_FOR (uint part = 0; part < 3; part++) {
        WARP_FOR (uint e = 0; e < HEAD / 16; e++) {
            const uint behind = e / 4 * PANEL + e % 4 * 32;
            group_multiply_tiles(
                warp, scores, BLOCK, group_behind(q, behind + (part == 0 ? TILE_BYTES : 0)),
                group_behind(k, behind + (part == 1 ? TILE_BYTES : 0)), part == 0 && e == 0);
        }
    }
    group_end();
}

/* The numbers of the operands of a product of rows that may begin with zeros, behind HEAD / 2 sums. */
#if HEAD == 128
#define ROW_OPERANDS "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
#define ROW_ADDS     "%69"
#define ROW_NUMBERS  GROUP_NUMBERS_128
#define ROW_SUMS(c)  GROUP_C128(c)
#define ROW_PRODUCT  GROUP_PRODUCT(128)
#else
#define ROW_OPERANDS "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
#define ROW_ADDS     "%37"
#define ROW_NUMBERS  GROUP_NUMBERS_64
#define ROW_SUMS(c)  GROUP_C64(c)
#define ROW_PRODUCT  GROUP_PRODUCT(64)
#endif

/* group_multiply_rows, which starts with c = 0 if `add` is 0. */
INLINED void
multiply_rows(float4 *c, uint4 a, group_panels b, int add)
{
    GROUP_ASM(GROUP_PTX "{ .reg .pred p; setp.ne.b32 p, " ROW_ADDS ", 0; " ROW_PRODUCT ROW_NUMBERS
                        "}, " ROW_OPERANDS : ROW_SUMS(c) : "r"(a.x),
              "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(add) : "memory");
}

/* Weights of a block as fragments of halves. */
typedef struct {
    uint4 high[BLOCK / 16];
    uint4 low[BLOCK / 16];
    uint4 lowered[BLOCK / 16]; /* high / LIFT, for lifted values */
} split_weights;

/* Starts sums = weights * values, of tiles of high and low halves. */
INLINED void
start_sums(uint values, const split_weights *weights, float4 *sums)
{
    const group_panels v = group_panels_at(values, PANEL);
    WARP_FOR (uint part = 0; part < 3; part++) {
        WARP_FOR (uint k = 0; k < BLOCK / 16; k++) {
            const uint4 a = part == 0   ? weights->low[k]
                            : part == 1 ? weights->lowered[k]
                                        : weights->high[k];
            const uint behind = k * 16 * GROUP_ROW_BYTES + (part == 1 ? TILE_BYTES : 0);
            multiply_rows(sums, a, group_behind(v, behind), part > 0 || k > 0);
        }
    }
    group_end();
}

/* Row g of a lane, its first two numbers, and row g + 8. */
typedef struct {
    float2 base;
    float2 sum;
    float2 decay; /* of the sums before this block */
} softmax_rows;

/* Excludes keys from `end` on, counted from the lane's first key, for each of the lane's rows. */
INLINED void
exclude(float4 *scores, int2 end)
{
    WARP_FOR (int n = 0; n < KEY_TILES; n++) {
        scores[n].x = 8 * n < end.x ? scores[n].x : -INFINITY;
        scores[n].y = 8 * n + 1 < end.x ? scores[n].y : -INFINITY;
        scores[n].z = 8 * n < end.y ? scores[n].z : -INFINITY;
        scores[n].w = 8 * n + 1 < end.y ? scores[n].w : -INFINITY;
    }
}

/* Turns products into weights, and raises bases that are far below a score. */
INLINED void
weigh(const warp_state *warp, softmax_rows *rows, float4 *scores, float factor)
{
    float2 high = fmax(scores[0].xz, scores[0].yw);
    WARP_FOR (int n = 1; n < KEY_TILES; n++) {
        high = fmax(high, fmax(scores[n].xz, scores[n].yw));
    }
    rows->decay = (float2)1.0f;
    const float2 above = fma(high, (float2)factor, (float2)-HEADROOM);
    if (warp_any(warp, above.x > rows->base.x || above.y > rows->base.y)) {
        high = fmax(high * factor, rows->base);
        high =
            fmax(high, (float2)(warp_exchange(warp, high.x, 1u), warp_exchange(warp, high.y, 1u)));
        high =
            fmax(high, (float2)(warp_exchange(warp, high.x, 2u), warp_exchange(warp, high.y, 2u)));
        rows->decay.x = score_exp2(rows->base.x - high.x);
        rows->decay.y = score_exp2(rows->base.y - high.y);
        rows->base = high;
    }
    const float2 from = RAISED - rows->base;
    float2 sum = (float2)0.0f; /* of the block alone: short sums round less */
    WARP_FOR (int n = 0; n < KEY_TILES; n++) {
        scores[n].x = score_exp2(fma(scores[n].x, factor, from.x));
        scores[n].y = score_exp2(fma(scores[n].y, factor, from.x));
        scores[n].z = score_exp2(fma(scores[n].z, factor, from.y));
        scores[n].w = score_exp2(fma(scores[n].w, factor, from.y));
        sum += scores[n].xz + scores[n].yw;
    }
    rows->sum = fma(rows->sum, rows->decay, sum);
}

INLINED uint
lowered(uint word)
{
    uint result;
    __asm__("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(LOWERED));
    return result;
}

/* Splits two tiles of weights. High halves are cut off, so that they need not be converted back. */
INLINED void
split_tiles(float4 a, float4 b, split_weights *weights, int k)
{
    const float4 c = as_float4(as_uint4(a) & 0xffffe000u);
    const float4 d = as_float4(as_uint4(b) & 0xffffe000u);
    const uint4 high =
        (uint4)(warp_pack(c.x, c.y), warp_pack(c.z, c.w), warp_pack(d.x, d.y), warp_pack(d.z, d.w));
    a -= c;
    b -= d;
    weights->high[k] = high;
    weights->low[k] =
        (uint4)(warp_pack(a.x, a.y), warp_pack(a.z, a.w), warp_pack(b.x, b.y), warp_pack(b.z, b.w));
    weights->lowered[k] =
        (uint4)(lowered(high.x), lowered(high.y), lowered(high.z), lowered(high.w));
}

__kernel
WARP_KERNEL(THREADS) void attend_halves(__global const uint4 *query, __global const uint4 *key,
                                        __global const uint4 *value, __global float2 *output, int L,
                                        int S, float factor, float unscale, int causal)
{
    WARP_DECLARE(warp, 4, memory, 3 * 2 * TILE_BYTES / 16 + 2);
    const uint queries = warp.start;
    const uint keys = queries + 2 * TILE_BYTES;
    const uint values = keys + 2 * TILE_BYTES;
    const uint queries_are_here = values + 2 * TILE_BYTES;
    const uint keys_are_here = queries_are_here + PHASE_BYTES;
    const uint values_are_here = keys_are_here + PHASE_BYTES;
    const int tiles = (L + BLOCK - 1) / BLOCK;
    const int head = (int)get_group_id(0) / tiles;
    /* The rows with the most keys come first. */
    const int tile = tiles - 1 - (int)get_group_id(0) % tiles;
    const int i0 = tile * BLOCK;
    const int first = head * ((S + BLOCK - 1) / BLOCK);
    const int2 row = i0 + (int)(warp.index * 16 + warp.lane / 4) + (int2)(0, 8);
    const int2 limit = causal ? min(row + 1, S) : (int2)S;
    const int all_see = causal ? min(i0 + 1, S) : S; /* so many keys */
    const int blocks = ((causal ? min(i0 + BLOCK, S) : S) + BLOCK - 1) / BLOCK;
    if (get_local_id(0) == 0) {
        phase_start(queries_are_here, 1);
        phase_start(keys_are_here, 1);
        phase_start(values_are_here, 1);
        group_copies_arrive(); /* shows the barriers to copies */
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* the barriers' starts: their uses */
    copy_tile(queries, query, head * tiles + tile, queries_are_here);
    copy_tile(keys, key, first, keys_are_here);
    copy_tile(values, value, first, values_are_here);
    softmax_rows rows = {(float2)-FLT_MAX, (float2)0.0f, (float2)1.0f};
    float4 scores[KEY_TILES] = {(float4)0.0f};
    float4 sums[TILES] = {(float4)0.0f};
    float4 result[TILES] = {(float4)0.0f};
    phase_wait(queries_are_here, 0u);
    for (int n = 0; n < blocks; n++) {
        const int j = n * BLOCK;
        phase_wait(keys_are_here, (uint)n & 1u);
        group_begin();
        start_scores(&warp, queries, keys, scores);
        GROUP_WAIT(0);
        group_keep(scores, BLOCK);
        barrier(CLK_LOCAL_MEM_FENCE); /* reads of keys: the next copy over them */
        if (n + 1 < blocks) {
            copy_tile(keys, key, first + n + 1, keys_are_here);
        }
        if (j + BLOCK > all_see) {
            exclude(scores, limit - j - (int)(warp.lane % 4) * 2);
        }
        weigh(&warp, &rows, scores, factor);
        split_weights weights;
        WARP_FOR (int k = 0; k < BLOCK / 16; k++) {
            split_tiles(scores[2 * k], scores[2 * k + 1], &weights, k);
        }
        phase_wait(values_are_here, (uint)n & 1u);
        group_begin();
        start_sums(values, &weights, sums);
        GROUP_WAIT(0);
        group_keep(sums, HEAD);
        barrier(CLK_LOCAL_MEM_FENCE); /* reads of values: the next copy over them */
        if (n + 1 < blocks) {
            copy_tile(values, value, first + n + 1, values_are_here);
        }
        const float4 decay = rows.decay.xxyy;
        WARP_FOR (int c = 0; c < TILES; c++) {
            result[c] = fma(result[c], decay, sums[c]);
        }
    }
    rows.sum +=
        (float2)(warp_exchange(&warp, rows.sum.x, 1u), warp_exchange(&warp, rows.sum.y, 1u));
    rows.sum +=
        (float2)(warp_exchange(&warp, rows.sum.x, 2u), warp_exchange(&warp, rows.sum.y, 2u));
    const float2 share = unscale / rows.sum;
    output += ((size_t)head * L + row.x) * (HEAD / 2) + warp.lane % 4;
    WARP_FOR (int n = 0; n < TILES; n++) {
        if (row.x < L) {
            output[4 * n] = result[n].xy * share.x;
        }
        if (row.y < L) {
            output[8 * (HEAD / 2) + 4 * n] = result[n].zw * share.y;
        }
    }
}
