/* SPDX-License-Identifier: MIT */
#include "opencl/launch.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "opencl/device.h"
#include "opencl/guards.h"
#include "opencl/launched.h"
#include "opencl/memory.h"
#include "opencl/pace.h"
#include "opencl/pending.h"
#include "opencl/storage.h"

/* A launch that is not waited for copies host arrays up to this size first. For larger
   ones waiting costs less, where the device can read them where they lie. */
#define COPIED_BYTES ((size_t)1 << 20)

/* A host that wakes up late finds two pieces done. The second seems to have taken no time, so shorter
   times are added to the next. */
#define TIMED_SECONDS 5e-3

/* The host looks at a long piece, and at signals, this often. */
#define WAITING_MILLISECONDS 5

/* The calling thread polls a small launch for so long at most. A small launch takes less time. */
#define POLLED_SECONDS 100e-6

/* As ca_cl_check; the message also names the kernel. */
static ca_status
check_call(cl_int code, const char *call, const ca_device *device, const ca_kernel *kernel,
           ca_error *error)
{
    char text[128];
    if (code == CL_SUCCESS) { /* the usual case writes no text */
        return CA_OK;
    }
    (void)snprintf(text, sizeof text, "%s for kernel '%s'", call, kernel->spec.name);
    return ca_cl_check_kernel(code, text, device->info.name, error);
}

static int
count_arguments(const ca_launch *launch, const ca_step *step)
{
    return step->arguments != NULL ? step->narguments : launch->nspans;
}

/* ---- checks ---- */

/* Refuse a step that exceeds the device's limits. */
static ca_status
check_step(const ca_device *device, const ca_step *step, int narguments, ca_error *error)
{
    const ca_device_info *info = &device->info;
    const char *name = step->kernel->spec.name;
    size_t most = step->kernel->limits.work_group;
    if (narguments < 0 || narguments > CA_MAX_SPANS) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "kernel '%s' is given %d arrays; at most %d can be bound", name,
                            narguments, CA_MAX_SPANS);
    }
    if (step->params_size > CA_PARAMETER_BYTES) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "kernel '%s' is given params of %zu bytes; at most %d can be passed",
                            name, step->params_size, CA_PARAMETER_BYTES);
    }
    size_t parameters = step->params_size + (size_t)narguments * sizeof(void *);
    if (parameters > (uint64_t)info->max_parameter_size) {
        return ca_error_set(
            error, CA_ERROR_DEVICE,
            "kernel '%s' is given %zu bytes of arguments; device '%s' takes at most %" PRId64, name,
            parameters, info->name, info->max_parameter_size);
    }
    if (step->kernel->limits.local_memory > (uint64_t)info->local_memory) {
        return ca_error_set(error, CA_ERROR_KERNEL,
                            "kernel '%s' takes %" PRIu64 " bytes of local memory; device '%s' has "
                            "%" PRId64,
                            name, step->kernel->limits.local_memory, info->name,
                            info->local_memory);
    }
    if (step->local_size == 0 || step->local_size > most || step->global_size == 0 ||
        step->global_size % step->local_size != 0) {
        return ca_error_set(error, CA_ERROR_KERNEL,
                            "kernel '%s' is given %zu work-items in groups of %zu; device '%s' "
                            "takes whole groups of at most %zu",
                            name, step->global_size, step->local_size, info->name, most);
    }
    return CA_OK;
}

static ca_status
check_steps(const ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = CA_OK;
    for (int i = 0; i < launch->nsteps && status == CA_OK; i++) {
        const ca_step *step = &launch->steps[i];
        status = check_step(device, step, count_arguments(launch, step), error);
    }
    return status;
}

/* True if the launch may be left pending: it writes no host memory, and uses no storage
   whose address the host was given. */
