/* SPDX-License-Identifier: MIT
 *
 * What every attention kernel shares: its macros and arguments, loads and stores of one
 * element of each dtype, offsets.
 *
 *     -DDTYPE         of query, key, output, scores  CA_KERNEL_FLOAT16 … FLOAT64
 *     -DVALUE_DTYPE   of value; DTYPE by default
 *     -DREAL64        1: compute in double, which needs a device with fp64
 *     -DMASK          dtype of mask, or CA_KERNEL_NO_MASK
 *     -DMASK_ADDS     1: its values are added; 0: other than 0 attends
 *     -DFILTER        1: 0 in a mask adds params.filter; 0: it excludes
 *     -DBIAS          1: there is a bias of DTYPE
 *     -DINPUT_BIAS    1: there is an input bias of DTYPE
 *     -DPAST          1: there are past keys and values
 *     -DPRESENT       1: present keys and values are written
 *     -DSCORES        the stage of scores that is written, 0 … 3, or -1
 *     -DSOFTCAP_LAST  1: the softcap comes after the mask
 *     -DDROPOUT       1: weights are dropped
 *
 * Half types are storage only. All arithmetic is in `real`: float, or double.
 */
#ifndef CLATTN_COMMON_CL
#define CLATTN_COMMON_CL

#include "attention_params.h"
#include "view.cl" /* ca_offset, ca_unravel */

#ifndef DTYPE
#define DTYPE CA_KERNEL_FLOAT32
#endif
#ifndef VALUE_DTYPE
#define VALUE_DTYPE DTYPE
#endif
#ifndef REAL64
#define REAL64 0
#endif
#ifndef MASK
#define MASK CA_KERNEL_NO_MASK
#endif
#ifndef MASK_ADDS
#define MASK_ADDS 0
#endif
#ifndef FILTER
#define FILTER 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef INPUT_BIAS
#define INPUT_BIAS 0
#endif
#ifndef PAST
#define PAST 0
#endif
#ifndef PRESENT
#define PRESENT 0
#endif
#ifndef SCORES
#define SCORES -1
#endif
#ifndef SOFTCAP_LAST
#define SOFTCAP_LAST 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif

/* Of kernels that are made for head sizes E and Ev, and with or without a softcap. */
#ifndef HEAD_E
#define HEAD_E 64
#endif
#ifndef HEAD_EV
#define HEAD_EV HEAD_E
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif

#pragma OPENCL FP_CONTRACT ON

#define HAS_MASK    (MASK != CA_KERNEL_NO_MASK)
#define HAS_ADDENDS (HAS_MASK || BIAS)

#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)

/* REAL(1.0) is 1.0f or 1.0. */
#if REAL64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define REAL_SIZE 8
#define REAL(x)   x
typedef double real;
#else
#define REAL_SIZE 4
#define REAL(x)   x##f
typedef float real;
#endif

#define LOG2_E REAL(1.4426950408889634)
#define LN_2   REAL(0.69314718055994531)

/* --- one element ------------------------------------------------------------------ */

/* storage_1 is how an element of dtype 1 lies in memory. A float64 is read as bits
   unless the arithmetic is in double. */
typedef uchar storage_0;
typedef half storage_1;
typedef ushort storage_2;
typedef float storage_3;
#if REAL64
typedef double storage_4;
#else
typedef ulong storage_4;
#endif
typedef char storage_5;
typedef short storage_6;
typedef int storage_7;
typedef long storage_8;
typedef uchar storage_9;
typedef ushort storage_10;
typedef uint storage_11;
typedef ulong storage_12;

typedef JOIN(storage_, DTYPE) storage;
typedef JOIN(storage_, VALUE_DTYPE) value_storage;
#if HAS_MASK
typedef JOIN(storage_, MASK) mask_storage;
#else
typedef uchar mask_storage;
#endif

static inline float
bfloat16_to_float(ushort bits)
{
    return as_float((uint)bits << 16);
}

/* Rounds to nearest even; a NaN stays one, with its top payload bit set. */
static inline ushort
float_to_bfloat16(float x)
{
    const uint bits = as_uint(x);
    const uint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (ushort)((isnan(x) ? bits | 0x400000u : rounded) >> 16);
}

/* The float that the bits of a double round to, without fp64. Finite values saturate,
   so that the lowest double stays different from -inf; those below 2^-126 become zero,
   which no score can tell. Defined by a macro because lanes.cl has it on vectors too.
 */
#define DEFINE_DOUBLE_BITS_TO_FLOAT(name, floats, uints, ulongs)                       \
    static inline floats name(ulongs bits)                                             \
    {                                                                                  \
        const ulongs magnitude = bits & 0x7ffffffffffffffful;                          \
        const ulongs rounded = magnitude + 0xffffffful + ((magnitude >> 29) & 1ul);    \
        ulongs result =                                                                \
            (min(rounded, (ulongs)0x47efffffe0000000ul) >> 29) - (896ul << 23);        \
        result = magnitude < 0x3810000000000000ul ? (ulongs)0 : result;                \
        result = magnitude >= 0x7ff0000000000000ul ? (ulongs)0x7f800000ul : result;    \
        result = magnitude > 0x7ff0000000000000ul ? (ulongs)0x7fc00000ul : result;     \
        return as_##floats(convert_##uints(result | ((bits >> 32) & 0x80000000ul)));   \
    }

