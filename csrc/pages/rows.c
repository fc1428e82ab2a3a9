/* SPDX-License-Identifier: MIT */
#include "pages/rows.h"

#include <stdio.h>
#include <stdlib.h>
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

/* On CPUs a work-group copies or quantises so many bytes. On other devices it has GROUP work-items. */
#define BYTES_COPIED ((int64_t)64 << 10)
#define BYTES_CODED  ((int64_t)16 << 10)
#define GROUP        256

/* The widest element that kernels move. */
#define WIDEST 16

enum { FROM, TO, PLACES, SCALES, OFFSETS, SPANS };

/* ---- what is kept ---- */

static bool
has_scales(const ca_tensor *tensor, int ndim, const int64_t *sizes)
{
    bool fits = tensor->data != NULL && tensor->dtype == CA_FLOAT32 && tensor->ndim == ndim &&
                ca_tensor_fills_extent(tensor);
    for (int d = 0; fits && d < ndim; d++) {
        fits = tensor->shape[d] == sizes[d];
    }
    return fits;
}

bool
ca_kept_is_whole(const ca_kept *kept)
{
    const ca_tensor *pages = &kept->pages;
    if (pages->ndim != 4 || !ca_tensor_fills_extent(pages) || kept->size < 1) {
        return false;
    }
    const bool whole = pages->shape[3] == kept->size;
    const int64_t groups = (kept->size + CA_INT4_GROUP - 1) / CA_INT4_GROUP;
    const int64_t sizes[] = {pages->shape[0], pages->shape[1], pages->shape[2], groups};
    switch (kept->codes) {
    case CA_CODES_NONE:
        return whole;
    case CA_CODES_INT8:
        return whole && pages->dtype == CA_INT8 && has_scales(&kept->scales, 3, sizes);
    case CA_CODES_INT4:
        return pages->dtype == CA_UINT8 && pages->shape[3] == (kept->size + 1) / 2 &&
               has_scales(&kept->scales, 4, sizes) && has_scales(&kept->offsets, 4, sizes);
    default:
        return whole && pages->dtype == CA_UINT8 && has_scales(&kept->scales, 1, sizes + 1);
    }
}

static bool
has_row_scales(const ca_kept *kept)
{
    return kept->codes == CA_CODES_INT8 || kept->codes == CA_CODES_INT4;
}

int
ca_kept_tensors(const ca_kept *kept, ca_tensor tensors[CA_KEPT_TENSORS])
{
    int count = 0;
    tensors[count++] = kept->pages;
    if (has_row_scales(kept)) {
        tensors[count++] = kept->scales;
    }
    if (kept->offsets.data != NULL) {
        tensors[count++] = kept->offsets;
    }
    return count;
}

/* ---- by the host ---- */

static bool
is_for_host(const ca_rows *rows)
{
    const ca_tensor *from = &rows->from;
    return rows->to->codes == CA_CODES_NONE && from->strides[3] == 1 &&
           ca_tensor_count(from) * (int64_t)ca_dtype_size(from->dtype) <= SMALL_BYTES &&
           ca_storage_is_at_hand(from) && ca_storage_is_at_hand(&rows->to->pages);
}