static bool
can_be_left(const ca_device *device, const ca_launch *launch)
{
    size_t copied = 0;
    for (int i = 0; i < launch->nspans; i++) {
        const ca_span *span = &launch->spans[i];
        bool stored = span->block != NULL;
        if (span->bytes != 0 && (stored ? ca_storage_is_shared(ca_storage_of(span->block))
                                        : span->access != CA_ACCESS_READ)) {
            return false;
        }
        copied += stored ? 0 : span->bytes;
    }
    return copied <= COPIED_BYTES || !device->storage_is_host;
}

/* True if the calling thread stays awake until the launch is done: it runs a small launch itself, or
   polls it. No earlier call may be pending. The local queue would overtake such a call, and polling
   would have to wait for it. */
static bool
stays_awake(ca_device *device, const ca_launch *launch)
{
    if (!launch->small || (device->local_queue == NULL && !device->info.wakes_late)) {
        return false;
    }
    ca_mutex_lock(&device->lock);
    bool empty = ca_pending_is_empty(device);
    ca_mutex_unlock(&device->lock);
    return empty;
}

/* How a launch is run. */
typedef struct {
    bool awake;   /* the calling thread runs it, or polls it */
    bool is_long; /* it runs in pieces */
    bool leave;   /* it is left pending */
} manner;

static manner
choose_manner(ca_device *device, const ca_launch *launch)
{
    manner chosen = {.awake = stays_awake(device, launch)};
    chosen.is_long = ca_pace_seconds(device, launch) > CA_LONG_SECONDS;
    chosen.leave = !chosen.awake && !chosen.is_long && can_be_left(device, launch);
    return chosen;
}

bool
ca_launch_is_left(ca_device *device, const ca_launch *launch)
{
    return can_be_left(device, launch) && choose_manner(device, launch).leave;
}

/* ---- enqueueing, under the device's lock ---- */

/* Enqueue one kernel. *event, if wanted, is the kernel's. */
static ca_status
enqueue_step(ca_device *device, cl_command_queue queue, const ca_launch *launch,
             const ca_step *step, const ca_binding *bindings, cl_event *event, ca_error *error)
{
    const ca_cl *cl = device->cl;
    ca_kernel *kernel = step->kernel;
    ca_status status = CA_OK;
    int narguments = count_arguments(launch, step);
    CA_TRY(ca_memory_set(device, kernel, bindings, step->arguments, narguments, error));
    cl_int code = CL_SUCCESS;
    if (step->params_size > 0) {
        code = cl->clSetKernelArg(kernel->handle, (cl_uint)narguments, step->params_size,
                                  step->params);
        CA_TRY(check_call(code, "clSetKernelArg", device, kernel, error));
    }
    code = cl->clEnqueueNDRangeKernel(queue, kernel->handle, 1, NULL, &step->global_size,
                                      &step->local_size, 0, NULL, event);
    CA_TRY(check_call(code, "clEnqueueNDRangeKernel", device, kernel, error));
done:
    return status;
}

/* Enqueue the kernels. The queues are in order, so *event, if wanted, is the last kernel's. */
static ca_status
enqueue_steps(ca_device *device, cl_command_queue queue, const ca_launch *launch,
              const ca_binding *bindings, cl_event *event, ca_error *error)
{
    ca_status status = CA_OK;
    for (int i = 0; i < launch->nsteps && status == CA_OK; i++) {
        bool last = i == launch->nsteps - 1;
        status = enqueue_step(device, queue, launch, &launch->steps[i], bindings,
                              last ? event : NULL, error);
    }
    if (status == CA_OK) {
        ca_launched_add(device, launch);
    }
    return status;
}

/* Returns the last kernel that every launch like this one has. */
static const ca_kernel *
last_kernel(const ca_launch *launch)
{
    return launch->steps[launch->nsteps - 1 - launch->last_if_left].kernel;
}

/* Enqueue the steps, then the copies of results. *event is the last command's. After a failure
   some commands may be under way. */
