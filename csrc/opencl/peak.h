/* SPDX-License-Identifier: MIT
 *
 * Kernels that reach a device's limits, by which the speed of others is measured:
 * arithmetic, and reading memory. The caller takes the time; a run without steps or
 * passes takes as long as all that is not measured, transfers of memory included.
 */
#ifndef CLATTN_OP_PEAK_H
#define CLATTN_OP_PEAK_H

#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h" /* ca_dtype, ca_tensor */
#include "opencl/info.h" /* ca_device */

/* Fused multiply-adds of CA_FLOAT32 or CA_FLOAT64, `steps` (0 or more) one after the
   other in each of many chains, on all of the device. *flop counts a multiply-add as
   two; *value is the mean of what every chain x = x / 2 + 1 arrived at: 2, but for the
   first steps. */
ca_status ca_peak_fma(ca_device *device, ca_dtype dtype, int64_t steps, double *flop,
                      double *value, ca_error *error);

/* Read an array of CA_FLOAT32, contiguous, of one dimension, `passes` times (0 or more) on
   all of the device; one of the device's own is at the start of its memory. *sum is that
   of all that was read. */
ca_status ca_peak_read(ca_device *device, const ca_tensor *array, int64_t passes,
                       double *sum, ca_error *error);

#endif
