/* SPDX-License-Identifier: MIT
 *
 * The trial of a kernel: its first use on a device that is no CPU, or whose driver is not known.
 * Drivers make wrong code of right text now and then, and some end the process (opencl/apart.h).
 */
#ifndef CLATTN_ATTENTION_TRIAL_H
#define CLATTN_ATTENTION_TRIAL_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "opencl/info.h" /* ca_device */
#include "opencl/spec.h" /* ca_kernel_spec */

/* Kernels that may be tried, at most. */
#define CA_TRIED_KERNELS 16

/* A kernel that is tried, and how a problem is computed by it alone. */
typedef struct {
    int number;         /* below CA_TRIED_KERNELS; of a variant its row in the table */
    int variant;        /* the row of the variant that it belongs to */
    bool is_backward;   /* it computes gradients */
    const void *kernel; /* what the functions below are given */
    /* Find the program of the problem. CA_ERROR_SETTING if the kernel does not take the problem. */
    ca_status (*plan)(ca_device *device, const ca_attention *attention, const void *kernel,
                      ca_kernel_spec *spec, ca_error *error);
    /* Compute the problem, and wait. */
    ca_status (*run)(ca_device *device, const ca_attention *attention, const void *kernel,
                     ca_error *error);
} ca_tried;

/* Compare a kernel, whose program for `attention` is `spec`, with what the host computes, on a small
   problem with the same head sizes and dtypes: once for each dtype of queries, and for each program if
   the driver is not known. A pass is kept on disk. CA_OK if the results agree, and where no trial is
   needed. CA_ERROR_KERNEL if they differ, if the kernel for the small problem cannot be built or
   launched, or if it ends another process. */
ca_status ca_attention_try(ca_device *device, const ca_attention *attention, const ca_tried *tried,
                           const ca_kernel_spec *spec, ca_error *error);

/* Do that on any device. `anew`: here, whatever is kept on disk of it. CA_ERROR_SETTING if the kernel
   does not take the small problem. */
ca_status ca_attention_try_kernel(ca_device *device, const ca_tried *tried, ca_dtype dtype,
                                  ca_dtype value_dtype, int64_t E, int64_t Ev, bool anew,
                                  ca_error *error);

/* Returns a bit for each kernel that has given wrong results for the dtype of these queries, but none for
   the reference. */
uint32_t ca_attention_wrong(const ca_device *device, const ca_attention *attention);

#endif
