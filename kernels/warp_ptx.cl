/* SPDX-License-Identifier: MIT
 *
 * warp.cl by PTX of compute capability 8.0: mma, ldmatrix, cp.async, shfl, vote.
 *
 * What touches memory is volatile and tells so, which keeps it in order with barriers.
 */
#ifndef CLATTN_WARP_PTX_CL
#define CLATTN_WARP_PTX_CL

#include "common.cl" /* DTYPE */

#define WARP_UNROLL _Pragma("unroll")
#define WARP_SKIPS  1

#define WARP_COMPUTE_AGAIN(x) __asm__ volatile("" : "+r"(x))

#define WARP_KERNEL(count) __attribute__((reqd_work_group_size(count, 1, 1)))

typedef struct {
    uint lane;
    uint index;
    uint start; /* places are addresses in the group's window of local memory */
} warp_state;

#define WARP_DECLARE(warp, count, memory, size)                                        \
    __local uint4 memory[size] __attribute__((aligned(128)));                          \
    warp_state warp;                                                                   \
    warp.lane = (uint)get_local_id(0) % 32u;                                           \
    warp.index = (uint)get_local_id(0) / 32u;                                          \
    warp.start = (uint)(size_t)memory

static inline uint4
warp_load(const warp_state *warp, uint place)
{
    uint4 m;
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                     : "r"(place)
                     : "memory");
    return m;
}

static inline uint4
warp_load_columns(const warp_state *warp, uint place)
{
    uint4 m;
    __asm__ volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
        : "r"(place)
        : "memory");
    return m;
}

#if DTYPE == CA_KERNEL_BFLOAT16
#define WARP_TYPE "bf16"
#else
#define WARP_TYPE "f16"
#endif

static inline float4
warp_multiply(const warp_state *warp, float4 c, uint4 a, uint2 b)
{
    float4 d;
    __asm__ volatile("mma.sync.aligned.m16n8k16.row.col.f32." WARP_TYPE "." WARP_TYPE
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%10, %11, %12, %13};"
                     : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y),
                       "f"(c.x), "f"(c.y), "f"(c.z), "f"(c.w));
    return d;
}

static inline float
warp_exchange(const warp_state *warp, float x, uint mask)
{
    float y;
    __asm__ volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;"
                     : "=f"(y)
                     : "f"(x), "r"(mask));
    return y;
}

static inline bool
warp_any(const warp_state *warp, bool x)
{
    uint any;
    __asm__ volatile("{ .reg .pred p; .reg .pred q; setp.ne.u32 p, %1, 0; "
                     "vote.sync.any.pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q; }"
                     : "=r"(any)
                     : "r"((uint)x));
    return any != 0;
}

static inline uint
warp_pack(float low, float high)
{
    uint packed;
    __asm__("cvt.rn." WARP_TYPE "x2.f32 %0, %1, %2;"
            : "=r"(packed)
            : "f"(high), "f"(low));
    return packed;
}

static inline uint
warp_lower_halves(uint a, uint b)
{
    uint halves;
    __asm__("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(halves) : "r"(a), "r"(b));
    return halves;
}

static inline uint
warp_upper_halves(uint a, uint b)
{
    uint halves;
    __asm__("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(halves) : "r"(a), "r"(b));
    return halves;
}

static inline float
warp_exp2(float x)
{
    float y;
    __asm__("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static inline void
warp_copy(const warp_state *warp, uint place, __global const void *from, uint bytes)
{
    __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(place), "l"(from), "r"(bytes)
                     : "memory");
}

static inline void
warp_copies_end(const warp_state *warp)
{
    __asm__ volatile("cp.async.commit_group;" : : : "memory");
}

#define WARP_COPIES_WAIT(warp, n)                                                      \
    __asm__ volatile("cp.async.wait_group %0;" : : "n"(n) : "memory")

#endif
