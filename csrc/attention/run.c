/* SPDX-License-Identifier: MIT
 *
 * Run an attention problem: at once where it is trivial, else in one launch, or in
 * halves where one launch cannot hold it.
 */
#include "attention/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention/halves.h"
#include "attention/params.h"
#include "attention/plan.h"
#include "opencl/launch.h"
#include "opencl/program.h"
#include "opencl/runtime.h"
#include "opencl/storage.h"

#define TENSORS CA_ATTENTION_TENSORS
#define SPANS   (TENSORS + 1) /* arguments of kernels: the tensors, partial rows */

void
ca_attention_init(ca_attention *attention)
{
    for (int t = 0; t < TENSORS; t++) {
        ca_tensor_set_absent(&attention->tensors[t]);
    }
    attention->mask_is_added = false;
    attention->filter = -INFINITY;
    attention->below = CA_BAND_UNBOUNDED;
    attention->above = CA_BAND_UNBOUNDED;
    attention->band_follows_counts = false;
    attention->scale = 1;
    attention->softcap = 0;
    attention->mask_before_softcap = false;
    attention->dropout = 0;
    attention->seed = 0;
    attention->in_float64 = false;
    attention->stage = CA_SCORES_SCALED;
    attention->variant = CA_VARIANT_ANY;
    attention->limits = (ca_limits){0};
    attention->call = "attention";
}

/* ---- one launch ---- */

/* A result that fills its extent is written as a whole. */
static ca_access
access_of(ca_attention_tensor t, const ca_tensor *tensor)
{
    if (!ca_attention_is_result(t)) {
        return CA_ACCESS_READ;
    }
    return ca_tensor_fills_extent(tensor) ? CA_ACCESS_WRITE : CA_ACCESS_UPDATE;
}

/* Give two inputs that overlap in memory the range of both. False where they do not, or
   have it already, or their elements do not lie in step. */
static bool
join(const ca_attention *attention, int a, int b, ca_extent *extents)
{
    char *a_start = extents[a].data;
    char *b_start = extents[b].data;
    char *a_end = a_start + extents[a].bytes;
    char *b_end = b_start + extents[b].bytes;
    bool held = attention->tensors[a].block != NULL ||
                attention->tensors[b].block != NULL; /* in memory of their own */
    if (held || !ca_extents_overlap(&extents[a], &extents[b]) ||
        (a_start == b_start && a_end == b_end)) {
        return false;
    }
    char *start = a_start < b_start ? a_start : b_start;
    size_t bytes = (size_t)((a_end > b_end ? a_end : b_end) - start);
    ptrdiff_t a_size = (ptrdiff_t)ca_dtype_size(attention->tensors[a].dtype);
    ptrdiff_t b_size = (ptrdiff_t)ca_dtype_size(attention->tensors[b].dtype);
    if ((a_start - start) % a_size != 0 || (b_start - start) % b_size != 0) {
        return false;
    }
    extents[a].offset += (a_start - start) / a_size;
    extents[b].offset += (b_start - start) / b_size;
    extents[a].data = extents[b].data = start;
    extents[a].bytes = extents[b].bytes = bytes;
    return true;
}

/* Inputs that overlap, as the parts of a packed array do, share one buffer: OpenCL
   leaves overlapping ones undefined, and copies them twice. */
static void
join_overlaps(const ca_attention *attention, ca_extent extents[TENSORS])
{
    bool joined = true;
    while (joined) {
        joined = false;
        for (int a = 0; a < CA_ATTENTION_OUTPUT; a++) {
            for (int b = 0; b < a; b++) {
                joined = join(attention, a, b, extents) || joined;
            }
        }
    }
}

static size_t
round_up(size_t count, size_t step)
{
    return (count + step - 1) / step * step;
}

/* Below this a thread alone is done before a second one would have been of use. Counted
   in multiplications and additions of float32; those of float64 take twice as long. */
#define SMALL_WORK 0.6e6

