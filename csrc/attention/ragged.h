/* SPDX-License-Identifier: MIT
 *
 * Ragged problems: rows and keys of several sequences, packed one behind the other. Sequences of different
 * lengths may need different variants, so a launch has a step for each. The work-items of a step take ranges of
 * rows from a list.
 */
#ifndef CLATTN_ATTENTION_RAGGED_H
#define CLATTN_ATTENTION_RAGGED_H

#include "attention/problem.h"
#include "base/status.h"
#include "opencl/forced.h" /* ca_forced */
#include "opencl/info.h"   /* ca_device */

/* Run a problem that has sequences, as ca_attention_run does. */
ca_status ca_attention_run_ragged(ca_device *device, const ca_forced *forced,
                                  const ca_attention *attention, ca_error *error);

#endif
