/* SPDX-License-Identifier: MIT
 *
 * How the diagonal kernel runs a problem on a device.
 */
#ifndef CLATTN_OP_DIAGONAL_PLAN_H
#define CLATTN_OP_DIAGONAL_PLAN_H

#include "base/fold.h"
#include "diagonal/problem.h"
#include "kernels/diagonal/params.h"
#include "opencl/program.h" /* ca_kernel_spec */

enum { CA_DIAGONAL_INPUT, CA_DIAGONAL_OUTPUT, CA_DIAGONAL_TENSORS };

/* A problem as runs: each row of a matrix has one that is inside the band,
   lower <= x - y < upper, and what is outside before and after it. */
typedef struct {
    ca_tensor tensors[CA_DIAGONAL_TENSORS];
    ca_output_memory memory;
    ca_variant variant;
    const char *call;
    bool in_place;
    int64_t lower;
    int64_t upper;
    int inside; /* CA_DIAGONAL_FILL, _COPY or _SKIP */
    int outside;
    uint64_t inside_bits;
    uint64_t outside_bits;
} ca_diagonal_runs;

typedef struct {
    ca_kernel_spec spec;
    ca_diagonal_params params; /* all but views and leading dimensions' sizes */
    size_t groups;             /* of work-items */
    size_t local_size;
} ca_diagonal_plan;

/* Do elements of the tensor lie side by side along its last dimension? */
bool ca_diagonal_has_rows(const ca_tensor *tensor);

/* Whether any element is inside, outside, in a run of that kind. */
bool ca_diagonal_has_inside(const ca_diagonal_runs *runs);
bool ca_diagonal_has_outside(const ca_diagonal_runs *runs);
bool ca_diagonal_has_run(const ca_diagonal_runs *runs, int kind);

ca_diagonal_plan ca_diagonal_make_plan(const ca_device_info *info,
                                       const ca_diagonal_runs *runs,
                                       const ca_leading_dims *dims);

#endif