static bool
is_small(const ca_attention *attention, const ca_attention_params *params)
{
    bool wide = attention->tensors[CA_ATTENTION_QUERY].dtype == CA_FLOAT64;
    double keys = (double)(params->upper - params->lower + 1); /* of the band */
    keys = keys < (double)params->T ? keys : (double)params->T;
    double work = (wide ? 4 : 2) * keys * (double)(params->E + params->Ev);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        work *= (double)params->batch[d];
    }
    return work * (double)params->L < SMALL_WORK;
}

/* Where the rows of each part of the keys go. */
static ca_status
allocate_partial(ca_device *device, const ca_attention_plan *plan,
                 const ca_attention_params *params, ca_storage **partial,
                 ca_error *error)
{
    int64_t sizes[] = {params->batch[0], params->batch[1], params->batch[2],
                       params->L,        params->splits,   plan->partial_bytes};
    int64_t bytes;
    ca_status status = ca_shape_count(6, sizes, "query", &bytes, error);
    return status != CA_OK ? status
                           : ca_storage_new(device, (size_t)bytes, "partial results",
                                            partial, error);
}

/* Build one kernel of a plan, the next step; its grid's product are the work-items. */
static ca_status
add_step(ca_device *device, ca_launch *launch, const ca_kernel_spec *spec,
         const ca_attention_params *params, int ngrid, const int64_t *grid,
         size_t local_size, ca_error *error)
{
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    int64_t items;
    CA_TRY(ca_kernel_get(device, spec, &kernel, error));
    CA_TRY(ca_shape_count(ngrid, grid, "query", &items, error));
    launch->steps[launch->nsteps++] =
        (ca_step){kernel, params, sizeof(*params), round_up((size_t)items, local_size),
                  local_size};
done:
    return status;
}

static ca_status
launch_whole(ca_device *device, const ca_attention *attention,
             const ca_extent extents[TENSORS], const ca_leading_dims *dims,
             int64_t first_row, ca_error *error)
{
    ca_status status = CA_OK;
    ca_storage *partial = NULL;
    ca_attention_plan plan;
    if (attention->tensors[CA_ATTENTION_QUERY].dtype == CA_BFLOAT16) {
        CA_TRY(ca_device_find_pairs(device, error));
    }
    CA_TRY(ca_device_prepare(device, error));
    CA_TRY(ca_attention_make_plan(ca_device_get_info(device), attention, dims, &plan,
                                  error));
    ca_attention_params params =
        ca_attention_describe(attention, extents, dims, first_row);
    params.heads = plan.heads;
    params.splits = plan.splits;
    if (plan.splits > 1) {
        CA_TRY(allocate_partial(device, &plan, &params, &partial, error));
    }
    ca_span spans[SPANS];
    for (int t = 0; t < TENSORS; t++) {
        spans[t] = (ca_span){
            .data = extents[t].data,
            .bytes = extents[t].bytes,
            .access = access_of((ca_attention_tensor)t, &attention->tensors[t]),
            .block = attention->tensors[t].block};
    }
    spans[TENSORS] = (ca_span){.access = CA_ACCESS_WRITE};
    if (partial != NULL) {
        ca_block *block = ca_storage_block(partial);
        spans[TENSORS] =
            (ca_span){block->address, block->bytes, CA_ACCESS_WRITE, block};
    }
    ca_launch launch = {
        .spans = spans,
        .nspans = SPANS,
        .small = is_small(attention, &params),
        .call = attention->call,
    };
    CA_TRY(add_step(device, &launch, &plan.spec, &params, CA_ATTENTION_GRID_DIMS,
                    plan.grid, plan.local_size, error));
    if (plan.splits > 1) {
        int64_t rows[] = {params.batch[0], params.batch[1], params.batch[2], params.L,
                          (int64_t)plan.merge_local};
        CA_TRY(add_step(device, &launch, &plan.merge, &params, 5, rows,
                        plan.merge_local, error));
    }
    CA_TRY(ca_launch_run(device, &launch, error));
done:
    ca_storage_release(partial);
    return status;
}

