/* SPDX-License-Identifier: MIT
 *
 * The memory behind an argument of a kernel.
 */
#ifndef CLATTN_OPENCL_SPAN_H
#define CLATTN_OPENCL_SPAN_H

#include <stddef.h>

#include "base/tensor.h" /* ca_block */

typedef enum {
    CA_ACCESS_READ,
    CA_ACCESS_WRITE,  /* the kernel writes every byte */
    CA_ACCESS_PASS,   /* a kernel writes every byte, and a kernel behind it reads them */
    CA_ACCESS_UPDATE, /* the kernel writes some bytes and keeps the others */
} ca_access;

/* Memory behind one __global argument. bytes == 0: the argument is NULL. */
typedef struct {
    void *data;
    size_t bytes;
    ca_access access;
    ca_block *block;  /* the storage whose memory this is, as a whole; NULL: host memory */
    const char *name; /* for messages; NULL: nobody has named it */
} ca_span;

/* Spans of a launch, and arguments of a kernel. */
#define CA_MAX_SPANS 32

#endif
