/* SPDX-License-Identifier: MIT
 *
 * The params struct of probe_device, shared by the host's C and OpenCL C. It has every
 * kind of member that other kernels' structs have.
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
