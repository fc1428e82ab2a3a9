/* SPDX-License-Identifier: MIT */
#include "diagonal/plan.h"

#include <string.h>

static int64_t
clamp(int64_t value, int64_t lowest, int64_t highest)
{
    return value < lowest ? lowest : value > highest ? highest : value;
}

static int64_t
divide_up(int64_t count, int64_t step)
{
    return (count + step - 1) / step;
}

static int64_t
round_up(int64_t count, int64_t step)
{
    return divide_up(count, step) * step;
}

/* ---- regions ---- */

bool
ca_diagonal_has_inside(const ca_diagonal_regions *regions)
{
    const ca_tensor *output = &regions->tensors[CA_DIAGONAL_OUTPUT];
    return regions->lower < regions->upper && regions->lower < ca_tensor_size(output, 1) &&
           regions->upper > 1 - ca_tensor_size(output, 2);
}

bool
ca_diagonal_has_outside(const ca_diagonal_regions *regions)
{
    const ca_tensor *output = &regions->tensors[CA_DIAGONAL_OUTPUT];
    return regions->lower > 1 - ca_tensor_size(output, 2) ||
           regions->upper < ca_tensor_size(output, 1);
}

bool
ca_diagonal_has(const ca_diagonal_regions *regions, int action)
{
    return (regions->inside.action == action && ca_diagonal_has_inside(regions)) ||
           (regions->outside.action == action && ca_diagonal_has_outside(regions));
}

/* ---- the layout ---- */

bool
ca_diagonal_has_rows(const ca_tensor *tensor)
{
    return ca_tensor_size(tensor, 1) == 1 || ca_tensor_stride(tensor, 1) == 1;
}

/* True if the matrices are contiguous and follow one another without gaps. */
static bool
has_no_gaps(const ca_tensor *tensor, const ca_leading_dims *dims, int t)
{
    int64_t rows = ca_tensor_size(tensor, 2);
    int64_t columns = ca_tensor_size(tensor, 1);
    return ca_diagonal_has_rows(tensor) && (rows == 1 || ca_tensor_stride(tensor, 2) == columns) &&
           dims->count == 1 && dims->stride[0][t] == rows * columns;
}

/* Returns the rows and columns of a block: the most of which the device's local memory holds one. */
static int64_t
block_size(const ca_device_info *info, int64_t width)
{
    int64_t size = width == 8 ? CA_DIAGONAL_LARGEST_BLOCK / 2 : CA_DIAGONAL_LARGEST_BLOCK;
    while (size > CA_DIAGONAL_SMALLEST_BLOCK &&
           CA_DIAGONAL_BLOCK_BYTES(size, width) > info->local_memory) {
        size /= 2;
    }
    return size;
}

static int
choose_layout(const ca_device_info *info, const ca_diagonal_regions *regions,
              const ca_leading_dims *dims)
{
    const ca_tensor *input = &regions->tensors[CA_DIAGONAL_INPUT];
    const ca_tensor *output = &regions->tensors[CA_DIAGONAL_OUTPUT];
    bool copies = ca_diagonal_has(regions, CA_DIAGONAL_COPY);
    if (copies && !ca_diagonal_has_rows(input)) {
        return CA_DIAGONAL_BLOCKS;
    }
    int64_t most = CA_DIAGONAL_SHORT_BYTES / (int64_t)ca_dtype_size(output->dtype);
    int64_t rows = ca_tensor_size(output, 2);
    bool is_short = rows <= most && ca_tensor_size(output, 1) <= most / rows &&
                    CA_DIAGONAL_PATTERN_BYTES <= info->local_memory;
    bool dense = has_no_gaps(output, dims, CA_DIAGONAL_OUTPUT) &&
                 (!copies || has_no_gaps(input, dims, CA_DIAGONAL_INPUT));
    return is_short && dense ? CA_DIAGONAL_SHORT : CA_DIAGONAL_ROWS;
}

/* Returns the region's action in a layout. CA_DIAGONAL_SHORT cannot skip a region: it writes the
   numbers that the memory holds already. */
static int
action_of(const ca_diagonal_regions *regions, const ca_diagonal_region *region, int layout)
{
    return layout != CA_DIAGONAL_SHORT || region->action != CA_DIAGONAL_SKIP ? region->action
           : regions->in_place                                               ? CA_DIAGONAL_COPY
                                                                             : CA_DIAGONAL_FILL;
}

/* ---- tiles ---- */

#define CPU_TILE_LOWEST  ((int64_t)32 << 10) /* bytes */
#define CPU_TILE_HIGHEST ((int64_t)256 << 10)
#define TILES_PER_UNIT   8
#define GROUP_TILE       ((int64_t)32 << 10)
#define GROUP            256 /* work-items */
#define BLOCK            CA_DIAGONAL_LARGEST_BLOCK

