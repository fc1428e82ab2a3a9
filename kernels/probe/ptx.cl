/* SPDX-License-Identifier: MIT
 *
 * Uses each instruction that kernels have as PTX. The host builds this program to see
 * whether the driver's compiler takes them, and never runs it.
 *
 *     -DWARP  1: those of support/warp.clh too; 0: only those of support/exchange.clh
 */
#define DTYPE       CA_KERNEL_FLOAT16
#define VALUE_DTYPE DTYPE
#define REAL64      0
#if WARP
#include "kernels/support/warp.clh"
#else
#define EXCHANGE EXCHANGE_PTX
#include "kernels/support/exchange.clh"
#endif

__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void
probe_ptx(__global const uint4 *input, __global float4 *output)
{
    const uint item = (uint)get_local_id(0);
    float4 x = as_float4(input[item]);
#if WARP
    WARP_DECLARE(warp, 1, memory, 32);
    const uint address = warp.start + item * 16u;
    warp_copy(&warp, address, input + item, 16u);
    warp_copies_end(&warp);
    WARP_COPIES_WAIT(&warp, 0);
    barrier(CLK_LOCAL_MEM_FENCE); /* what was copied, before it is read */
    const uint4 rows = warp_load(&warp, address);
    const uint4 columns = warp_load_columns(&warp, address);
    int again = (int)item;
    WARP_COMPUTE_AGAIN(again);
    x = warp_multiply(&warp, x, rows, columns.xy);
    x.y = warp_any(&warp, x.x > 1.0f) ? warp_exchange(&warp, x.x, 1u) : (float)again;
    x.z = as_float(warp_pack(x.x, x.y));
#endif
    x.x = exchange(score_exp2(x.x), 1);
    output[item] = x;
}
