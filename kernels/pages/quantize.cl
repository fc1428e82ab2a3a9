/* SPDX-License-Identifier: MIT
 *
 * Writes vectors to their places in pages, as codes. x are the numbers of a vector, or of a group of
 * CA_INT4_GROUP neighbours in it:
 *
 *     int8    scale = max|x| / 127                code = x / scale               -127 … 127
 *     float8  scale of the head, given            code = x / scale               saturates
 *     int4    scale = (max x - min x) / 15        code = (x - offset) / scale    0 … 15
 *             offset = min x
 *
 * Codes are rounded to nearest, ties to even. Float64 numbers are rounded to float32 first. Two codes of
 * int4 make a byte, the first one in its low half. Numbers without range have codes of 0 and the scale 1.
 * NaN or infinity makes the scale NaN in int8 and int4; float8 has codes of its own for them, but e4m3fn
 * none for infinity, which becomes NaN.
 *
 *     global size  ceil(entries * heads * rows / params.tile) groups
 *     work-group   params.tile vectors, each of one work-item
 *
 *     -DCODES  CA_CODES_INT8, …
 *     and the macros of support/lanes.clh
 */
#include "kernels/pages/places.clh"
#include "kernels/support/lanes.clh" /* realv, load_lanes, load */

/* A smaller scale is none: some devices take numbers below 2^-126 for 0. */
#define SMALLEST_SCALE 0x1p-120f

/* Returns the number a / b, rounded to nearest. The division of a GPU may be off by some last bits. */
#if ON_CPU
#define DEFINE_DIVIDE(name, type)                                                                  \
    INLINED type name(type a, float b)                                                             \
    {                                                                                              \
        return a / (type)b;                                                                        \
    }
#else
#define DEFINE_DIVIDE(name, type)                                                                  \
    INLINED type name(type a, float b)                                                             \
    {                                                                                              \
        const type divisor = (type)b;                                                              \
        const type inverse = (type)1.0f / divisor;                                                 \
        const type near = a / divisor;                                                             \
        const type nearer = fma(fma(-near, divisor, a), inverse, near);                            \
        const type nearest = fma(fma(-nearer, divisor, a), inverse, nearer);                       \
        return fabs(nearest) <= (type)FLT_MAX ? nearest : near; /* it has overflowed */            \
    }
#endif
DEFINE_DIVIDE(divide, float)
DEFINE_DIVIDE(divide_lanes, realv)

/* Returns numbers that are small enough, rounded to nearest, ties to even: the sum has no bits left for
   fractions. */
#define WITHOUT_FRACTION 12582912.0f /* 1.5 * 2^23 */
INLINED intv
round_lanes(realv x)
{
    return as_intv(x + (realv)WITHOUT_FRACTION) - as_int(WITHOUT_FRACTION);
}

/* Returns the numbers from e on, and the last one again behind it. */
INLINED realv
numbers_at(__global const storage *from, ca_int64 column, int e, int count)
{
    realv x;
    if (column == 1 && e + LANES <= count) {
        return load_lanes(from + e);
    }
    for (int n = 0; n < LANES; n++) {
        ((float *)&x)[n] = load(from + min(e + n, count - 1) * column);
    }
    return x;
}

typedef WIDE(uchar) byte_lanes;

/* Writes the lowest byte of the codes of numbers e … min(e + LANES, count) - 1. */
INLINED void
store_codes(__global uchar *to, intv codes, int e, int count)
{
    const byte_lanes bytes = WIDE(convert_uchar)(codes & 255);
    if (e + LANES <= count) {
        *(__global unaligned_ucharv *)(to + e) = bytes;
        return;
    }
    for (int n = 0; e + n < count; n++) {
        to[e + n] = ((const uchar *)&bytes)[n];
    }
}

/* The range of some numbers. */
typedef struct {
    float low;
    float high;
    bool finite;
} number_range;

/* Of numbers or vectors, without the rules for NaN of fmin and fmax. */
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))

INLINED void
find_range(number_range *range, __global const storage *from, ca_int64 column, int count)
{
    realv low = (realv)INFINITY;
    realv high = (realv)(-INFINITY);
    intv finite = (intv)(-1);
    PLAIN_FOR (int e = 0; e < count; e += LANES) {
        const realv x = numbers_at(from, column, e, count);
        low = LESS(x, low);
        high = MORE(x, high);
        finite &= (as_intv(x) & 0x7f800000) != (intv)0x7f800000;
    }
#if LANES == 16
    const float4 lows = LESS(LESS(low.s0123, low.s4567), LESS(low.s89ab, low.scdef));
    const float4 highs = MORE(MORE(high.s0123, high.s4567), MORE(high.s89ab, high.scdef));
#else
    const float4 lows = low;
    const float4 highs = high;
#endif
    range->low = LESS(LESS(lows.s0, lows.s1), LESS(lows.s2, lows.s3)) + 0.0f; /* no -0 */
    range->high = MORE(MORE(highs.s0, highs.s1), MORE(highs.s2, highs.s3));
    range->finite = all(finite);
}

/* Returns -1 if numbers become codes, 0 if all their codes are 0: bits for `&`. */
INLINED int
has_codes(const number_range *range, float scale)
{
    return range->finite && scale >= SMALLEST_SCALE ? -1 : 0;
}

INLINED float
kept_scale(const number_range *range, float scale)
{
    return !range->finite ? NAN : scale >= SMALLEST_SCALE ? scale : 1.0f;
}

