/* SPDX-License-Identifier: MIT
 *
 * Run a diagonal-matrix problem in one launch, or in halves if one launch cannot hold it.
 *
 * Each of the two regions, inside and outside of the band, gets an action: fill, copy or skip. Two kinds
 * of elements are skipped: those that a call in place would copy to themselves, and zeros in memory that
 * is zero already. If the columns of the output lie side by side in memory, rows and columns are exchanged,
 * and the band is mirrored.
 *
 * New pages of the system are zero. A large new result with zeros is made of new, large pages, and the
 * kernel skips the zeros. Whoever reads the result finds them without a page fault for every 4 KiB. A
 * smaller result lies in ordinary memory, whose pages mostly exist: there the kernel writes a zero sooner
 * than the system makes a page.
 */
#include "diagonal/run.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/fold.h"
#include "diagonal/plan.h"
#include "opencl/apart.h"
#include "opencl/launch.h"
#include "opencl/prepare.h"
#include "opencl/program.h"
#include "opencl/runtime.h"

_Static_assert(sizeof(ca_diagonal_params) == CA_DIAGONAL_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");

#define INPUT   CA_DIAGONAL_INPUT
#define OUTPUT  CA_DIAGONAL_OUTPUT
#define TENSORS CA_DIAGONAL_TENSORS

/* ---- a problem as regions ---- */

/* Bounds of -rows … columns can be added to rows and columns without overflow. */
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
        ca_tensor_swap(tensor, row);
    }
}

/* Exchanges rows and columns. The band then bounds -(x - y). */
static void
transpose(ca_diagonal_regions *regions)
{
    int64_t lower = regions->lower;
    regions->lower = 1 - regions->upper;
    regions->upper = 1 - lower;
    swap_last_dims(&regions->tensors[INPUT]);
    swap_last_dims(&regions->tensors[OUTPUT]);
}

/* True if elements lie side by side along the columns rather than along the rows. */
static bool
lies_in_columns(const ca_tensor *tensor)
{
    return !ca_diagonal_has_rows(tensor) ||
           (ca_tensor_size(tensor, 1) == 1 && ca_tensor_stride(tensor, 2) == 1);
}

static ca_diagonal_regions
regions_of(const ca_forced *forced, const ca_diagonal *problem)
{
    int64_t rows = ca_tensor_size(&problem->output, 2);
    int64_t columns = ca_tensor_size(&problem->output, 1);
    bool has_input = problem->input.data != NULL;
    bool in_place = has_input && problem->input.data == problem->output.data;
    ca_diagonal_region filled = {CA_DIAGONAL_FILL, problem->value};
    ca_diagonal_region rest = {in_place    ? CA_DIAGONAL_SKIP
                               : has_input ? CA_DIAGONAL_COPY
                                           : CA_DIAGONAL_FILL,
                               0};
    if (problem->memory == CA_OUTPUT_ZERO) {
        filled.action = filled.bits == 0 ? CA_DIAGONAL_SKIP : CA_DIAGONAL_FILL;
        rest.action = has_input ? rest.action : CA_DIAGONAL_SKIP;
    }
    ca_diagonal_regions regions = {
        .problem = problem,
        .forced = forced,
        .tensors = {[INPUT] = problem->input, [OUTPUT] = problem->output},
        .in_place = in_place,
        .lower = clamp_bound(problem->lower, rows, columns),
        .upper = clamp_bound(problem->upper, rows, columns),
        .inside = problem->inverted ? rest : filled,
        .outside = problem->inverted ? filled : rest,
    };
    if (regions.upper < regions.lower) {
        regions.upper = regions.lower;
    }
    if (lies_in_columns(&regions.tensors[OUTPUT])) {
        transpose(&regions);
    }
    /* A region without elements becomes like the other: fewer programs are built. */
    if (!ca_diagonal_has_inside(&regions)) {
        regions.inside = regions.outside;
    } else if (!ca_diagonal_has_outside(&regions)) {
        regions.outside = regions.inside;
    }
    return regions;
}

/* ---- the memory of the output ---- */

bool
ca_diagonal_has_lines(const ca_tensor *output)
{
    return ca_diagonal_has_rows(output) || ca_tensor_size(output, 2) == 1 ||
           ca_tensor_stride(output, 2) == 1;
}

bool
ca_diagonal_can_write(const ca_device_info *info, const ca_tensor *output)
{
    return ca_diagonal_has_lines(output) && ca_tensor_is_nested(output) &&
           (info->memory != CA_MEMORY_COPY || output->block != NULL ||
            ca_tensor_fills_extent(output));
}

