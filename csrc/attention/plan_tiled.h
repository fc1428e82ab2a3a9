/* SPDX-License-Identifier: MIT
 *
 * How a work-group of attention/tiled.cl is arranged, and one of attention/tiled_backward.cl.
 */
#ifndef CLATTN_ATTENTION_PLAN_TILED_H
#define CLATTN_ATTENTION_PLAN_TILED_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/plan.h"
#include "opencl/info.h" /* ca_device_info */

/* E and Ev are at most so large. */
#define CA_TILING_HEAD 512

/* Kernels count rows and keys in an int. */
#define CA_TILING_LENGTH (INT64_C(1) << 28)

/* With more local memory, some GPUs have room for only one work-group at a time; on others a static array may
   not be larger. */
#define CA_TILING_MEMORY (48 << 10)

/* A work-item has few registers if it has fewer. */
#define CA_TILING_REGISTERS 256

/* Local memory holds at most so many elements of a query or key at a time, and the values of at most so many
   keys, unless a knob says otherwise. */
#define CA_TILING_PASS 64
#define CA_TILING_KEYS 32

/* The macros of the kernels. */
typedef struct {
    int64_t TX;
    int64_t TY;
    int64_t MI;
    int64_t NJ;
    int64_t NC; /* columns of a result of a work-item */
    int64_t EC;
    int64_t KC;
} ca_tiling;

/* Returns the columns of a work-item, rounded up so that they are loaded by twos or fours. */
int64_t ca_tiling_columns(const ca_tiling *t, int64_t columns);

/* Choose the most rows of values, then the fewest passes over a head, that fit `available` bytes: KC and EC, at
   most those of the tiling. Passes that leave much of the last one empty do not count. False if none fits. */
bool ca_tiling_fit(ca_tiling *t, int64_t E, int64_t real, int64_t available);

/* Define its macros, and SUB_GROUP. */
void ca_tiling_define(const ca_tiling *t, const ca_device_info *info, ca_kernel_spec *spec);

#endif
