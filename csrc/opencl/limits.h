/* SPDX-License-Identifier: MIT
 *
 * Less of a device than there is, for tests: CLATTN_SUB_GROUPS, CLATTN_LOCAL_MEMORY.
 */
#ifndef CLATTN_OP_LIMITS_H
#define CLATTN_OP_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "opencl/info.h" /* ca_device_info */

/* All zero: the device as it is. */
typedef struct {
    bool chooses_sub_group;
    int64_t sub_group;    /* the only size of sub-groups; 0: there are none */
    int64_t local_memory; /* bytes at most; 0: as many as there are */
} ca_limits;

/* From the two variables; NULL or "": not limited. CA_ERROR_VALUE for other words. */
ca_status ca_limits_parse(const char *sub_groups, const char *local_memory,
                          ca_limits *limits, ca_error *error);

bool ca_limits_are_set(const ca_limits *limits);

/* Lower what `info` says. CA_ERROR_VALUE where the device lacks the sub-groups. */
ca_status ca_limits_apply(const ca_limits *limits, ca_device_info *info,
                          ca_error *error);

#endif
