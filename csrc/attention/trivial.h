/* SPDX-License-Identifier: MIT
 *
 * Attention problems that need no kernel.
 */
#ifndef CLATTN_ATTENTION_TRIVIAL_H
#define CLATTN_ATTENTION_TRIVIAL_H

#include "attention/problem.h"
#include "base/status.h"

/* True where nothing has to be written, or there are no keys at all. */
bool ca_attention_is_trivial(const ca_attention *attention);

/* Write the answer of a trivial problem: zeros, and -inf for the log-sum-exp. */
ca_status ca_attention_fill(const ca_attention *attention, ca_error *error);

#endif
