/* SPDX-License-Identifier: MIT
 *
 * One launch of a planned attention problem, with the launch that computes rows again.
 */
#ifndef CLATTN_ATTENTION_LAUNCH_H
#define CLATTN_ATTENTION_LAUNCH_H

#include "attention/plan.h"
#include "attention/problem.h"
#include "base/status.h"
#include "opencl/forced.h"  /* ca_forced */
#include "opencl/info.h"    /* ca_device */
#include "opencl/storage.h" /* ca_storage */

/* Find out whether the device has instructions for bfloat16, if the query has this dtype. Where pairs are
   slower than floats, the function asks for pairs only if a variant is forced. */
ca_status ca_attention_find_instructions(ca_device *device, const ca_forced *forced,
                                         const ca_attention *attention, ca_error *error);

/* Build the plan's kernels and launch them on a prepared device; wait, except for results that the
   device holds (ca_launch_run). CA_ERROR_KERNEL where the driver cannot build, create or enqueue a
   kernel: no result is defined then, and another plan may be launched. *limits become tighter
   where a kernel, once it is built, allows less than the plan asks for. */
ca_status ca_attention_launch(ca_device *device, const ca_attention *attention,
                              const ca_attention_plan *plan, ca_plan_limits *limits,
                              ca_error *error);

/* Launch the kernel of inputs alone, as a whole problem (attention/inputs.h). */
ca_status ca_attention_launch_inputs(ca_device *device, const ca_attention *inputs,
                                     ca_error *error);

/* A kernel of a launch that a caller plans itself. */
typedef struct {
    ca_attention attention;
    ca_attention_plan plan;
    int products; /* of queries and keys, for each score. One of the reference counts CA_REFERENCE_TIMES */
    bool adds;      /* to what stands in its result */
    uint32_t flags; /* of the params, beside those of the call */
    double work;    /* 0: that of its products for each pair of a row and a key */
    bool at_most;   /* as in ca_step */
} ca_launched;

/* Set `products`; the members behind it are zero. */
static inline void
ca_launched_begin(ca_launched *launched, int products)
{
    launched->products = products;
    launched->adds = false;
    launched->flags = 0;
    launched->work = 0;
    launched->at_most = false;
}

/* The reference kernel takes so many times as long as the others. */
#define CA_REFERENCE_TIMES 16

/* Launch kernels one after another on a prepared device, as one launch, and wait. *redoes becomes true if one
   of them asks for results to be computed again. *limits become tighter as in ca_attention_launch. Both may be
   NULL. */
ca_status ca_attention_launch_all(ca_device *device, const ca_launched *steps, int count,
                                  ca_plan_limits *limits, bool *redoes, ca_error *error);

/* Launch the steps of a ragged problem likewise, and the kernel that computes rows of `whole` again. Results that
   the device holds may be left pending. `partial` holds the rows of splits, or is NULL. */
ca_status ca_attention_launch_ragged(ca_device *device, const ca_attention *whole,
                                     const ca_launched *steps, int count, ca_storage *partial,
                                     ca_error *error);

/* As ca_attention_launch. If the kernels allow less than the plan asks for, plan the variant again within their
   limits. */
ca_status ca_attention_launch_within(ca_device *device, const ca_forced *forced,
                                     const ca_attention *attention, const ca_attention_plan *plan,
                                     ca_error *error);

#endif
