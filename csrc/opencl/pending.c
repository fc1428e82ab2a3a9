/* SPDX-License-Identifier: MIT */
#include "opencl/pending.h"

static ca_pending_call *
call_of(ca_pending *pending, uint64_t ticket)
{
    return &pending->calls[ticket % CA_MAX_PENDING];
}

/* Wait for the event. The failure of a call is read from the status of its event: an error here
   means that there was no waiting. */
static cl_int
wait_for_event(const ca_device *device, cl_event event)
{
    cl_int code = device->cl->clWaitForEvents(1, &event);
    return code == CL_SUCCESS ? code : device->cl->clFinish(device->queue);
}

cl_int
ca_pending_status(const ca_device *device, cl_event event)
{
    cl_int code = CL_COMPLETE;
    cl_int asked = device->cl->clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof code,
                                              &code, NULL);
    if (asked != CL_SUCCESS) { /* a kernel may be running: its memory must not be given away */
        code = wait_for_event(device, event);
    }
    return code;
}

/* Describe the failure of a call with that code. */
static ca_status
set_failure(const ca_device *device, const ca_pending_call *call, cl_int code, ca_error *error)
{
    const char *name = device->info.name;
    const char *word = ca_cl_error_name(code);
    return ca_error_set(error, CA_ERROR_DEVICE,
                        "%s: kernel '%s' on device '%s' failed with %s (%d)", call->call,
                        call->kernel, name, word, (int)code);
}

ca_status
ca_pending_failure(const ca_device *device, const ca_pending_call *call, cl_int code,
                   ca_error *error)
{
    cl_int own = ca_pending_status(device, call->event); /* `code` may be a general one */
    return set_failure(device, call, own < CL_COMPLETE ? own : code, error);
}

/* Keep the failure, unless an earlier one is kept. */
static void
note_failure(ca_device *device, const ca_pending_call *call, cl_int code)
{
    ca_pending *pending = &device->pending;
    if (!pending->failed) {
        pending->failed = true;
        set_failure(device, call, code, &pending->failure);
    }
}

/* Remove calls that are done, oldest first, and keep the first failure. */
static void
retire(ca_device *device)
{
    ca_pending *pending = &device->pending;
    while (pending->first < pending->next) {
        ca_pending_call *call = call_of(pending, pending->first);
        cl_int code = ca_pending_status(device, call->event);
        if (code > CL_COMPLETE) {
            break;
        }
        if (code < CL_COMPLETE) {
            note_failure(device, call, code);
        }
        device->cl->clReleaseEvent(call->event);
        pending->first++;
    }
}

/* Several threads may each make room for one call before any of them adds its call. */
#define SPARE 16

static cl_int
wait_and_release(const ca_device *device, cl_event event)
{
    cl_int code = wait_for_event(device, event);
    device->cl->clReleaseEvent(event);
    return code;
}

/* Keep the event of a call while the device's lock is not held. If the driver cannot, wait at once,
   under the lock, and set *event to NULL. */
static cl_int
keep_event(const ca_device *device, cl_event *event)
{
    if (device->cl->clRetainEvent(*event) == CL_SUCCESS) {
        return CL_SUCCESS;
    }
    cl_int code = wait_for_event(device, *event);
    *event = NULL;
    return code;
}

/* If there are `count` calls or more, wait for the oldest and return true. */
static bool
wait_above(ca_device *device, uint64_t count)
{
    ca_pending *pending = &device->pending;
    cl_event oldest = NULL;
    ca_mutex_lock(&device->lock);
    retire(device);
    bool waits = pending->next - pending->first >= count;
    if (waits) {
        oldest = call_of(pending, pending->first)->event;
        (void)keep_event(device, &oldest);
    }
    ca_mutex_unlock(&device->lock);
    if (oldest != NULL) {
        (void)wait_and_release(device, oldest);
    }
    return waits;
}

void
ca_pending_make_room(ca_device *device)
{
    (void)wait_above(device, CA_MAX_PENDING - SPARE);
}

bool
ca_pending_wait_for_oldest(ca_device *device)
{
    return wait_above(device, 1);
}

