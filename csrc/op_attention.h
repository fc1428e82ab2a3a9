/* SPDX-License-Identifier: MIT
 *
 * The attention problem that every front door fills in, and the one place that plans
 * and launches it. Nothing here knows a specification's name.
 */
#ifndef CLATTN_OP_ATTENTION_H
#define CLATTN_OP_ATTENTION_H

#include <stdint.h>

#include "cl_device.h" /* ca_device */
#include "status.h"
#include "tensor.h"

/* An unbounded side of the band of keys. */
#define CA_BAND_UNBOUNDED INT64_MAX

typedef enum {
    CA_VARIANT_ANY, /* the fastest that can run the problem on the device */
    CA_VARIANT_REFERENCE,
    CA_VARIANT_CPU,
} ca_variant;

/* All tensors but lse have n + 2 dimensions and one leading shape of n sizes, which
   they may broadcast with stride 0; lse has n + 1. query, key, value and output share
   one float dtype; lse is float64 for float64, else float32. Kernels trust this: the
   front door checks it. */
typedef struct {
    ca_tensor query;  /* (…, L, E) */
    ca_tensor key;    /* (…, S, E) */
    ca_tensor value;  /* (…, S, Ev) */
    ca_tensor mask;   /* (…, L, S) bool or any float; data NULL: no mask */
    ca_tensor output; /* (…, L, Ev); its elements cover its extent without gaps */
    ca_tensor lse;    /* (…, L), likewise; data NULL: not wanted */
    /* Row i attends key j only where -below <= j - i <= above; a bound may be negative,
       an unbounded side is CA_BAND_UNBOUNDED. */
    int64_t below;
    int64_t above;
    double scale;
    double softcap; /* 0: none */
    ca_variant variant;
} ca_attention;

/* True where the answer needs no kernel: nothing to write, or no keys at all. */
bool ca_attention_is_trivial(const ca_attention *attention);

/* Write a trivial answer: zeros, and -inf for the log-sum-exp. */
void ca_attention_fill(const ca_attention *attention);

/* Plan, launch and wait. CA_ERROR_VALUE where the variant asked for cannot run this
   problem on this device. */
ca_status ca_attention_run(ca_device *device, const ca_attention *attention,
                           ca_error *error);

#endif
