/* SPDX-License-Identifier: MIT
 *
 * Run an attention problem on a device.
 */
#ifndef CLATTN_ATTENTION_RUN_H
#define CLATTN_ATTENTION_RUN_H

#include "attention/problem.h"
#include "base/status.h"
#include "opencl/forced.h" /* ca_forced */
#include "opencl/info.h"   /* ca_device */

/* True where nothing has to be written, or there are no keys at all. */
bool ca_attention_is_trivial(const ca_attention *attention);

/* Write the answer of a trivial problem: zeros, and -inf for the log-sum-exp. */
ca_status ca_attention_fill(const ca_attention *attention, ca_error *error);

/* Plan the problem, launch it and wait, except for results that a device holds
   (ca_launch_run). The problem must not be trivial; it is changed on the way.
   CA_ERROR_SETTING where the variant that is forced does not take the problem, or the
   device lacks the limits that are forced. */
ca_status ca_attention_run(ca_device *device, const ca_forced *forced, ca_attention *attention,
                           ca_error *error);

/* Try the variant in a row of the table, or its kernel for gradients, as ca_attention_try_kernel does.
   CA_ERROR_SETTING if the variant has no such kernel. */
ca_status ca_attention_try_variant(ca_device *device, int variant, bool gradients, ca_dtype dtype,
                                   ca_dtype value_dtype, int64_t E, int64_t Ev, bool anew,
                                   ca_error *error);

#endif
