/* SPDX-License-Identifier: MIT
 *
 * clattn uses a device only after the device has built this kernel and run it correctly. The
 * kernel tests features that attention kernels need: a struct passed by value, 64-bit
 * integers, exp2, a null pointer, and loads and stores of halves that round to nearest even.
 *
 *     rounded[i] = half(input[i] * scale)
 *     powers[i]  = exp2(input[i] + bias)                    float
 *     sums[i]    = 64-bit arithmetic on the struct's members, which overflows 32 bits
 *
 * One work-item owns one element. No macros.
 */
#include "kernels/probe/params.h"

/* A negative size where host and device would lay the struct out differently. */
typedef char probe_params_size[sizeof(ca_probe_params) == CA_PROBE_PARAMS_SIZE ? 1 : -1];

__kernel void
probe_device(__global const half *input, __global half *rounded, __global float *powers,
             __global long *sums, __global const float *absent, ca_probe_params params)
{
    const long i = (long)get_global_id(0);
    if (i >= params.count) {
        return;
    }
    const float x = vload_half((size_t)i, input);
    vstore_half_rte(x * params.scale, (size_t)i, rounded);
    powers[i] = exp2(x + params.bias);

    long sum = absent == 0 ? 0 : 1;
    for (int v = 0; v < 2; v++) {
        sum += params.views[v].offset;
        for (int n = 0; n < 3; n++) {
            sum += (i + v + n) * params.views[v].strides[n];
        }
    }
    sums[i] = sum;
}
