/* SPDX-License-Identifier: MIT
 *
 * The trial of a variant: its first use on a device that is no CPU, or whose driver is not known.
 * Drivers make wrong code of right text now and then, and some end the process (opencl/apart.h).
 */
#ifndef CLATTN_ATTENTION_TRIAL_H
#define CLATTN_ATTENTION_TRIAL_H

#include <stdint.h>

#include "attention/plan.h"
#include "attention/problem.h"
#include "base/status.h"
#include "opencl/info.h" /* ca_device */

/* Compare the variant of a plan with what the host computes, on a small problem with the head sizes and
   dtypes of `attention`: once for each dtype of queries, and for each program if the driver is not
   known. A pass is kept on disk. CA_OK if the results agree, and where no trial is needed.
   CA_ERROR_KERNEL if they differ, if the kernel for the small problem cannot be built or launched,
   or if it ends another process. */
ca_status ca_attention_try(ca_device *device, const ca_attention *attention,
                           const ca_attention_plan *plan, ca_error *error);

/* Do that on any device, for the variant in a row of the table. `anew`: here, whatever is kept on disk
   of it. CA_ERROR_SETTING if the variant does not take the small problem. */
ca_status ca_attention_try_variant(ca_device *device, int variant, ca_dtype dtype,
                                   ca_dtype value_dtype, int64_t E, int64_t Ev, bool anew,
                                   ca_error *error);

/* Returns a bit for each variant that has given wrong results for the dtype of these queries. */
uint32_t ca_attention_wrong(const ca_device *device, const ca_attention *attention);

#endif
