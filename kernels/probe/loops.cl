/* SPDX-License-Identifier: MIT
 *
 * Tests that loops run as often as they say. Some drivers end the loops of a work-item after 65,535
 * rounds in all, without an error.
 *
 *     sums[0] = sum of `rounds` numbers, each made of the one before
 */
__kernel void
probe_loops(__global uint *sums, long rounds)
{
    uint x = 1u;
    uint sum = 0u;
    for (long n = 0; n < rounds; n++) {
        x = x * 1664525u + 1013904223u;
        sum += x >> 16;
    }
    sums[0] = sum;
}
