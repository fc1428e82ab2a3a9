/* SPDX-License-Identifier: MIT
 *
 * What every kernel shares: the storage types, loads and stores of one element,
 * offsets.
 *
 *     -DDTYPE   query, key, value, output  CA_KERNEL_FLOAT16 … CA_KERNEL_FLOAT64
 *     -DMASK    mask  CA_KERNEL_NO_MASK, CA_KERNEL_BOOL, CA_KERNEL_FLOAT16 … FLOAT64
 *
 * Half types are storage only. All arithmetic is in `real`: float, or double for
 * CA_KERNEL_FLOAT64, the one case that needs a device with fp64.
 */
#ifndef CLATTN_COMMON_CL
#define CLATTN_COMMON_CL

#include "attention_params.h"

#ifndef DTYPE
#define DTYPE CA_KERNEL_FLOAT32
#endif
#ifndef MASK
#define MASK CA_KERNEL_NO_MASK
#endif

#pragma OPENCL FP_CONTRACT ON

#define HAS_MASK       (MASK != CA_KERNEL_NO_MASK)
#define HAS_FLOAT_MASK (HAS_MASK && MASK != CA_KERNEL_BOOL)

/* REAL(1.0) is 1.0f or 1.0. */
#if DTYPE == CA_KERNEL_FLOAT64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define REAL_SIZE 8
#define REAL(x)   x
typedef double real;
#else
#define REAL_SIZE 4
#define REAL(x)   x##f
typedef float real;
#endif

#if DTYPE == CA_KERNEL_FLOAT16
typedef half storage;
#elif DTYPE == CA_KERNEL_BFLOAT16
typedef ushort storage;
#else
typedef real storage;
#endif

/* A float64 mask is read as bits unless the arithmetic is in double. */
#if MASK == CA_KERNEL_FLOAT16
typedef half mask_storage;
#elif MASK == CA_KERNEL_BFLOAT16
typedef ushort mask_storage;
#elif MASK == CA_KERNEL_FLOAT32
typedef float mask_storage;
#elif MASK == CA_KERNEL_FLOAT64 && REAL_SIZE == 8
typedef double mask_storage;
#elif MASK == CA_KERNEL_FLOAT64
typedef ulong mask_storage;
#else
typedef uchar mask_storage;
#endif

#define LOG2_E REAL(1.4426950408889634)
#define LN_2   REAL(0.69314718055994531)

/* --- one element ------------------------------------------------------------------ */

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

static inline real
load(__global const storage *x)
{
#if DTYPE == CA_KERNEL_FLOAT16
    return vload_half(0, x);
#elif DTYPE == CA_KERNEL_BFLOAT16
    return bfloat16_to_float(*x);
#else
    return *x;
#endif
}

static inline void
store(real value, __global storage *x)
{
#if DTYPE == CA_KERNEL_FLOAT16
    vstore_half_rte(value, 0, x);
#elif DTYPE == CA_KERNEL_BFLOAT16
    *x = float_to_bfloat16(value);
#else
    *x = value;
#endif
}

/* --- masks ------------------------------------------------------------------------ */

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

/* What is added to a score: the mask's value, or 0 and -inf for a bool. -inf excludes.
 */
static inline real
load_mask(__global const mask_storage *x)
{
#if MASK == CA_KERNEL_FLOAT16
    return vload_half(0, x);
#elif MASK == CA_KERNEL_BFLOAT16
    return bfloat16_to_float(*x);
#elif MASK == CA_KERNEL_FLOAT64 && REAL_SIZE == 4
    return double_bits_to_float(*x);
#elif HAS_FLOAT_MASK
    return *x;
#else
    return *x ? REAL(0.0) : -INFINITY;
#endif
}

/* --- where things are ------------------------------------------------------------- */

/* The offset of element [batch, row, column] of a tensor, in elements from its pointer.
 */
static inline ca_int64
ca_offset(const ca_view *view, const ca_int64 *batch, ca_int64 row, ca_int64 column)
{
    ca_int64 offset = view->offset + row * view->row + column * view->column;
    for (int n = 0; n < CA_BATCH_DIMS; n++) {
        offset += batch[n] * view->batch[n];
    }
    return offset;
}

/* Splits a linear batch index; the last dimension runs fastest. No %: beside /
   compilers turn it into a `freeze`, which Oclgrind's check for uninitialised values
   refuses. */
static inline void
ca_unravel(ca_int64 linear, const ca_attention_params *params, ca_int64 *batch)
{
    for (int n = CA_BATCH_DIMS - 1; n >= 0; n--) {
        const ca_int64 rest = linear;
        linear = rest / params->batch[n];
        batch[n] = rest - linear * params->batch[n];
    }
}

static inline real
ca_scale(const ca_attention_params *params)
{
#if REAL_SIZE == 8
    return as_double(params->scale_bits);
#else
    return params->scale;
#endif
}

static inline real
ca_softcap(const ca_attention_params *params)
{
#if REAL_SIZE == 8
    return as_double(params->softcap_bits);
#else
    return params->softcap;
#endif
}

#endif
