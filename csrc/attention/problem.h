/* SPDX-License-Identifier: MIT
 *
 * The attention problem that every front door fills in, and the one place that plans
 * and launches it. Nothing here knows a specification's name.
 */
#ifndef CLATTN_OP_ATTENTION_H
#define CLATTN_OP_ATTENTION_H

#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h"
#include "base/variant.h"  /* ca_variant */
#include "opencl/info.h"   /* ca_device */
#include "opencl/limits.h" /* ca_limits */

/* An unbounded side of the band of keys. */
#define CA_BAND_UNBOUNDED INT64_MAX

typedef enum {
    CA_ATTENTION_QUERY,         /* (…, L, E) */
    CA_ATTENTION_KEY,           /* (…, S, E) */
    CA_ATTENTION_VALUE,         /* (…, S, Ev), of any float dtype */
    CA_ATTENTION_PAST_KEY,      /* (…, P, E), of key's dtype */
    CA_ATTENTION_PAST_VALUE,    /* (…, P, Ev), of value's dtype */
    CA_ATTENTION_INPUT_BIAS,    /* (…, E + E + Ev), contiguous in the last dimension */
    CA_ATTENTION_MASK,          /* (…, L, M), M <= T, of any dtype */
    CA_ATTENTION_BIAS,          /* (…, L, T) */
    CA_ATTENTION_KEY_COUNTS,    /* (…) int64, 0 … T */
    CA_ATTENTION_OUTPUT,        /* (…, L, Ev); without keys all its extent is filled */
    CA_ATTENTION_LSE,           /* (…, L), likewise; of the type of the arithmetic */
    CA_ATTENTION_PRESENT_KEY,   /* (…, T, E), of key's dtype */
    CA_ATTENTION_PRESENT_VALUE, /* (…, T, Ev), of value's dtype */
    CA_ATTENTION_SCORES,        /* (…, L, T) */
    CA_ATTENTION_TENSORS,
} ca_attention_tensor;

/* What to write to CA_ATTENTION_SCORES. */
typedef enum {
    CA_SCORES_SCALED,   /* scale * query @ key.T */
    CA_SCORES_STEP_ONE, /* after the softcap (the mask, with mask_before_softcap) */
    CA_SCORES_STEP_TWO, /* after both; -inf where a key is excluded */
    CA_SCORES_WEIGHTS,  /* after the softmax; zeros in an empty row */
} ca_scores_stage;

/* The keys are the past ones followed by the new ones: T = P + S. Tensors have one
   leading shape of n sizes, output's, which they may broadcast with stride 0 (the
   present ones only in its last dimension: query heads that share them). Rows and keys
   that a mask or bias broadcasts have stride 0 too, and their full size. The absent
   ones (data NULL) have dtype float32 and are not used. query, key, input_bias, bias,
   output and scores share one float dtype. Kernels trust this: the front door checks
   it.

       score[i, j] = scale * (query[i] + input_bias) . (key[j] + input_bias)
       score       = softcap * tanh(score / softcap)
       score       = score + mask[i, j] + bias[i, j]
       output[i]   = sum_j softmax_j(score[i, :])[j] * (value[j] + input_bias)

   The input bias is not added to past keys and values. */
typedef struct {
    ca_tensor tensors[CA_ATTENTION_TENSORS];
    /* False: mask tells which keys are attended to (not 0), and the others get `filter`
       added; -inf excludes. True: its values are added. Keys from M on are excluded. */
    bool mask_is_added;
    double filter;
    /* Row i attends key j only where -below <= j - i <= above; a bound may be negative,
       an unbounded side is CA_BAND_UNBOUNDED. Keys from key_counts on are excluded;
       where the band follows them, they are added to j's bounds. */
    int64_t below;
    int64_t above;
    bool band_follows_counts;
    double scale;
    double softcap; /* 0: none */
    /* The softcap comes after the mask: an excluded key has the score -softcap. */
    bool mask_before_softcap;
    /* Weights are dropped with this probability, by Philox 4x32-10 of seed, row (its
       index in the leading shape and L) and key; the others are scaled up. */
    double dropout;
    uint64_t seed;
    bool in_float64; /* compute in float64 whatever the dtypes are */
    ca_scores_stage stage;
    ca_variant variant;
    ca_limits limits;
    const char *call; /* the function it is done for */
} ca_attention;

/* A problem with no tensors and no options: full band, scale 1. */
void ca_attention_init(ca_attention *attention);

/* True where the answer needs no kernel: nothing to write, or no keys at all. */
bool ca_attention_is_trivial(const ca_attention *attention);

/* Write a trivial answer: zeros, and -inf for the log-sum-exp. */
ca_status ca_attention_fill(const ca_attention *attention, ca_error *error);

/* Plan, launch and wait, but for results that a device holds (ca_launch_run).
   CA_ERROR_VALUE where the variant asked for cannot run this problem on this device, or
   it lacks what the limits ask for. */
ca_status ca_attention_run(ca_device *device, const ca_attention *attention,
                           ca_error *error);

#endif
