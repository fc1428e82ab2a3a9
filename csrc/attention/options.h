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

/* The optional arrays that a problem has. View n of a kernel's params is that of roles[n]. A plan
   is made only if there are at most CA_OPTIONAL_VIEWS of them. */
typedef struct {
    int count;
    ca_attention_role roles[CA_OPTIONAL_ROLES];
    int64_t slots; /* 4 bits for each of CA_PAST_KEY … CA_SCORES: the number n of its view */
} ca_optional_arrays;

ca_optional_arrays ca_attention_optional(const ca_attention *attention);

#endif
