/* SPDX-License-Identifier: MIT
 *
 * NVIDIA's binaries of programs, which are the text of PTX.
 */
#ifndef CLATTN_OPENCL_PTX_H
#define CLATTN_OPENCL_PTX_H

#include "base/strbuf.h"

/* Turn PTX of `size` bytes for compute capability 9.0 into PTX for 9.0a, and append the result. The driver
   builds OpenCL C for 9.0 only. So kernels write each instruction of 9.0a as a comment, behind a mark
   (kernels/support/warp_group.clh). This function removes the marks and changes the target. */
void ca_ptx_retarget(const char *ptx, size_t size, ca_strbuf *retargeted);

#endif
