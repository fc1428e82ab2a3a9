/* SPDX-License-Identifier: MIT
 *
 * The trial of a variant: its first use on a device that is no CPU. Drivers of GPUs make wrong code
 * of right text now and then.
 */
#ifndef CLATTN_ATTENTION_TRIAL_H
#define CLATTN_ATTENTION_TRIAL_H

#include "attention/plan.h"
#include "attention/problem.h"
#include "base/status.h"
#include "opencl/info.h" /* ca_device */

/* Compare the plan's variant with the reference, once for each dtype of queries, on a small problem
   with the head sizes and dtypes of `attention`. A pass is kept on disk. CA_OK if the results agree,
   and where no trial is needed. CA_ERROR_KERNEL if they differ, or if the variant cannot be
   built or launched. */
ca_status ca_attention_try(ca_device *device, const ca_attention *attention,
                           const ca_attention_plan *plan, ca_error *error);

#endif
