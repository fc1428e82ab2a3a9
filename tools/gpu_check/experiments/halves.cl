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
 *     split_halves   (n numbers) to two arrays of halves, `scale` times as large; the low ones also
 *                    `lift` times as large. A work-item has 8 numbers.
 *     attend_halves  arrays of (heads, L or S, HEAD). A group of 4 warps has 64 rows, and passes over the
 *                    keys in blocks of 64. `factor` turns products into scores in log2; `unscale` is
 *                    1 / (scale of the values). The low halves of values are lifted by LIFT.
 *
 * Local memory has the group's queries, a block of keys and a block of values. The next keys are copied
 * while the group weighs these, the next values while it multiplies the next keys. A second group on the
 * same unit multiplies while this one weighs.
 */
#define DTYPE           CA_KERNEL_FLOAT16
#define VALUE_DTYPE     DTYPE
#define REAL64          0
#define WARP            CA_WARP_PTX_GROUPS
#define LOCAL_ALIGNMENT GROUP_PANEL_BYTES
#include "kernels/support/warp_group.clh"

#define BLOCK      64
#define CHUNKS     (HEAD / 8)
#define TILE_BYTES (BLOCK * HEAD * 2)
#define PANEL      (BLOCK * GROUP_ROW_BYTES)
#define THREADS    128
#define COPY_ROWS  (THREADS / CHUNKS)
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
split_halves(__global const float4 *x, __global uint4 *high, __global uint4 *low, float scale,
             float lift, int n)
{
    const int at = (int)get_global_id(0);
    if (at < n / 8) {
        const float4 a = x[2 * at] * scale;
        const float4 b = x[2 * at + 1] * scale;
        const uint2 p = split_pair(a.xy, lift);
        const uint2 q = split_pair(a.zw, lift);
        const uint2 r = split_pair(b.xy, lift);
        const uint2 s = split_pair(b.zw, lift);
        high[at] = (uint4)(p.x, q.x, r.x, s.x);
        low[at] = (uint4)(p.y, q.y, r.y, s.y);
    }
}

/* Two tiles of 64 rows, one behind the other: high and low halves. */
typedef struct {
    __global const char *high;
    __global const char *low;
    uint at; /* the address of this work-item's first chunk */
    int row; /* its first row */
} split_tile;

INLINED split_tile
tile_of(const warp_state *warp, __global const uint4 *high, __global const uint4 *low, int tile)
{
    const uint id = warp->index * WARP_LANES + warp->lane;
    const uint chunk = id % CHUNKS;
    const uint row = id / CHUNKS;
    const uint offset = chunk / 8 * PANEL + row * GROUP_ROW_BYTES + chunk % 8 * 16;
    const size_t from = (size_t)row * CHUNKS + chunk;
    return (split_tile){(__global const char *)(high + from), (__global const char *)(low + from),
                        warp->start + tile * 2 * TILE_BYTES + GROUP_AT(offset), (int)row};
}

/* Starts to copy rows first … first + 63 of `rows`, zeros behind them. */
INLINED void
copy_tile(const warp_state *warp, const split_tile *tile, int first, int rows)
{
    const size_t from = (size_t)first * HEAD * 2;
    WARP_FOR (int r = 0; r < BLOCK; r += COPY_ROWS) {
        const uint bytes = first + tile->row + r < rows ? 16 : 0;
        const uint at = tile->at + r * GROUP_ROW_BYTES;
        warp_copy(warp, at, tile->high + from + r * HEAD * 2, bytes);
        warp_copy(warp, at + TILE_BYTES, tile->low + from + r * HEAD * 2, bytes);
    }
    warp_copies_end(warp);
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
    const float2 above = fma(high, factor, -HEADROOM);
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
WARP_KERNEL(THREADS) void attend_halves(__global const uint4 *query_high,
                                        __global const uint4 *query_low,
                                        __global const uint4 *key_high,
                                        __global const uint4 *key_low,
                                        __global const uint4 *value_high,
                                        __global const uint4 *value_low, __global float2 *output,
                                        int L, int S, float factor, float unscale, int causal)
{
    WARP_DECLARE(warp, 4, memory, 3 * 2 * TILE_BYTES / 16);
    const int tiles = (L + BLOCK - 1) / BLOCK;
    const int head = (int)get_group_id(0) / tiles;
    /* The rows with the most keys come first. */
    const int i0 = (tiles - 1 - (int)get_group_id(0) % tiles) * BLOCK;
    const size_t from = (size_t)head * S * CHUNKS;
    const size_t rows_from = (size_t)head * L * CHUNKS;
    const split_tile query = tile_of(&warp, query_high + rows_from, query_low + rows_from, 0);
    const split_tile key = tile_of(&warp, key_high + from, key_low + from, 1);
    const split_tile value = tile_of(&warp, value_high + from, value_low + from, 2);
    const int2 row = i0 + (int)(warp.index * 16 + warp.lane / 4) + (int2)(0, 8);
    const int2 limit = causal ? min(row + 1, S) : (int2)S;
    const int all_see = causal ? min(i0 + 1, S) : S; /* so many keys */
    const int end = causal ? min(i0 + BLOCK, S) : S;
    copy_tile(&warp, &query, i0, L);
    copy_tile(&warp, &key, 0, S);
    copy_tile(&warp, &value, 0, S);
    softmax_rows rows = {(float2)-FLT_MAX, (float2)0.0f, (float2)1.0f};
    float4 result[TILES];
    WARP_FOR (int n = 0; n < TILES; n++) {
        result[n] = (float4)0.0f;
    }
    for (int j = 0; j < end; j += BLOCK) {
        float4 scores[KEY_TILES];
        WARP_COPIES_WAIT(&warp, 1);
        group_copies_arrive();
        barrier(CLK_LOCAL_MEM_FENCE); /* copies of keys: their reads */
        group_begin();
        start_scores(&warp, warp.start, warp.start + 2 * TILE_BYTES, scores);
        GROUP_WAIT(0);
        group_keep(scores, BLOCK);
        barrier(CLK_LOCAL_MEM_FENCE); /* reads of keys: the next copies over them */
        copy_tile(&warp, &key, j + BLOCK, S);
        if (j + BLOCK > all_see) {
            exclude(scores, limit - j - (int)(warp.lane % 4) * 2);
        }
        weigh(&warp, &rows, scores, factor);
        split_weights weights;
        WARP_FOR (int k = 0; k < BLOCK / 16; k++) {
            split_tiles(scores[2 * k], scores[2 * k + 1], &weights, k);
        }
        float4 sums[TILES];
        WARP_COPIES_WAIT(&warp, 1);
        group_copies_arrive();
        barrier(CLK_LOCAL_MEM_FENCE); /* copies of values: their reads */
        group_begin();
        start_sums(warp.start + 4 * TILE_BYTES, &weights, sums);
        GROUP_WAIT(0);
        group_keep(sums, HEAD);
        barrier(CLK_LOCAL_MEM_FENCE); /* reads of values: the next copies over them */
        copy_tile(&warp, &value, j + BLOCK, S);
        const float4 decay = rows.decay.xxyy;
        WARP_FOR (int n = 0; n < TILES; n++) {
            result[n] = fma(result[n], decay, sums[n]);
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
