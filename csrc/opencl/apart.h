/* SPDX-License-Identifier: MIT
 *
 * Trials in another process. Some drivers end the process by code that others compile, so what a
 * driver has not done before is done there first.
 */
#ifndef CLATTN_OPENCL_APART_H
#define CLATTN_OPENCL_APART_H

#include "base/status.h"
#include "opencl/info.h"
#include "opencl/spec.h"

/* Lets another process do what the request says with the device, unless the driver is known, or the
 * caller has no other process (error->apart). clattn/_apart.py reads requests:
 *
 *     open                                        make the device ready
 *     attention WORD DTYPE VALUE_DTYPE E EV       try the variant WORD: see attention/trial.h
 *     diagonal WIDTH                              copy and fill elements of WIDTH bytes
 *
 * CA_OK if that process has lived, whatever came out there. CA_ERROR_KERNEL, with the reason, if it
 * has not. This is kept on disk, for the driver, the request and the program of `spec`.
 * CA_ERROR_STOPPED after a signal whose handler raises. The calling thread holds no lock. */
ca_status ca_apart_try(ca_device *device, const ca_kernel_spec *spec, const char *request,
                       ca_error *error);

#endif
