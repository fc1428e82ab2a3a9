/* SPDX-License-Identifier: MIT */
#include "attention/backward.h"

#include <stdlib.h>

#include "attention/backward_cpu.h"
#include "attention/backward_mma.h"
#include "attention/backward_reference.h"
#include "attention/backward_steps.h"
#include "attention/backward_tiled.h"
#include "attention/launch.h"
#include "attention/plan.h"
#include "attention/trial.h"
#include "attention/variants.h"
#include "kernels/attention/params.h"
#include "opencl/prepare.h"
#include "opencl/runtime.h"
#include "opencl/step.h" /* CA_MAX_STEPS */
#include "opencl/storage.h"

/* Numbers of a row that the steps share: base, sum and delta. */
#define NUMBERS 3

/* Captured arrays whose gradients the problem asks for. */
static int
captured_count(const ca_attention *attention)
{
    return attention->mods != NULL ? attention->mods->captured_count : 0;
}

bool
ca_attention_has_gradients(const ca_attention *attention)
{
    bool any = captured_count(attention) > 0;
    for (ca_attention_role role = CA_ATTENTION_GRAD_QUERY; role <= CA_ATTENTION_GRAD_SINKS;
         role++) {
        any = any || ca_attention_has(attention, role);
    }
    return any;
}

/* A matrix of reals, in the memory of `storage`. */
static ca_operand
matrix_in(ca_storage *storage, const ca_attention *attention, int64_t rows, int64_t columns)
{
    ca_block *block = ca_storage_block(storage);
    return (ca_operand){
        .dtype = ca_attention_in_float64(attention) ? CA_FLOAT64 : CA_FLOAT32,
        .data = block->address,
        .block = block,
        .rows = rows,
        .columns = columns,
        .row_stride = columns,
        .column_stride = 1,
        .memory = {.data = block->address, .bytes = block->bytes},
    };
}

/* The numbers of rows, (…, L, NUMBERS), in the memory of `storage`. */
static ca_operand
numbers_in(ca_storage *storage, const ca_attention *attention)
{
    ca_operand numbers = matrix_in(storage, attention, attention->L, NUMBERS);
    int64_t stride = attention->L * NUMBERS;
    for (int d = CA_BATCH_DIMS - 1; d >= 0; d--) {
        numbers.batch[d] = stride;
        stride *= attention->batch[d];
    }
    return numbers;
}

/* ---- arrays that the score_mod reads ---- */

/* Work-items that share the rows, and sums that their copies of a gradient have, at most: 32 MiB of float32.
   A copy may have more sums. These numbers decide the order of additions, so no device changes them. The kernel
   for CPUs goes over many rows at a time, so few work-items share them. */
#define SHARES     1024
#define CPU_SHARES 64
#define MOST_SUMS  (INT64_C(1) << 22)

/* How the rows of a problem are shared. */
typedef struct {
    int64_t groups; /* of rows that add to other elements than those of other groups */
    int64_t copies; /* of the gradient, and shares of a group */
    uint32_t apart; /* as in ca_captured */
} shares;

static shares
share_rows(const ca_attention *attention, const ca_captured *captured, int64_t elements,
           int64_t most)
{
    const int64_t *batch = attention->batch;
    int64_t heads = attention->mods->numbers[CA_NUMBER_OF_HEADS];
    heads = heads > 0 ? heads : 1;
    const int64_t sizes[] = {batch[0] * batch[1] * batch[2] / heads, heads, attention->L};
    int64_t copies = ca_smaller(most, MOST_SUMS / elements);
    int64_t rows = 1;
    shares found = {1, 1, 0};
    /* Without room for copies, rows have to be kept apart. */
    for (int d = 0; d < 3; d++) {
        bool is_apart = copies < most && (captured->apart >> d & 1) != 0;
        found.apart |= (uint32_t)is_apart << d;
        *(is_apart ? &found.groups : &rows) *= sizes[d];
    }
    int64_t wanted = found.groups > 0 ? ca_divide_up(most, found.groups) : 1;
    copies = ca_smaller(ca_smaller(copies, wanted), rows);
    found.copies = copies > 1 ? copies : 1;
    return found;
}

