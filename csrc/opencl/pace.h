/* SPDX-License-Identifier: MIT
 *
 * How long kernels take, and the pieces of a long one. Only this room includes this header.
 *
 * A kernel remembers how much work it has lately done in a second. Before that a guess stands in,
 * which is slower than kernels are, so that a piece is too short rather than too long.
 */
#ifndef CLATTN_OPENCL_PACE_H
#define CLATTN_OPENCL_PACE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/device.h"
#include "opencl/pending.h" /* CA_LONG_SECONDS */
#include "opencl/step.h"

/* The seconds that all steps of a launch take. */
double ca_pace_seconds(const ca_device *device, const ca_launch *launch);

/* CA_ERROR_VALUE if the launch takes longer than the device's `longest`, even at the highest speed
   that one may hope for where no speed is known. */
ca_status ca_pace_check(const ca_device *device, const ca_launch *launch, ca_error *error);

/* Note that some work-groups of a step have run for so long. */
void ca_pace_note(const ca_step *step, size_t groups, double seconds);

/* Note that a whole step has run for so long, although it was not taken for a long one, if its
   kernel's speed was known. */
void ca_pace_correct(const ca_step *step, double seconds);

/* A step on its way: the next piece is work-groups first … first + count - 1. */
typedef struct {
    const ca_device *device;
    const ca_launch *launch;
    const ca_step *step;
    size_t groups; /* of the step */
    size_t first;
    size_t count;
    int turns; /* so many pieces were set after the first, all but the last of which are timed */
} ca_pace;

/* Set the first piece. It is short, because the speed may have been another problem's. */
ca_pace ca_pace_begin(const ca_device *device, const ca_launch *launch, const ca_step *step);

/* The seconds that the piece takes: many more than pieces should if a single work-group does. */
double ca_pace_piece_seconds(const ca_pace *pace);

/* Set the next piece. Its count is 0 after the last one. CA_ERROR_VALUE if at the speed that is
   known now the whole step takes longer than the device's `longest`. */
ca_status ca_pace_next(ca_pace *pace, ca_error *error);

#endif
