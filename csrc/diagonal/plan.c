/* SPDX-License-Identifier: MIT */
#include "diagonal/plan.h"

#include <stdlib.h>

/* ---- runs ---- */

static int64_t
clamp(int64_t value, int64_t lowest, int64_t highest)
{
    return value < lowest ? lowest : value > highest ? highest : value;
}

bool
ca_diagonal_has_inside(const ca_diagonal_runs *runs)
{
    const ca_tensor *output = &runs->tensors[CA_DIAGONAL_OUTPUT];
    return runs->lower < runs->upper && runs->lower < ca_tensor_size(output, 1) &&
           runs->upper > 1 - ca_tensor_size(output, 2);
}

bool
ca_diagonal_has_outside(const ca_diagonal_runs *runs)
{
    const ca_tensor *output = &runs->tensors[CA_DIAGONAL_OUTPUT];
    return runs->lower > 1 - ca_tensor_size(output, 2) ||
           runs->upper < ca_tensor_size(output, 1);
}

bool
ca_diagonal_has_run(const ca_diagonal_runs *runs, int kind)
{
    return (runs->inside == kind && ca_diagonal_has_inside(runs)) ||
           (runs->outside == kind && ca_diagonal_has_outside(runs));
}

/* ---- the form ---- */

bool
ca_diagonal_has_rows(const ca_tensor *tensor)
{
    return ca_tensor_size(tensor, 1) == 1 || ca_tensor_stride(tensor, 1) == 1;
}

/* Are matrices contiguous, one behind the other? */
static bool
has_no_gaps(const ca_tensor *tensor, const ca_leading_dims *dims, int t)
{
    int64_t rows = ca_tensor_size(tensor, 2);
    int64_t columns = ca_tensor_size(tensor, 1);
    return ca_diagonal_has_rows(tensor) &&
           (rows == 1 || ca_tensor_stride(tensor, 2) == columns) && dims->count == 1 &&
           dims->stride[0][t] == rows * columns;
}

static int
choose_form(const ca_diagonal_runs *runs, const ca_leading_dims *dims)
{
    const ca_tensor *input = &runs->tensors[CA_DIAGONAL_INPUT];
    const ca_tensor *output = &runs->tensors[CA_DIAGONAL_OUTPUT];
    bool copies = ca_diagonal_has_run(runs, CA_DIAGONAL_COPY);
    if (copies && !ca_diagonal_has_rows(input)) {
        return CA_DIAGONAL_BLOCKS;
    }
    int64_t most = CA_DIAGONAL_SHORT_BYTES / (int64_t)ca_dtype_size(output->dtype);
    int64_t rows = ca_tensor_size(output, 2);
    bool is_short = rows <= most && ca_tensor_size(output, 1) <= most / rows;
    bool dense = has_no_gaps(output, dims, CA_DIAGONAL_OUTPUT) &&
                 (!copies || has_no_gaps(input, dims, CA_DIAGONAL_INPUT));
    return is_short && dense ? CA_DIAGONAL_SHORT : CA_DIAGONAL_ROWS;
}

/* ---- tiles ---- */

#define CPU_TILE_LOWEST  ((int64_t)32 << 10)
#define CPU_TILE_HIGHEST ((int64_t)256 << 10)
#define TILES_PER_UNIT   8
#define GROUP_TILE       ((int64_t)32 << 10)
#define GROUP            256
#define BLOCK            CA_DIAGONAL_LARGEST_BLOCK

static int64_t
tile_bytes(const ca_device_info *info, bool alone, int64_t bytes)
{
    int64_t units = info->compute_units > 0 ? info->compute_units : 1;
    int64_t share = bytes / (TILES_PER_UNIT * units);
    return alone ? clamp(share, CPU_TILE_LOWEST, CPU_TILE_HIGHEST) : GROUP_TILE;
}

static int64_t
round_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step * step;
}

static int64_t
divide_up(int64_t count, int64_t parts)
{
    return (count + parts - 1) / parts;
}

