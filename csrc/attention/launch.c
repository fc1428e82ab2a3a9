/* SPDX-License-Identifier: MIT */
#include "attention/launch.h"

#include <inttypes.h>
#include <stdio.h>

#include "attention/describe.h"
#include "attention/variants.h" /* ca_attention_plan_redo */
#include "opencl/launch.h"
#include "opencl/marks.h"
#include "opencl/program.h"
#include "opencl/runtime.h"
#include "opencl/storage.h"

#define OPERANDS CA_ATTENTION_OPERANDS

/* Arguments of kernels behind the operands: partial rows and marks. */
#define OTHER_SPANS 2

static const char *const names[] = {
    [CA_ATTENTION_QUERY] = "query",
    [CA_ATTENTION_KEY] = "key",
    [CA_ATTENTION_VALUE] = "value",
    [CA_ATTENTION_PAST_KEY] = "past_key",
    [CA_ATTENTION_PAST_VALUE] = "past_value",
    [CA_ATTENTION_INPUT_BIAS] = "input bias",
    [CA_ATTENTION_MASK] = "mask",
    [CA_ATTENTION_BIAS] = "bias",
    [CA_ATTENTION_KEY_COUNTS] = "key counts",
    [CA_ATTENTION_SINKS] = "sinks",
    [CA_ATTENTION_OFFSETS] = "offsets",
    [CA_ATTENTION_BLOCKS] = "mask blocks",
    [CA_ATTENTION_NUMBERS] = "numbers of mods",
    [CA_ATTENTION_TABLE0] = "table 0",
    [CA_ATTENTION_TABLE1] = "table 1",
    [CA_ATTENTION_TABLE2] = "table 2",
    [CA_ATTENTION_TABLE3] = "table 3",
    [CA_ATTENTION_OUTPUT] = "output",
    [CA_ATTENTION_LSE] = "lse",
    [CA_ATTENTION_PRESENT_KEY] = "present_key",
    [CA_ATTENTION_PRESENT_VALUE] = "present_value",
    [CA_ATTENTION_SCORES] = "scores",
};

/* A result that fills its extent is written as a whole. */
static ca_access
access_of(const ca_attention *attention, ca_attention_role role)
{
    const ca_operand *operand = &attention->operands[role];
    if (!ca_attention_is_result(role) || operand->data == NULL) {
        return CA_ACCESS_READ;
    }
    const int64_t sizes[] = {attention->batch[0], attention->batch[1], attention->batch[2],
                             operand->rows, operand->columns};
    const int64_t strides[] = {operand->batch[0], operand->batch[1], operand->batch[2],
                               operand->row_stride, operand->column_stride};
    size_t bytes = ca_dtype_size(operand->dtype);
    for (int d = 0; d < CA_BATCH_DIMS + 2; d++) {
        bytes *= strides[d] != 0 || sizes[d] == 0 ? (size_t)sizes[d] : 1;
    }
    return bytes == ca_attention_extent(attention, role).bytes ? CA_ACCESS_WRITE : CA_ACCESS_UPDATE;
}

/* True if the kernels of a plan take an operand. Of the optional operands, usual programs take none, or
   a mask alone. Programs without mods take no operands of mods. */
static bool
takes(const ca_attention *attention, int usual, ca_attention_role role)
{
    bool always = role <= CA_ATTENTION_VALUE || role == CA_ATTENTION_KEY_COUNTS ||
                  role == CA_ATTENTION_OUTPUT ||
                  (role == CA_ATTENTION_MASK && usual == CA_USUAL_MASKED);
    bool optional = !usual && (attention->mods != NULL || !ca_attention_is_of_mods(role));
    return always || optional;
}

/* List the arguments of kernels: operands, partial rows and marks. The memory of partial rows is not
   there yet, and usual programs do not take it. Returns how many arguments these are. */
static int
list_spans(const ca_attention *attention, int usual, ca_span marks, ca_span *spans)
{
    int nspans = 0;
    for (int role = 0; role < OPERANDS; role++) {
        const ca_operand *operand = &attention->operands[role];
        if (takes(attention, usual, (ca_attention_role)role)) {
            spans[nspans++] = (ca_span){.data = operand->memory.data,
                                        .bytes = operand->memory.bytes,
                                        .access = access_of(attention, (ca_attention_role)role),
                                        .block = operand->block,
                                        .name = names[role]};
        }
    }
    if (!usual) {
        spans[nspans++] = (ca_span){.access = CA_ACCESS_WRITE};
    }
    spans[nspans++] = marks;
    return nspans;
}

