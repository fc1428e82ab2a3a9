/* SPDX-License-Identifier: MIT */
#include "attention/backward.h"

#include <stdlib.h>
#include <string.h>

#include "attention/launch.h"
#include "attention/plan.h"
#include "kernels/attention/params.h"
#include "opencl/prepare.h"
#include "opencl/runtime.h"
#include "opencl/step.h" /* CA_MAX_STEPS */
#include "opencl/storage.h"

/* Work-items of a group, where these are lanes. */
#define GROUP 64

/* Numbers of a row that the steps share: base, sum and delta. */
#define NUMBERS 3

/* What each gradient is computed by. */
static const struct {
    ca_attention_role role;
    uint32_t step;
    bool is_wide; /* some columns by a work-item, else one number */
} gradients[] = {
    {CA_ATTENTION_GRAD_QUERY, CA_BACKWARD_QUERY, true},
    {CA_ATTENTION_GRAD_KEY, CA_BACKWARD_KEY, true},
    {CA_ATTENTION_GRAD_VALUE, CA_BACKWARD_VALUE, true},
    {CA_ATTENTION_GRAD_MASK, CA_BACKWARD_MASK, false},
    {CA_ATTENTION_GRAD_SINKS, CA_BACKWARD_SINKS, false},
};

enum { GRADIENTS = sizeof gradients / sizeof gradients[0] };
_Static_assert(GRADIENTS + 2 <= CA_MAX_STEPS, "rows and deltas are steps too");

static bool
has_elements(const ca_attention *attention, ca_attention_role role)
{
    return ca_attention_extent(attention, role).bytes > 0;
}

bool
ca_attention_has_gradients(const ca_attention *attention)
{
    bool any = false;
    for (int n = 0; n < GRADIENTS; n++) {
        any = any || ca_attention_has(attention, gradients[n].role);
    }
    return any;
}

ca_status
ca_attention_clear_gradient(const ca_tensor *gradient, ca_error *error)
{
    ca_extent extent = ca_tensor_extent(gradient);
    if (extent.bytes == 0) {
        return CA_OK;
    }
    if (gradient->block == NULL) {
        memset(extent.data, 0, extent.bytes);
        return CA_OK;
    }
    void *zeros = calloc(extent.bytes, 1);
    if (zeros == NULL) {
        return ca_error_set(error, CA_ERROR_MEMORY, "no memory for %zu bytes", extent.bytes);
    }
    size_t offset = (size_t)((char *)extent.data - (char *)gradient->block->address);
    ca_status status =
        ca_storage_write(ca_storage_of(gradient->block), offset, zeros, extent.bytes, error);
    free(zeros);
    return status;
}

/* The numbers of rows, (…, L, NUMBERS), in the memory of `storage`. */
static ca_operand
numbers_in(ca_storage *storage, const ca_attention *attention)
{
    const int64_t *batch = attention->batch;
    ca_block *block = ca_storage_block(storage);
    int64_t stride = attention->L * NUMBERS;
    ca_operand numbers = {
        .dtype = ca_attention_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32,
        .data = block->address,
        .block = block,
        .rows = attention->L,
        .columns = NUMBERS,
        .row_stride = NUMBERS,
        .column_stride = 1,
        .memory = {.data = block->address, .bytes = block->bytes},
    };
    for (int d = CA_BATCH_DIMS - 1; d >= 0; d--) {
        numbers.batch[d] = stride;
        stride *= batch[d];
    }
    return numbers;
}

/* Make a problem of one step: it has no results but the numbers of rows. */
static void
start_step(const ca_attention *attention, const ca_operand *numbers, ca_attention *step)
{
    *step = *attention;
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        if (ca_attention_is_result(role)) {
            ca_attention_remove(step, role);
        }
    }
    ca_attention_remove(step, CA_ATTENTION_GRAD_LSE);
    step->operands[CA_ATTENTION_LSE] = *numbers;
}

static void
plan_step(const ca_device_info *info, ca_launched *launched, uint32_t gradient,
          const int64_t grid[CA_ATTENTION_GRID_DIMS])
{
    ca_attention_plan *plan = &launched->plan;
    ca_plan_begin(plan, &launched->attention, "attention_backward", 1);
    plan->gradient = gradient;
    plan->redoes = false;
    for (int d = 0; d < CA_ATTENTION_GRID_DIMS; d++) {
        plan->grid[d] = grid[d];
    }
    if (info->items_are_lanes) {
        plan->local_size = (size_t)ca_smaller(info->max_work_group, GROUP);
        plan->any_local_size = true;
    }
    ca_plan_define_data(plan, info, &launched->attention);
}

