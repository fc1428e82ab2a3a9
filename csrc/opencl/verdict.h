/* SPDX-License-Identifier: MIT
 *
 * Verdicts: what a trial of a device has found, kept on disk beside the programs. A later process
 * that finds a verdict does not run the trial.
 */
#ifndef CLATTN_OPENCL_VERDICT_H
#define CLATTN_OPENCL_VERDICT_H

#include <stdbool.h>

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/spec.h"

/* Tries a kernel of the device. CA_OK: it passes. CA_ERROR_KERNEL: it fails, and the error says
   why. After any other status there is no verdict. */
typedef ca_status (*ca_trial)(ca_device *device, const ca_kernel_spec *spec, const void *context,
                              ca_error *error);

/* The verdict about the kernel: an earlier process's, or that of `trial`, which gets `context`. It
   belongs to the program, driver and device, to the way in which kernels reach memory, and to what
   is tried (`what`, any text). `keeps_failures`: a failure is kept on disk too, with its message and
   the compiler's log. */
ca_status ca_verdict_find(ca_device *device, const ca_kernel_spec *spec, const char *what,
                          bool keeps_failures, ca_trial trial, const void *context,
                          ca_error *error);

/* Keep the verdict on disk that the kernel passes. */
void ca_verdict_keep_pass(const ca_device *device, const ca_kernel_spec *spec);

#endif