/* Below this a thread alone is done before a second one would have been of use. Counted
   in multiplications and additions of float32; those of float64 take twice as long. */
#define SMALL_WORK 0.6e6

/* The operations of a call, where a score costs as many as `more` columns beside its products. */
static double
work_of(const ca_attention *attention, const ca_attention_params *params, int64_t more)
{
    bool wide = attention->operands[CA_ATTENTION_QUERY].dtype == CA_FLOAT64;
    double keys = (double)params->upper - (double)params->lower + 1; /* of the band */
    keys = keys < (double)params->T ? keys : (double)params->T;
    double work = (wide ? 4 : 2) * keys * (double)(params->E + params->Ev + more);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        work *= (double)params->batch[d];
    }
    return work * (double)params->L;
}

/* The work of a score's softmax, mask and options, as columns of the head size. */
#define SCORE_COLUMNS 32

/* The reference kernel takes so many times as long as the others. */
#define REFERENCE_TIMES 16

/* Only calls with more work are described, because only they may be refused. */
#define DESCRIBED_WORK 1e12

/* Writes the sizes of a call, for the message that refuses it. */
static void
write_sizes(const ca_attention *attention, char *text, size_t size)
{
    const int64_t *batch = attention->batch;
    (void)snprintf(text, size,
                   "%" PRId64 " query rows in each of %.0f heads, %" PRId64
                   " keys for each row, head sizes %" PRId64 " and %" PRId64,
                   attention->L, (double)batch[0] * (double)batch[1] * (double)batch[2],
                   attention->T, attention->E, attention->Ev);
}

/* Allocate memory for the partial results: each split of the keys leaves one for each row. */
static ca_status
allocate_partial(ca_device *device, const ca_attention_plan *plan, const ca_attention *attention,
                 ca_storage **partial, ca_error *error)
{
    int64_t sizes[] = {attention->batch[0], attention->batch[1], attention->batch[2],
                       attention->L,        plan->splits,        plan->partial_bytes};
    int64_t bytes;
    ca_status status = ca_shape_count(6, sizes, "query", &bytes, error);
    return status != CA_OK
               ? status
               : ca_storage_new(device, (size_t)bytes, "partial results", partial, error);
}

/* One kernel of a plan. The product of `grid` is the number of work-items, which whole work-groups
   round up. Unless `usual` is 0, the kernel belongs to a usual program, which takes shorter params. */
typedef struct {
    const ca_kernel_spec *spec;
    const ca_attention_params *params;
    int usual;
    const int64_t *grid;
    size_t local_size;
    bool any_local_size;
    double work;
} planned_step;

/* Build the kernel, and add it as the launch's next step. */
static ca_status
add_step(ca_device *device, ca_launch *launch, const planned_step *step, ca_plan_limits *limits,
         ca_error *error)
{
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    int64_t items;
    size_t local_size = step->local_size;
    CA_TRY(ca_kernel_get(device, step->spec, &kernel, error));
    CA_TRY(ca_shape_count(CA_ATTENTION_GRID_DIMS, step->grid, "query", &items, error));
    size_t most = ca_kernel_get_limits(kernel)->work_group;
    if (step->any_local_size && local_size > most && most > 0) {
        local_size = most;
    }
    (void)ca_kernel_tighten(device, kernel, local_size, limits);
    size_t groups = ((size_t)items + local_size - 1) / local_size;
    size_t bytes = step->usual ? CA_USUAL_PARAMS_SIZE : sizeof(*step->params);
    launch->steps[launch->nsteps++] =
        (ca_step){kernel, step->params, bytes, groups * local_size, local_size, step->work};
done:
    return status;
}

/* If the kernel of a launch has set the mark, launch the kernel that computes each row again that
   is not finite. If the host has waited for the first launch, the host reads the mark. If the first
   launch is left pending, the second one is enqueued behind it, and its work-items read the mark. */
