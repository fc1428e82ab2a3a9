/* SPDX-License-Identifier: MIT
 *
 * Operations of 32 work-items on small matrices of half or bfloat16, under one set of
 * names and with two implementations:
 *
 *     -DWARP  1: instructions of matrix units, in PTX      warp_ptx.cl
 *             0: emulated, the default                     warp_emulation.cl
 *     and those of common.cl; DTYPE is one of the half types
 *
 * The emulation runs on any device, to check a kernel's indices and logic; it is slow.
 *
 *     WARP_KERNEL(count)        attributes of a kernel of `count` work-items a group
 *     WARP_DECLARE(warp, n, memory, size)
 *                               at kernel scope: a `warp_state` of n warps a group, and
 *                               `memory`, local memory of size times 16 bytes
 *     warp.lane, warp.index     0 … 31, and the warp's number in its group
 *     warp.start                the place of memory[0], a multiple of 128: places count
 *                               bytes, in 32 bits
 *     WARP_UNROLL               before loops whose counter indexes registers
 *     WARP_COMPUTE_AGAIN(x)     what depends on the int x is computed here, each time:
 *                               not kept in registers from before a loop
 *     WARP_SKIPS                1: a warp may leave operations out that others do
 *
 *     warp_load(warp, place)    four matrices of 8 x 8: lanes 8 n … 8 n + 7 pass the
 *                               rows of matrix n, 16 aligned bytes each; lane 4 g + t
 *                               gets columns 2 t and 2 t + 1 of row g of each matrix
 *     warp_load_columns(…)      the same of the transposed matrices
 *     warp_multiply(warp, c, a, b)
 *                               c + a * b, of 16 x 8, 16 x 16 and 16 x 8
 *     warp_exchange(warp, x, mask)
 *                               x of lane ^ mask
 *     warp_any(warp, x)         true if x is in a lane; may be true if it is in a lane
 *                               of another warp of the group
 *     warp_pack(low, high)      two floats, rounded, in a word
 *     warp_lower_halves(a, b), warp_upper_halves(a, b)
 *                               of two words, in a word, a's in the lower half
 *     warp_exp2(x)              2^x, 0 where that is below the smallest normal float
 *     warp_copy(warp, place, from, bytes)
 *                               16 aligned bytes from global memory, later; where
 *                               `bytes` is 0 instead of 16, zeros
 *     warp_copies_end(warp)     ends a set of copies
 *     WARP_COPIES_WAIT(warp, n) all but the n last sets have arrived; a barrier makes
 *                               them visible to the other work-items
 *
 * Fragments, in words of two numbers, the lower index in the lower half; g and t are
 * lane / 4 and lane % 4:
 *
 *     a (16 x 16)  .x row g, .y row g + 8: columns 2 t, 2 t + 1; .z, .w: columns + 8
 *     b (16 x 8)   column g; .x rows 2 t, 2 t + 1; .y rows + 8
 *     c (16 x 8)   .x .y row g, columns 2 t, 2 t + 1; .z .w row g + 8; floats
 *
 * Every work-item of the group comes to every operation, in the same order: in the
 * emulation each is a barrier or more.
 */
#ifndef CLATTN_WARP_CL
#define CLATTN_WARP_CL

#include "common.cl" /* DTYPE */

#define WARP_LANES 32

#ifndef WARP
#define WARP 0
#endif

#if WARP
#include "warp_ptx.cl"
#else
#include "warp_emulation.cl"
#endif

#endif
