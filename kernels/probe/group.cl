/* SPDX-License-Identifier: MIT
 *
 * Tests the products of support/warp_group.clh by their numbers. csrc/opencl/capabilities.c knows what they
 * should be. 128 work-items, one group.
 *
 *     -DTEST  CA_PROBE_FLOAT16_MATRICES, CA_PROBE_BFLOAT16_MATRICES
 *
 * Number n is input[n % CA_PROBE_NUMBERS]. Three panels hold 64 rows of 64 numbers each: panel p begins with
 * number 4096 p. The matrix `left`, 64 x 16, has the first 1024 numbers.
 *
 * The group computes two products:
 *
 *     first     left matrix: columns 16 … 31 of panel 0
 *               right matrix: columns 16 … 31 of panel 1, transposed
 *     second    left matrix: `left`
 *               right matrix: rows 16 … 31 of panels 1 and 2, which lie side by side
 *
 * A work-item holds fragments of each product. It multiplies fragment k by k + 1, and adds them up.
 * Work-item i writes this sum of the first product to output[i], and that of the second to output[128 + i].
 */
#include "kernels/probe/halves.clh" /* DTYPE */

#define WARP            CA_WARP_PTX_GROUPS
#define LOCAL_ALIGNMENT GROUP_PANEL_BYTES
#include "kernels/support/warp_group.clh"

#define PANEL (GROUP_ROWS * 64) /* numbers */

INLINED float
number_at(__global const float *input, uint n)
{
    return input[n % CA_PROBE_NUMBERS];
}

/* Two numbers of the matrix `left`, from one on. */
INLINED uint
pair_of_left(__global const float *input, uint row, uint column)
{
    const uint n = row * 16u + column;
    return warp_pack(number_at(input, n), number_at(input, n + 1u));
}

__kernel WARP_KERNEL(128) void probe_group(__global const float *input, __global float4 *output)
{
    WARP_DECLARE(warp, GROUP_WARPS, memory, 3 * PANEL / 8);
    const uint item = (uint)get_local_id(0);
    for (uint n = item; n < 3 * PANEL; n += 128u) {
        ((__local ushort *)memory)[GROUP_AT(2u * n) / 2u] =
            (ushort)warp_pack(number_at(input, n), 0.0f);
    }
    const uint row = warp.index * 16u + warp.lane / 4u;
    const uint column = warp.lane % 4u * 2u;
    const uint4 left =
        (uint4)(pair_of_left(input, row, column), pair_of_left(input, row + 8u, column),
                pair_of_left(input, row, column + 8u), pair_of_left(input, row + 8u, column + 8u));
    const group_panels first = group_panels_at(warp.start, 2 * PANEL);
    const group_panels second = group_panels_at(warp.start + 2 * PANEL, 2 * PANEL);
    float4 tiles[8] = {(float4)0.0f};
    float4 rows[16] = {(float4)0.0f};

    group_copies_arrive();
    barrier(CLK_LOCAL_MEM_FENCE); /* the panels: products of them */
    group_begin();
    group_multiply_tiles(&warp, tiles, 64, group_behind(first, 32), group_behind(second, 32), true);
    group_multiply_rows(&warp, rows, 128, left, group_behind(second, 16 * GROUP_ROW_BYTES));
    group_end();
    GROUP_WAIT(0);
    group_keep(tiles, 64);
    group_keep(rows, 128);
    float4 sum_of_tiles = (float4)0.0f;
    float4 sum_of_rows = (float4)0.0f;
    WARP_FOR (int k = 0; k < 8; k++) {
        sum_of_tiles += tiles[k] * (float)(k + 1);
    }
    WARP_FOR (int k = 0; k < 16; k++) {
        sum_of_rows += rows[k] * (float)(k + 1);
    }
    output[item] = sum_of_tiles;
    output[128u + item] = sum_of_rows;
}
