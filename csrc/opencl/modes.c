/* SPDX-License-Identifier: MIT */
#include "opencl/modes.h"

#include <string.h>

static const char *const words[] = {
    [CA_MEMORY_SVM] = "svm",
    [CA_MEMORY_HOST_PTR] = "host",
    [CA_MEMORY_COPY] = "copy",
};

const char *
ca_memory_word(ca_memory_mode mode)
{
    return words[mode];
}

bool
ca_memory_find(const char *word, ca_memory_mode *mode)
{
    *mode = CA_MEMORY_SVM;
    while (*mode < CA_MEMORY_COPY && strcmp(word, words[*mode]) != 0) {
        (*mode)++;
    }
    return strcmp(word, words[*mode]) == 0;
}
