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

/* Runs a request for the device in another process. Does nothing if the driver is known, or if
 * error->apart is NULL. clattn/_host/apart.py reads the request, which is one of these:
 *
 *     open                                        make the device ready
 *     attention WORD DTYPE VALUE_DTYPE E EV       try the variant WORD: see attention/trial.h
 *     gradients WORD DTYPE VALUE_DTYPE E EV       the same of its kernel for gradients
 *     diagonal WIDTH                              copy and fill elements of WIDTH bytes
 *     pages CODES DTYPE                           write elements of DTYPE to pages, as CA_CODES_…
 *
 * CA_OK if the other process did not end early, whether its results were right or not.
 * CA_ERROR_KERNEL, with the reason, if the process ended early or hung. Both are kept on disk for the
 * driver, the request and the program of `spec`. CA_ERROR_STOPPED if the handler of a signal raised an
 * exception. The calling thread holds no lock. */
ca_status ca_apart_try(ca_device *device, const ca_kernel_spec *spec, const char *request,
                       ca_error *error);

#endif
