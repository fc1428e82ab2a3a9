/* SPDX-License-Identifier: MIT
 *
 * The operations of support/warp.clh, one kernel for each: as PTX, or emulated.
 *
 *     -DWARP, -DDTYPE  as in support/warp.clh
 */
#define VALUE_DTYPE DTYPE
#define REAL64      0
#include "kernels/support/warp.clh"

/* Rows of 16 halves, in 32 bytes each, by way of local memory: a x b + c, where `b` has its
   columns as rows, and the transposed matrix as it is loaded. */
__kernel WARP_KERNEL(32) void multiply(__global const uint4 *a, __global const uint4 *b,
                                       __global const float4 *c, __global float4 *output,
                                       __global uint4 *transposed)
{
    WARP_DECLARE(warp, 1, memory, 64);
    const uint item = (uint)get_local_id(0);
    memory[item] = a[item];
    memory[32 + item] = item < 16 ? b[item] : (uint4)(0u);
    barrier(CLK_LOCAL_MEM_FENCE); /* what lanes wrote, before others read it */
    const uint place = warp.start + (item % 16u) * 32u + (item / 16u) * 16u;
    const uint column = warp.start + 512u + (item % 8u) * 32u + (item / 8u % 2u) * 16u;
    const uint4 left = warp_load(&warp, place);
    const uint4 right = warp_load(&warp, column);
    transposed[item] = warp_load_columns(&warp, place);
    output[item] = warp_multiply(&warp, c[item], left, right.xy);
}

/* Two sets of copies in flight. Items whose number is odd get zeros in the second set. */
__kernel WARP_KERNEL(128) void copies(__global const uint4 *input, __global uint4 *output)
{
    WARP_DECLARE(warp, 4, memory, 256);
    const uint item = (uint)get_local_id(0);
    warp_copy(&warp, warp.start + item * 16u, input + item, 16u);
    warp_copies_end(&warp);
    warp_copy(&warp, warp.start + 2048u + item * 16u, input + 128 + item, item % 2u ? 0u : 16u);
    warp_copies_end(&warp);
    WARP_COPIES_WAIT(&warp, 1);
    barrier(CLK_LOCAL_MEM_FENCE); /* the first set, before others read it */
    output[item] = memory[127u - item];
    WARP_COPIES_WAIT(&warp, 0);
    barrier(CLK_LOCAL_MEM_FENCE); /* the second set */
    output[128u + item] = memory[128u + 127u - item];
}

__kernel WARP_KERNEL(64) void numbers(__global const float *input, __global float *exchanged,
                                      __global uint *packed, __global float *powers,
                                      __global uint *votes)
{
    WARP_DECLARE(warp, 2, memory, 1);
    const uint item = (uint)get_local_id(0);
    memory[0].x = 0;
    const float x = input[item];
    exchanged[item] = warp_exchange(&warp, x, 5u);
    packed[item] = warp_pack(x, input[64u + item]);
    powers[item] = score_exp2(x);
    votes[item] = warp_any(&warp, item == 7u);
}
