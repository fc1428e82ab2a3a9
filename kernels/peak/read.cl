/* SPDX-License-Identifier: MIT
 *
 * Read an array as fast as the device can; what is read is added up in registers.
 *
 *     output[group] = the sum of the group's elements
 *
 *     global size  passes * tiles * LOCAL, all tiles of a pass before those of the next
 *     work-group   a tile of consecutive elements; its items read vectors side by side
 *
 *     -DLANES  4, 8 or 16: floats of a vector; 4 where a group has several items
 *     -DLOCAL  work-items of a group
 */
#include "kernels/peak/params.h"

#ifndef LANES
#define LANES 16
#endif
#ifndef LOCAL
#define LOCAL 1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)
typedef JOIN(float, LANES) vector;

/* Arrays of GPUs begin at a multiple of their 16 bytes, which vload does not tell the
   compiler: it would read each float by itself. */
#if LOCAL > 1
#define LOAD(x) (*(__global const vector *)(x))
#else
#define LOAD(x) JOIN(vload, LANES)(0, x)
#endif

/* Sums that do not wait for each other. */
#define SUMS 8
#define STEP (SUMS * LANES * LOCAL) /* elements */

typedef char peak_params_size[sizeof(ca_peak_params) == CA_PEAK_PARAMS_SIZE ? 1 : -1];

__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1), vec_type_hint(vector))) void
peak_read(__global const float *input, __global float *output, ca_peak_params params)
{
    const ca_int64 tiles =
        max((params.count + params.tile - 1) / params.tile, (ca_int64)1);
    const ca_int64 group = (ca_int64)get_group_id(0);
    const ca_int64 first = (group - group / tiles * tiles) * params.tile;
    const ca_int64 last = min(first + params.tile, params.count);
    const ca_int64 whole = first + (last - first) / STEP * STEP;
    const ca_int64 item = (ca_int64)get_local_id(0);

    vector sums[SUMS];
#pragma unroll
    for (int n = 0; n < SUMS; n++) {
        sums[n] = (vector)(0.0f);
    }
    for (ca_int64 i = first + item * LANES; i < whole; i += STEP) {
#pragma unroll
        for (int n = 0; n < SUMS; n++) {
            sums[n] += LOAD(input + i + n * LANES * LOCAL);
        }
    }
    vector sum = sums[0];
#pragma unroll
    for (int n = 1; n < SUMS; n++) {
        sum += sums[n];
    }
    float total = 0.0f;
    for (int n = 0; n < LANES; n++) {
        total += ((const float *)&sum)[n];
    }
    for (ca_int64 i = whole + item; i < last; i += LOCAL) {
        total += input[i];
    }
#if LOCAL > 1
    __local float totals[LOCAL];
    totals[item] = total;
    barrier(CLK_LOCAL_MEM_FENCE); /* totals are written; the first item reads them */
    if (item == 0) {
        for (int n = 1; n < LOCAL; n++) {
            total += totals[n];
        }
    }
#endif
    if (item == 0) {
        output[group] = total;
    }
}