static ca_status
enqueue(ca_device *device, const ca_launch *launch, const ca_binding *bindings, cl_event *event,
        ca_error *error)
{
    ca_status status = CA_OK;
    bool fetches = ca_memory_fetches(device, bindings, launch->nspans);
    CA_TRY(enqueue_steps(device, device->queue, launch, bindings, fetches ? NULL : event, error));
    if (fetches) {
        CA_TRY(ca_memory_fetch(device, bindings, launch->nspans, event, error));
    }
    CA_TRY(check_call(device->cl->clFlush(device->queue), "clFlush", device, last_kernel(launch),
                      error));
done:
    return status;
}

/* ---- four ways to run a launch ---- */

static ca_pending_call
as_pending(const ca_device *device, const ca_launch *launch, cl_event event)
{
    return (ca_pending_call){event, launch->call, last_kernel(launch)->spec.name,
                             ca_pace_seconds(device, launch)};
}

/* Poll a small launch. A thread that sleeps may take longer to wake up than the device takes for the
   launch. Larger launches are not polled, because their kernels need all processors. */
static void
poll(const ca_device *device, cl_event event)
{
    double end = ca_seconds() + POLLED_SECONDS;
    while (ca_pending_status(device, event) > CL_COMPLETE && ca_seconds() < end) {
        ca_yield();
    }
}

/* Wait for the launch. Reports failures of calls before it, too. */
static ca_status
wait_for(ca_device *device, const ca_launch *launch, cl_event event, ca_error *error)
{
    const ca_pending_call call = as_pending(device, launch, event);
    if (launch->small && device->info.wakes_late) {
        poll(device, event);
    }
    cl_int code = device->cl->clWaitForEvents(1, &event);
    if (code != CL_SUCCESS) {
        device->cl->clFinish(device->queue);
    }
    ca_status status = ca_pending_check(device, error);
    return status == CA_OK && code != CL_SUCCESS ? ca_pending_failure(device, &call, code, error)
                                                 : status;
}

/* Send what the device needs, enqueue, wait; results of the host are there on return. */
static ca_status
launch_and_wait(ca_device *device, const ca_launch *launch, const ca_binding *bindings,
                ca_error *error)
{
    cl_event event = NULL;
    double start = ca_seconds();
    ca_status status = ca_memory_send(device, bindings, launch->nspans, error);
    if (status == CA_OK) {
        ca_mutex_lock(&device->lock);
        status = enqueue(device, launch, bindings, &event, error);
        ca_mutex_unlock(&device->lock);
    }
    if (status == CA_OK) {
        status = wait_for(device, launch, event, error);
        if (launch->nsteps == 1) {
            ca_pace_correct(&launch->steps[0], ca_seconds() - start);
        }
        if (status == CA_OK) {
            status = ca_memory_collect(device, bindings, launch->nspans, error);
        }
    } else {
        device->cl->clFinish(device->queue);
    }
    if (event != NULL) {
        device->cl->clReleaseEvent(event);
    }
    return status;
}

/* Enqueue one piece of a step. */
static ca_status
enqueue_piece(ca_device *device, const ca_launch *launch, const ca_pace *pace,
              const ca_binding *bindings, cl_event *event, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t params[CA_PARAMETER_BYTES / sizeof(int64_t)];
    ca_step piece = *pace->step;
    memcpy(params, piece.params, piece.params_size);
    if (piece.work > 0) {
        params[0] = (int64_t)pace->first;
        piece.global_size = pace->count * piece.local_size;
    }
    piece.params = params;
    ca_mutex_lock(&device->lock);
    CA_TRY(enqueue_step(device, device->queue, launch, &piece, bindings, event, error));
    CA_TRY(check_call(device->cl->clFlush(device->queue), "clFlush", device, piece.kernel, error));
done:
    ca_mutex_unlock(&device->lock);
    return status;
}