#if CODES == CA_CODES_INT8
CALLED void
write_codes(__global uchar *to, __global float *scales, __global const storage *from,
            ca_int64 column, int count)
{
    number_range range;
    find_range(&range, from, column, count);
    const float scale = divide(MORE(-range.low, range.high), 127.0f);
    const intv kept = (intv)has_codes(&range, scale);
    PLAIN_FOR (int e = 0; e < count; e += LANES) {
        const realv x = numbers_at(from, column, e, count);
        store_codes(to, round_lanes(divide_lanes(x, scale)) & kept, e, count);
    }
    *scales = kept_scale(&range, scale);
}

#elif CODES == CA_CODES_INT4
#if LANES == 16
typedef uchar8 pair_lanes;
#define convert_pairs convert_uchar8
#else
typedef uchar2 pair_lanes;
#define convert_pairs convert_uchar2
#endif
typedef pair_lanes unaligned_pairs __attribute__((aligned(1)));

/* Writes the codes of numbers e … min(e + LANES, count) - 1, two a byte. */
INLINED void
store_pairs(__global uchar *to, intv codes, int e, int count)
{
    const pair_lanes bytes = convert_pairs(codes.even | codes.odd << 4);
    if (e + LANES <= count) {
        *(__global unaligned_pairs *)(to + e / 2) = bytes;
        return;
    }
    for (int n = 0; e + n < count; n += 2) {
        const int low = ((const int *)&codes)[n];
        to[(e + n) / 2] = e + n + 1 < count ? ((const uchar *)&bytes)[n / 2] : (uchar)low;
    }
}

/* The range of a group may be larger than any float; half of it is not. */
CALLED void
write_codes(__global uchar *to, __global float *scales, __global float *offsets,
            __global const storage *from, ca_int64 column, int count)
{
    number_range range;
    find_range(&range, from, column, count);
    const float half_low = range.low * 0.5f;
    const float scale = divide(range.high * 0.5f - half_low, 7.5f);
    const intv kept = (intv)has_codes(&range, scale);
    PLAIN_FOR (int e = 0; e < count; e += LANES) {
        const realv x = numbers_at(from, column, e, count) * 0.5f - (realv)half_low;
        const intv codes = min(round_lanes(divide_lanes(x, scale * 0.5f)), (intv)15) & kept;
        store_pairs(to, codes, e, count);
    }
    *scales = kept_scale(&range, scale);
    *offsets = range.finite ? range.low : 0.0f;
}

#else
#if CODES == CA_CODES_E4M3FN
#define MANTISSA     3 /* bits */
#define BIAS         7
#define LARGEST      0x7e
#define INFINITE     0x7f
#define NOT_A_NUMBER 0x7f
#else
#define MANTISSA     2
#define BIAS         15
#define LARGEST      0x7b
#define INFINITE     0x7c
#define NOT_A_NUMBER 0x7e
#endif
#define DROPPED   (23 - MANTISSA)                             /* bits of a float's mantissa */
#define UNITS     as_float((BIAS - 1 + MANTISSA + 127) << 23) /* in 1, of subnormal codes */
#define SUBNORMAL as_float((1 - BIAS + 127) << 23)            /* codes of numbers below it */

INLINED intv
codes_of(realv x, float scale)
{
    const intv magnitude = as_intv(divide_lanes(x, scale)) & 0x7fffffff;
    const intv rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + (magnitude >> DROPPED & 1);
    const intv normal = min((rounded >> DROPPED) - ((127 - BIAS) << MANTISSA), (intv)LARGEST);
    const intv below = magnitude < as_int(SUBNORMAL);
    const realv small = below ? as_realv(magnitude) * UNITS : (realv)0.0f;
    const intv finite = below ? round_lanes(small) : normal;
    const intv given = as_intv(x) & 0x7fffffff;
    const intv other = given > 0x7f800000 ? (intv)NOT_A_NUMBER : (intv)INFINITE;
    return (given < 0x7f800000 ? finite : other) | (as_intv(x) >> 24 & 0x80);
}

CALLED void
write_codes(__global uchar *to, float scale, __global const storage *from, ca_int64 column,
            int count)
{
    PLAIN_FOR (int e = 0; e < count; e += LANES) {
        store_codes(to, codes_of(numbers_at(from, column, e, count), scale), e, count);
    }
}
#endif

__kernel void
pages_quantize(__global const storage *from, __global uchar *to, __global const ca_int64 *places,
               __global float *scales, __global float *offsets, const ca_pages_params params)
{
    const int size = (int)params.size;
    vector_walk walk;
    start_walk(&walk, &params);
    PLAIN_FOR (ca_int64 number = walk.first; number < walk.end; number += walk.step) {
        vector_place vector;
        find_vector(&vector, &params, places, number);
        if (vector.place < 0) {
            continue;
        }
        __global const storage *read = from + vector.from;
#if CODES == CA_CODES_INT8
        write_codes(to + vector.to * size, scales + vector.to, read, params.column, size);
#elif CODES == CA_CODES_INT4
        const int groups = (size + CA_INT4_GROUP - 1) / CA_INT4_GROUP;
        PLAIN_FOR (int g = 0; g < groups; g++) {
            const int first = g * CA_INT4_GROUP;
            write_codes(to + vector.to * ((size + 1) / 2) + first / 2,
                        scales + vector.to * groups + g, offsets + vector.to * groups + g,
                        read + first * params.column, params.column,
                        min(size - first, CA_INT4_GROUP));
        }
#else
        write_codes(to + vector.to * size, scales[vector.head], read, params.column, size);
#endif
    }
}