/* ---- the pass ---- */

/* A backward pass in the making. */
typedef struct {
    ca_device *device;
    const ca_attention *attention;
    ca_storage *storage; /* of the numbers of rows */
    ca_operand numbers;
    ca_launched *steps; /* CA_MAX_STEPS of them */
    bool on_cpu;        /* the kernel for CPUs has computed the numbers */
} pass;

static bool
is_any(ca_attention_role role)
{
    (void)role;
    return true;
}

static bool
is_wide(ca_attention_role role)
{
    return role <= CA_ATTENTION_GRAD_VALUE;
}

static bool
is_narrow(ca_attention_role role)
{
    return !is_wide(role);
}

static bool
is_of_sinks(ca_attention_role role)
{
    return role == CA_ATTENTION_GRAD_SINKS;
}

/* A kernel that computes gradients faster than the reference. */
typedef struct {
    int variant;
    bool (*takes)(const ca_device_info *info, const ca_forced *forced,
                  const ca_attention *attention);
    ca_backward_division (*divide)(const ca_device_info *info, const ca_attention *attention);
    int (*plan)(const ca_device_info *info, const ca_attention *attention,
                const ca_backward_division *division, const ca_operand *numbers,
                const ca_operand *sums, ca_launched *steps);
    bool (*leaves)(ca_attention_role role); /* to the reference: these gradients */
} fast_kernel;

static const fast_kernel fast_kernels[] = {
    {CA_INDEX_cpu, ca_backward_cpu_takes, ca_backward_cpu_divide, ca_backward_cpu_plan,
     is_of_sinks},
    {CA_INDEX_mma, ca_backward_mma_takes, ca_backward_tiled_divide, ca_backward_mma_plan,
     is_narrow},
    {CA_INDEX_tiled, ca_backward_tiled_takes, ca_backward_tiled_divide, ca_backward_tiled_plan,
     is_narrow},
};

enum { FAST_KERNELS = sizeof fast_kernels / sizeof fast_kernels[0] };

/* Numbers of kernels that are tried: the fast ones and the reference, behind the variants. */
_Static_assert(CA_VARIANT_COUNT + FAST_KERNELS + 1 <= CA_TRIED_KERNELS, "each has a number");

/* Start a pass on a prepared device. */
static ca_status
start_pass(pass *p, ca_device *device, const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    *p = (pass){.device = device, .attention = attention, .numbers = {.dtype = CA_FLOAT32}};
    int64_t sizes[] = {attention->batch[0],
                       attention->batch[1],
                       attention->batch[2],
                       attention->L,
                       NUMBERS,
                       ca_plan_real_bytes(attention)};
    int64_t bytes;
    CA_TRY(ca_plan_check_float64(ca_device_get_info(device), attention, error));
    CA_TRY(ca_shape_count(6, sizes, "query", &bytes, error));
    p->steps = calloc(CA_MAX_STEPS, sizeof(*p->steps));
    if (p->steps == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory for the steps of a launch"));
    }
    if (bytes > 0) {
        CA_TRY(ca_storage_new(device, (size_t)bytes, "numbers of rows", &p->storage, error));
        p->numbers = numbers_in(p->storage, attention);
    }
done:
    return status;
}

static void
end_pass(pass *p)
{
    free(p->steps);
    ca_storage_release(p->storage);
}

/* Let the reference compute all gradients. */
static ca_status
run_reference(const pass *p, ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(p->device);
    int count = 0;
    if (p->storage != NULL) {
        count = ca_backward_reference_plan_rows(info, p->attention, &p->numbers, p->steps);
    }
    count += ca_backward_reference_plan(info, p->attention, &p->numbers, is_any, p->steps + count);
    return ca_attention_launch_all(p->device, p->steps, count, NULL, NULL, error);
}

/* Let a fast kernel compute gradients, and the reference those that it leaves, and those numbers of query, key and
   value that are not finite. *limits become tighter as in ca_attention_launch. */
