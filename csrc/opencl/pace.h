/* SPDX-License-Identifier: MIT
 *
 * How long kernels take, and the pieces of a long one. Only this room includes this header.
 *
 * Each kernel keeps its measured speed: work in a second. A kernel that was never measured has a
 * guessed speed, which is lower than that of any kernel, so that its pieces are too short rather
 * than too long.
 */
#ifndef CLATTN_OPENCL_PACE_H
#define CLATTN_OPENCL_PACE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/device.h"
#include "opencl/pending.h" /* CA_LONG_SECONDS */
#include "opencl/step.h"

/* Returns the expected seconds of all steps of a launch take. */
double ca_pace_seconds(const ca_device *device, const ca_launch *launch);

/* CA_ERROR_SETTING if the launch takes longer than the device's `longest`. A kernel that was never
   measured is taken to be as fast as the fastest device. */
ca_status ca_pace_check(const ca_device *device, const ca_launch *launch, ca_error *error);

/* Sets the speed of a step's kernel from the seconds that some work-groups took. */
void ca_pace_note(const ca_step *step, size_t groups, double seconds);

/* Lowers the speed of a step's kernel if the whole step, which was expected to be short, took long.
   Does nothing if the kernel's speed was a guess. */
void ca_pace_correct(const ca_step *step, double seconds);

/* A step that runs in pieces. The next piece is work-groups first … first + count - 1. */
typedef struct {
    const ca_device *device;
    const ca_launch *launch;
    const ca_step *step;
    size_t groups; /* of the step */
    size_t first;
    size_t count;
    int turns; /* pieces that were set after the first; all but the last are timed */
} ca_pace;

/* Sets the first piece. It is short, because another problem may have set the kernel's speed. */
ca_pace ca_pace_begin(const ca_device *device, const ca_launch *launch, const ca_step *step);

/* Returns the expected seconds of the piece. They are too many where one work-group takes too long. */
double ca_pace_piece_seconds(const ca_pace *pace);

/* Sets the next piece, whose count is 0 after the last one. CA_ERROR_SETTING if the whole step takes
   longer than the device's `longest` at the speed that the pieces so far have shown. */
ca_status ca_pace_next(ca_pace *pace, ca_error *error);

#endif
