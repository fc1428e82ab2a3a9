/* SPDX-License-Identifier: MIT
 *
 * Tests that a work-group has as much local memory as the device says. Each of 32
 * work-items fills a share of the memory, and adds up the share of another work-item.
 *
 *     -DBYTES  of local memory
 */
#define ROWS (BYTES / 16)

__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void
probe_local(__global const uint4 *input, __global uint4 *output)
{
    __local uint4 memory[ROWS];
    const uint item = (uint)get_local_id(0);
    uint4 sum = (uint4)0u;
    for (uint n = item; n < ROWS; n += 32u) {
        memory[n] = input[item] + n;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint n = 31u - item; n < ROWS; n += 32u) {
        sum += memory[n] * (2u * (n / 32u) + 1u);
    }
    output[item] = sum;
}