static ca_status
run_planned(const pass *p, const ca_device_info *info, const fast_kernel *fast,
            ca_plan_limits *limits, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_device_info *whole = ca_device_get_info(p->device);
    const ca_attention *attention = p->attention;
    ca_backward_division division = fast->divide(info, attention);
    ca_storage *storage = NULL;
    ca_operand sums = {.dtype = CA_FLOAT32};
    bool redoes;
    if (division.stride > 0) {
        int64_t sizes[] = {
            division.parts, attention->batch[0], attention->batch[1],          attention->batch[2],
            attention->L,   division.stride,     ca_plan_real_bytes(attention)};
        int64_t bytes;
        CA_TRY(ca_shape_count(7, sizes, "query", &bytes, error));
        CA_TRY(ca_storage_new(p->device, (size_t)bytes, "sums of the query's gradient", &storage,
                              error));
        sums = matrix_in(storage, attention, bytes / division.stride / sizes[6], division.stride);
    }
    int count = fast->plan(info, attention, &division, &p->numbers, &sums, p->steps);
    count +=
        ca_backward_reference_plan(whole, attention, &p->numbers, fast->leaves, p->steps + count);
    CA_TRY(ca_attention_launch_all(p->device, p->steps, count, limits, &redoes, error));
    if (redoes) {
        count = ca_backward_reference_plan(whole, attention, &p->numbers, is_wide, p->steps);
        for (int n = 0; n < count; n++) {
            p->steps[n].flags = CA_REDOES;
            p->steps[n].adds = true;
        }
        CA_TRY(ca_attention_launch_all(p->device, p->steps, count, NULL, NULL, error));
    }
done:
    ca_storage_release(storage);
    return status;
}

/* Plans that are tried: the first one, and those within the limits of its kernels. */
#define MOST_PLANS 3

/* The same. If the kernels allow less than the plan asks for, plan them again within their limits. */
static ca_status
run_fast(const pass *p, ca_device_info *info, const ca_forced *forced, const fast_kernel *fast,
         ca_error *error)
{
    for (int plans = 1;; plans++) {
        ca_plan_limits limits = {info->max_work_group, info->local_memory};
        ca_status status = run_planned(p, info, fast, &limits, error);
        bool tighter =
            limits.group < info->max_work_group || limits.local_memory < info->local_memory;
        ca_variant_limit(info, &limits);
        if (status != CA_ERROR_KERNEL || !tighter || plans == MOST_PLANS ||
            !fast->takes(info, forced, p->attention)) {
            return status;
        }
        ca_error_clear(error);
    }
}

/* Returns the last program of a fast kernel, or of the reference for NULL: the kernel is left out by it. Kernels may
   share the first one. */
static ca_kernel_spec
last_program(const pass *p, const ca_device_info *info, const fast_kernel *fast)
{
    const ca_operand none = {.dtype = CA_FLOAT32};
    int count;
    if (fast == NULL) {
        count = ca_backward_reference_plan_rows(info, p->attention, &p->numbers, p->steps);
    } else {
        ca_backward_division division = fast->divide(info, p->attention);
        count = fast->plan(info, p->attention, &division, &p->numbers, &none, p->steps);
    }
    return p->steps[count - 1].plan.spec;
}

/* ---- trials ---- */

/* Start a pass that a kernel alone computes. CA_ERROR_SETTING if the kernel does not take it. */
static ca_status
start_alone(pass *p, ca_device *device, const ca_attention *attention, const fast_kernel *fast,
            ca_device_info *info, ca_forced *forced, ca_error *error)
{
    ca_status status = CA_OK;
    *info = *ca_device_get_info(device);
    *forced = (ca_forced){.kernel = fast != NULL ? ca_variant_at(fast->variant)->word : NULL};
    CA_TRY(start_pass(p, device, attention, error));
    if (fast != NULL && !fast->takes(info, forced, attention)) {
        CA_TRY(ca_error_set(error, CA_ERROR_SETTING, "the kernel for gradients does not take it"));
    }
done:
    return status;
}

