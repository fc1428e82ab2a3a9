/* SPDX-License-Identifier: MIT */
#include "attention/tuning.h"

#include <string.h>

#include "opencl/tuning.h"

_Static_assert(CA_TUNING_WORDS >= CA_CLASSES * CA_VARIANT_COUNT, "every class has its words");

ca_status
ca_tuning_find_class(const char *name, int *number, ca_error *error)
{
    char found[CA_CLASS_NAME_SIZE];
    for (int n = 0; n < CA_CLASSES; n++) {
        ca_class_name(n, found);
        if (strcmp(found, name) == 0) {
            *number = n;
            return CA_OK;
        }
    }
    return ca_error_set(error, CA_ERROR_VALUE, "there is no class '%.40s'", name);
}

ca_status
ca_tuning_find_variant(const char *word, int *variant, ca_error *error)
{
    for (int n = 0; n < CA_VARIANT_COUNT; n++) {
        if (strcmp(ca_variant_at(n)->word, word) == 0 && ca_variant_at(n)->knobs != NULL) {
            *variant = n;
            return CA_OK;
        }
    }
    return ca_error_set(error, CA_ERROR_VALUE, "there is no variant '%.20s' with knobs", word);
}

ca_status
ca_tuning_add(int variant, const char *name, int64_t value, uint64_t *word, ca_error *error)
{
    const ca_knob *knobs = ca_variant_at(variant)->knobs;
    int n = 0;
    while (knobs[n].name != NULL && strcmp(knobs[n].name, name) != 0) {
        n++;
    }
    for (int i = 0; knobs[n].name != NULL && i < CA_KNOB_VALUES && knobs[n].values[i] != 0; i++) {
        if (knobs[n].values[i] == value) {
            *word &= ~(UINT64_C(0xff) << (8 * n));
            *word |= (uint64_t)(i + 1) << (8 * n);
            return CA_OK;
        }
    }
    return ca_error_set(error, CA_ERROR_VALUE, "%s has no knob %.20s with the value %lld",
                        ca_variant_at(variant)->word, name, (long long)value);
}

void
ca_tuning_set(const ca_device_info *info, int number, int variant, uint64_t word)
{
    atomic_store_explicit(&info->tuning->words[ca_knobs_place(number, variant)], word,
                          memory_order_relaxed);
    if (word != 0) {
        atomic_store_explicit(&info->tuning->in_use, true, memory_order_relaxed);
    }
}

uint64_t
ca_tuning_get(const ca_device_info *info, int number, int variant)
{
    return atomic_load_explicit(&info->tuning->words[ca_knobs_place(number, variant)],
                                memory_order_relaxed);
}
