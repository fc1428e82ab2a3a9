/* SPDX-License-Identifier: MIT
 *
 * The backward pass of attention: gradients of query, key, value, mask and sinks.
 *
 * A problem that asks for gradients has operands GRAD_QUERY … GRAD_SINKS. Its OUTPUT and FORWARD_LSE are what
 * the forward pass gave, and GRAD_OUTPUT and GRAD_LSE, which may be absent, are the gradients of what it gave.
 */
#ifndef CLATTN_ATTENTION_BACKWARD_H
#define CLATTN_ATTENTION_BACKWARD_H

#include <stdbool.h>

#include "attention/problem.h"
#include "attention/trial.h" /* ca_tried */
#include "base/status.h"
#include "opencl/forced.h" /* ca_forced */
#include "opencl/info.h"   /* ca_device */

/* True if the problem asks for gradients. */
bool ca_attention_has_gradients(const ca_attention *attention);

/* Compute the gradients, and wait. */
ca_status ca_attention_run_backward(ca_device *device, const ca_forced *forced,
                                    const ca_attention *attention, ca_error *error);

/* Find the kernel for gradients of the variant in a row of the table. CA_ERROR_SETTING if it has none. */
ca_status ca_backward_find_tried(int variant, ca_tried *tried, ca_error *error);

#endif
