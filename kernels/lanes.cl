/* SPDX-License-Identifier: MIT
 *
 * Vectors of LANES reals, for kernels that keep one query per lane: load and store of
 * consecutive elements, register transpose, exp2, tanh.
 *
 *     -DLANES  4, 8 or 16; what fills a vector register
 *     and those of common.cl
 */
#ifndef CLATTN_LANES_CL
#define CLATTN_LANES_CL

#include "common.cl"

#ifndef LANES
#if REAL_SIZE == 8
#define LANES 8
#else
#define LANES 16
#endif
#endif

#define WIDE(name) JOIN(name, LANES) /* WIDE(float) is float16 where LANES is 16 */

#if REAL_SIZE == 8
#define EXPONENT_BIAS 1023
#define MANTISSA_BITS 52
#define INT_NAME      long
#define as_realv      WIDE(as_double)
#define as_intv       WIDE(as_long)
#define convert_realv WIDE(convert_double)
#define convert_intv  WIDE(convert_long)
typedef WIDE(double) realv;
typedef WIDE(long) intv;
#else
#define EXPONENT_BIAS 127
#define MANTISSA_BITS 23
#define INT_NAME      int
#define as_realv      WIDE(as_float)
#define as_intv       WIDE(as_int)
#define convert_realv WIDE(convert_float)
#define convert_intv  WIDE(convert_int)
typedef WIDE(float) realv;
typedef WIDE(int) intv;
#endif

/* --- consecutive elements --------------------------------------------------------- */

/* Vectors that lie at any element: what is stored through them. With some compilers
   vstore is a store for each element. */
typedef realv unaligned_realv __attribute__((aligned(REAL_SIZE)));
typedef WIDE(float) unaligned_floatv __attribute__((aligned(4)));
typedef WIDE(ushort) unaligned_ushortv __attribute__((aligned(2)));

typedef WIDE(uint) uintv; /* one for each real */
typedef WIDE(ulong) ulongv;
#define as_uintv       WIDE(as_uint)
#define convert_uintv  WIDE(convert_uint)
#define convert_ulongv WIDE(convert_ulong)

static inline WIDE(float) bfloat16_to_float_lanes(WIDE(ushort) bits)
{
    return WIDE(as_float)(convert_uintv(bits) << 16);
}

/* vload_half and vstore_half ask only for the alignment of one half, but some compilers
   assume that of the vector: hence by way of a private one. */
static inline WIDE(float) load_halves(__global const half *x)
{
    const WIDE(ushort) bits = WIDE(vload)(0, (__global const ushort *)x);
    return WIDE(vload_half)(0, (const half *)&bits);
}

#if !REAL64
DEFINE_DOUBLE_BITS_TO_FLOAT(double_bits_to_float_lanes, realv, uintv, ulongv)
#endif

/* load_1 and so on, of LANES consecutive elements. */
#define DEFINE_LOAD_LANES(dtype, value)                                                \
    static inline realv load_lanes_##dtype(__global const storage_##dtype *x)          \
    {                                                                                  \
        return convert_realv(value);                                                   \
    }

