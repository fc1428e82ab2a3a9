/* SPDX-License-Identifier: MIT
 *
 * Whether a device's compiler takes the instruction for pairs of bfloat16, and whether
 * it does what kernels rely on: built and run once, where the processor has it.
 *
 *     sums[i] = start + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
 *
 * One work-item owns all 16 sums. No macros.
 */
#include "kernels/support/bfloat16_pairs.clh"

__kernel void
probe_pairs(__global const ushort *a, __global const ushort *b, __global float *sums,
            const float start)
{
    vstore16(add_pair_products((float16)start, load_pairs(a), load_pairs(b)), 0, sums);
}
