/* SPDX-License-Identifier: MIT
 *
 * The devices of this machine, for the rooms above. A ca_runtime is made at the first call
 * that needs a device and lives until the module goes; its devices live as long.
 */
#ifndef CLATTN_OPENCL_RUNTIME_H
#define CLATTN_OPENCL_RUNTIME_H

#include "base/status.h"
#include "base/tensor.h" /* ca_extent */
#include "opencl/info.h"
#include "opencl/spec.h"

typedef struct ca_runtime ca_runtime;

/* Open the loader (ca_cl_open's arguments), list the devices of all platforms, and sort
   them: by type as in ca_device_type, on CPUs those with CA_MEMORY_SVM first, else in the
   loader's order. No context is made yet.
   `cache_folder` (copied; NULL: no disk cache) is where built programs are kept.
   `memory_override` is "svm", "host" or "copy" (NULL or "": the best the device has); a
   device that lacks the mode cannot be used.
   `longest`: a launch that would take more seconds is refused.
   `trusts_drivers`: every driver counts as known (opencl/apart.h).
   CA_ERROR_DEVICE when there is no loader, no platform or no device. */
ca_status ca_runtime_open(const char *const *preload, const char *const *candidates,
                          const char *cache_folder, const char *memory_override, double longest,
                          bool trusts_drivers, ca_runtime **runtime, ca_error *error);

void ca_runtime_close(ca_runtime *runtime); /* NULL is fine */

/* CA_ERROR_DEVICE in a child forked after the runtime was opened. The threads of its
   drivers are gone, so only the accessors below may be called there. */
ca_status ca_runtime_check_fork(const ca_runtime *runtime, ca_error *error);

/* The loader, for ca_library_symbol. */
void *ca_runtime_loader(const ca_runtime *runtime);

int ca_runtime_device_count(const ca_runtime *runtime);

/* The device of that index. Devices of adopted queues follow those of the list, in the order in
   which they came; NULL follows the last. */
ca_device *ca_runtime_device(const ca_runtime *runtime, int index);

/* The device that runs its calls in a queue of another library, a cl_command_queue, and in the
   queue's context; the same one each time. The device reaches memory by copies and buffers, and
   keeps queue and context until the runtime is closed. CA_ERROR_VALUE if the queue is out of order,
   or its device is none of the list; CA_ERROR_DEVICE if the device is unusable. */
ca_status ca_runtime_adopt(ca_runtime *runtime, void *queue, ca_device **device, ca_error *error);

/* True if the device runs its calls in a queue of another library. */
bool ca_device_is_adopted(const ca_device *device);

/* The first usable device, prepared. CA_ERROR_DEVICE with each device's reason when none is
   usable. */
ca_status ca_runtime_default_device(ca_runtime *runtime, ca_device **device, ca_error *error);

/* The first usable device that `words` name, prepared: opencl/words.h. CA_ERROR_VALUE naming
   `what`, the words and all devices when nothing matches, or a name fits several platforms;
   CA_ERROR_DEVICE with the reasons when no match is usable. */
ca_status ca_runtime_find_device(ca_runtime *runtime, const char *words, const char *what,
                                 ca_device **device, ca_error *error);

const ca_device_info *ca_device_get_info(const ca_device *device);

/* True if one of the extents is larger than a buffer of the device may be. */
bool ca_exceeds_device(const ca_device_info *info, const ca_extent *extents, int count);

/* Why the device lacks a capability that its driver reports, or NULL. Final when the device is
   prepared. */
const ca_error *ca_device_lacks(const ca_device *device, ca_capability capability);

/* What the room above keeps for a device: bits of what it has tried, and of what was wrong then.
   Thread-safe. */
bool ca_device_was_tried(const ca_device *device, int bit);
void ca_device_set_tried(ca_device *device, int bit, bool is_right);
uint64_t ca_device_wrong(const ca_device *device);

/* True if the kernel is left out. One built with other macros is another kernel. Thread-safe. */
bool ca_device_leaves_out(ca_device *device, const ca_kernel_spec *spec);

/* Leave a kernel out from now on, and make a notice of its name and the reason, once. Without memory
   for that, nothing happens: the kernel will fail again. Thread-safe. */
void ca_device_leave_out(ca_device *device, const ca_kernel_spec *spec, const char *reason);

/* Take one of the device's notices, to be freed. NULL: there is none. Thread-safe. */
char *ca_device_take_notice(ca_device *device);

#endif
