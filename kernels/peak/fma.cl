/* SPDX-License-Identifier: MIT
 *
 * As many fused multiply-adds as the device can do: chains of vectors that stay in
 * registers and do not depend on each other.
 *
 *     chain[n] = chain[n] * factor + addend       steps times
 *     output[item] = the mean of all lanes of all chains
 *
 *     global size  any number of work-groups of LOCAL work-items
 *     work-item    CA_PEAK_CHAINS vectors
 *
 *     -DREAL64  1: in double
 *     -DLANES   2, 4, 8 or 16: reals of a vector
 *     -DLOCAL   work-items of a group
 */
#include "kernels/peak/params.h"

#ifndef REAL64
#define REAL64 0
#endif
#ifndef LANES
#if REAL64
#define LANES 8
#else
#define LANES 16
#endif
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

/* A negative size where host and device would lay the struct out differently. */
typedef char peak_params_size[sizeof(ca_peak_params) == CA_PEAK_PARAMS_SIZE ? 1 : -1];

/* The vector hint keeps compilers from vectorising over work-items as well. */
__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1), vec_type_hint(realv))) void
peak_fma(__global const float *input, __global float *output, ca_peak_params params)
{
    const realv factor = (realv)((real)params.factor);
    const realv addend = (realv)((real)params.addend);
    realv chain[CA_PEAK_CHAINS];
#pragma unroll
    for (int n = 0; n < CA_PEAK_CHAINS; n++) {
        chain[n] = (realv)((real)n);
    }
    for (ca_int64 step = 0; step < params.steps; step++) {
#pragma unroll
        for (int n = 0; n < CA_PEAK_CHAINS; n++) {
            chain[n] = fma(chain[n], factor, addend);
        }
    }
    realv sum = chain[0];
#pragma unroll
    for (int n = 1; n < CA_PEAK_CHAINS; n++) {
        sum += chain[n];
    }
    real total = 0;
    for (int n = 0; n < LANES; n++) {
        total += ((const real *)&sum)[n];
    }
    output[get_global_id(0)] = (float)(total / (real)(LANES * CA_PEAK_CHAINS));
}
