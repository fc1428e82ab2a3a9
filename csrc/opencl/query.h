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

/* A buffer of another library. A sub-buffer is a part of its parent. */
typedef struct {
    cl_mem whole;  /* the buffer, or its parent */
    size_t bytes;  /* of `whole` */
    size_t offset; /* of the buffer in `whole` */
    bool read_only;
} ca_buffer_info;

/* CA_ERROR_VALUE naming `what` for a buffer of another context than the device's, and for memory
   that is no buffer. */
ca_status ca_query_buffer(const ca_device *device, cl_mem buffer, const char *what,
                          ca_buffer_info *info, ca_error *error);

#endif
