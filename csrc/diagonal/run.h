/* SPDX-License-Identifier: MIT
 *
 * Run a diagonal-matrix problem.
 */
#ifndef CLATTN_DIAGONAL_RUN_H
#define CLATTN_DIAGONAL_RUN_H

#include "base/platform.h" /* ca_pages */
#include "base/status.h"
#include "diagonal/problem.h"
#include "opencl/forced.h" /* ca_forced */
#include "opencl/info.h"   /* ca_device */

/* True if elements lie side by side along the rows or the columns of each matrix. */
bool ca_diagonal_has_lines(const ca_tensor *output);

/* True if kernels can write to `output`, any tensor, on this device. False if rows and
   columns are both strided, if elements share memory, or if the device would have to
   copy other elements that lie between. */
bool ca_diagonal_can_write(const ca_device_info *info, const ca_tensor *output);

/* Returns the kind of memory for a new output of `bytes` bytes: zero pages where the
   problem has zeros, which kernels can then skip. `diagonal` needs no output yet. */
ca_pages ca_diagonal_choose_pages(const ca_device_info *info, const ca_diagonal *diagonal,
                                  int64_t bytes);

/* Plans, launches, and waits as ca_launch_run does. A problem that writes nothing launches
   nothing. */
ca_status ca_diagonal_run(ca_device *device, const ca_forced *forced, const ca_diagonal *diagonal,
                          ca_error *error);

#endif
