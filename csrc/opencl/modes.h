/* SPDX-License-Identifier: MIT
 *
 * The words for memory modes: CLATTN_MEMORY, Device.memory_mode.
 */
#ifndef CLATTN_OPENCL_MODES_H
#define CLATTN_OPENCL_MODES_H

#include <stdbool.h>

#include "opencl/info.h"

/* Returns "svm", "host" or "copy". */
const char *ca_memory_word(ca_memory_mode mode);

/* Finds the mode that a word names. False if the word names none. */
bool ca_memory_find(const char *word, ca_memory_mode *mode);

#endif