/* The numbers of rows: what their softmax is made of. */
static void
plan_rows(const ca_device_info *info, const ca_attention *attention, const ca_operand *numbers,
          ca_launched *launched)
{
    const int64_t *batch = attention->batch;
    const int64_t grid[] = {batch[0], batch[1], batch[2], attention->L, 1};
    start_step(attention, numbers, &launched->attention);
    ca_attention_remove(&launched->attention, CA_ATTENTION_GRAD_OUTPUT);
    launched->products = 1;
    launched->adds = false;
    plan_step(info, launched, CA_BACKWARD_ROWS, grid);
}

static void
plan_deltas(const ca_device_info *info, const ca_attention *attention, const ca_operand *numbers,
            ca_launched *launched)
{
    const int64_t *batch = attention->batch;
    const int64_t grid[] = {batch[0], batch[1], batch[2], attention->L, 1};
    ca_attention *step = &launched->attention;
    start_step(attention, numbers, step);
    for (int role = CA_ATTENTION_FIRST_OPTIONAL; role < CA_ATTENTION_FIRST_GRADIENT; role++) {
        ca_attention_remove(step, role);
    }
    step->operands[CA_ATTENTION_FORWARD] = attention->operands[CA_ATTENTION_OUTPUT];
    step->operands[CA_ATTENTION_GRAD_OUTPUT] = attention->operands[CA_ATTENTION_GRAD_OUTPUT];
    step->operands[CA_ATTENTION_GRAD_LSE] = attention->operands[CA_ATTENTION_GRAD_LSE];
    launched->products = 0;
    launched->adds = false;
    plan_step(info, launched, CA_BACKWARD_DELTAS, grid);
}

/* Gradient n of the table. */
static void
plan_gradient(const ca_device_info *info, const ca_attention *attention, const ca_operand *numbers,
              int n, ca_launched *launched)
{
    const ca_operand *result = &attention->operands[gradients[n].role];
    ca_attention *step = &launched->attention;
    int64_t grid[CA_ATTENTION_GRID_DIMS];
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        grid[d] = result->batch[d] != 0 ? attention->batch[d] : 1;
    }
    grid[3] = gradients[n].is_wide || result->row_stride != 0 ? result->rows : 1;
    grid[4] = gradients[n].is_wide         ? ca_divide_up(result->columns, CA_REFERENCE_COLUMNS)
              : result->column_stride != 0 ? result->columns
                                           : 1;
    start_step(attention, numbers, step);
    if (gradients[n].role == CA_ATTENTION_GRAD_SINKS) {
        ca_attention_remove(step, CA_ATTENTION_GRAD_OUTPUT);
    } else {
        ca_attention_remove(step, CA_ATTENTION_SINKS); /* they are part of the rows' sums */
    }
    step->operands[CA_ATTENTION_OUTPUT] = *result;
    launched->products = 3;
    launched->adds = (attention->repeated >> gradients[n].role & 1) != 0;
    plan_step(info, launched,
              gradients[n].step | (launched->adds ? CA_BACKWARD_ADDS : 0) |
                  CA_BACKWARD_DTYPE * (uint32_t)result->dtype,
              grid);
}

ca_status
ca_attention_run_backward(ca_device *device, const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_device_info *info = ca_device_get_info(device);
    ca_storage *storage = NULL;
    ca_operand numbers = {.dtype = CA_FLOAT32};
    ca_launched *steps = NULL;
    int count = 0;
    int64_t sizes[] = {attention->batch[0],
                       attention->batch[1],
                       attention->batch[2],
                       attention->L,
                       NUMBERS,
                       ca_plan_real_bytes(attention)};
    int64_t bytes;
    CA_TRY(ca_device_prepare(device, error));
    CA_TRY(ca_plan_check_float64(info, attention, error));
    CA_TRY(ca_shape_count(6, sizes, "query", &bytes, error));
    steps = malloc(CA_MAX_STEPS * sizeof(*steps));
    if (steps == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory for the steps of a launch"));
    }
    if (bytes > 0) {
        CA_TRY(ca_storage_new(device, (size_t)bytes, "numbers of rows", &storage, error));
        numbers = numbers_in(storage, attention);
        plan_rows(info, attention, &numbers, &steps[count++]);
        plan_deltas(info, attention, &numbers, &steps[count++]);
    }
    for (int n = 0; n < GRADIENTS; n++) {
        if (has_elements(attention, gradients[n].role)) {
            plan_gradient(info, attention, &numbers, n, &steps[count++]);
        }
    }
    CA_TRY(ca_attention_launch_all(device, steps, count, error));
done:
    free(steps);
    ca_storage_release(storage);
    return status;
}
