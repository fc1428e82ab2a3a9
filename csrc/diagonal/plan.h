/* SPDX-License-Identifier: MIT
 *
 * How the diagonal kernel runs a problem on a device.
 */
#ifndef CLATTN_DIAGONAL_PLAN_H
#define CLATTN_DIAGONAL_PLAN_H

#include "base/fold.h"
#include "diagonal/problem.h"
#include "kernels/diagonal/params.h"
#include "opencl/forced.h" /* ca_forced */
#include "opencl/info.h"   /* ca_device_info */
#include "opencl/spec.h"   /* ca_kernel_spec */

enum { CA_DIAGONAL_INPUT, CA_DIAGONAL_OUTPUT, CA_DIAGONAL_TENSORS };

/* What becomes of the elements inside the band, or of those outside. */
typedef struct {
    int action;    /* CA_DIAGONAL_FILL, _COPY or _SKIP */
    uint64_t bits; /* of the element to fill with */
} ca_diagonal_region;

/* The two regions of a problem, or of half a problem. */
typedef struct {
    const ca_diagonal *problem; /* a half has the same memory and call */
    const ca_forced *forced;
    ca_tensor tensors[CA_DIAGONAL_TENSORS];
    bool in_place;
    int64_t lower; /* inside: lower <= x - y < upper */
    int64_t upper;
    ca_diagonal_region inside;
    ca_diagonal_region outside;
} ca_diagonal_regions;

typedef struct {
    ca_kernel_spec spec;
    ca_diagonal_params params; /* all but views and sizes of leading dimensions */
    size_t groups;             /* of work-items */
    size_t local_size;
} ca_diagonal_plan;

/* True if elements lie side by side along the tensor's last dimension. */
bool ca_diagonal_has_rows(const ca_tensor *tensor);

/* True if the region, or any region of that action, contains an element. */
bool ca_diagonal_has_inside(const ca_diagonal_regions *regions);
bool ca_diagonal_has_outside(const ca_diagonal_regions *regions);
bool ca_diagonal_has(const ca_diagonal_regions *regions, int action);

/* `dims` are the folded leading dimensions, CA_BATCH_DIMS at most. */
ca_diagonal_plan ca_diagonal_make_plan(const ca_device_info *info,
                                       const ca_diagonal_regions *regions,
                                       const ca_leading_dims *dims);

#endif
