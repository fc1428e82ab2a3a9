/* SPDX-License-Identifier: MIT
 *
 * NVIDIA's binaries of programs, which are the text of PTX.
 */
#ifndef CLATTN_OPENCL_PTX_H
#define CLATTN_OPENCL_PTX_H

#include "base/strbuf.h"

/* Append PTX of `size` bytes for compute capability 9.0, turned into PTX for 9.0a. Kernels write instructions
   of 9.0a behind a mark that makes them comments (kernels/support/warp_group.clh), because the driver
   builds OpenCL C for 9.0 only. */
void ca_ptx_retarget(const char *ptx, size_t size, ca_strbuf *retargeted);

#endif
