/* SPDX-License-Identifier: MIT
 *
 * The tuner's numbers of a device, set and read by words for a class, a variant and a knob.
 */
#ifndef CLATTN_ATTENTION_TUNING_H
#define CLATTN_ATTENTION_TUNING_H

#include "attention/knobs.h"
#include "attention/variants.h"
#include "base/status.h"

/* Find a class by its name. CA_ERROR_VALUE where there is none. */
ca_status ca_tuning_find_class(const char *name, int *number, ca_error *error);

/* Find a variant of that word with knobs. */
ca_status ca_tuning_find_variant(const char *word, int *variant, ca_error *error);

/* Put the value of a knob of the variant into a word. CA_ERROR_VALUE where the variant has no such
   knob, or the value is not legal. */
ca_status ca_tuning_add(int variant, const char *name, int64_t value, uint64_t *word,
                        ca_error *error);

/* Set the word of a class and a variant, or return it. Thread-safe: a call that another thread has
   begun takes the old numbers or the new ones. */
void ca_tuning_set(const ca_device_info *info, int number, int variant, uint64_t word);
uint64_t ca_tuning_get(const ca_device_info *info, int number, int variant);

#endif
