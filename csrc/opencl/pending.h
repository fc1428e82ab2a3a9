/* SPDX-License-Identifier: MIT
 *
 * Launches that were enqueued and not waited for. Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_PENDING_H
#define CLATTN_OPENCL_PENDING_H

#include <stdbool.h>
#include <stdint.h>

#include "opencl/device.h"

/* A launch that takes longer is long: it runs in pieces, and is waited for. */
#define CA_LONG_SECONDS 0.1

/* ---- without the device's lock ---- */

/* Wait until there is room for another call. */
void ca_pending_make_room(ca_device *device);

/* Wait for the oldest call. False if there is none. */
bool ca_pending_wait_for_oldest(ca_device *device);

/* Wait until the calls take at most CA_LONG_SECONDS more. CA_ERROR_STOPPED if the caller stops that
   (ca_error.stops); so do the next two. */
ca_status ca_pending_settle(ca_device *device, ca_error *error);

/* Wait for all calls. Their failures are kept for ca_pending_check. */
ca_status ca_pending_drain(ca_device *device, ca_error *error);

/* Wait for the call of that ticket, then report as ca_pending_check does. */
ca_status ca_pending_wait(ca_device *device, uint64_t ticket, ca_error *error);

/* Report the first failure since the last report, of any call that is done. */
ca_status ca_pending_check(ca_device *device, ca_error *error);

/* CL_COMPLETE; a larger number while the command is under way; a smaller one, an error. */
cl_int ca_pending_status(const ca_device *device, cl_event event);

/* Describe the failure of a call that was waited for with that code. */
ca_status ca_pending_failure(const ca_device *device, const ca_pending_call *call, cl_int code,
                             ca_error *error);

/* ---- under the device's lock ---- */

/* Add a call and take its event over. Returns the call's ticket, which is above 0. */
uint64_t ca_pending_add(ca_device *device, const ca_pending_call *call);

/* True if no call is left. */
bool ca_pending_is_empty(ca_device *device);

/* True if the call of that ticket is done. Ticket 0 stands for no call. */
bool ca_pending_is_done(ca_device *device, uint64_t ticket);

#endif
