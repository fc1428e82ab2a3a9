/* SPDX-License-Identifier: MIT
 *
 * What the kernels that measure a device's limits are told, one text for host C and
 * OpenCL C.
 */
#ifndef CLATTN_PEAK_PARAMS_H
#define CLATTN_PEAK_PARAMS_H

#include "kernels/support/view_params.h" /* ca_int64 */

/* peak/fma.cl: CA_PEAK_CHAINS vectors, each of which depends on nothing but itself. As
   many as registers hold beside two operands. */
#define CA_PEAK_CHAINS 12

/* Kernel arguments of both, in this order:
 *     input   __global const float pointer; peak_fma: NULL
 *     output  __global float pointer; peak_fma: an element for each work-item,
 *             peak_read: one for each work-group
 *     params  ca_peak_params by value
 */
typedef struct {
    ca_int64 steps; /* peak_fma: of each chain */
    ca_int64 count; /* peak_read: elements of the input */
    ca_int64 tile;  /* peak_read: elements that a work-group reads */
    float factor;   /* peak_fma: data, so that no compiler foresees the result */
    float addend;
} ca_peak_params;

#define CA_PEAK_PARAMS_SIZE 32

#endif