static void
copy_rows(const ca_rows *rows)
{
    const ca_tensor *from = &rows->from;
    const ca_tensor *to = &rows->to->pages;
    const int64_t heads = to->shape[1];
    const int64_t page_size = to->shape[2];
    const int64_t count = from->shape[2];
    const int64_t width = (int64_t)ca_dtype_size(to->dtype);
    const int64_t bytes = to->shape[3] * width;
    for (int64_t n = 0; n < from->shape[0] * count; n++) {
        const int64_t place = rows->places[n];
        const int64_t entry = n / count;
        const int64_t page = place / page_size;
        const char *source =
            (const char *)from->data +
            (entry * from->strides[0] + (n - entry * count) * from->strides[2]) * width;
        char *target =
            (char *)to->data + (page * heads * page_size + place - page * page_size) * bytes;
        for (int64_t head = 0; place >= 0 && head < heads; head++) {
            memcpy(target + head * page_size * bytes, source + head * from->strides[1] * width,
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
           (params->head % least == 0 || params->heads == 1) &&
           (params->entry % least == 0 || params->entries == 1);
}

/* Counts elements of the widest kind instead. */
static void
widen(ca_pages_params *params, int64_t width)
{
    params->size = params->size * width / WIDEST;
    params->offset = params->offset * width / WIDEST;
    params->row = params->row * width / WIDEST;
    params->head = params->head * width / WIDEST;
    params->entry = params->entry * width / WIDEST;
}

/* Moves elements of the widest kind that sizes and strides allow. */
static void
set_width(rows_plan *plan, const void *memory, int64_t width)
{
    const bool wide = is_wide(&plan->params, memory, width);
    if (wide) {
        widen(&plan->params, width);
    }
    ca_kernel_define(&plan->spec, "WIDTH", wide ? WIDEST : width);
}

/* Lets another process run the kernel first, if the driver is not known: the kernel may end that process. */
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
    const int64_t vectors = params->entries * params->heads * params->rows;
    ca_kernel *kernel = NULL;
    int64_t local = 1;
    params->across = 1;
    const int64_t bytes = plan->codes == CA_CODES_NONE ? BYTES_COPIED : BYTES_CODED;
    params->tile = bytes / divide_up(plan->bytes, vectors) + 1;
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

/* Sets what is written, and as what. */
static void
plan_rows(const ca_device_info *info, const ca_rows *rows, rows_plan *plan)
{
    const bool on_cpu = info->type == CA_DEVICE_CPU && !info->items_are_lanes;
    static const uint8_t arguments[] = {FROM, TO, PLACES, SCALES, OFFSETS};
    const ca_tensor *from = &rows->from;
    const ca_kept *to = rows->to;
    const ca_extent memory = ca_tensor_memory(from);
    const int64_t width = (int64_t)ca_dtype_size(from->dtype);
    const int64_t count = from->shape[0] * from->shape[2];
    const bool copies = to->codes == CA_CODES_NONE;
    *plan = (rows_plan){
        .spec = {.name = copies ? "pages_copy" : "pages_quantize"},
        .params = {.entries = from->shape[0],
                   .heads = from->shape[1],
                   .rows = from->shape[2],
                   .size = from->shape[3],
                   .offset = memory.offset,
                   .entry = from->strides[0],
                   .head = from->strides[1],
                   .row = from->strides[2],
                   .column = from->strides[3],
                   .page_size = to->pages.shape[2],
                   .heads_adjoin = llabs(from->strides[1]) < llabs(from->strides[2])},
        .codes = to->codes,
        .dtype = from->dtype,
        .bytes = count * from->shape[1] * from->shape[3] * width,
        .spans = {[FROM] = span_of(from, CA_ACCESS_READ, "from"),
                  [TO] = span_of(&to->pages, CA_ACCESS_UPDATE, "pages"),
                  [PLACES] = span_of_places(rows->places, count),
                  [SCALES] =
                      span_of(&to->scales, has_row_scales(to) ? CA_ACCESS_UPDATE : CA_ACCESS_READ,
                              "scales"),
                  [OFFSETS] = span_of(&to->offsets, CA_ACCESS_UPDATE, "offsets")},
        .nspans = copies ? SCALES : SPANS,
        .arguments = arguments,
        .narguments = copies ? SCALES : SPANS,
    };
    if (copies) {
        set_width(plan, memory.data, width);
        return;
    }
    ca_kernel_define(&plan->spec, "DTYPE", from->dtype);
    ca_kernel_define(&plan->spec, "VALUE_DTYPE", from->dtype);
    ca_kernel_define(&plan->spec, "REAL64", 0);
    ca_kernel_define(&plan->spec, "CODES", to->codes);
    ca_kernel_define(&plan->spec, "LANES", on_cpu ? 16 : 4);
    ca_kernel_define(&plan->spec, "ON_CPU", on_cpu);
}

ca_status
ca_rows_write(ca_device *device, const ca_rows *rows, ca_error *error)
{
    ca_status status = CA_OK;
    rows_plan plan;
    if (rows->from.shape[0] * rows->from.shape[2] == 0) {
        return CA_OK;
    }
    if (is_for_host(rows)) {
        copy_rows(rows);
        return CA_OK;
    }
    CA_TRY(ca_device_prepare(device, error));
    plan_rows(ca_device_get_info(device), rows, &plan);
    CA_TRY(launch(device, &plan, rows->call, error));
done:
    return status;
}

ca_status
ca_rows_copy(ca_device *device, const ca_tensor *from, const ca_tensor *to, const int64_t *moves,
             int64_t count, const char *call, ca_error *error)
{
    ca_status status = CA_OK;
    static const uint8_t within[] = {TO, TO, PLACES};
    static const uint8_t between[] = {FROM, TO, PLACES};
    const bool is_same = from->data == to->data;
    const int64_t width = (int64_t)ca_dtype_size(from->dtype);
    const ca_extent memory = ca_tensor_memory(from);
    rows_plan plan = {
        .spec = {.name = "pages_copy"},
        .params = {.entries = 1,
                   .heads = to->shape[1],
                   .rows = count,
                   .size = to->strides[2],
                   .offset = memory.offset,
                   .column = 1,
                   .page_size = to->shape[2],
                   .source_size = from->shape[2]},
        .codes = CA_CODES_NONE,
        .dtype = to->dtype,
        .bytes = count * to->shape[1] * to->strides[2] * width,
        .spans = {[TO] = span_of(to, CA_ACCESS_UPDATE, "pages"),
                  [PLACES] = span_of_places(moves, 2 * count)},
        .nspans = SCALES,
        .arguments = is_same ? within : between,
        .narguments = SCALES,
    };
    if (count == 0) {
        return CA_OK;
    }
    if (!is_same) {
        plan.spans[FROM] = span_of(from, CA_ACCESS_READ, "from");
    }
    CA_TRY(ca_device_prepare(device, error));
    set_width(&plan, memory.data, width);
    CA_TRY(launch(device, &plan, call, error));
done:
    return status;
}