uint64_t
ca_pending_add(ca_device *device, const ca_pending_call *call)
{
    ca_pending *pending = &device->pending;
    if (pending->next == 0) { /* tickets start at 1 */
        pending->first = pending->next = 1;
    }
    if (pending->next - pending->first == CA_MAX_PENDING) { /* added by many threads */
        ca_pending_call *oldest = call_of(pending, pending->first);
        (void)device->cl->clWaitForEvents(1, &oldest->event);
        retire(device);
    }
    if (pending->next - pending->first == CA_MAX_PENDING) {
        /* The oldest call cannot be waited for: the device is lost, and all calls with it. */
        device->cl->clFinish(device->queue);
        for (; pending->first < pending->next; pending->first++) {
            ca_pending_call *lost = call_of(pending, pending->first);
            note_failure(device, lost, CL_DEVICE_NOT_AVAILABLE);
            device->cl->clReleaseEvent(lost->event);
        }
    }
    *call_of(pending, pending->next) = *call;
    return pending->next++;
}

bool
ca_pending_is_empty(ca_device *device)
{
    retire(device);
    return device->pending.first == device->pending.next;
}

bool
ca_pending_is_done(ca_device *device, uint64_t ticket)
{
    if (ticket >= device->pending.first) {
        retire(device);
    }
    return ticket < device->pending.first || ticket == 0;
}

/* Wait for the call of that ticket, and on the way for calls before it, so that the caller can stop
   the waiting in between. Failures are kept. */
static ca_status
wait_for(ca_device *device, uint64_t ticket, ca_error *error)
{
    const ca_pending *pending = &device->pending;
    ca_status status = CA_OK;
    bool last = false;
    while (!last && status == CA_OK) {
        cl_event event = NULL;
        cl_int code = CL_SUCCESS;
        ca_mutex_lock(&device->lock);
        last = ca_pending_is_done(device, ticket);
        if (!last) {
            uint64_t next = pending->first;
            double seconds = call_of(&device->pending, next)->seconds;
            while (next < ticket) {
                seconds += call_of(&device->pending, next + 1)->seconds;
                if (seconds > CA_LONG_SECONDS) {
                    break;
                }
                next++;
            }
            last = next == ticket;
            event = call_of(&device->pending, next)->event;
            code = keep_event(device, &event);
        }
        ca_mutex_unlock(&device->lock);
        if (event != NULL) {
            code = wait_and_release(device, event);
        }
        if (code != CL_SUCCESS) {
            CA_TRY(ca_cl_check(code, "clFinish", device->info.name, error));
        }
        status = last ? CA_OK : ca_error_ask(error);
    }
done:
    return status;
}

ca_status
ca_pending_wait(ca_device *device, uint64_t ticket, ca_error *error)
{
    ca_status status = wait_for(device, ticket, error);
    return status != CA_OK ? status : ca_pending_check(device, error);
}

ca_status
ca_pending_settle(ca_device *device, ca_error *error)
{
    ca_pending *pending = &device->pending;
    ca_mutex_lock(&device->lock);
    uint64_t last = pending->next;
    double seconds = 0;
    while (last > pending->first && seconds <= CA_LONG_SECONDS) {
        seconds += call_of(pending, --last)->seconds;
    }
    ca_mutex_unlock(&device->lock);
    return seconds > CA_LONG_SECONDS ? wait_for(device, last, error) : CA_OK;
}

ca_status
ca_pending_check(ca_device *device, ca_error *error)
{
    ca_pending *pending = &device->pending;
    ca_status status = CA_OK;
    ca_mutex_lock(&device->lock);
    retire(device);
    if (pending->failed) {
        pending->failed = false;
        status = ca_error_set(error, CA_ERROR_DEVICE, "%s", pending->failure.message);
    }
    ca_mutex_unlock(&device->lock);
    return status;
}

ca_status
ca_pending_drain(ca_device *device, ca_error *error)
{
    ca_mutex_lock(&device->lock);
    uint64_t last = device->pending.next;
    ca_mutex_unlock(&device->lock);
    return last != 0 ? wait_for(device, last - 1, error) : CA_OK;
}
