/* SPDX-License-Identifier: MIT
 *
 * The trial of a variant: its first use on a device that is no CPU. Drivers of GPUs make wrong code
 * of right text now and then.
 */
#ifndef CLATTN_ATTENTION_TRIAL_H
#define CLATTN_ATTENTION_TRIAL_H

#include <stdint.h>

#include "attention/problem.h"
#include "base/status.h"
#include "opencl/info.h" /* ca_device */

/* Compare a variant, a row of the table, with the reference, once for each dtype of queries, on a
   small problem with the head sizes and dtypes of `attention`. A pass is kept on disk. CA_OK if the
   results agree, and where no trial is needed. CA_ERROR_KERNEL if they differ, or if the kernel for
   the small problem cannot be built or launched. */
ca_status ca_attention_try(ca_device *device, const ca_attention *attention, int variant,
                           ca_error *error);

/* Returns a bit for each variant that has given wrong results for the dtype of these queries. */
uint32_t ca_attention_wrong(const ca_device *device, const ca_attention *attention);

#endif
