/* SPDX-License-Identifier: MIT
 *
 * How fast matrix units multiply: CHAINS sums of a warp, all operands in registers.
 */
#define VALUE_DTYPE DTYPE
#define REAL64      0
#include "kernels/support/warp.clh"

__kernel WARP_KERNEL(256) void matrix_rate(__global const uint4 *input, __global float *output,
                                           uint count)
{
    WARP_DECLARE(warp, 8, memory, 1);
    const uint item = (uint)get_local_id(0);
    memory[0].x = 0;
    const uint4 a = input[item];
    const uint4 b = input[256u + item];
    float4 sums[CHAINS];
    WARP_FOR (uint n = 0; n < CHAINS; n++) {
        sums[n] = (float4)((float)n);
    }
    for (uint i = 0; i < count; i++) {
        WARP_FOR (uint n = 0; n < CHAINS; n++) {
            sums[n] = warp_multiply(&warp, sums[n], a, n % 2u ? b.zw : b.xy);
        }
    }
    float4 all = sums[0];
    WARP_FOR (uint n = 1; n < CHAINS; n++) {
        all += sums[n];
    }
    output[get_global_id(0)] = all.x + all.y + all.z + all.w;
}
