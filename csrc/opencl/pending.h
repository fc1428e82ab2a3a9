/* SPDX-License-Identifier: MIT
 *
 * Calls that were enqueued and not waited for. Only cl_* files include this header.
 */
#ifndef CLATTN_CL_PENDING_H
#define CLATTN_CL_PENDING_H

#include "opencl/internal.h"

/* Without the lock: wait until there is room for a call. */
void ca_pending_make_room(ca_device *device);

/* Under the device's lock: note a call, whose event it takes over. Returns its ticket,
   above 0. */
uint64_t ca_pending_add(ca_device *device, const ca_pending_call *call);

/* Under the device's lock: forget what is done. True where nothing is left. */
bool ca_pending_is_empty(ca_device *device);

/* Under the device's lock: is the call of that ticket done? 0 is no call's. */
bool ca_pending_is_done(ca_device *device, uint64_t ticket);

/* Without the lock: wait for the call of that ticket; a failure is kept. */
void ca_pending_await(ca_device *device, uint64_t ticket);

/* Without the lock: the same. A failure
   since the last time, of any call, is told and forgotten. */
ca_status ca_pending_wait(ca_device *device, uint64_t ticket, ca_error *error);

/* Without the lock: the same for calls that are done already. */
ca_status ca_pending_check(ca_device *device, ca_error *error);

/* The failure of a call that was waited for with that code. */
ca_status ca_pending_failure(const ca_device *device, const ca_pending_call *call,
                             cl_int code, ca_error *error);

/* Without the lock: wait for the oldest call; false where there is none. */
bool ca_pending_wait_for_oldest(ca_device *device);

/* Without the lock: wait for all calls; failures are kept. */
void ca_pending_drain(ca_device *device);

#endif
