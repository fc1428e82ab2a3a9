/* SPDX-License-Identifier: MIT
 *
 * warp.cl emulated by local memory and barriers: the first barrier of an operation
 * stands between what the lanes write and what they read of each other, the second one
 * between that and the next operation's writes. Copies are held back until they are
 * waited for. What it cannot show is that a kernel lacks a barrier of its own.
 *
 * A copy fills its destination with large numbers at once, so that a missing wait shows,
 * and so does an address that is not a multiple of 16 bytes, a fault in hardware. They
 * are not NaN: kernels compute rows again that have one.
 */
#ifndef CLATTN_WARP_EMULATION_CL
#define CLATTN_WARP_EMULATION_CL

#include "common.cl" /* DTYPE, load and store of one element */

#define WARP_UNROLL _Pragma("nounroll")
#define WARP_SKIPS  0

#define WARP_COMPUTE_AGAIN(x) (void)0

#define WARP_WRONG  0x64006400u /* large numbers in both half types */
#define WARP_COPIES 64          /* of a work-item, in flight; a power of 2 */

typedef struct {
    uint lane;
    uint index;
    uint start; /* 0: places count from memory's first byte */
    __local uint4 *memory;
    __local uint *scratch; /* WARP_SCRATCH words of this warp */
    __local uint *shared;  /* a word of the group */
    /* Copies and sets are numbered from 0; each has its place in a ring. */
    uint copies;
    uint copied;
    uint sets;
    uint set_end[WARP_COPIES]; /* the first copy after a set */
    __local uint4 *to[WARP_COPIES];
    __global const uint4 *from[WARP_COPIES]; /* NULL: zeros */
} warp_state;

/* The pointer is volatile because PoCL 3.1 loses constant offsets from the array: they
   stay in what the array was before each thread had its own. */
#define WARP_MEMORY(memory, size)                                                      \
    __local uint4 memory##_array[size] __attribute__((aligned(128)));                  \
    __local uint4 *volatile memory##_start = memory##_array;                           \
    __local uint4 *memory = memory##_start

static inline void
warp_begin(warp_state *warp, __local uint4 *memory)
{
    warp->start = 0;
    warp->memory = memory;
    warp->copies = 0;
    warp->copied = 0;
    warp->sets = 0;
}

static inline float
warp_number(uint bits)
{
#if DTYPE == CA_KERNEL_BFLOAT16
    return bfloat16_to_float((ushort)bits);
#else
    const ushort x = (ushort)bits;
    return vload_half(0, (__private const half *)&x);
#endif
}

static inline uint
warp_bits(float x)
{
#if DTYPE == CA_KERNEL_BFLOAT16
    return float_to_bfloat16(x);
#else
    ushort bits;
    vstore_half_rte(x, 0, (__private half *)&bits);
    return bits;
#endif
}

static inline uint
warp_pack(float low, float high)
{
    return warp_bits(low) | warp_bits(high) << 16;
}

static inline uint
warp_lower_halves(uint a, uint b)
{
    return (a & 0xffffu) | b << 16;
}

static inline uint
warp_upper_halves(uint a, uint b)
{
    return a >> 16 | (b & 0xffff0000u);
}

static inline float
warp_exp2(float x)
{
    const float y = exp2(x);
    return y < FLT_MIN ? 0.0f : y;
}

/* The sum of the two products of a word's numbers. */
static inline float
warp_pair(uint a, uint b)
{
    return warp_number(a & 0xffffu) * warp_number(b & 0xffffu) +
           warp_number(a >> 16) * warp_number(b >> 16);
}

/* c plus what columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a add: `a` is lane 4 g + t's,
   b0 and b1 are the t-th words of the two columns of b that this lane has in c. */
static inline float4
warp_add_products(float4 c, uint4 a, uint2 b0, uint2 b1)
{
    c.x += warp_pair(a.x, b0.x) + warp_pair(a.z, b0.y);
    c.y += warp_pair(a.x, b1.x) + warp_pair(a.z, b1.y);
    c.z += warp_pair(a.y, b0.x) + warp_pair(a.w, b0.y);
    c.w += warp_pair(a.y, b1.x) + warp_pair(a.w, b1.y);
    return c;
}

/* Word t of a row, given its place. */
static inline uint
warp_word(const warp_state *warp, uint place, uint t)
{
    return place & 15u ? WARP_WRONG
                       : ((__local const uint *)(warp->memory + place / 16u))[t];
}

/* Element g of two rows. */
static inline uint
warp_column_word(const warp_state *warp, uint place0, uint place1, uint g)
{
    if ((place0 | place1) & 15u) {
        return WARP_WRONG;
    }
    return (uint)((__local const ushort *)(warp->memory + place0 / 16u))[g] |
           (uint)((__local const ushort *)(warp->memory + place1 / 16u))[g] << 16;
}

static inline void
warp_copy_until(warp_state *warp, uint end)
{
    for (; warp->copied < end; warp->copied++) {
        const uint n = warp->copied % WARP_COPIES;
        *warp->to[n] = warp->from[n] != 0 ? *warp->from[n] : (uint4)0u;
    }
}

