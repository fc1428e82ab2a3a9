/* SPDX-License-Identifier: MIT
 *
 * Built kernels, cached in memory for each device and as binaries on disk.
 */
#ifndef CLATTN_CL_PROGRAM_H
#define CLATTN_CL_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "opencl/device.h"

typedef struct ca_kernel ca_kernel; /* lives as long as its device */

typedef struct {
    const char *name; /* a string literal: "E" */
    int64_t value;
} ca_define;

#define CA_MAX_DEFINES 32

/* Which kernel, specialised how. `name` is the stem of the file in kernels/ and the
   function in it. The order of the defines is part of the identity. */
typedef struct {
    const char *name; /* a string literal */
    bool in_c30;      /* written in OpenCL C 3.0, for sub-groups; else 1.2 */
    int ndefines;     /* more than CA_MAX_DEFINES: the kernel is refused */
    ca_define defines[CA_MAX_DEFINES];
} ca_kernel_spec;

/* Add a macro. */
static inline void
ca_kernel_define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    if (spec->ndefines < CA_MAX_DEFINES) {
        spec->defines[spec->ndefines] = (ca_define){name, value};
    }
    spec->ndefines++;
}

/* Look the kernel up, else load it from disk, else build it. Thread-safe; one build at
   a time and device; a hit costs a hash and a comparison. CA_ERROR_DEVICE with the
   compiler's log and numbered source lines where it does not build. */
ca_status ca_kernel_get(ca_device *device, const ca_kernel_spec *spec,
                        ca_kernel **kernel, ca_error *error);

#endif
