/* SPDX-License-Identifier: MIT
 *
 * Kernels that tests force, by CLATTN_KERNEL.
 */
#ifndef CLATTN_OP_VARIANT_H
#define CLATTN_OP_VARIANT_H

typedef enum {
    CA_VARIANT_ANY,       /* the fastest that can run the problem on the device */
    CA_VARIANT_REFERENCE, /* the one for all devices */
    CA_VARIANT_CPU,
} ca_variant;

#endif
