/* SPDX-License-Identifier: MIT
 *
 * The rate of products of groups of warps: c (64 x 128) += a (64 x 64) * b (128 x 64) transposed, `count`
 * times, with a and b in local memory.
 *
 *     global size  groups * 128, local size 128
 *     c            (groups, 64, 128)
 */
#define DTYPE           CA_KERNEL_FLOAT16
#define VALUE_DTYPE     DTYPE
#define REAL64          0
#define WARP            CA_WARP_PTX_GROUPS
#define LOCAL_ALIGNMENT GROUP_PANEL_BYTES
#include "kernels/support/warp_group.clh"

#define COLUMNS 128

/* Copies rows of 64 numbers to a panel. */
INLINED void
fill(__local uint4 *memory, __global const uint4 *from, int rows)
{
    for (int n = (int)get_local_id(0); n < rows * 8; n += 128) {
        memory[n ^ (n >> 3 & 7)] = from[n];
    }
}

__kernel WARP_KERNEL(128) void products(__global const uint4 *a, __global const uint4 *b,
                                        __global float2 *output, int count)
{
    WARP_DECLARE(warp, 4, memory, (64 + COLUMNS) * 8);
    fill(memory, a, 64);
    fill(memory + 64 * 8, b, COLUMNS);
    group_copies_arrive();
    barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the products' reads */
    const group_panels left = group_panels_at(warp.start, 64 * GROUP_ROW_BYTES);
    const group_panels right =
        group_panels_at(warp.start + 64 * GROUP_ROW_BYTES, COLUMNS * GROUP_ROW_BYTES);
    float4 sums[COLUMNS / 8];
    WARP_FOR (int n = 0; n < COLUMNS / 8; n++) {
        sums[n] = (float4)0.0f;
    }
    group_begin();
    for (int turn = 0; turn < count; turn++) {
        WARP_FOR (uint k = 0; k < 4; k++) {
            group_multiply_tiles(&warp, sums, COLUMNS, group_behind(left, 32 * k),
                                 group_behind(right, 32 * k), false);
        }
        group_end();
    }
    GROUP_WAIT(0);
    group_keep(sums, COLUMNS);
    output +=
        (get_group_id(0) * 64 + warp.index * 16 + warp.lane / 4) * (COLUMNS / 2) + warp.lane % 4;
    WARP_FOR (int n = 0; n < COLUMNS / 8; n++) {
        output[4 * n] = sums[n].xy;
        output[8 * (COLUMNS / 2) + 4 * n] = sums[n].zw;
    }
}