ca_pages
ca_diagonal_choose_pages(const ca_device_info *info, const ca_diagonal *diagonal, int64_t bytes)
{
    bool has_zeros = diagonal->input.data == NULL || diagonal->value == 0;
    /* Zero pages save the writes of zeros on a CPU only: any other device sends or pins every page.
       In a small result, writing the zeros costs less than new pages. */
    return has_zeros && info->type == CA_DEVICE_CPU && info->memory != CA_MEMORY_COPY &&
                   bytes >= CA_LARGE_MEMORY
               ? CA_PAGES_ZERO
               : CA_PAGES_ANY;
}

/* ---- one launch ---- */

/* One thread has finished this much before a second one would have helped. */
#define SMALL_BYTES (128 << 10)

static bool
is_small(const ca_tensor *output)
{
    return ca_tensor_count(output) <= SMALL_BYTES / (int64_t)ca_dtype_size(output->dtype);
}

static ca_view
view_of(const ca_tensor *tensor, const ca_extent *extent, const ca_leading_dims *dims, int t)
{
    ca_view view = {.offset = extent->offset,
                    .row = ca_tensor_stride(tensor, 2),
                    .column = ca_tensor_stride(tensor, 1)};
    ca_fold_strides(dims, t, view.batch);
    return view;
}

/* Let another process copy and fill such elements first, if the driver is not known. */
static ca_status
try_apart(ca_device *device, const ca_kernel_spec *spec, int64_t width, ca_error *error)
{
    char request[32];
    if (ca_device_get_info(device)->is_known || ca_kernel_is_built(device, spec)) {
        return CA_OK;
    }
    ca_kernel_spec of_width = {.name = spec->name};
    ca_kernel_define(&of_width, "WIDTH", width);
    (void)snprintf(request, sizeof request, "diagonal %d", (int)width);
    return ca_apart_try(device, &of_width, request, error);
}

/* Make a plan and its kernel, within the limits that only a built kernel tells. */
static ca_status
plan_and_build(ca_device *device, const ca_diagonal_regions *regions, const ca_leading_dims *dims,
               ca_diagonal_plan *plan, ca_kernel **kernel, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_device_info *info = ca_device_get_info(device);
    ca_plan_limits limits = {info->max_work_group, info->local_memory};
    *plan = ca_diagonal_make_plan(info, regions, dims);
    CA_TRY(try_apart(device, &plan->spec, (int64_t)ca_dtype_size(regions->tensors[OUTPUT].dtype),
                     error));
    CA_TRY(ca_kernel_get(device, &plan->spec, kernel, error));
    while (ca_kernel_tighten(device, *kernel, plan->local_size, &limits)) {
        ca_device_info limited = *info;
        limited.max_work_group = limits.group;
        limited.local_memory = limits.local_memory;
        *plan = ca_diagonal_make_plan(&limited, regions, dims);
        CA_TRY(ca_kernel_get(device, &plan->spec, kernel, error));
    }
done:
    return status;
}

static ca_status
launch_whole(ca_device *device, const ca_diagonal_regions *regions, const ca_leading_dims *dims,
             ca_error *error)
{
    ca_status status = CA_OK;
    ca_diagonal_plan plan;
    ca_kernel *kernel = NULL;
    CA_TRY(plan_and_build(device, regions, dims, &plan, &kernel, error));

    const ca_tensor *output = &regions->tensors[OUTPUT];
    bool whole = ca_tensor_fills_extent(output) && !regions->in_place &&
                 !ca_diagonal_has(regions, CA_DIAGONAL_SKIP);
    ca_access access = whole ? CA_ACCESS_WRITE : CA_ACCESS_UPDATE;
    ca_span spans[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        const ca_tensor *tensor = &regions->tensors[t];
        ca_extent extent = ca_tensor_memory(tensor);
        *(t == INPUT ? &plan.params.input : &plan.params.output) =
            view_of(tensor, &extent, dims, t);
        /* In place, both are one buffer with one access. */
        spans[t] = (ca_span){.data = extent.data,
                             .bytes = extent.bytes,
                             .access = t == OUTPUT || regions->in_place ? access : CA_ACCESS_READ,
                             .block = tensor->block,
                             .name = t == OUTPUT ? "output" : "input"};
    }
    ca_fold_sizes(dims, plan.params.batch);
    ca_launch launch = {
        .spans = spans,
        .nspans = TENSORS,
        .steps = {{.kernel = kernel,
                   .params = &plan.params,
                   .params_size = sizeof(plan.params),
                   .global_size = plan.groups * plan.local_size,
                   .local_size = plan.local_size,
                   .work = (double)ca_tensor_extent(output).bytes}},
        .nsteps = 1,
        .small = is_small(output),
        .call = regions->problem->call,
    };
    CA_TRY(ca_launch_run(device, &launch, error));
done:
    return status;
}

