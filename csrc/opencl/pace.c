/* SPDX-License-Identifier: MIT */
#include "opencl/pace.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>

/* Work that a compute unit does in a second: at least, and at most. */
#define SLOWEST         4e9
#define FASTEST_OF_CPUS 1e12
#define FASTEST         1e14

/* Two pieces are under way at a time. */
#define PIECE_SECONDS 0.05
#define FIRST_PIECE   0.25 /* of such a piece */
#define GROWTH        4    /* of a piece, at most, from the one before */

/* Pieces that have to be timed before their speed may end a call: some drivers compile a kernel in the
   first one. */
#define FEWEST_PIECES 2

static double
units_of(const ca_device *device)
{
    return device->info.compute_units > 0 ? (double)device->info.compute_units : 1;
}

static size_t
groups_of(const ca_step *step)
{
    return step->global_size / step->local_size;
}

/* The kernel's speed; where none is known, `guess` for each compute unit. */
static double
speed_of(const ca_device *device, const ca_step *step, double guess)
{
    double known = atomic_load_explicit(&step->kernel->speed, memory_order_relaxed);
    return known > 0 ? known : guess * units_of(device);
}

double
ca_pace_seconds(const ca_device *device, const ca_launch *launch)
{
    double seconds = 0;
    for (int i = 0; i < launch->nsteps; i++) {
        seconds += launch->steps[i].work / speed_of(device, &launch->steps[i], SLOWEST);
    }
    return seconds;
}

void
ca_pace_note(const ca_step *step, size_t groups, double seconds)
{
    if (seconds > 0 && step->work > 0 && !step->at_most) {
        double share = (double)groups / (double)groups_of(step);
        atomic_store_explicit(&step->kernel->speed, step->work * share / seconds,
                              memory_order_relaxed);
    }
}

void
ca_pace_correct(const ca_step *step, double seconds)
{
    if (seconds > CA_LONG_SECONDS &&
        atomic_load_explicit(&step->kernel->speed, memory_order_relaxed) > 0) {
        ca_pace_note(step, groups_of(step), seconds);
    }
}

/* ---- calls that would not end ---- */

static void
write_time(double seconds, char text[64])
{
    static const struct {
        double seconds;
        const char *name;
    } units[] = {{31557600, "years"}, {86400, "days"}, {3600, "hours"}, {60, "minutes"}};
    size_t n = 0;
    while (n < 4 && seconds < 2 * units[n].seconds) {
        n++;
    }
    (void)snprintf(text, 64, "%.3g %s", n < 4 ? seconds / units[n].seconds : seconds,
                   n < 4 ? units[n].name : "seconds");
}

static ca_status
refuse(const ca_device *device, const ca_launch *launch, double seconds, ca_error *error)
{
    char needed[64];
    char allowed[64];
    write_time(seconds, needed);
    write_time(device->longest, allowed);
    return ca_error_set(error, CA_ERROR_SETTING,
                        "%s would take about %s on device '%s'%s%s; expected at most %s, or "
                        "the environment variable CLATTN_MAX_SECONDS to allow more",
                        launch->call, needed, device->info.name,
                        launch->sizes != NULL ? ", with " : "",
                        launch->sizes != NULL ? launch->sizes : "", allowed);
}

/* The seconds of a step, one group of which no other compute unit can help with. Such a group
   cannot be timed either, so a long one counts at the lowest speed. */
static double
seconds_of(const ca_device *device, const ca_step *step)
{
    bool cpu = device->info.type == CA_DEVICE_CPU;
    double units = units_of(device);
    double group = step->work / (double)groups_of(step);
    double fast = speed_of(device, step, cpu ? FASTEST_OF_CPUS : FASTEST);
    double slow = speed_of(device, step, SLOWEST);
    return fmax(step->work / fast, group * units / slow);
}

ca_status
ca_pace_check(const ca_device *device, const ca_launch *launch, ca_error *error)
{
    double seconds = 0;
    for (int i = 0; i < launch->nsteps; i++) {
        seconds += seconds_of(device, &launch->steps[i]);
    }
    return seconds > device->longest ? refuse(device, launch, seconds, error) : CA_OK;
}

/* ---- pieces ---- */

/* Limit the piece to so many seconds, in whole rounds of the compute units, and to the groups that
   are left. A step of little work is one piece. */
static void
set_count(ca_pace *pace, double seconds, size_t most)
{
    size_t left = pace->groups - pace->first;
    if (pace->step->work == 0) {
        pace->count = left;
        return;
    }
    double units = units_of(pace->device);
    double group = pace->step->work / (double)pace->groups;
    double count = seconds * speed_of(pace->device, pace->step, SLOWEST) / group;
    count = fmin(count, (double)most);
    count = fmax(floor(count / units), 1) * units;
    /* A short rest joins the piece. */
    pace->count = 1.25 * count >= (double)left ? left : (size_t)count;
}

ca_pace
ca_pace_begin(const ca_device *device, const ca_launch *launch, const ca_step *step)
{
    ca_pace pace = {.device = device, .launch = launch, .step = step, .groups = groups_of(step)};
    set_count(&pace, FIRST_PIECE * PIECE_SECONDS, pace.groups);
    return pace;
}

double
ca_pace_piece_seconds(const ca_pace *pace)
{
    double units = units_of(pace->device);
    double groups = fmax((double)pace->count, units);
    double speed = speed_of(pace->device, pace->step, SLOWEST);
    return pace->step->work / (double)pace->groups * groups / speed;
}

ca_status
ca_pace_next(ca_pace *pace, ca_error *error)
{
    double seconds = pace->step->work / speed_of(pace->device, pace->step, SLOWEST);
    size_t before = pace->count;
    pace->first += before;
    pace->count = 0;
    if (pace->turns++ > FEWEST_PIECES && seconds > pace->device->longest) {
        return refuse(pace->device, pace->launch, seconds, error);
    }
    if (pace->first < pace->groups) {
        set_count(pace, PIECE_SECONDS, before > SIZE_MAX / GROWTH ? SIZE_MAX : before * GROWTH);
    }
    return CA_OK;
}