static ca_status
redo(ca_device *device, const ca_attention *attention, const ca_mark *mark, ca_launch *launch,
     ca_attention_params *params, ca_span *spans, ca_error *error)
{
    ca_status status = CA_OK;
    bool needed = *launch->left;
    ca_attention_plan plan;
    if (!needed) {
        CA_TRY(ca_mark_is_set(device, mark, &needed, error));
    }
    if (needed) {
        bool marked = !*launch->left;
        double work = marked ? REFERENCE_TIMES * work_of(attention, params, SCORE_COLUMNS) : 0;
        ca_attention_plan_redo(ca_device_get_info(device), attention, marked, &plan);
        params->flags |= CA_REDOES;
        params->tiles = (uint32_t)plan.tiles;
        launch->nspans = list_spans(attention, false, spans[launch->nspans - 1], spans);
        for (int n = 0; n < launch->nspans - OTHER_SPANS; n++) {
            if (spans[n].access == CA_ACCESS_WRITE) {
                spans[n].access = CA_ACCESS_UPDATE;
            }
        }
        launch->nsteps = 0;
        const planned_step step = {.spec = &plan.spec,
                                   .params = params,
                                   .grid = plan.grid,
                                   .local_size = plan.local_size,
                                   .any_local_size = plan.any_local_size,
                                   .work = work};
        CA_TRY(add_step(device, launch, &step, &(ca_plan_limits){0}, error));
        CA_TRY(ca_launch_run(device, launch, error));
    }
done:
    return status;
}

ca_status
ca_attention_launch(ca_device *device, const ca_attention *attention, const ca_attention_plan *plan,
                    ca_plan_limits *limits, ca_error *error)
{
    ca_status status = CA_OK;
    ca_storage *partial = NULL;
    ca_attention_params merging;
    ca_mark mark;
    char sizes[192];
    bool left;
    ca_attention_params params = ca_attention_describe(attention, plan);

    ca_span spans[OPERANDS + OTHER_SPANS];
    ca_span marks;
    CA_TRY(ca_mark_take(device, &mark, &marks, error));
    int nspans = list_spans(attention, plan->usual, marks, spans);
    params.redo_slot = mark.slot;
    params.redo_mark = mark.value;
    ca_launch launch = {
        .spans = spans,
        .nspans = nspans,
        .small = work_of(attention, &params, 0) < SMALL_WORK,
        .call = attention->call,
        .mark = &mark,
        .left = &left,
    };
    double work = work_of(attention, &params, SCORE_COLUMNS);
    work *= plan->variant == CA_INDEX_reference ? REFERENCE_TIMES : 1;
    if (work > DESCRIBED_WORK) {
        write_sizes(attention, sizes, sizeof sizes);
        launch.sizes = sizes;
    }
    const planned_step step = {.spec = &plan->spec,
                               .params = &params,
                               .usual = plan->usual,
                               .grid = plan->grid,
                               .local_size = plan->local_size,
                               .any_local_size = plan->any_local_size,
                               .work = work};
    CA_TRY(add_step(device, &launch, &step, limits, error));
    if (plan->splits > 1) {
        const int64_t rows[] = {params.batch[0], params.batch[1], params.batch[2], params.L,
                                (int64_t)plan->merge_local};
        merging = params;
        merging.flags |= CA_MERGES;
        const planned_step merge = {.spec = &plan->merge,
                                    .params = &merging,
                                    .grid = rows,
                                    .local_size = plan->merge_local};
        CA_TRY(add_step(device, &launch, &merge, limits, error));
        CA_TRY(ca_launch_check(device, &launch, error)); /* before memory is taken */
        CA_TRY(allocate_partial(device, plan, attention, &partial, error));
        ca_block *block = ca_storage_block(partial);
        spans[nspans - OTHER_SPANS] =
            (ca_span){block->address, block->bytes, CA_ACCESS_WRITE, block, "partial results"};
    }
    CA_TRY(ca_launch_run(device, &launch, error));
    if (plan->redoes) {
        CA_TRY(redo(device, attention, &mark, &launch, &params, spans, error));
    }
done:
    ca_storage_release(partial);
    return status;
}

static bool
are_tighter(const ca_plan_limits *limits, const ca_plan_limits *before)
{
    return limits->group < before->group || limits->local_memory < before->local_memory;
}

ca_status
ca_attention_launch_within(ca_device *device, const ca_forced *forced,
                           const ca_attention *attention, const ca_attention_plan *plan,
                           ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    ca_plan_limits limits = {info->max_work_group, info->local_memory};
    ca_plan_limits before = limits;
    ca_attention_plan within; /* no copy of *plan, which would cost each call time */
    ca_status status = ca_attention_launch(device, attention, plan, &limits, error);
    while (status == CA_ERROR_KERNEL && are_tighter(&limits, &before)) {
        before = limits;
        within.variant = plan->variant;
        if (!ca_attention_plan_within(info, forced, attention, &limits, &within)) {
            break;
        }
        ca_error_clear(error);
        status = ca_attention_launch(device, attention, &within, &limits, error);
    }
    return status;
}
