/* SPDX-License-Identifier: MIT */
#include "base/variant.h"

#include <string.h>

static const char *const names[CA_VARIANTS] = {
    [CA_VARIANT_ANY] = "",
    [CA_VARIANT_REFERENCE] = "reference",
    [CA_VARIANT_CPU] = "cpu",
    [CA_VARIANT_DECODE] = "decode",
    [CA_VARIANT_PAIRS] = "pairs",
    [CA_VARIANT_DECODE_CPU] = "decode-cpu",
    [CA_VARIANT_DECODE_GPU] = "decode-gpu",
    [CA_VARIANT_DECODE_MMA] = "decode-mma",
    [CA_VARIANT_TILED] = "tiled",
    [CA_VARIANT_MMA] = "mma",
};

const char *
ca_variant_name(ca_variant variant)
{
    return names[variant];
}

ca_status
ca_variant_parse(const char *name, ca_variant *variant, ca_error *error)
{
    int v = CA_VARIANT_ANY;
    while (v < CA_VARIANTS && strcmp(name != NULL ? name : "", names[v]) != 0) {
        v++;
    }
    if (v == CA_VARIANTS) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "CLATTN_KERNEL is \"%.100s\"; expected \"reference\", "
                            "\"cpu\", \"decode\", \"decode-cpu\", \"decode-gpu\", "
                            "\"decode-mma\", \"pairs\", \"tiled\" or \"mma\"",
                            name);
    }
    *variant = (ca_variant)v;
    return CA_OK;
}
