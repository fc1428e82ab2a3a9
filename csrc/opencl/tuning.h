/* SPDX-License-Identifier: MIT
 *
 * What the tuner has found for a device, as words that attention/knobs.h reads.
 */
#ifndef CLATTN_OPENCL_TUNING_H
#define CLATTN_OPENCL_TUNING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define CA_TUNING_WORDS 540

/* All zero: nothing is tuned. A word is read and written whole, so calls take no lock. */
typedef struct ca_tuning {
    atomic_bool in_use; /* false: all words are zero, and plans need not look */
    _Atomic(uint64_t) words[CA_TUNING_WORDS];
} ca_tuning;

#endif
