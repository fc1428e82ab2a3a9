/* SPDX-License-Identifier: MIT */
#include "opencl/forced.h"

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
ca_forced_parse_trials(const char *words, ca_forced *forced, ca_error *error)
{
    static const char *const names[] = {
        [CA_TRIALS_APART] = "apart",
        [CA_TRIALS_HERE] = "here",
        [CA_TRIALS_OFF] = "off",
    };
    forced->trials = CA_TRIALS_APART;
    for (int n = 0; is_given(words) && strcmp(words, names[n]) != 0; n++) {
        if (n == CA_TRIALS_OFF) {
            return ca_error_set(error, CA_ERROR_SETTING,
                                "CLATTN_TRIALS is \"%.100s\"; expected \"apart\", \"here\" or "
                                "\"off\"",
                                words);
        }
        forced->trials = (ca_trials)(n + 1);
    }
    return CA_OK;
}

ca_status
ca_forced_parse_limits(const char *sub_groups, const char *local_memory, ca_forced *forced,
                       ca_error *error)
{
    forced->chooses_sub_group = false;
    forced->local_memory = 0;
    if (is_given(sub_groups)) {
        int64_t size = parse_number(sub_groups);
        if (size != 0 && size != 8 && size != 16 && size != 32) {
            return ca_error_set(error, CA_ERROR_SETTING,
                                "CLATTN_SUB_GROUPS is \"%.100s\"; expected 0, 8, 16 or 32",
                                sub_groups);
        }
        forced->chooses_sub_group = true;
        forced->sub_group = size;
    }
    if (is_given(local_memory)) {
        forced->local_memory = parse_number(local_memory);
        if (forced->local_memory < 1) {
            return ca_error_set(error, CA_ERROR_SETTING,
                                "CLATTN_LOCAL_MEMORY is \"%.100s\"; expected a number of bytes",
                                local_memory);
        }
    }
    return CA_OK;
}

bool
ca_forced_limits(const ca_forced *forced)
{
    return forced->emulates || forced->chooses_sub_group || forced->local_memory > 0;
}

ca_status
ca_forced_limit(const ca_forced *forced, const ca_device_info *info, ca_device_info *limited,
                ca_error *error)
{
    *limited = *info;
    if (forced->emulates) {
        limited->float16_matrices = limited->bfloat16_matrices = limited->group_matrices = false;
    }
    if (forced->chooses_sub_group) {
        if ((info->sub_groups & forced->sub_group) != forced->sub_group) {
            return ca_error_set(error, CA_ERROR_SETTING,
                                "CLATTN_SUB_GROUPS is %d, but %s has no sub-groups of that size",
                                (int)forced->sub_group, info->name);
        }
        limited->sub_groups = forced->sub_group;
        limited->smallest_sub_group = forced->sub_group;
        limited->shuffle_lanes = 0;
    }
    if (forced->local_memory > 0) {
        limited->local_memory =
            forced->local_memory < info->local_memory ? forced->local_memory : info->local_memory;
        limited->ample_local_memory = limited->group_matrices = false;
    }
    return CA_OK;
}
