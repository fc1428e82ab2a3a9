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
ca_forced_parse_local_memory(const char *words, ca_forced *forced, ca_error *error)
{
    forced->local_memory = is_given(words) ? parse_number(words) : 0;
    if (is_given(words) && forced->local_memory < 1) {
        return ca_error_set(error, CA_ERROR_SETTING,
                            "CLATTN_LOCAL_MEMORY is \"%.100s\"; expected a number of bytes", words);
    }
    return CA_OK;
}

bool
ca_forced_limits(const ca_forced *forced)
{
    return forced->emulates || forced->local_memory > 0;
}

void
ca_forced_limit(const ca_forced *forced, const ca_device_info *info, ca_device_info *limited)
{
    *limited = *info;
    if (forced->emulates) {
        limited->float16_matrices = limited->bfloat16_matrices = limited->group_matrices = false;
    }
    if (forced->local_memory > 0) {
        limited->local_memory =
            forced->local_memory < info->local_memory ? forced->local_memory : info->local_memory;
        limited->ample_local_memory = limited->group_matrices = false;
    }
}
