/* SPDX-License-Identifier: MIT
 *
 * Run a diagonal-matrix problem: in one launch, or in halves where one launch cannot
 * hold it.
 */
#include "diagonal/problem.h"

#include <stdlib.h>

#include "base/fold.h"
#include "diagonal/plan.h"
#include "opencl/launch.h"
#include "opencl/program.h"

_Static_assert(sizeof(ca_diagonal_params) == CA_DIAGONAL_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");

#define INPUT   CA_DIAGONAL_INPUT
#define OUTPUT  CA_DIAGONAL_OUTPUT
#define TENSORS CA_DIAGONAL_TENSORS

/* ---- a problem as runs ---- */

/* A bound within what any element of the matrix has as x - y. */
static int64_t
clamp_bound(int64_t bound, int64_t rows, int64_t columns)
{
    return bound < -rows ? -rows : bound > columns ? columns : bound;
}

static void
swap_last_dims(ca_tensor *tensor)
{
    int row = tensor->ndim - 2;
    if (tensor->ndim >= 2) { /* not absent */
        int64_t size = tensor->shape[row];
        int64_t stride = tensor->strides[row];
        tensor->shape[row] = tensor->shape[row + 1];
        tensor->strides[row] = tensor->strides[row + 1];
        tensor->shape[row + 1] = size;
        tensor->strides[row + 1] = stride;
    }
}

/* The transposed matrices, whose band is that of -(x - y). */
static void
transpose(ca_diagonal_runs *runs)
{
    int64_t lower = runs->lower;
    runs->lower = 1 - runs->upper;
    runs->upper = 1 - lower;
    swap_last_dims(&runs->tensors[INPUT]);
    swap_last_dims(&runs->tensors[OUTPUT]);
}

/* Do elements lie side by side along the rows' dimension rather? */
static bool
lies_in_columns(const ca_tensor *tensor)
{
    return !ca_diagonal_has_rows(tensor) ||
           (ca_tensor_size(tensor, 1) == 1 && ca_tensor_stride(tensor, 2) == 1);
}

static ca_diagonal_runs
runs_of(const ca_diagonal *diagonal)
{
    int64_t rows = ca_tensor_size(&diagonal->output, 2);
    int64_t columns = ca_tensor_size(&diagonal->output, 1);
    bool inverted = diagonal->inverted;
    ca_diagonal_runs runs = {
        .tensors = {[INPUT] = diagonal->input, [OUTPUT] = diagonal->output},
        .memory = diagonal->memory,
        .variant = diagonal->variant,
        .call = diagonal->call,
        .in_place = diagonal->input.data != NULL &&
                    diagonal->input.data == diagonal->output.data,
        .lower = clamp_bound(diagonal->lower, rows, columns),
        .upper = clamp_bound(diagonal->upper, rows, columns),
    };
    runs.upper = runs.upper > runs.lower ? runs.upper : runs.lower;
    int rest = runs.in_place                  ? CA_DIAGONAL_SKIP
               : diagonal->input.data != NULL ? CA_DIAGONAL_COPY
                                              : CA_DIAGONAL_FILL;
    runs.inside = inverted ? rest : CA_DIAGONAL_FILL;
    runs.outside = inverted ? CA_DIAGONAL_FILL : rest;
    runs.inside_bits = inverted ? 0 : diagonal->value;
    runs.outside_bits = inverted ? diagonal->value : 0;
    if (runs.memory == CA_OUTPUT_ZERO) {
        bool zero_inside = runs.inside == CA_DIAGONAL_FILL && runs.inside_bits == 0;
        bool zero_outside = runs.outside == CA_DIAGONAL_FILL && runs.outside_bits == 0;
        runs.inside = zero_inside ? CA_DIAGONAL_SKIP : runs.inside;
        runs.outside = zero_outside ? CA_DIAGONAL_SKIP : runs.outside;
    }
    if (lies_in_columns(&runs.tensors[OUTPUT])) {
        transpose(&runs);
    }
    /* A kind that no element is of is none. */
    if (!ca_diagonal_has_inside(&runs)) {
        runs.inside = runs.outside;
        runs.inside_bits = runs.outside_bits;
    } else if (!ca_diagonal_has_outside(&runs)) {
        runs.outside = runs.inside;
        runs.outside_bits = runs.inside_bits;
    }
    return runs;
}

/* ---- the memory of the output ---- */

bool
ca_diagonal_can_write(const ca_device_info *info, const ca_tensor *output)
{
    bool lines = ca_diagonal_has_rows(output) || ca_tensor_size(output, 2) == 1 ||
                 ca_tensor_stride(output, 2) == 1;
    return lines && ca_tensor_is_nested(output) &&
           (info->memory != CA_MEMORY_COPY || output->block != NULL ||
            ca_tensor_fills_extent(output));
}

ca_pages
ca_diagonal_choose_pages(const ca_device_info *info, const ca_diagonal *diagonal,
                         int64_t bytes)
{
    bool writes_zeros = diagonal->input.data == NULL || diagonal->value == 0;
    /* Other devices send or pin every page, and in smaller memory a zero costs less to
       write than a new page to make. */
    return writes_zeros && info->type == CA_DEVICE_CPU &&
                   info->memory != CA_MEMORY_COPY && bytes >= CA_LARGE_MEMORY
               ? CA_PAGES_ZERO
               : CA_PAGES_ANY;
}

/* ---- one launch ---- */

static ca_view
view_of(const ca_tensor *tensor, const ca_extent *extent, const ca_leading_dims *dims,
        int t)
{
    ca_view view = {.offset = extent->offset,
                    .row = ca_tensor_stride(tensor, 2),
                    .column = ca_tensor_stride(tensor, 1)};
    ca_fold_strides(dims, t, view.batch);
    return view;
}

/* Up to here a thread alone is done before a second one would have been of use. */
#define SMALL_BYTES ((double)(128 << 10))

static bool
is_small(const ca_diagonal_runs *runs)
{
    const ca_tensor *output = &runs->tensors[OUTPUT];
    double bytes = (double)ca_dtype_size(output->dtype);
    for (int d = 0; d < output->ndim; d++) {
        bytes *= (double)output->shape[d];
    }
    return bytes <= SMALL_BYTES;
}

static ca_status
launch_whole(ca_device *device, const ca_diagonal_runs *runs,
             const ca_leading_dims *dims, ca_error *error)
{
    ca_status status = CA_OK;
    ca_diagonal_plan plan =
        ca_diagonal_make_plan(ca_device_get_info(device), runs, dims);
    ca_kernel *kernel = NULL;
    CA_TRY(ca_kernel_get(device, &plan.spec, &kernel, error));

    const ca_tensor *output = &runs->tensors[OUTPUT];
    bool whole = ca_tensor_fills_extent(output) && !runs->in_place &&
                 !ca_diagonal_has_run(runs, CA_DIAGONAL_SKIP);
    ca_access access = whole ? CA_ACCESS_WRITE : CA_ACCESS_UPDATE;
    ca_span spans[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        ca_extent extent = ca_tensor_memory(&runs->tensors[t]);
        ca_view view = view_of(&runs->tensors[t], &extent, dims, t);
        *(t == INPUT ? &plan.params.input : &plan.params.output) = view;
        /* In place both are one buffer, with one access. */
        spans[t] =
            (ca_span){.data = extent.data,
                      .bytes = extent.bytes,
                      .access = t == OUTPUT || runs->in_place ? access : CA_ACCESS_READ,
                      .block = runs->tensors[t].block};
    }
    ca_fold_sizes(dims, plan.params.batch);
    ca_launch launch = {
        .spans = spans,
        .nspans = TENSORS,
        .steps = {{kernel, &plan.params, sizeof(plan.params),
                   plan.groups * plan.local_size, plan.local_size}},
        .nsteps = 1,
        .small = is_small(runs),
        .call = runs->call,
    };
    CA_TRY(ca_launch_run(device, &launch, error));
done:
    return status;
}

/* ---- halves, where one launch cannot hold it all ---- */

/* Entries first … first + count - 1 of dimension `d`: with rows and columns the band
   moves along. */
static ca_diagonal_runs
part_of(const ca_diagonal_runs *runs, int d, int64_t first, int64_t count)
{
    ca_diagonal_runs part = *runs;
    int ndim = part.tensors[OUTPUT].ndim;
    for (int t = 0; t < TENSORS; t++) {
        ca_take_part(&part.tensors[t], d, first, count);
    }
    int64_t shift = d == ndim - 2 ? first : d == ndim - 1 ? -first : 0;
    part.lower += shift;
    part.upper += shift;
    return part;
}

/* The dimension along which a tensor reaches farthest, -1 for none. */
static int
farthest_dimension(const ca_tensor *tensor)
{
    int best = -1;
    int64_t farthest = 0;
    for (int d = 0; d < tensor->ndim; d++) {
        int64_t reach = llabs((tensor->shape[d] - 1) * tensor->strides[d]);
        if (reach > farthest) {
            farthest = reach;
            best = d;
        }
    }
    return best;
}

/* The dimension to halve, -1 where one launch will do: where a tensor is too large, that
   which makes it smallest; where there are more leading dimensions than a kernel walks,
   the smallest of them. */
static int
dimension_to_halve(const ca_device_info *info, const ca_diagonal_runs *runs,
                   const ca_leading_dims *dims)
{
    const ca_tensor *output = &runs->tensors[OUTPUT];
    for (int t = 0; t < TENSORS; t++) {
        ca_extent extent = ca_tensor_extent(&runs->tensors[t]);
        if (ca_exceeds_device(info, &extent, 1)) {
            return farthest_dimension(&runs->tensors[t]);
        }
    }
    return dims->count > CA_BATCH_DIMS
               ? ca_smallest_dimension(output->shape, output->ndim - 2)
               : -1;
}

/* What is not copied is not read, and rows that nothing is written to are not walked. */
static void
leave_out(ca_diagonal_runs *runs)
{
    const ca_tensor *output = &runs->tensors[OUTPUT];
    if (!ca_diagonal_has_run(runs, CA_DIAGONAL_COPY) && !runs->in_place) {
        ca_tensor_set_absent(&runs->tensors[INPUT]);
    }
    if (runs->outside == CA_DIAGONAL_SKIP) {
        int64_t rows = ca_tensor_size(output, 2);
        int64_t last = ca_tensor_size(output, 1) - runs->lower; /* exclusive */
        int64_t first = runs->upper < 1 ? 1 - runs->upper : 0;
        last = last < rows ? last : rows;
        if (last - first < rows && last > first) {
            *runs = part_of(runs, output->ndim - 2, first, last - first);
        }
    }
}

static ca_status
run_part(ca_device *device, const ca_diagonal_runs *whole, ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    if (!ca_diagonal_has_run(whole, CA_DIAGONAL_FILL) &&
        !ca_diagonal_has_run(whole, CA_DIAGONAL_COPY)) {
        return CA_OK;
    }
    ca_diagonal_runs runs = *whole;
    leave_out(&runs);
    const ca_tensor *output = &runs.tensors[OUTPUT];
    ca_leading_dims dims;
    ca_fold_leading(runs.tensors, TENSORS, output->ndim - 2, output->shape, &dims);
    int d = dimension_to_halve(info, &runs, &dims);
    if (d < 0) {
        return launch_whole(device, &runs, &dims, error);
    }
    int64_t size = output->shape[d];
    ca_diagonal_runs half = part_of(&runs, d, 0, size / 2);
    ca_status status = run_part(device, &half, error);
    if (status == CA_OK) {
        half = part_of(&runs, d, size / 2, size - size / 2);
        status = run_part(device, &half, error);
    }
    return status;
}

ca_status
ca_diagonal_run(ca_device *device, const ca_diagonal *diagonal, ca_error *error)
{
    ca_diagonal_runs runs = runs_of(diagonal);
    return run_part(device, &runs, error);
}
