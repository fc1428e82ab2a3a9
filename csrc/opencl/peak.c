/* SPDX-License-Identifier: MIT */
#include "opencl/peak.h"

#include <stdlib.h>

#include "kernels/peak/params.h"
#include "opencl/launch.h"
#include "opencl/program.h"
#include "opencl/runtime.h"

_Static_assert(sizeof(ca_peak_params) == CA_PEAK_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");

#define GROUP 64                 /* work-items, where they are not alone */
#define TILE  ((int64_t)1 << 18) /* elements that a group reads */

/* Bytes of a vector that a register holds. */
static int64_t
vector_bytes(const ca_device_info *info)
{
    bool cpu = info->type == CA_DEVICE_CPU;
    return !cpu ? 16 : info->float_width >= 16 ? 64 : info->float_width >= 8 ? 32 : 16;
}

static size_t
group_size(const ca_device_info *info)
{
    return info->type == CA_DEVICE_CPU    ? 1
           : info->max_work_group < GROUP ? (size_t)info->max_work_group
                                          : GROUP;
}

/* Of a GPU, as many as its registers hold of peak_fma: none of its units is left without. */
static int64_t
groups_per_unit(const ca_device_info *info)
{
    return info->type == CA_DEVICE_CPU ? 4 : 16;
}

static void
define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    spec->defines[spec->ndefines++] = (ca_define){name, value};
}

/* *sum is that of so many outputs. */
static ca_status
run(ca_device *device, const ca_kernel_spec *spec, const ca_span *input,
    const ca_peak_params *params, size_t groups, size_t outputs, double *sum,
    ca_error *error)
{
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    size_t local_size = group_size(ca_device_get_info(device));
    float *output = malloc(outputs * sizeof *output);
    if (output == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory for %zu sums", outputs));
    }
    CA_TRY(ca_device_prepare(device, error));
    CA_TRY(ca_kernel_get(device, spec, &kernel, error));
    const ca_span spans[] = {
        *input,
        {.data = output, .bytes = outputs * sizeof *output, .access = CA_ACCESS_WRITE},
    };
    const ca_launch launch = {
        .spans = spans,
        .nspans = sizeof spans / sizeof spans[0],
        .steps = {{kernel, params, sizeof *params, groups * local_size, local_size}},
        .nsteps = 1,
        .call = "a peak",
    };
    CA_TRY(ca_launch_run(device, &launch, error));
    *sum = 0;
    for (size_t i = 0; i < outputs; i++) {
        *sum += (double)output[i];
    }
done:
    free(output);
    return status;
}

ca_status
ca_peak_fma(ca_device *device, ca_dtype dtype, int64_t steps, double *flop,
            double *value, ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    int64_t lanes = vector_bytes(info) / (int64_t)ca_dtype_size(dtype);
    size_t groups = (size_t)(groups_per_unit(info) * info->compute_units);
    size_t items = groups * group_size(info);
    ca_kernel_spec spec = {.name = "peak_fma"};
    define(&spec, "REAL64", dtype == CA_FLOAT64);
    define(&spec, "LANES", lanes);
    define(&spec, "LOCAL", (int64_t)group_size(info));
    const ca_peak_params params = {.steps = steps, .factor = 0.5f, .addend = 1.0f};
    const ca_span nothing = {.access = CA_ACCESS_READ};
    double sum;
    ca_status status =
        run(device, &spec, &nothing, &params, groups, items, &sum, error);
    if (status == CA_OK) {
        *value = sum / (double)items;
        *flop = 2.0 * (double)items * CA_PEAK_CHAINS * (double)lanes * (double)steps;
    }
    return status;
}

ca_status
ca_peak_read(ca_device *device, const ca_tensor *array, int64_t passes, double *sum,
             ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    int64_t count = array->shape[0];
    ca_kernel_spec spec = {.name = "peak_read"};
    define(&spec, "LANES", vector_bytes(info) / (int64_t)sizeof(float));
    define(&spec, "LOCAL", (int64_t)group_size(info));
    /* Without passes one group is launched, which has nothing to read. */
    bool reads = passes > 0 && count > 0;
    const ca_peak_params params = {.count = reads ? count : 0, .tile = TILE};
    ca_extent extent = ca_tensor_memory(array);
    const ca_span input = {.data = extent.data,
                           .bytes = extent.bytes,
                           .access = CA_ACCESS_READ,
                           .block = array->block};
    size_t tiles = (size_t)((count + TILE - 1) / TILE);
    size_t groups = reads ? tiles * (size_t)passes : 1;
    return run(device, &spec, &input, &params, groups, groups, sum, error);
}
