/* SPDX-License-Identifier: MIT
 *
 * Pairs of bfloat16 in 32 bits, on processors that have an instruction for them.
 */
#ifndef CLATTN_BFLOAT16_PAIRS_CL
#define CLATTN_BFLOAT16_PAIRS_CL

/* sum + a.low * b.low + a.high * b.high in each lane. The compiler's target may lack
   the instruction that the processor has, so its name for it may be refused. */
static inline float16
add_pair_products(float16 sum, uint16 a, uint16 b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));
    return sum;
}

typedef uint16 unaligned_pairs __attribute__((aligned(2)));

/* 16 pairs, one behind the other. */
static inline uint16
load_pairs(__global const ushort *x)
{
    return *(__global const unaligned_pairs *)x;
}

#endif
