/* SPDX-License-Identifier: MIT
 *
 * Kernels that tests force, by CLATTN_KERNEL.
 */
#ifndef CLATTN_OP_VARIANT_H
#define CLATTN_OP_VARIANT_H

#include "base/status.h"

typedef enum {
    CA_VARIANT_ANY,       /* the fastest that can run the problem on the device */
    CA_VARIANT_REFERENCE, /* the one for all devices */
    CA_VARIANT_CPU,
    CA_VARIANT_DECODE, /* that of the device's type */
    CA_VARIANT_DECODE_CPU,
    CA_VARIANT_DECODE_GPU,
    CA_VARIANT_DECODE_MMA,
    CA_VARIANT_PAIRS,
    CA_VARIANT_TILED,
    CA_VARIANT_MMA,
    CA_VARIANTS,
} ca_variant;

/* The word of CLATTN_KERNEL. */
const char *ca_variant_name(ca_variant variant);

/* What CLATTN_KERNEL forces; NULL or "": nothing. CA_ERROR_VALUE for another word. */
ca_status ca_variant_parse(const char *name, ca_variant *variant, ca_error *error);

#endif
