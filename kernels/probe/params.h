/* SPDX-License-Identifier: MIT
 *
 * What probes and the host's C share: the params struct of probe_device, which has every
 * kind of member that other kernels' structs have, and the numbers of other probes.
 */
#pragma once

#ifdef __OPENCL_C_VERSION__
typedef long ca_probe_int64;
#else
#include <stdint.h>
typedef int64_t ca_probe_int64;
#endif

typedef struct {
    ca_probe_int64 offset;
    ca_probe_int64 strides[3];
} ca_probe_view;

typedef struct {
    ca_probe_int64 count;
    ca_probe_view views[2];
    float scale;
    float bias;
} ca_probe_params;

#define CA_PROBE_PARAMS_SIZE 80

/* TEST of probe/warp.cl and probe/group.cl */
#define CA_PROBE_VOTES             0
#define CA_PROBE_LOADS             1
#define CA_PROBE_FLOAT16_MATRICES  2
#define CA_PROBE_BFLOAT16_MATRICES 3
#define CA_PROBE_COPIES            4

/* Times this factor, few numbers are numbers of a half type. */
#define CA_PROBE_FACTOR (4105.0f / 4096.0f)

/* Of the input of probe/group.cl; a prime, so that no two rows of a panel are the same. */
#define CA_PROBE_NUMBERS 509