/* Wait for a piece. While a single work-group takes long, the caller may stop the call. */
static ca_status
wait_for_piece(ca_device *device, const ca_launch *launch, cl_event event, double seconds,
               ca_error *error)
{
    ca_status status = CA_OK;
    while (seconds > 2 * CA_LONG_SECONDS && status == CA_OK &&
           ca_pending_status(device, event) > CL_COMPLETE) {
        ca_sleep(WAITING_MILLISECONDS);
        status = ca_error_ask(error);
    }
    return status != CA_OK ? status : wait_for(device, launch, event, error);
}

/* Run a step in pieces. One piece waits behind the piece that runs, so that the device is never
   idle. After an error none is under way. */
static ca_status
run_pieces(ca_device *device, const ca_launch *launch, const ca_step *step,
           const ca_binding *bindings, ca_error *error)
{
    ca_status status = CA_OK;
    cl_event events[2] = {NULL, NULL}; /* of the piece that runs, and of the one behind */
    size_t counts[2] = {0, 0};
    double seconds[2] = {0, 0};
    double before = ca_seconds(); /* since then so many groups have run */
    size_t timed = 0;
    ca_pace pace = ca_pace_begin(device, launch, step);
    while (pace.count > 0 || events[0] != NULL) {
        if (pace.count > 0) {
            counts[1] = pace.count;
            seconds[1] = ca_pace_piece_seconds(&pace);
            CA_TRY(enqueue_piece(device, launch, &pace, bindings, &events[1], error));
        }
        if (events[0] != NULL) {
            CA_TRY(wait_for_piece(device, launch, events[0], seconds[0], error));
            double now = ca_seconds();
            timed += counts[0];
            if (now - before > TIMED_SECONDS) {
                ca_pace_note(step, timed, now - before);
                before = now;
                timed = 0;
            }
            device->cl->clReleaseEvent(events[0]);
        }
        events[0] = events[1];
        events[1] = NULL;
        counts[0] = counts[1];
        seconds[0] = seconds[1];
        CA_TRY(ca_error_ask(error));
        CA_TRY(ca_pace_next(&pace, error));
    }
    /* No piece was long enough to be timed, so the host times the whole step. Without this time, a fast
       device would run every call in short pieces, which suit the guessed speed. */
    if (timed == pace.groups) {
        ca_pace_note(step, timed, ca_seconds() - before);
    }
done:
    if (status == CA_ERROR_STOPPED && launch->mark != NULL) {
        ca_mark_stop(device, launch->mark);
    }
    for (int i = 0; i < 2; i++) {
        if (events[i] != NULL) {
            (void)device->cl->clWaitForEvents(1, &events[i]);
            device->cl->clReleaseEvent(events[i]);
        }
    }
    return status;
}

/* As launch_and_wait, in pieces. */
static ca_status
launch_in_pieces(ca_device *device, const ca_launch *launch, const ca_binding *bindings,
                 ca_error *error)
{
    ca_status status = CA_OK;
    cl_event event = NULL;
    CA_TRY(ca_memory_send(device, bindings, launch->nspans, error));
    for (int i = 0; i < launch->nsteps; i++) {
        CA_TRY(run_pieces(device, launch, &launch->steps[i], bindings, error));
    }
    ca_mutex_lock(&device->lock);
    ca_launched_add(device, launch);
    ca_mutex_unlock(&device->lock);
    if (ca_memory_fetches(device, bindings, launch->nspans)) {
        ca_mutex_lock(&device->lock);
        status = ca_memory_fetch(device, bindings, launch->nspans, &event, error);
        ca_mutex_unlock(&device->lock);
        CA_TRY(status);
        CA_TRY(wait_for(device, launch, event, error));
    }
    CA_TRY(ca_memory_collect(device, bindings, launch->nspans, error));
done:
    if (status != CA_OK && status != CA_ERROR_STOPPED) {
        device->cl->clFinish(device->queue);
    }
    if (event != NULL) {
        device->cl->clReleaseEvent(event);
    }
    return status;
}