/* ---- halves, where one launch cannot hold the problem ---- */

/* Returns the regions of the entries first … first + count - 1 of dimension `d`. Fewer
   rows or columns shift the band. */
static ca_diagonal_regions
entries_of(const ca_diagonal_regions *regions, int d, int64_t first, int64_t count)
{
    ca_diagonal_regions entries = *regions;
    int ndim = entries.tensors[OUTPUT].ndim;
    for (int t = 0; t < TENSORS; t++) {
        if (entries.tensors[t].data != NULL) {
            ca_tensor_take(&entries.tensors[t], d, first, count);
        }
    }
    int64_t shift = d == ndim - 2 ? first : d == ndim - 1 ? -first : 0;
    entries.lower += shift;
    entries.upper += shift;
    return entries;
}

/* Returns the dimension along which a tensor reaches farthest, -1 for none. */
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

/* Returns the dimension to halve, -1 if one launch can hold the problem. If a tensor is
   too large for the device, half of this dimension is its smallest half. If there are
   more leading dimensions than a kernel walks, this is the smallest of them. */
static int
dimension_to_halve(const ca_device_info *info, const ca_diagonal_regions *regions,
                   const ca_leading_dims *dims)
{
    const ca_tensor *output = &regions->tensors[OUTPUT];
    for (int t = 0; t < TENSORS; t++) {
        ca_extent extent = ca_tensor_extent(&regions->tensors[t]);
        if (ca_exceeds_device(info, &extent, 1)) {
            return farthest_dimension(&regions->tensors[t]);
        }
    }
    return dims->count > CA_BATCH_DIMS ? ca_smallest_dimension(output->shape, output->ndim - 2)
                                       : -1;
}

/* Leaves out an input of which nothing is copied, and the first and last rows if
   nothing is written to them. */
static void
leave_out(ca_diagonal_regions *regions)
{
    const ca_tensor *output = &regions->tensors[OUTPUT];
    if (!ca_diagonal_has(regions, CA_DIAGONAL_COPY) && !regions->in_place) {
        ca_tensor_set_absent(&regions->tensors[INPUT]);
    }
    if (regions->outside.action == CA_DIAGONAL_SKIP) {
        int64_t rows = ca_tensor_size(output, 2);
        int64_t first = regions->upper < 1 ? 1 - regions->upper : 0;
        int64_t last = ca_tensor_size(output, 1) - regions->lower; /* exclusive */
        last = last < rows ? last : rows;
        if (last - first < rows && last > first) {
            *regions = entries_of(regions, output->ndim - 2, first, last - first);
        }
    }
}

static ca_status
run_regions(ca_device *device, ca_diagonal_regions regions, ca_error *error)
{
    if (!ca_diagonal_has(&regions, CA_DIAGONAL_FILL) &&
        !ca_diagonal_has(&regions, CA_DIAGONAL_COPY)) {
        return CA_OK;
    }
    leave_out(&regions);
    const ca_tensor *output = &regions.tensors[OUTPUT];
    ca_leading_dims dims;
    ca_fold_leading(regions.tensors, TENSORS, output->ndim - 2, output->shape, &dims);
    int d = dimension_to_halve(ca_device_get_info(device), &regions, &dims);
    if (d < 0) {
        return launch_whole(device, &regions, &dims, error);
    }
    int64_t half = output->shape[d] / 2;
    int64_t rest = output->shape[d] - half;
    ca_status status = run_regions(device, entries_of(&regions, d, 0, half), error);
    return status == CA_OK ? run_regions(device, entries_of(&regions, d, half, rest), error)
                           : status;
}

ca_status
ca_diagonal_run(ca_device *device, const ca_forced *forced, const ca_diagonal *diagonal,
                ca_error *error)
{
    ca_status status = ca_device_prepare(device, error);
    return status == CA_OK ? run_regions(device, regions_of(forced, diagonal), error) : status;
}