static ca_status
find_program(ca_device *device, const ca_attention *attention, const void *fast,
             ca_kernel_spec *spec, ca_error *error)
{
    ca_status status = CA_OK;
    ca_device_info info;
    ca_forced forced;
    pass p;
    CA_TRY(start_alone(&p, device, attention, fast, &info, &forced, error));
    *spec = last_program(&p, &info, fast);
done:
    end_pass(&p);
    return status;
}

static ca_status
run_alone(ca_device *device, const ca_attention *attention, const void *fast, ca_error *error)
{
    ca_status status = CA_OK;
    ca_device_info info;
    ca_forced forced;
    pass p;
    CA_TRY(start_alone(&p, device, attention, fast, &info, &forced, error));
    CA_TRY(fast != NULL ? run_fast(&p, &info, &forced, fast, error) : run_reference(&p, error));
done:
    end_pass(&p);
    return status;
}

/* Returns a row of the table as a kernel that is tried. The row behind the last one is the reference. */
static ca_tried
tried_kernel(int row)
{
    const fast_kernel *fast = row < FAST_KERNELS ? &fast_kernels[row] : NULL;
    return (ca_tried){.number = CA_VARIANT_COUNT + row,
                      .variant = fast != NULL ? fast->variant : CA_INDEX_reference,
                      .is_backward = true,
                      .kernel = fast,
                      .plan = find_program,
                      .run = run_alone};
}

ca_status
ca_backward_find_tried(int variant, ca_tried *tried, ca_error *error)
{
    for (int row = 0; row <= FAST_KERNELS; row++) {
        *tried = tried_kernel(row);
        if (tried->variant == variant) {
            return CA_OK;
        }
    }
    return ca_error_set(error, CA_ERROR_SETTING, "%s has no kernel for gradients",
                        ca_variant_at(variant)->word);
}

/* Try the kernel of a row, unless one is forced. `spec` is its program for the pass. */
static ca_status
try_kernel(const pass *p, const ca_forced *forced, int row, const ca_kernel_spec *spec,
           ca_error *error)
{
    const ca_tried tried = tried_kernel(row);
    return forced->kernel != NULL || forced->trials == CA_TRIALS_OFF
               ? CA_OK
               : ca_attention_try(p->device, p->attention, &tried, spec, error);
}

/* ---- the choice ---- */

/* Run the fastest kernel that works, as launch_best of attention/run.c does. */
static ca_status
run_best(pass *p, const ca_forced *forced, ca_error *error)
{
    ca_status status = CA_OK;
    const uint32_t wrong = ca_attention_wrong(p->device, p->attention);
    ca_forced now = *forced;
    ca_kernel_spec spec;
    now.left_out |= wrong;
    for (int n = 0; n < FAST_KERNELS; n++) {
        const fast_kernel *fast = &fast_kernels[n];
        ca_device_info info;
        ca_forced_limit(forced, ca_device_get_info(p->device), &info);
        if (p->storage == NULL || (wrong >> tried_kernel(n).number & 1) != 0 ||
            !fast->takes(&info, &now, p->attention)) {
            continue;
        }
        spec = last_program(p, &info, fast);
        if (ca_device_leaves_out(p->device, &spec)) {
            continue;
        }
        status = try_kernel(p, forced, n, &spec, error);
        if (status == CA_OK) {
            status = run_fast(p, &info, &now, fast, error);
        }
        p->on_cpu = status == CA_OK && n == 0;
        if (status != CA_ERROR_KERNEL || forced->kernel != NULL) {
            return status;
        }
        ca_device_leave_out(p->device, &spec, error->message);
        ca_error_clear(error);
    }
    spec = last_program(p, ca_device_get_info(p->device), NULL);
    CA_TRY(try_kernel(p, forced, FAST_KERNELS, &spec, error));
    CA_TRY(run_reference(p, error));
done:
    return status;
}

/* Let a step that computes no scores share its program with calls without mods. */
static void
remove_mods(const pass *p, ca_launched *launched)
{
    if (p->on_cpu) {
        launched->attention.mods = NULL;
    }
}

