/* SPDX-License-Identifier: MIT
 *
 * What a problem asks of kernels, as bits. They are data for kernels on CPUs and macros for
 * kernels on GPUs.
 */
#ifndef CLATTN_ATTENTION_OPTIONS_H
#define CLATTN_ATTENTION_OPTIONS_H

#include <stdint.h>

#include "attention/problem.h"
#include "kernels/attention/params.h" /* CA_USES_…, CA_OPTIONAL_VIEWS */

/* CA_USES_… and the stage of scores. */
uint32_t ca_attention_options(const ca_attention *attention);

/* The optional arrays that the problem has, at most CA_OPTIONAL_VIEWS. Returns their number; array
   n is roles[n]. */
int ca_attention_optional(const ca_attention *attention,
                          ca_attention_role roles[CA_OPTIONAL_ROLES]);

/* For each optional array, 4 bits: its number in ca_attention_optional. */
int64_t ca_attention_slots(const ca_attention *attention);

#endif
