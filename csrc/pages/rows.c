/* SPDX-License-Identifier: MIT */
#include "pages/rows.h"

#include <stdio.h>
#include <string.h>

#include "opencl/apart.h"
#include "opencl/launch.h"
#include "opencl/prepare.h"
#include "opencl/program.h"
#include "opencl/runtime.h"
#include "opencl/storage.h"

_Static_assert(sizeof(ca_pages_params) == CA_PAGES_PARAMS_SIZE,
               "host and device must agree on the parameters' layout");

/* The host has copied this much before a kernel would have started. */
#define SMALL_BYTES (64 << 10)

/* Bytes of a work-group on CPUs, and work-items of one elsewhere. */
#define CPU_BYTES ((int64_t)16 << 10)
#define GROUP     256

/* The widest element that kernels move. */
#define WIDEST 16

enum { FROM, TO, PLACES, SCALES, OFFSETS, SPANS };

/* ---- by the host ---- */

static bool
is_for_host(const ca_rows *rows, int64_t bytes)
{
    return rows->codes == CA_CODES_NONE && bytes <= SMALL_BYTES && rows->from.strides[2] == 1 &&
           ca_storage_is_at_hand(&rows->from) && ca_storage_is_at_hand(&rows->to);
}

static void
copy_rows(const ca_rows *rows)
{
    const int64_t heads = rows->to.shape[1];
    const int64_t page_size = rows->to.shape[2];
    const int64_t width = (int64_t)ca_dtype_size(rows->to.dtype);
    const int64_t bytes = rows->to.shape[3] * width;
    for (int64_t r = 0; r < rows->count; r++) {
        const int64_t page = rows->places[r] / page_size;
        const int64_t row = rows->places[r] - page * page_size;
        const char *from = (const char *)rows->from.data + r * rows->from.strides[0] * width;
        char *to = (char *)rows->to.data + (page * heads * page_size + row) * bytes;
        for (int64_t head = 0; head < heads; head++) {
            memcpy(to + head * page_size * bytes, from + head * rows->from.strides[1] * width,
                   (size_t)bytes);
        }
    }
}

/* ---- by a kernel ---- */

typedef struct {
    ca_kernel_spec spec;
    ca_pages_params params;
    int codes;
    ca_dtype dtype; /* of what is read */
    int64_t bytes;  /* that are read */
    ca_span spans[SPANS];
    int nspans;
    const uint8_t *arguments;
    int narguments;
} rows_plan;

static int64_t
divide_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step;
}

/* Returns true if all strides and sizes are whole elements of the widest kind. The vectors of pages have
   no gaps. */
static bool
is_wide(const ca_pages_params *params, const void *memory, int64_t width)
{
    const int64_t least = WIDEST / width;
    return params->column == 1 && (uintptr_t)memory % WIDEST == 0 && params->size % least == 0 &&
           params->offset % least == 0 && (params->row % least == 0 || params->rows == 1) &&
           (params->head % least == 0 || params->heads == 1);
}

/* Counts elements of the widest kind instead. */
static void
widen(ca_pages_params *params, int64_t width)
{
    params->size = params->size * width / WIDEST;
    params->offset = params->offset * width / WIDEST;
    params->row = params->row * width / WIDEST;
    params->head = params->head * width / WIDEST;
}

/* Let another process write such rows first, if the driver is not known. */
static ca_status
try_apart(ca_device *device, const rows_plan *plan, ca_error *error)
{
    char request[32];
    if (ca_device_get_info(device)->is_known || ca_kernel_is_built(device, &plan->spec)) {
        return CA_OK;
    }
    (void)snprintf(request, sizeof request, "pages %d %s", plan->codes, ca_dtype_name(plan->dtype));
    return ca_apart_try(device, &plan->spec, request, error);
}

/* Divides the vectors among work-groups, and launches the kernel. */
static ca_status
launch(ca_device *device, rows_plan *plan, const char *call, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_device_info *info = ca_device_get_info(device);
    ca_pages_params *params = &plan->params;
    const int64_t vectors = params->rows * params->heads;
    ca_kernel *kernel = NULL;
    int64_t local = 1;
    params->across = 1;
    params->tile = CPU_BYTES / divide_up(plan->bytes, vectors) + 1;
    CA_TRY(try_apart(device, plan, error));
    CA_TRY(ca_kernel_get(device, &plan->spec, &kernel, error));
    if (info->items_are_lanes) {
        const int64_t most = (int64_t)ca_kernel_get_limits(kernel)->work_group;
        while (2 * local <= GROUP && 2 * local <= most) {
            local *= 2;
        }
        const bool shares = strcmp(plan->spec.name, "pages_copy") == 0;
        while (shares && 2 * params->across <= params->size && params->across < local) {
            params->across *= 2;
        }
        params->tile = local / params->across;
    }
    const ca_launch run = {
        .spans = plan->spans,
        .nspans = plan->nspans,
        .steps = {{.kernel = kernel,
                   .params = params,
                   .params_size = sizeof(*params),
                   .global_size = (size_t)(divide_up(vectors, params->tile) * local),
                   .local_size = (size_t)local,
                   .work = (double)plan->bytes,
                   .arguments = plan->arguments,
                   .narguments = plan->narguments}},
        .nsteps = 1,
        .small = plan->bytes <= 2 * SMALL_BYTES,
        .call = call,
    };
    CA_TRY(ca_launch_run(device, &run, error));
done:
    return status;
}

