/* SPDX-License-Identifier: MIT
 *
 * Tests the instruction for pairs of bfloat16. The host builds and runs this kernel once,
 * if the processor has the instruction.
 *
 *     sums[i] = start + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
 *
 * One work-item owns all 16 sums. No macros.
 */
#include "kernels/support/bfloat16_pairs.clh"

typedef uint16 unaligned_pairs __attribute__((aligned(2)));

__kernel void
probe_pairs(__global const ushort *a, __global const ushort *b, __global float *sums,
            const float start)
{
    const uint16 pairs = *(__global const unaligned_pairs *)a;
    const uint16 others = *(__global const unaligned_pairs *)b;
    vstore16(add_pair_products((float16)start, pairs, others), 0, sums);
}
