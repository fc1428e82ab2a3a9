/* SPDX-License-Identifier: MIT */
#include "opencl/limits.h"

#include <stdlib.h>
#include <string.h>

/* A number of up to 9 digits, -1 for other words. */
static int64_t
parse_number(const char *words)
{
    size_t length = strlen(words);
    bool digits = length <= 9 && strspn(words, "0123456789") == length;
    return digits ? strtol(words, NULL, 10) : -1;
}

static bool
is_given(const char *words)
{
    return words != NULL && words[0] != '\0';
}

ca_status
ca_limits_parse(const char *sub_groups, const char *local_memory, ca_limits *limits,
                ca_error *error)
{
    *limits = (ca_limits){0};
    if (is_given(sub_groups)) {
        int64_t size = parse_number(sub_groups);
        if (size != 0 && size != 8 && size != 16 && size != 32) {
            return ca_error_set(
                error, CA_ERROR_VALUE,
                "CLATTN_SUB_GROUPS is \"%.100s\"; expected 0, 8, 16 or 32", sub_groups);
        }
        limits->chooses_sub_group = true;
        limits->sub_group = size;
    }
    if (is_given(local_memory)) {
        limits->local_memory = parse_number(local_memory);
        if (limits->local_memory < 1) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "CLATTN_LOCAL_MEMORY is \"%.100s\"; expected a number "
                                "of bytes",
                                local_memory);
        }
    }
    return CA_OK;
}

bool
ca_limits_are_set(const ca_limits *limits)
{
    return limits->chooses_sub_group || limits->local_memory > 0;
}

ca_status
ca_limits_apply(const ca_limits *limits, ca_device_info *info, ca_error *error)
{
    if (limits->chooses_sub_group) {
        if ((info->sub_groups & limits->sub_group) != limits->sub_group) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "CLATTN_SUB_GROUPS is %d, but %s has no sub-groups of "
                                "that size",
                                (int)limits->sub_group, info->name);
        }
        info->sub_groups = limits->sub_group;
    }
    if (limits->local_memory > 0 && limits->local_memory < info->local_memory) {
        info->local_memory = limits->local_memory;
    }
    return CA_OK;
}