DEFINE_DOUBLE_BITS_TO_FLOAT(double_bits_to_float, float, uint, ulong)

#define DEFINE_LOAD(dtype, value)                                                      \
    static inline real load_##dtype(__global const storage_##dtype *x)                 \
    {                                                                                  \
        return (real)(value);                                                          \
    }

DEFINE_LOAD(1, vload_half(0, x))
DEFINE_LOAD(2, bfloat16_to_float(*x))
DEFINE_LOAD(3, *x)
#if REAL64
DEFINE_LOAD(4, *x)
#else
DEFINE_LOAD(4, double_bits_to_float(*x))
#endif
DEFINE_LOAD(5, *x)
DEFINE_LOAD(6, *x)
DEFINE_LOAD(7, *x)
DEFINE_LOAD(8, *x)
DEFINE_LOAD(9, *x)
DEFINE_LOAD(10, *x)
DEFINE_LOAD(11, *x)
DEFINE_LOAD(12, *x)

#define load       JOIN(load_, DTYPE)
#define load_value JOIN(load_, VALUE_DTYPE)

static inline void
store(real value, __global storage *x)
{
#if DTYPE == CA_KERNEL_FLOAT16
    vstore_half_rte(value, 0, x);
#elif DTYPE == CA_KERNEL_BFLOAT16
    *x = float_to_bfloat16((float)value);
#else
    *x = (storage)value;
#endif
}

/* What a mask adds to a score: its value, or 0 and `filter` for a condition. -inf
   excludes. */
static inline real
load_mask(__global const mask_storage *x, real filter)
{
#if MASK_ADDS
    return JOIN(load_, MASK)(x);
#else
    return *x ? REAL(0.0) : filter;
#endif
}

/* Two addends, mask and bias: -inf excludes, whatever the other one is, and finite ones
   whose sum is beyond the lowest number do not. */
#if REAL64
#define LOWEST_REAL (-DBL_MAX)
#else
#define LOWEST_REAL (-FLT_MAX)
#endif

static inline real
add_addends(real a, real b)
{
    const real sum = a + b;
    const real finite = sum < LOWEST_REAL ? LOWEST_REAL : sum;
    return a == -INFINITY || b == -INFINITY ? -INFINITY : finite;
}

/* --- arguments -------------------------------------------------------------------- */

#define ATTENTION_ARGUMENTS                                                            \
    __global const storage *query, __global const storage *key,                        \
        __global const value_storage *value, __global const storage *past_key,         \
        __global const value_storage *past_value, __global const storage *input_bias,  \
        __global const mask_storage *mask, __global const storage *bias,               \
        __global const long *key_counts, __global storage *output, __global real *lse, \
        __global storage *present_key, __global value_storage *present_value,          \
        __global storage *scores, __global real *partial,                              \
        const ca_attention_params params

/* The same to hand on. */
typedef struct {
    const ca_attention_params *params;
    __global const storage *query;
    __global const storage *key;
    __global const value_storage *value;
    __global const storage *past_key;
    __global const value_storage *past_value;
    __global const storage *input_bias;
    __global const mask_storage *mask;
    __global const storage *bias;
    __global const long *key_counts;
    __global storage *output;
    __global real *lse;
    __global storage *present_key;
    __global value_storage *present_value;
    __global storage *scores;
    __global real *partial;
} attention_call;

#define ATTENTION_CALL                                                                 \
    {&params,     query,         key,    value,      past_key, past_value,             \
     input_bias,  mask,          bias,   key_counts, output,   lse,                    \
     present_key, present_value, scores, partial}

/* --- where things are ------------------------------------------------------------- */

/* Row i of a batch may attend keys i + lower … i + upper, if they are below limit. */
typedef struct {
    ca_int64 lower;
    ca_int64 upper;
    ca_int64 limit;
} key_band;

static inline key_band
ca_band(const attention_call *call, const ca_int64 *batch)
{
    const ca_attention_params *params = call->params;
    key_band band = {params->lower, params->upper, params->limit};
    if (params->flags & CA_HAS_KEY_COUNTS) {
        /* The host has checked the range, but another thread may write there since. */
        const ca_int64 count = clamp(
            (ca_int64)call->key_counts[ca_offset(&params->key_counts, batch, 0, 0)],
            (ca_int64)0, params->T);
        band.limit = min(band.limit, count);
        if (params->flags & CA_COUNTS_SHIFT_BAND) {
            band.lower += count;
            band.upper += count;
        }
    }
    return band;
}

static inline real
ca_scale(const ca_attention_params *params)
{
#if REAL64
    return as_double(params->scale_bits);
#else
    return params->scale;
#endif
}

static inline real
ca_softcap(const ca_attention_params *params)
{
#if REAL64
    return as_double(params->softcap_bits);
#else
    return params->softcap;
#endif
}

/* Dropout: what the weights that are kept are scaled by. */
static inline real
ca_kept_scale(const ca_attention_params *params)
{
#if !DROPOUT
    return REAL(1.0);
#elif REAL64
    return as_double(params->kept_scale_bits);
#else
    return params->kept_scale;
#endif
}

static inline real
ca_filter(const ca_attention_params *params)
{
    return FILTER ? (real)params->filter : -INFINITY;
}

#endif
