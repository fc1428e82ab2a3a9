/* SPDX-License-Identifier: MIT
 *
 * What a problem asks of kernels, as the bits of kernels/attention/operands.h. Kernels for CPUs read the
 * bits from params, and kernels for GPUs have them as a macro.
 */
#ifndef CLATTN_ATTENTION_OPTIONS_H
#define CLATTN_ATTENTION_OPTIONS_H

#include <stdint.h>

#include "attention/problem.h"

/* CA_USES (…) and the stage of scores. */
int64_t ca_attention_options(const ca_attention *attention);

/* Write the optional operands that a problem has, in the order of their views in a kernel's params.
   Returns how many there are. A plan is made only if there are at most CA_OPTIONAL_VIEWS. */
int ca_attention_optional(const ca_attention *attention,
                          ca_attention_role roles[CA_OPTIONAL_ROLES]);

/* Of the reference. */
#define CA_ALL_OPTIONS INT64_MAX

/* The options that every kernel takes. */
#define CA_COMMON_OPTIONS                                                                          \
    (CA_USES(MASK) | CA_USES(ADDED_MASK) | CA_USES(FILTER) | CA_USES(BIAS) | CA_USES(SOFTCAP) |    \
     CA_USES(SINKS) | CA_USES(OFFSETS) | CA_USES(BLOCKS) | CA_USES(NUMBERS) | CA_USES(TABLE0) |    \
     CA_USES(TABLE1) | CA_USES(TABLE2) | CA_USES(TABLE3))

#define CA_RAGGED_OPTIONS CA_USES(SEQUENCES)

#define CA_SCALE_OPTIONS (CA_USES(KEY_SCALE) | CA_USES(VALUE_SCALE))
#define CA_INT4_OPTIONS  (CA_USES(KEY_OFFSET) | CA_USES(VALUE_OFFSET))

#define CA_PAST_OPTIONS (CA_USES(PAST_KEY) | CA_USES(PAST_VALUE))

#endif
