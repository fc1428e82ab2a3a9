/* SPDX-License-Identifier: MIT
 *
 * Ways from a pointer to a shared address (WAY), for an array of any alignment (ALIGN): what is
 * copied there asynchronously is loaded as matrices.
 */
#if WAY == 2
#define ADDRESS(to, p)                                                                             \
    __asm__ volatile("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"               \
                     : "=r"(to)                                                                    \
                     : "l"((const void *)(p)))
#elif WAY == 1
#define ADDRESS(to, p) __asm__ volatile("cvt.u32.u64 %0, %1;" : "=r"(to) : "l"(p))
#else
#define ADDRESS(to, p) to = (uint)(size_t)(p)
#endif

__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void
addresses(__global const uint4 *input, __global uint4 *output, __global uint *address)
{
    __local uint before[1];
    __local uint memory[128] __attribute__((aligned(ALIGN)));
    const uint item = (uint)get_local_id(0);
    uint start;
    uint4 m;
    before[0] = item;
    ADDRESS(start, memory);
    __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :
                     : "r"(start + item * 16u), "l"(input + item)
                     : "memory");
    __asm__ volatile("cp.async.commit_group;" : : : "memory");
    __asm__ volatile("cp.async.wait_group 0;" : : : "memory");
    barrier(CLK_LOCAL_MEM_FENCE);
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                     : "r"(start + item * 16u)
                     : "memory");
    output[item] = m;
    address[item] = item == 0 ? start : before[0];
}
