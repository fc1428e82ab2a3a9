/* SPDX-License-Identifier: MIT
 *
 * Kernels that run as fast as a device can: limit_fma and limit_exp compute, limit_read reads
 * memory. Each writes a sum, so that no compiler removes the work.
 *
 *     -DREAL64  1: limit_fma computes in double
 *     -DLANES   2, 4, 8 or 16: reals of a vector
 *     -DLOCAL   work-items of a work-group
 */
#ifndef REAL64
#define REAL64 0
#endif
#ifndef LANES
#define LANES 8
#endif
#ifndef LOCAL
#define LOCAL 1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)

#if REAL64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
typedef double real;
typedef JOIN(double, LANES) realv;
#else
typedef float real;
typedef JOIN(float, LANES) realv;
#endif

/* The vector hint keeps compilers from vectorising over work-items as well. */
#define KERNEL __kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1), vec_type_hint(realv)))

static real
sum_lanes(realv sum)
{
    real total = 0;
    for (int n = 0; n < LANES; n++) {
        total += ((const real *)&sum)[n];
    }
    return total;
}

/* As many chains as registers hold beside two operands. No chain depends on another. */
#define CHAINS 12

static void
write_mean(__global float *output, const realv *chain)
{
    realv sum = chain[0];
#pragma unroll
    for (int n = 1; n < CHAINS; n++) {
        sum += chain[n];
    }
    output[get_global_id(0)] = (float)(sum_lanes(sum) / (real)(LANES * CHAINS));
}

/* Fused multiply-adds: chain[n] = chain[n] * factor + addend, `steps` times. Each work-item
 * writes the mean of its chains. The factor is data: no compiler can foresee the result. */
KERNEL void
limit_fma(__global float *output, long steps, float factor, float addend)
{
    const realv factors = (realv)((real)factor);
    const realv addends = (realv)((real)addend);
    realv chain[CHAINS];
#pragma unroll
    for (int n = 0; n < CHAINS; n++) {
        chain[n] = (realv)((real)n);
    }
    for (long step = 0; step < steps; step++) {
#pragma unroll
        for (int n = 0; n < CHAINS; n++) {
            chain[n] = fma(chain[n], factors, addends);
        }
    }
    write_mean(output, chain);
}

#if !REAL64
typedef JOIN(int, LANES) intv;
#define AS_REALV JOIN(as_, JOIN(float, LANES))
#define AS_INTV  JOIN(as_, JOIN(int, LANES))

/* Inline assembly names the kind of a register by a letter: for vectors, Intel's compiler takes X, and clang
   takes v. */
#if LOCAL == 1 && LANES == 16 && defined(__INTEL_LLVM_COMPILER)
#define AVX512_REGISTER "X"
#elif LOCAL == 1 && LANES == 16 && defined(__AVX512DQ__)
#define AVX512_REGISTER "v"
#endif

/* 2^x, |x| < 126, by as few operations as float32 takes. AVX-512 has an instruction for x - floor(x), the
 * rest of x, and one that multiplies by 2^floor(x). Elsewhere adding 1.5 * 2^23 + 127 rounds x, and leaves
 * the exponent in the low bits. A polynomial computes the power of the rest. */
static realv
exp2_of(realv x)
{
#ifdef AVX512_REGISTER
    realv rest;
    realv result;
    __asm__("vreduceps $1, %1, %0" : "=" AVX512_REGISTER(rest) : AVX512_REGISTER(x));
    realv y = (realv)1.8671301e-3f;
    y = fma(y, rest, (realv)9.0170303e-3f);
    y = fma(y, rest, (realv)5.5799913e-2f);
    y = fma(y, rest, (realv)0.24016445f);
    y = fma(y, rest, (realv)0.69315131f);
    y = fma(y, rest, (realv)1.0f);
    __asm__("vscalefps %2, %1, %0"
            : "=" AVX512_REGISTER(result)
            : AVX512_REGISTER(y), AVX512_REGISTER(x));
    return result;
#else
    const realv shift = (realv)12583039.0f;
    const realv shifted = x + shift;
    const realv rest = x - (shifted - shift);
    realv y = (realv)1.3264727e-3f;
    y = fma(y, rest, (realv)9.6715128e-3f);
    y = fma(y, rest, (realv)5.5507337e-2f);
    y = fma(y, rest, (realv)0.24022242f);
    y = fma(y, rest, (realv)0.69314698f);
    return fma(y, rest, (realv)1.0f) * AS_REALV(AS_INTV(shifted) << 23);
#endif
}

/* Exponentials: chain[n] = 2^-chain[n], `steps` times. Each work-item writes the mean of its chains. */
KERNEL void
limit_exp(__global float *output, long steps)
{
    realv chain[CHAINS];
#pragma unroll
    for (int n = 0; n < CHAINS; n++) {
        chain[n] = (realv)((real)n);
    }
    for (long step = 0; step < steps; step++) {
#pragma unroll
        for (int n = 0; n < CHAINS; n++) {
            chain[n] = exp2_of(-chain[n]);
        }
    }
    write_mean(output, chain);
}
#endif

/* Sums that do not wait for each other. */
#define SUMS 8
#define STEP (SUMS * LANES * LOCAL) /* elements that a work-group reads at once */

/* The sum of a tile of `tile` elements for each work-group. The groups of one pass read the
 * whole input, then those of the next pass read it again. `tile` is a multiple of STEP, and
 * `count`, the elements of the input, is a multiple of `tile`. */
KERNEL void
limit_read(__global float *output, __global const realv *input, long count, long tile)
{
    const long group = (long)get_group_id(0);
    const long first = group % (count / tile) * tile;
    const long item = (long)get_local_id(0);

    realv sums[SUMS];
#pragma unroll
    for (int n = 0; n < SUMS; n++) {
        sums[n] = (realv)((real)0);
    }
    for (long i = first / LANES + item; i < (first + tile) / LANES; i += STEP / LANES) {
#pragma unroll
        for (int n = 0; n < SUMS; n++) {
            sums[n] += input[i + n * LOCAL];
        }
    }
    realv sum = sums[0];
#pragma unroll
    for (int n = 1; n < SUMS; n++) {
        sum += sums[n];
    }
    output[get_global_id(0)] = (float)sum_lanes(sum);
}
