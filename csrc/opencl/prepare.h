/* SPDX-License-Identifier: MIT
 *
 * A device becomes ready at its first use.
 */
#ifndef CLATTN_OPENCL_PREPARE_H
#define CLATTN_OPENCL_PREPARE_H

#include "base/status.h"
#include "opencl/info.h"

/* Make the device's context and queues at the first call, and find out whether the device passes
   the probe. The probe kernel runs unless a verdict on disk says that the device passes. Every call
   that uses a device calls this function first. The verdict is final. If a context or memory cannot
   be had, the next call tries again. If the probe fails in one memory mode, the next mode is tried. A
   driver that is not known opens the device in another process first (opencl/apart.h), so the calling
   thread holds no lock. Thread-safe. CA_ERROR_DEVICE if the device is unusable, or in a forked
   child. */
ca_status ca_device_prepare(ca_device *device, ca_error *error);

/* Prepare the device and find out, once, whether kernels/support/bfloat16_pairs.clh runs on
   it. Only then may info->bfloat16_pairs be read. Fails as ca_device_prepare does. */
ca_status ca_device_find_pairs(ca_device *device, ca_error *error);

/* Prepare the device. The first call also finds out whether kernels may use AMX, and stores the answer in
   info->amx. Callers read info->amx only after this call. Fails as ca_device_prepare does. */
ca_status ca_device_find_amx(ca_device *device, ca_error *error);

/* Release all that the device holds. It may be prepared again. */
void ca_device_release(ca_device *device);

#endif
