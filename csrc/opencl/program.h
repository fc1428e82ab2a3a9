/* SPDX-License-Identifier: MIT
 *
 * Built kernels, kept in memory for each device and as binaries on disk.
 */
#ifndef CLATTN_OPENCL_PROGRAM_H
#define CLATTN_OPENCL_PROGRAM_H

#include <stdbool.h>

#include "base/status.h"
#include "opencl/cache.h" /* ca_hash */
#include "opencl/info.h"
#include "opencl/spec.h"

/* Look the kernel up in memory, else load it from disk, else build it, on a prepared device.
   Thread-safe; a device builds one program at a time; a hit costs a hash and a comparison.
   CA_ERROR_KERNEL with the compiler's log and the numbered source where the program does not
   build. Asks after a build (ca_error_ask). */
ca_status ca_kernel_get(ca_device *device, const ca_kernel_spec *spec, ca_kernel **kernel,
                        ca_error *error);

/* As ca_kernel_get, for a caller that holds the device's build_lock. The device needs only a
   context. */
ca_status ca_kernel_get_locked(ca_device *device, const ca_kernel_spec *spec, ca_kernel **kernel,
                               ca_error *error);

/* True if this process has the kernel in memory. Thread-safe. */
bool ca_kernel_is_built(ca_device *device, const ca_kernel_spec *spec);

const ca_kernel_limits *ca_kernel_get_limits(const ca_kernel *kernel);

/* Make the limits of the next plan tighter where the built kernel does not allow groups of `local_size`
   work-items, or takes more local memory than the device has. A compiler that takes more than the
   kernel declares takes as many times more of less. False if nothing became tighter. */
bool ca_kernel_tighten(const ca_device *device, const ca_kernel *kernel, size_t local_size,
                       ca_plan_limits *limits);

/* The builds from source by this process for the device. A program that the driver takes from a
   cache of its own counts as built. Thread-safe. */
ca_build_stats ca_device_built(ca_device *device);

/* A hash of the texts of all kernels. */
ca_hash ca_kernels_identity(void);

/* A hash of everything that a build of this kernel depends on. False without memory. */
bool ca_kernel_identity(const ca_device *device, const ca_kernel_spec *spec, ca_hash *identity);

#endif