static inline void
warp_copy(warp_state *warp, uint place, __global const void *from, uint bytes)
{
    const uint n = warp->copies % WARP_COPIES;
    __local uint4 *to = warp->memory + place / 16u;
    *to = (uint4)WARP_WRONG;
    if ((place & 15u) != 0u || ((size_t)from & 15u) != 0u) {
        return;
    }
    if (warp->copies - warp->copied == WARP_COPIES) {
        warp_copy_until(warp, warp->copied + 1);
    }
    warp->to[n] = to;
    warp->from[n] = bytes != 0 ? (__global const uint4 *)from : 0;
    warp->copies++;
}

static inline void
warp_copies_end(warp_state *warp)
{
    warp->set_end[warp->sets % WARP_COPIES] = warp->copies;
    warp->sets++;
}

static inline void
warp_copies_wait(warp_state *warp, uint n)
{
    if (warp->sets > n) {
        warp_copy_until(warp, warp->set_end[(warp->sets - n - 1) % WARP_COPIES]);
    }
}

#define WARP_COPIES_WAIT(warp, n) warp_copies_wait(warp, n)

#define WARP_SCRATCH 192 /* words: the fragments of a product */

#define WARP_KERNEL(count) __attribute__((reqd_work_group_size(count, 1, 1)))

#define WARP_DECLARE(warp, count, memory, size)                                        \
    __local uint warp##_scratch[(count) * WARP_SCRATCH];                               \
    __local uint warp##_shared;                                                        \
    WARP_MEMORY(memory, size);                                                         \
    warp_state warp;                                                                   \
    warp.lane = (uint)get_local_id(0) & 31u;                                           \
    warp.index = (uint)get_local_id(0) >> 5;                                           \
    warp.scratch = warp##_scratch + warp.index * WARP_SCRATCH;                         \
    warp.shared = &warp##_shared;                                                      \
    warp_begin(&warp, memory)

static inline float
warp_exchange(const warp_state *warp, float x, uint mask)
{
    warp->scratch[warp->lane] = as_uint(x);
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint y = warp->scratch[warp->lane ^ mask];
    barrier(CLK_LOCAL_MEM_FENCE);
    return as_float(y);
}

/* One answer for the group, whose warps take the same way at each barrier. */
static inline bool
warp_any(const warp_state *warp, bool x)
{
    if (get_local_id(0) == 0) {
        *warp->shared = 0u;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (x) {
        atomic_or(warp->shared, 1u);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const bool any = *warp->shared != 0u;
    barrier(CLK_LOCAL_MEM_FENCE);
    return any;
}

static inline float4
warp_multiply(const warp_state *warp, float4 c, uint4 a, uint2 b)
{
    __local uint *s = warp->scratch;
    const uint lane = warp->lane;
    const uint g = lane >> 2;
    const uint column = 2u * (lane & 3u);
    s[lane] = a.x;
    s[32u + lane] = a.y;
    s[64u + lane] = a.z;
    s[96u + lane] = a.w;
    s[128u + lane] = b.x;
    s[160u + lane] = b.y;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint t = 0; t < 4; t++) {
        const uint a_lane = 4u * g + t;
        const uint b_lane = 4u * column + t;
        const uint4 row =
            (uint4)(s[a_lane], s[32u + a_lane], s[64u + a_lane], s[96u + a_lane]);
        const uint2 b0 = (uint2)(s[128u + b_lane], s[160u + b_lane]);
        const uint2 b1 = (uint2)(s[132u + b_lane], s[164u + b_lane]);
        c = warp_add_products(c, row, b0, b1);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return c;
}

static inline void
warp_tell_row(const warp_state *warp, uint place)
{
    warp->scratch[warp->lane] = place;
    barrier(CLK_LOCAL_MEM_FENCE);
}

static inline uint
warp_row_of(const warp_state *warp, uint lane)
{
    return warp->scratch[lane];
}

static inline uint4
warp_load(const warp_state *warp, uint place)
{
    const uint g = warp->lane >> 2;
    const uint t = warp->lane & 3u;
    warp_tell_row(warp, place);
    const uint4 words = (uint4)(warp_word(warp, warp_row_of(warp, g), t),
                                warp_word(warp, warp_row_of(warp, g + 8u), t),
                                warp_word(warp, warp_row_of(warp, g + 16u), t),
                                warp_word(warp, warp_row_of(warp, g + 24u), t));
    barrier(CLK_LOCAL_MEM_FENCE);
    return words;
}

static inline uint
warp_column_of(const warp_state *warp, uint first)
{
    const uint row = first + 2u * (warp->lane & 3u);
    return warp_column_word(warp, warp_row_of(warp, row), warp_row_of(warp, row + 1u),
                            warp->lane >> 2);
}

static inline uint4
warp_load_columns(const warp_state *warp, uint place)
{
    warp_tell_row(warp, place);
    const uint4 words = (uint4)(warp_column_of(warp, 0u), warp_column_of(warp, 8u),
                                warp_column_of(warp, 16u), warp_column_of(warp, 24u));
    barrier(CLK_LOCAL_MEM_FENCE);
    return words;
}

#endif