/* True if each tile has one work-item, as on CPUs, else a group shares the tile. Tests
   force the variant "cpu", or another one for groups. */
static bool
items_are_alone(const ca_device_info *info, const char *kernel)
{
    return kernel == NULL ? !info->items_are_lanes : strcmp(kernel, "cpu") == 0;
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

/* `bytes`: of the whole output. */
static int64_t
tile_bytes(const ca_device_info *info, bool alone, int64_t bytes)
{
    int64_t units = info->compute_units > 0 ? info->compute_units : 1;
    int64_t share = bytes / (TILES_PER_UNIT * units);
    return alone ? clamp(share, CPU_TILE_LOWEST, CPU_TILE_HIGHEST) : GROUP_TILE;
}

/* Sets the size of a tile to about `elements`. A tile's number of columns is a multiple of BLOCK;
   its number of rows too, if the layout copies blocks. */
static void
set_tiles(int layout, int64_t elements, int64_t matrices, ca_diagonal_plan *plan)
{
    ca_diagonal_params *params = &plan->params;
    int64_t columns = params->columns;
    int64_t rows = matrices * params->rows;
    int64_t least = layout == CA_DIAGONAL_BLOCKS ? BLOCK : 1; /* rows of a tile */
    if (layout == CA_DIAGONAL_SHORT) {
        params->tile_columns = round_up(elements, BLOCK);
        params->tiles = 1;
        plan->groups = (size_t)divide_up(rows * columns, params->tile_columns);
        return;
    }
    int64_t across = divide_up(columns, divide_up(elements, least));
    params->tile_columns = round_up(divide_up(columns, across), BLOCK);
    params->tiles = divide_up(columns, params->tile_columns);
    params->tile_rows = round_up(clamp(elements / columns, 1, rows), least);
    plan->groups = (size_t)(params->tiles * divide_up(rows, params->tile_rows));
}

/* ---- the plan ---- */

/* Some drivers report a smaller cache than the last one. */
#define STREAM_LOWEST ((int64_t)32 << 20)

/* True if stores that bypass the caches are faster: if the output is too large to be still in the
   last cache when it is read. New memory is in the cache already, because the system cleared it. */
static bool
streams(const ca_device_info *info, const ca_diagonal *problem, int64_t bytes)
{
    int64_t cache = info->cache > STREAM_LOWEST ? info->cache : STREAM_LOWEST;
    return problem->memory == CA_OUTPUT_GIVEN && bytes > cache;
}

ca_diagonal_plan
ca_diagonal_make_plan(const ca_device_info *info, const ca_diagonal_regions *regions,
                      const ca_leading_dims *dims)
{
    const ca_tensor *output = &regions->tensors[CA_DIAGONAL_OUTPUT];
    int64_t width = (int64_t)ca_dtype_size(output->dtype);
    int64_t rows = ca_tensor_size(output, 2);
    int64_t columns = ca_tensor_size(output, 1);
    int64_t count = ca_tensor_count(output);
    bool alone = items_are_alone(info, regions->forced->kernel);
    int64_t lanes = (alone ? 64 : 16) / width;
    int layout = choose_layout(info, regions, dims);
    ca_diagonal_plan plan = {
        .spec = {.name = "diagonal_band"},
        .params = {.batch = {1, 1, 1},
                   .rows = rows,
                   .columns = columns,
                   .lower = clamp(regions->lower, -rows, columns),
                   .upper = clamp(regions->upper, -rows, columns),
                   .inside_bits = (int64_t)regions->inside.bits,
                   .outside_bits = (int64_t)regions->outside.bits},
        .local_size = alone ? 1 : group_size(info),
    };
    set_tiles(layout, divide_up(tile_bytes(info, alone, count * width), width),
              count / (rows * columns), &plan);
    ca_kernel_define(&plan.spec, "WIDTH", width);
    ca_kernel_define(&plan.spec, "LANES", lanes < 16 ? lanes : 16);
    ca_kernel_define(&plan.spec, "LOCAL", (int64_t)plan.local_size);
    ca_kernel_define(&plan.spec, "LAYOUT", layout);
    ca_kernel_define(&plan.spec, "BLOCK", block_size(info, width));
    ca_kernel_define(&plan.spec, "INSIDE", action_of(regions, &regions->inside, layout));
    ca_kernel_define(&plan.spec, "OUTSIDE", action_of(regions, &regions->outside, layout));
    ca_kernel_define(&plan.spec, "STREAM", alone && streams(info, regions->problem, count * width));
    ca_kernel_define(&plan.spec, "SUB_GROUP", alone ? 0 : info->smallest_sub_group);
    return plan;
}
