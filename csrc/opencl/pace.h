/* SPDX-License-Identifier: MIT
 *
 * How long kernels take, and the pieces of a long one. Only this room includes this header.
 *
 * A step says how much work it has: operations of attention, bytes of a diagonal matrix. Each kernel
 * keeps its measured speed, work in a second, which each piece measures anew. A kernel that was never
 * measured has a guessed speed, which is lower than that of any kernel, so that its pieces are too short
 * rather than too long. On a fast device no piece may be long enough to be timed. Then the host times the
 * whole step.
 *
 * A piece takes 0.05 s, and consists of whole rounds of the compute units. The first one is shorter,
 * because the speed may be that of another problem. A second piece is enqueued behind the piece that
 * runs, so the device is never idle while the host takes the GIL.
 *
 * The host asks ca_error.stops between pieces. If a piece takes longer than pieces should, it asks every
 * 5 ms instead of waiting. A work-group goes over all keys of its rows, and a key may be repeated 2^30
 * times by a stride of 0: so kernels for CPUs look at the word of ca_mark_stop once for each block of
 * keys. After a stop the call waits for the pieces that are enqueued, and its memory is released as after
 * any call.
 *
 * A long launch is not left pending, and a launch that waits is not enqueued behind more than
 * CA_LONG_SECONDS of pending work. So what is pending is short, up to rows that are redone.
 */
#ifndef CLATTN_OPENCL_PACE_H
#define CLATTN_OPENCL_PACE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "opencl/device.h"
#include "opencl/pending.h" /* CA_LONG_SECONDS */
#include "opencl/step.h"

/* Returns how many seconds all steps of a launch are expected to take. */
double ca_pace_seconds(const ca_device *device, const ca_launch *launch);

/* CA_ERROR_SETTING if the launch takes longer than the device's `longest`. A kernel that was never
   measured is taken to be as fast as the fastest device. */
ca_status ca_pace_check(const ca_device *device, const ca_launch *launch, ca_error *error);

/* Sets the speed of a step's kernel, in work a second, from the seconds that `groups` of its work-groups took. Does
   nothing if the step's work is unknown, or known as an upper bound alone. */
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
