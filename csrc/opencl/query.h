/* SPDX-License-Identifier: MIT
 *
 * Which devices there are and what each can do. Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_QUERY_H
#define CLATTN_OPENCL_QUERY_H

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/loader.h"

/* List the devices of all platforms in the order of preference, without making a context.
   A device that cannot be used is marked so, with the reason. The caller frees *devices,
   which is NULL after a failure. `memory_override` as in ca_runtime_open. */
ca_status ca_query_devices(const ca_cl *cl, const char *memory_override, ca_device **devices,
                           int *count, ca_error *error);

#endif