static ca_span
span_of(const ca_tensor *tensor, ca_access access, const char *name)
{
    const ca_extent memory = ca_tensor_memory(tensor);
    return (ca_span){.data = memory.data,
                     .bytes = memory.bytes,
                     .access = access,
                     .block = tensor->block,
                     .name = name};
}

static ca_span
span_of_places(const int64_t *places, int64_t count)
{
    return (ca_span){.data = (void *)(uintptr_t)places,
                     .bytes = (size_t)count * sizeof(*places),
                     .access = CA_ACCESS_READ,
                     .name = "places"};
}

static void
plan_rows(const ca_device_info *info, const ca_rows *rows, rows_plan *plan)
{
    const bool on_cpu = info->type == CA_DEVICE_CPU && !info->items_are_lanes;
    static const uint8_t arguments[] = {FROM, TO, PLACES, SCALES, OFFSETS};
    const ca_tensor *from = &rows->from;
    const ca_extent memory = ca_tensor_memory(from);
    const int64_t width = (int64_t)ca_dtype_size(from->dtype);
    const bool copies = rows->codes == CA_CODES_NONE;
    const ca_access of_scales = rows->codes == CA_CODES_INT8 || rows->codes == CA_CODES_INT4
                                    ? CA_ACCESS_UPDATE
                                    : CA_ACCESS_READ;
    *plan = (rows_plan){
        .spec = {.name = copies ? "pages_copy" : "pages_quantize"},
        .params = {.rows = rows->count,
                   .heads = from->shape[1],
                   .size = from->shape[2],
                   .offset = memory.offset,
                   .row = from->strides[0],
                   .head = from->strides[1],
                   .column = from->strides[2],
                   .page_size = rows->to.shape[2]},
        .codes = rows->codes,
        .dtype = from->dtype,
        .bytes = rows->count * from->shape[1] * from->shape[2] * width,
        .spans = {[FROM] = span_of(from, CA_ACCESS_READ, "from"),
                  [TO] = span_of(&rows->to, CA_ACCESS_UPDATE, "pages"),
                  [PLACES] = span_of_places(rows->places, rows->count),
                  [SCALES] = span_of(&rows->scales, of_scales, "scales"),
                  [OFFSETS] = span_of(&rows->offsets, CA_ACCESS_UPDATE, "offsets")},
        .nspans = copies ? SCALES : SPANS,
        .arguments = arguments,
        .narguments = copies ? SCALES : SPANS,
    };
    if (!copies) {
        ca_kernel_define(&plan->spec, "DTYPE", from->dtype);
        ca_kernel_define(&plan->spec, "VALUE_DTYPE", from->dtype);
        ca_kernel_define(&plan->spec, "REAL64", 0);
        ca_kernel_define(&plan->spec, "CODES", rows->codes);
        ca_kernel_define(&plan->spec, "LANES", on_cpu ? 16 : 4);
        ca_kernel_define(&plan->spec, "ON_CPU", on_cpu);
    } else if (is_wide(&plan->params, memory.data, width)) {
        widen(&plan->params, width);
        ca_kernel_define(&plan->spec, "WIDTH", WIDEST);
    } else {
        ca_kernel_define(&plan->spec, "WIDTH", width);
    }
}

ca_status
ca_rows_write(ca_device *device, const ca_rows *rows, ca_error *error)
{
    ca_status status = CA_OK;
    rows_plan plan;
    if (rows->count == 0) {
        return CA_OK;
    }
    CA_TRY(ca_device_prepare(device, error));
    plan_rows(ca_device_get_info(device), rows, &plan);
    if (is_for_host(rows, plan.bytes)) {
        copy_rows(rows);
        return CA_OK;
    }
    CA_TRY(launch(device, &plan, rows->call, error));
done:
    return status;
}

ca_status
ca_rows_copy(ca_device *device, const ca_tensor *pages, const int64_t *moves, int64_t count,
             const char *call, ca_error *error)
{
    ca_status status = CA_OK;
    enum { PAGES, MOVES, MEMORIES };
    static const uint8_t arguments[] = {PAGES, PAGES, MOVES};
    const int64_t width = (int64_t)ca_dtype_size(pages->dtype);
    const ca_extent memory = ca_tensor_memory(pages);
    rows_plan plan = {
        .spec = {.name = "pages_copy"},
        .params = {.rows = count,
                   .heads = pages->shape[1],
                   .size = pages->strides[2],
                   .offset = memory.offset,
                   .column = 1,
                   .page_size = pages->shape[2],
                   .has_sources = 1},
        .codes = CA_CODES_NONE,
        .dtype = pages->dtype,
        .bytes = count * pages->shape[1] * pages->strides[2] * width,
        .spans = {[PAGES] = span_of(pages, CA_ACCESS_UPDATE, "pages"),
                  [MOVES] = span_of_places(moves, 2 * count)},
        .nspans = MEMORIES,
        .arguments = arguments,
        .narguments = sizeof(arguments),
    };
    if (count == 0) {
        return CA_OK;
    }
    CA_TRY(ca_device_prepare(device, error));
    const bool wide = is_wide(&plan.params, memory.data, width);
    if (wide) {
        widen(&plan.params, width);
    }
    ca_kernel_define(&plan.spec, "WIDTH", wide ? WIDEST : width);
    CA_TRY(launch(device, &plan, call, error));
done:
    return status;
}