DEFINE_LOAD_LANES(1, load_halves(x))
DEFINE_LOAD_LANES(2, bfloat16_to_float_lanes(WIDE(vload)(0, x)))
DEFINE_LOAD_LANES(3, WIDE(vload)(0, x))
#if REAL64
DEFINE_LOAD_LANES(4, WIDE(vload)(0, x))
#else
DEFINE_LOAD_LANES(4, double_bits_to_float_lanes(WIDE(vload)(0, x)))
#endif
DEFINE_LOAD_LANES(5, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(6, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(7, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(8, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(9, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(10, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(11, WIDE(vload)(0, x))
DEFINE_LOAD_LANES(12, WIDE(vload)(0, x))

#define load_lanes       JOIN(load_lanes_, DTYPE)
#define load_value_lanes JOIN(load_lanes_, VALUE_DTYPE)

static inline void
store_lanes(realv value, __global storage *x)
{
#if DTYPE == CA_KERNEL_FLOAT16
    WIDE(ushort) bits;
    JOIN(WIDE(vstore_half), _rte)(value, 0, (half *)&bits);
    *(__global unaligned_ushortv *)x = bits;
#elif DTYPE == CA_KERNEL_BFLOAT16
    const uintv bits = as_uintv(WIDE(convert_float)(value));
    const uintv rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uintv kept = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
    *(__global unaligned_ushortv *)x = WIDE(convert_ushort)(kept >> 16);
#elif DTYPE == CA_KERNEL_FLOAT32
    *(__global unaligned_floatv *)x = WIDE(convert_float)(value);
#else
    *(__global unaligned_realv *)x = value;
#endif
}

/* load_mask of LANES consecutive elements. */
static inline realv
load_mask_lanes(__global const mask_storage *x, real filter)
{
#if MASK_ADDS
    return JOIN(load_lanes_, MASK)(x);
#else
    return convert_intv(WIDE(vload)(0, x)) == 0 ? (realv)filter : (realv)REAL(0.0);
#endif
}

static inline realv
add_addends_lanes(realv a, realv b)
{
    const realv lowest = (realv)LOWEST_REAL;
    const realv sum = a + b;
    const realv finite = sum < lowest ? lowest : sum;
    const intv excluded = (a == (realv)(-INFINITY)) | (b == (realv)(-INFINITY));
    return excluded ? (realv)(-INFINITY) : finite;
}

/* Ask for memory that is needed soon. clang's builtin is the machine's instruction; some
   compilers make OpenCL's prefetch() nothing. On CPUs, the only devices that vectors of
   lanes are for, an address means the same in every address space. */
#if !defined(PREFETCH) && defined(__has_builtin)
#if __has_builtin(__builtin_prefetch)
#define PREFETCH(x) __builtin_prefetch((const void *)(size_t)(x))
#endif
#endif
#ifndef PREFETCH
#define PREFETCH(x) prefetch(x, 1)
#endif

#define CACHE_LINE 64

static inline void
prefetch_bytes(__global const char *x, int bytes)
{
    for (int n = 0; n < bytes; n += CACHE_LINE) {
        PREFETCH(x + n);
    }
}

/* --- between lanes ---------------------------------------------------------------- */

/* INTERLEAVE_LOW(a, b) is a[0], b[0], a[1], b[1], …; INTERLEAVE_HIGH goes on to the
   end. clang's builtin is a machine shuffle wherever there is one; vector literals,
   which every compiler takes, are up to 30 instructions with some. */
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE_BUILTIN 1
#endif
#endif

#if LANES == 16 && defined(SHUFFLE_BUILTIN)
#define INTERLEAVE_LOW(a, b)                                                           \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,  \
                            23)
#define INTERLEAVE_HIGH(a, b)                                                          \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,    \
                            30, 15, 31)
#elif LANES == 8 && defined(SHUFFLE_BUILTIN)
#define INTERLEAVE_LOW(a, b)  __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif LANES == 4 && defined(SHUFFLE_BUILTIN)
#define INTERLEAVE_LOW(a, b)  __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#elif LANES == 16
#define INTERLEAVE_LOW(a, b)                                                           \
    (realv)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4, a.s5, b.s5,    \
            a.s6, b.s6, a.s7, b.s7)
#define INTERLEAVE_HIGH(a, b)                                                          \
    (realv)(a.s8, b.s8, a.s9, b.s9, a.sa, b.sa, a.sb, b.sb, a.sc, b.sc, a.sd, b.sd,    \
            a.se, b.se, a.sf, b.sf)
#elif LANES == 8
#define INTERLEAVE_LOW(a, b)  (realv)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3)
#define INTERLEAVE_HIGH(a, b) (realv)(a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7)
#elif LANES == 4
#define INTERLEAVE_LOW(a, b)  (realv)(a.s0, b.s0, a.s1, b.s1)
#define INTERLEAVE_HIGH(a, b) (realv)(a.s2, b.s2, a.s3, b.s3)
#endif

/* x[r][c] becomes x[c][r], for x of LANES vectors: log2(LANES) perfect shuffles. */
static inline void
transpose(realv *x)
{
#pragma unroll
    for (int stage = 1; stage < LANES; stage *= 2) {
        realv shuffled[LANES];
#pragma unroll
        for (int n = 0; n < LANES / 2; n++) {
            shuffled[2 * n] = INTERLEAVE_LOW(x[n], x[n + LANES / 2]);
            shuffled[2 * n + 1] = INTERLEAVE_HIGH(x[n], x[n + LANES / 2]);
        }
#pragma unroll
        for (int n = 0; n < LANES; n++) {
            x[n] = shuffled[n];
        }
    }
}

/* 0, 1, 2, … */
static inline realv
lane_indices(void)
{
    realv lanes;
    for (int n = 0; n < LANES; n++) {
        ((real *)&lanes)[n] = (real)n;
    }
    return lanes;
}

/* Whether a bit is set in any lane; any() is a branch per lane with some compilers. */
static inline bool
any_lane(intv x)
{
    INT_NAME lanes[LANES];
    WIDE(vstore)(x, 0, lanes);
    INT_NAME bits = 0;
#pragma unroll
    for (int n = 0; n < LANES; n++) {
        bits |= lanes[n];
    }
    return bits != 0;
}

/* --- functions -------------------------------------------------------------------- */

/* The larger; b where a is NaN: one instruction, which fmax is not. */
static inline realv
larger(realv a, realv b)
{
    return a > b ? a : b;
}

/* 2^x for x <= 0, to 1.5e-7 relative (double: 3e-16): exactly 1 at 0, exactly 0 from
   the exponent's end on, NaN for NaN. Adding `shift` rounds x to an integer, whose
   biased form is then in the low bits; the polynomial is minimax on [-1/2, 1/2]. */
static inline realv
exp2_lanes(realv x)
{
    const realv shift = (realv)((real)(3ul << (MANTISSA_BITS - 1)) + EXPONENT_BIAS);
    x = larger((realv)(-EXPONENT_BIAS), x);
    const realv shifted = x + shift;
    const realv power = as_realv(as_intv(shifted) << MANTISSA_BITS);
    const realv r = x - (shifted - shift);
#if REAL_SIZE == 8
    realv y = (realv)4.434799902120244e-10;
    y = fma(y, r, (realv)7.0737877552716844e-9);
    y = fma(y, r, (realv)1.0178199417198297e-7);
    y = fma(y, r, (realv)1.3215435254549312e-6);
    y = fma(y, r, (realv)1.5252733493386206e-5);
    y = fma(y, r, (realv)1.540353045717144e-4);
    y = fma(y, r, (realv)1.3333558146774516e-3);
    y = fma(y, r, (realv)9.618129107594069e-3);
    y = fma(y, r, (realv)5.5504108664820084e-2);
    y = fma(y, r, (realv)0.2402265069591013);
    y = fma(y, r, (realv)0.6931471805599453);
#else
    realv y = (realv)1.3264727e-3f;
    y = fma(y, r, (realv)9.6715128e-3f);
    y = fma(y, r, (realv)5.5507337e-2f);
    y = fma(y, r, (realv)0.24022242f);
    y = fma(y, r, (realv)0.69314698f);
#endif
    return fma(y, r, (realv)REAL(1.0)) * power;
}

/* tanh to 2 ulp: an odd polynomial (double: rational; both Cephes') near 0, where the
   other form, (1 - q) / (1 + q) with q = exp(-2 |x|), cancels. */
static inline realv
tanh_lanes(realv x)
{
    const realv size = fabs(x);
    const realv q = exp2_lanes(size * (realv)(-2 * LOG2_E));
    const realv far = copysign((1 - q) / (1 + q), x);
    const realv z = x * x;
#if REAL_SIZE == 8
    realv p = (realv)-0.964399179425052238628;
    p = fma(p, z, (realv)-99.2877231001918586564);
    p = fma(p, z, (realv)-1614.68768441708447952);
    realv d = z + 112.811678491632931402;
    d = fma(d, z, (realv)2235.48839060100448583);
    d = fma(d, z, (realv)4844.06305325125486048);
    p /= d;
#else
    realv p = (realv)-5.70498873e-3f;
    p = fma(p, z, (realv)2.06390888e-2f);
    p = fma(p, z, (realv)-5.37397156e-2f);
    p = fma(p, z, (realv)0.133314422f);
    p = fma(p, z, (realv)-0.333332819f);
#endif
    return size < REAL(0.625) ? fma(x * z, p, x) : far;
}

#endif
