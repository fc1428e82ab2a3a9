/* SPDX-License-Identifier: MIT
 *
 * Tests how the work-items of a warp exchange numbers, and exp2, as support/exchange.clh has them.
 *
 *     output[i]      = words of input[i ^ 1], [i ^ 2], [i ^ 4], [i ^ 16]
 *     output[32 + i] = exp2(input[32 + i])
 */
#define DTYPE         CA_KERNEL_FLOAT32
#define VALUE_DTYPE   DTYPE
#define REAL64        0
#define WARP_SHUFFLES 1
#include "kernels/support/exchange.clh"

__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void
probe_exchange(__global const float4 *input, __global float4 *output)
{
    const uint item = (uint)get_local_id(0);
    const float4 x = input[item];
    const float4 y = input[32 + item];
    output[item] =
        (float4)(exchange(x.x, 1), exchange(x.y, 2), exchange(x.z, 4), exchange(x.w, 16));
    output[32 + item] =
        (float4)(score_exp2(y.x), score_exp2(y.y), score_exp2(y.z), score_exp2(y.w));
}
