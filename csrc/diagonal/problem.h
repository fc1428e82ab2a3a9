/* SPDX-License-Identifier: MIT
 *
 * The diagonal-matrix problem that every front door fills in, and the one place that
 * plans and launches it. Nothing here knows a specification's name.
 */
#ifndef CLATTN_OP_DIAGONAL_H
#define CLATTN_OP_DIAGONAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/platform.h" /* ca_pages */
#include "base/status.h"
#include "base/tensor.h"
#include "base/variant.h"  /* ca_variant */
#include "opencl/device.h" /* ca_device */

/* What is known of the memory of the output. */
typedef enum {
    CA_OUTPUT_GIVEN, /* the caller's */
    CA_OUTPUT_NEW,
    CA_OUTPUT_ZERO, /* new, and all of it zero */
} ca_output_memory;

/* Of every matrix, with column x and row y:

       inside       = lower <= x - y < upper
       output[y, x] = value where inside (with `inverted`: where not inside), elsewhere
                      input[y, x], or zero without an input

   input and output have one shape, of two dimensions or more, and one dtype. They share
   no memory, or are one and the same: then the call is in place. */
typedef struct {
    ca_tensor input; /* data NULL: none */
    ca_tensor output;
    ca_output_memory memory;
    int64_t lower; /* any numbers; lower >= upper: nothing is inside */
    int64_t upper;
    bool inverted;
    uint64_t value; /* bits of an element */
    ca_variant variant;
    const char *call; /* the function it is done for */
} ca_diagonal;

/* Can kernels write to `output` (any tensor) on this device? Not to columns and rows
   that are both strided, to elements that share memory, or between others that would
   have to be copied with them. */
bool ca_diagonal_can_write(const ca_device_info *info, const ca_tensor *output);

/* Returns the kind of memory for a new output of `bytes` bytes: zero pages where zeros
   are written, which kernels can then skip. `diagonal` needs no output yet. */
ca_pages ca_diagonal_choose_pages(const ca_device_info *info,
                                  const ca_diagonal *diagonal, int64_t bytes);

/* Plan, launch and wait, but for an output that a device holds (ca_launch_run); without
   work, nothing. */
ca_status ca_diagonal_run(ca_device *device, const ca_diagonal *diagonal,
                          ca_error *error);

#endif
