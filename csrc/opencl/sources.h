/* SPDX-License-Identifier: MIT
 *
 * The kernels' texts, embedded at build time by cmake/embed_kernels.py.
 */
#ifndef CLATTN_OPENCL_SOURCES_H
#define CLATTN_OPENCL_SOURCES_H

#include <stddef.h>

typedef struct {
    const char *name; /* attention_cpu is kernels/attention/cpu.cl */
    const unsigned char *bytes;
    size_t size;
} ca_kernel_source;

extern const ca_kernel_source ca_kernel_sources[];
extern const size_t ca_kernel_source_count;

#endif
