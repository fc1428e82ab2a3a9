/* SPDX-License-Identifier: MIT
 *
 * Marks: words in a device's memory, by which a kernel tells the host that a second kernel has
 * work to do. Each call has a value of its own, so no mark is ever set back.
 */
#ifndef CLATTN_OPENCL_MARKS_H
#define CLATTN_OPENCL_MARKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/span.h"

/* A kernel sets the mark by marks[slot] = value. The mark is set if marks[slot] >= value: later
   calls that use the slot write larger values. */
typedef struct {
    uint32_t slot;
    uint32_t value;
} ca_mark;

/* Take a mark for one call, on a prepared device. *marks is the memory of all marks. */
ca_status ca_mark_take(ca_device *device, ca_mark *mark, ca_span *marks, ca_error *error);

/* Has a kernel, which is complete, set the mark? Where a later call has the slot too, the answer
   may be true without it. */
ca_status ca_mark_is_set(ca_device *device, const ca_mark *mark, bool *set, ca_error *error);

#endif