/* ---- halves, where one launch cannot hold it all ---- */

/* first_row is dropout's number of the problem's first row. */
static ca_status
run_part(ca_device *device, const ca_attention *attention, int64_t first_row,
         ca_error *error)
{
    const ca_tensor *output = &attention->tensors[CA_ATTENTION_OUTPUT];
    ca_extent extents[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        extents[t] = ca_tensor_memory(&attention->tensors[t]);
    }
    ca_leading_dims dims;
    ca_attention_fold(attention, &dims);

    const ca_device_info *info = ca_device_get_info(device);
    bool fits = !ca_exceeds_device(info, extents, TENSORS);
    int d = ca_attention_dimension_to_halve(attention, fits);
    int64_t size = output->shape[d];
    if ((fits && dims.count <= CA_BATCH_DIMS) || size <= 1) {
        if (info->memory == CA_MEMORY_SVM) {
            return launch_whole(device, attention, extents, &dims, first_row, error);
        }
        ca_extent joined[TENSORS];
        memcpy(joined, extents, sizeof(joined));
        join_overlaps(attention, joined);
        return launch_whole(device, attention,
                            ca_exceeds_device(info, joined, TENSORS) ? extents : joined,
                            &dims, first_row, error);
    }
    int64_t rows = 1; /* of one entry of dimension d */
    for (int inner = d + 1; inner <= output->ndim - 2; inner++) {
        rows *= output->shape[inner];
    }
    ca_attention half = ca_attention_part(attention, d, 0, size / 2);
    ca_status status = run_part(device, &half, first_row, error);
    if (status == CA_OK) {
        half = ca_attention_part(attention, d, size / 2, size - size / 2);
        status = run_part(device, &half, first_row + size / 2 * rows, error);
    }
    return status;
}

/* ---- no queries, but present keys and values ---- */

/* Let one row of zeros for each batch do the writing. */
static ca_status
run_without_rows(ca_device *device, const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention substitute = *attention;
    ca_tensor *query = &substitute.tensors[CA_ATTENTION_QUERY];
    ca_tensor *output = &substitute.tensors[CA_ATTENTION_OUTPUT];
    int rows = output->ndim - 2;
    void *zeros = NULL;
    void *unused = NULL;
    int64_t count;
    query->shape[rows] = 1;
    output->shape[rows] = 1;
    CA_TRY(ca_shape_count(output->ndim, output->shape, "the result", &count, error));
    size_t size = ca_dtype_size(query->dtype);
    zeros = calloc((size_t)query->shape[rows + 1] + 1, size);
    unused = calloc((size_t)count + 1, size);
    if (zeros == NULL || unused == NULL) {
        CA_TRY(
            ca_error_set(error, CA_ERROR_MEMORY, "no memory for a row of the query"));
    }
    query->data = zeros;
    query->block = NULL;
    output->data = unused;
    output->block = NULL;
    int64_t stride = 1;
    for (int d = output->ndim - 1; d >= 0; d--) {
        query->strides[d] = 0;
        output->strides[d] = stride;
        stride *= output->shape[d];
    }
    ca_tensor_set_absent(&substitute.tensors[CA_ATTENTION_MASK]);
    ca_tensor_set_absent(&substitute.tensors[CA_ATTENTION_BIAS]);
    ca_tensor_set_absent(&substitute.tensors[CA_ATTENTION_LSE]);
    ca_tensor_set_absent(&substitute.tensors[CA_ATTENTION_SCORES]);
    CA_TRY(run_part(device, &substitute, 0, error));
done:
    free(unused);
    free(zeros);
    return status;
}

ca_status
ca_attention_run(ca_device *device, const ca_attention *attention, ca_error *error)
{
    const ca_tensor *output = &attention->tensors[CA_ATTENTION_OUTPUT];
    if (output->shape[output->ndim - 2] == 0) {
        return run_without_rows(device, attention, error);
    }
    return run_part(device, attention, 0, error);
}
