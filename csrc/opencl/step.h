/* SPDX-License-Identifier: MIT
 *
 * What a launch consists of.
 */
#ifndef CLATTN_OPENCL_STEP_H
#define CLATTN_OPENCL_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "opencl/marks.h" /* ca_mark */
#include "opencl/span.h"
#include "opencl/spec.h" /* ca_kernel */

#define CA_MAX_STEPS 8

/* One kernel. Its arguments are spans of the launch, then a params struct by value. The range has one dimension. A step
   with work may run in pieces: its params begin with an int64, the first work-group of a piece, which is 0 here. */
typedef struct {
    ca_kernel *kernel;
    const void *params;
    size_t params_size;
    size_t global_size; /* work-items, a multiple of local_size */
    size_t local_size;
    double work;  /* operations, or bytes; 0: little, or nobody knows */
    bool at_most; /* `work` is an upper bound: the time of the step says nothing about its speed */
    /* Which spans are the arguments; NULL: all, in their order. */
    const uint8_t *arguments;
    int narguments;
} ca_step;

/* Kernels that run one after the other on the same memory. */
typedef struct {
    const ca_span *spans;
    int nspans;
    ca_step steps[CA_MAX_STEPS];
    int nsteps;
    bool last_if_left;   /* the last step runs only if the launch is left pending */
    bool adds;           /* a step adds to what stands in a result: twice would be wrong */
    bool small;          /* microseconds of work: waking other threads would take as long */
    const char *call;    /* the function that asks for it, for messages */
    const char *sizes;   /* of its arguments, for a message; NULL: none */
    const ca_mark *mark; /* of the call; NULL: its kernels do not look at marks */
    bool *left;          /* NULL, or becomes true if the launch is left pending, else false */
} ca_launch;

#endif