/* The gradient of one array: three steps, of which the second one needs rows. */
static ca_status
run_captured(const pass *p, const ca_captured *captured, ca_error *error)
{
    ca_status status = CA_OK;
    ca_device *device = p->device;
    const ca_attention *attention = p->attention;
    const ca_device_info *info = ca_device_get_info(device);
    ca_storage *storage = NULL;
    int64_t elements = ca_tensor_count(&captured->gradient);
    int64_t bytes;
    int count = 0;
    if (elements == 0) {
        return CA_OK;
    }
    shares found = share_rows(attention, captured, elements, p->on_cpu ? CPU_SHARES : SHARES);
    uint32_t array = CA_BACKWARD_CAPTURED_ARRAY * captured->number;
    int64_t sizes[] = {found.copies, elements, 2, ca_plan_real_bytes(attention)};
    CA_TRY(ca_shape_count(4, sizes, "a captured array", &bytes, error));
    CA_TRY(ca_storage_new(device, (size_t)bytes, "sums of a captured array's gradient", &storage,
                          error));
    const ca_operand sums = matrix_in(storage, attention, found.copies, 2 * elements);
    ca_launched *clear = &p->steps[count++];
    ca_backward_start_step(attention, &p->numbers, &clear->attention);
    ca_backward_remove_optional(&clear->attention);
    clear->attention.operands[CA_ATTENTION_OUTPUT] = sums;
    remove_mods(p, clear);
    ca_backward_reference_plan_captured(info, clear, 0, found.copies, CA_BACKWARD_CLEAR,
                                        found.copies, 2 * elements);
    if (p->numbers.data != NULL) {
        ca_launched *pairs = &p->steps[count++];
        ca_backward_start_step(attention, &p->numbers, &pairs->attention);
        ca_attention_remove(&pairs->attention, CA_ATTENTION_SINKS);
        pairs->attention.operands[CA_ATTENTION_OUTPUT] = sums;
        uint32_t gradient = CA_BACKWARD_CAPTURED | CA_BACKWARD_APART * found.apart | array;
        if (p->on_cpu) {
            ca_backward_division division = ca_backward_cpu_divide(info, attention);
            ca_backward_cpu_plan_captured(info, &division, gradient, found.groups, found.copies,
                                          pairs);
        } else {
            ca_backward_reference_plan_captured(info, pairs, 3, found.copies, gradient,
                                                found.groups, found.copies);
        }
    }
    ca_launched *total = &p->steps[count++];
    ca_tensor flat = {.dtype = captured->gradient.dtype,
                      .ndim = 2,
                      .data = captured->gradient.data,
                      .block = captured->gradient.block,
                      .shape = {1, elements},
                      .strides = {elements, 1}};
    ca_backward_start_step(attention, &sums, &total->attention);
    ca_backward_remove_optional(&total->attention);
    ca_attention_set_output(&total->attention, &flat);
    remove_mods(p, total);
    bool adds = attention->first_row > 0; /* an earlier problem of the call has written there */
    ca_backward_reference_plan_captured(info, total, 0, found.copies,
                                        CA_BACKWARD_TOTAL | (adds ? CA_BACKWARD_ADDS : 0) |
                                            CA_BACKWARD_DTYPE * (uint32_t)flat.dtype,
                                        1, elements);
    CA_TRY(ca_attention_launch_all(device, p->steps, count, NULL, NULL, error));
done:
    ca_storage_release(storage);
    return status;
}

ca_status
ca_attention_run_backward(ca_device *device, const ca_forced *forced, const ca_attention *attention,
                          ca_error *error)
{
    ca_status status = CA_OK;
    pass p = {.steps = NULL};
    CA_TRY(ca_device_prepare(device, error));
    CA_TRY(start_pass(&p, device, attention, error));
    CA_TRY(run_best(&p, forced, error));
    for (int n = 0; n < captured_count(attention); n++) {
        CA_TRY(run_captured(&p, &attention->mods->captured[n], error));
    }
done:
    end_pass(&p);
    return status;
}
