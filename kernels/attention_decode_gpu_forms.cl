/* SPDX-License-Identifier: MIT
 *
 * What attention_decode_gpu.cl does in another way on each kind of device: how
 * neighbouring work-items exchange numbers, and exp2.
 *
 *     -DFORM       FORM_LOCAL, on any device: they exchange by local memory
 *                  FORM_SUB_GROUPS: in OpenCL C 3.0, by shuffles of a sub-group
 *                  FORM_PTX: by shuffles of a warp, and exp2 is one instruction
 *     -DSUB_GROUP  work-items of a sub-group, where the form has them
 */
#ifndef CLATTN_ATTENTION_DECODE_GPU_FORMS_CL
#define CLATTN_ATTENTION_DECODE_GPU_FORMS_CL

#include "common.cl"

#define FORM_LOCAL      0
#define FORM_SUB_GROUPS 1
#define FORM_PTX        2
#ifndef FORM
#define FORM FORM_LOCAL
#endif

#if FORM == FORM_SUB_GROUPS
#define FORM_ATTRIBUTE __attribute__((intel_reqd_sub_group_size(SUB_GROUP)))
#else
#define FORM_ATTRIBUTE
#endif

#if FORM != FORM_LOCAL
static inline uint
exchange_bits(uint bits, int apart)
{
#if FORM == FORM_PTX
    uint result;
    __asm__ volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
                     : "=r"(result)
                     : "r"(bits), "r"(apart));
    return result;
#else
    return sub_group_shuffle_xor(bits, (uint)apart);
#endif
}

/* x of the work-item whose number differs in the bit `apart`. */
static inline real
exchange(real x, int apart)
{
#if REAL64
    const uint2 bits = as_uint2(x);
    return as_double(
        (uint2)(exchange_bits(bits.x, apart), exchange_bits(bits.y, apart)));
#else
    return as_float(exchange_bits(as_uint(x), apart));
#endif
}
#endif

/* 2^x of a score, to two units of the last place. */
static inline real
score_exp2(real x)
{
#if FORM == FORM_PTX && !REAL64
    float result;
    __asm__("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2(x);
#endif
}

#endif