/* `elements`: of a tile. Sizes of tiles are multiples of BLOCK. */
static void
set_tiles(int form, int64_t elements, int64_t matrices, ca_diagonal_plan *plan)
{
    ca_diagonal_params *params = &plan->params;
    int64_t columns = params->columns;
    int64_t least = form == CA_DIAGONAL_BLOCKS ? BLOCK : 1; /* rows of a tile */
    if (form == CA_DIAGONAL_SHORT) {
        params->tile_columns = round_up(elements, BLOCK);
        params->tiles = 1;
        plan->groups =
            (size_t)divide_up(matrices * params->rows * columns, params->tile_columns);
        return;
    }
    int64_t across = divide_up(columns, divide_up(elements, least));
    params->tile_columns = round_up(divide_up(columns, across), BLOCK);
    params->tiles = divide_up(columns, params->tile_columns);
    params->tile_rows =
        round_up(clamp(elements / columns, 1, matrices * params->rows), least);
    plan->groups =
        (size_t)(params->tiles * divide_up(matrices * params->rows, params->tile_rows));
}

/* ---- the plan ---- */

/* Stores that pass the caches by are faster where the output is no longer in the last
   of them when it is read. Some drivers report a smaller cache than the last. New
   memory is in the cache from when the system cleared it. */
#define STREAM_LOWEST ((int64_t)32 << 20)

static bool
streams(const ca_device_info *info, const ca_diagonal_runs *runs, int64_t bytes)
{
    int64_t cache = info->cache > STREAM_LOWEST ? info->cache : STREAM_LOWEST;
    return runs->memory == CA_OUTPUT_GIVEN && bytes > cache;
}

/* Is a tile one work-item's, as CPUs have it? Else it is shared by a group. */
static bool
items_are_alone(const ca_device_info *info, const ca_diagonal_runs *runs)
{
    return runs->variant == CA_VARIANT_ANY ? info->type == CA_DEVICE_CPU
                                           : runs->variant == CA_VARIANT_CPU;
}

static size_t
group_size(const ca_device_info *info)
{
    int64_t size = 1;
    while (size < GROUP && 2 * size <= info->max_work_group) {
        size *= 2;
    }
    return (size_t)size;
}

/* A pattern has no holes: what would be skipped is written as it is already. */
static int
short_kind(const ca_diagonal_runs *runs, int kind)
{
    return kind != CA_DIAGONAL_SKIP ? kind
           : runs->in_place         ? CA_DIAGONAL_COPY
                                    : CA_DIAGONAL_FILL;
}

static void
define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    spec->defines[spec->ndefines++] = (ca_define){name, value};
}

ca_diagonal_plan
ca_diagonal_make_plan(const ca_device_info *info, const ca_diagonal_runs *runs,
                      const ca_leading_dims *dims)
{
    const ca_tensor *output = &runs->tensors[CA_DIAGONAL_OUTPUT];
    int64_t width = (int64_t)ca_dtype_size(output->dtype);
    int64_t rows = ca_tensor_size(output, 2);
    int64_t columns = ca_tensor_size(output, 1);
    bool alone = items_are_alone(info, runs);
    int64_t vector = alone ? 64 : 16; /* bytes */
    int64_t matrices = 1;
    for (int d = 0; d < dims->count; d++) {
        matrices *= dims->size[d];
    }
    ca_diagonal_plan plan = {
        .spec = {.name = "diagonal_band"},
        .params = {.batch = {1, 1, 1},
                   .rows = rows,
                   .columns = columns,
                   .lower = clamp(runs->lower, -rows, columns),
                   .upper = clamp(runs->upper, -rows, columns),
                   .inside_bits = (int64_t)runs->inside_bits,
                   .outside_bits = (int64_t)runs->outside_bits},
        .local_size = alone ? 1 : group_size(info),
    };
    int form = choose_form(runs, dims);
    bool is_short = form == CA_DIAGONAL_SHORT;
    int64_t bytes = matrices * rows * columns * width;
    set_tiles(form, divide_up(tile_bytes(info, alone, bytes), width), matrices, &plan);
    define(&plan.spec, "WIDTH", width);
    define(&plan.spec, "LANES", vector / width < 16 ? vector / width : 16);
    define(&plan.spec, "LOCAL", (int64_t)plan.local_size);
    define(&plan.spec, "FORM", form);
    define(&plan.spec, "INSIDE",
           is_short ? short_kind(runs, runs->inside) : runs->inside);
    define(&plan.spec, "OUTSIDE",
           is_short ? short_kind(runs, runs->outside) : runs->outside);
    define(&plan.spec, "STREAM", alone && streams(info, runs, bytes));
    return plan;
}