/* Enqueue, and add the launch to the pending calls, which take the event over. */
static ca_status
launch_and_leave(ca_device *device, const ca_launch *launch, const ca_binding *bindings,
                 ca_error *error)
{
    cl_event event = NULL;
    ca_pending_make_room(device);
    ca_mutex_lock(&device->lock);
    ca_status status = enqueue(device, launch, bindings, &event, error);
    if (status == CA_OK) {
        const ca_pending_call call = as_pending(device, launch, event);
        ca_memory_set_ticket(bindings, launch->nspans, ca_pending_add(device, &call));
    } else {
        device->cl->clFinish(device->queue);
        if (event != NULL) {
            device->cl->clReleaseEvent(event);
        }
    }
    ca_mutex_unlock(&device->lock);
    return status;
}

/* Run the kernels in this thread, under the device's lock. Events of the local queue are complete
   from the start, so there is nothing to wait for, and enqueueing returns the failure. Other
   launches wait for the lock no longer than a wake-up would take. */
static ca_status
launch_here(ca_device *device, const ca_launch *launch, const ca_binding *bindings, ca_error *error)
{
    ca_mutex_lock(&device->lock);
    ca_status status = enqueue_steps(device, device->local_queue, launch, bindings, NULL, error);
    ca_mutex_unlock(&device->lock);
    return status;
}

/* Run the launch in the way that suits it. A launch that is left pending copies host memory
   first. *begun becomes true before a kernel runs. */
static ca_status
launch_once(ca_device *device, const ca_launch *launch, bool *begun, ca_error *error)
{
    ca_binding bindings[CA_MAX_SPANS];
    ca_launch shorter;
    ca_status status = check_steps(device, launch, error);
    if (status != CA_OK) {
        return status;
    }
    const manner chosen = choose_manner(device, launch);
    const bool leave = chosen.leave;
    const bool here = chosen.awake && device->local_queue != NULL;
    if (launch->left != NULL) {
        *launch->left = leave;
    }
    if (launch->last_if_left && !leave) { /* another thread's calls have ended meanwhile */
        shorter = *launch;
        shorter.nsteps--;
        shorter.last_if_left = false;
        launch = &shorter;
    }
    CA_TRY(ca_memory_bind(device, launch->spans, launch->nspans, leave, bindings, error));
    if (!here && !leave) {
        CA_TRY(ca_pending_settle(device, error));
    }
    *begun = true;
    status = here             ? launch_here(device, launch, bindings, error)
             : leave          ? launch_and_leave(device, launch, bindings, error)
             : chosen.is_long ? launch_in_pieces(device, launch, bindings, error)
                              : launch_and_wait(device, launch, bindings, error);
    if (CA_GUARD > 0 && status == CA_OK && !leave) {
        status = ca_memory_check(bindings, launch->nspans, launch->call, error);
    }
done:
    ca_memory_release(device, bindings, launch->nspans);
    return status;
}

ca_status
ca_launch_check(const ca_device *device, const ca_launch *launch, ca_error *error)
{
    return ca_pace_check(device, launch, error);
}

ca_status
ca_launch_run(ca_device *device, const ca_launch *launch, ca_error *error)
{
    ca_status status = ca_device_check_fork(device, error);
    if (status == CA_OK) {
        status = ca_launch_check(device, launch, error);
    }
    bool begun = false;
    if (status == CA_OK) {
        status = launch_once(device, launch, &begun, error);
    }
    const bool once = begun && launch->adds;
    if (status == CA_ERROR_MEMORY && !once) { /* some drivers allocate as late as here */
        ca_error_clear(error);
        ca_pool_empty(device);
        status = launch_once(device, launch, &begun, error);
    }
    return status == CA_ERROR_KERNEL && once ? CA_ERROR_DEVICE : status;
}
