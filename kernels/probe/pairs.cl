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

__kernel void
probe_pairs(__global const ushort *a, __global const ushort *b, __global float *sums,
            const float start)
{
    vstore16(add_pair_products((float16)start, load_pairs(a), load_pairs(b)), 0, sums);
}
