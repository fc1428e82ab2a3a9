/* SPDX-License-Identifier: MIT
 *
 * Tests one kind of operation of support/warp.clh by its numbers. csrc/opencl/capabilities.c
 * knows what they should be. 32 work-items, i is the number of each.
 *
 *     -DTEST  CA_PROBE_VOTES: output[i] = is something true in any work-item?
 *             CA_PROBE_LOADS: output[i], output[32 + i] = the four matrices of the 32 rows
 *             in input, and these matrices transposed
 *             CA_PROBE_FLOAT16_MATRICES, CA_PROBE_BFLOAT16_MATRICES: output[i] = a product
 *             and a sum; output[32 + i] = the sum's start times CA_PROBE_FACTOR, rounded
 *             CA_PROBE_COPIES: output[i], … = three rows of copies, in reverse order, of
 *             which the second is partly zeros
 */
#include "kernels/probe/halves.clh" /* DTYPE */

#define WARP 1
#include "kernels/support/warp.clh"

#define ROWS 96 /* of 16 bytes, in local memory */

__kernel WARP_KERNEL(32) void probe_warp(__global const uint4 *input, __global uint4 *output)
{
    WARP_DECLARE(warp, 1, memory, ROWS);
    const uint item = warp.lane;
#if TEST == CA_PROBE_VOTES
    output[item] = (uint4)(warp_any(&warp, item == 5u), warp_any(&warp, item > 31u),
                           warp_any(&warp, item == 31u), warp_any(&warp, true));
#elif TEST == CA_PROBE_LOADS
    const uint address = warp.start + item * 16u;
    memory[item] = input[item];
    barrier(CLK_LOCAL_MEM_FENCE); /* the rows, before they are read */
    output[item] = warp_load(&warp, address);
    output[32 + item] = warp_load_columns(&warp, address);
#elif TEST == CA_PROBE_COPIES
    const uint address = warp.start + item * 16u;
    const uint row = 32u * 16u;
    warp_copy(&warp, address, input + item, 16u);
    warp_copy(&warp, address + row, input + 32 + item, item % 2u * 16u);
    warp_copies_end(&warp);
    warp_copy(&warp, address + 2u * row, input + 64 + item, 16u);
    warp_copies_end(&warp);
    WARP_COPIES_WAIT(&warp, 1);
    barrier(CLK_LOCAL_MEM_FENCE); /* the first set, before it is read */
    output[item] = memory[31u - item];
    output[32 + item] = memory[63u - item];
    WARP_COPIES_WAIT(&warp, 0);
    barrier(CLK_LOCAL_MEM_FENCE); /* the second set */
    output[64 + item] = memory[95u - item];
#else
    const float4 a = as_float4(input[item]);
    const float4 later = as_float4(input[32 + item]);
    const float4 b = as_float4(input[64 + item]);
    const float4 c = as_float4(input[96 + item]);
    const float4 d = c * CA_PROBE_FACTOR;
    const uint4 left = (uint4)(warp_pack(a.x, a.y), warp_pack(a.z, a.w),
                               warp_pack(later.x, later.y), warp_pack(later.z, later.w));
    const uint2 right = (uint2)(warp_pack(b.x, b.y), warp_pack(b.z, b.w));
    output[item] = as_uint4(warp_multiply(&warp, c, left, right));
    output[32 + item] = (uint4)(warp_pack(d.x, d.y), warp_pack(d.z, d.w), 0u, 0u);
#endif
}
