/* SPDX-License-Identifier: MIT */
#include "attention/launch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "attention/describe.h"
#include "attention/inputs.h"
#include "attention/options.h"
#include "attention/variants.h" /* ca_attention_plan_redo */
#include "opencl/launch.h"
#include "opencl/marks.h"
#include "opencl/prepare.h"
#include "opencl/program.h"
#include "opencl/runtime.h"
#include "opencl/storage.h"

/* Arguments of a kernel before its params: operands, partial rows and marks. */
#define MOST_ARGUMENTS (CA_ATTENTION_FIRST_OPTIONAL + CA_OPTIONAL_VIEWS + 2)

_Static_assert(MOST_ARGUMENTS * 8 + CA_ATTENTION_PARAMS_SIZE <= 1024,
               "every device takes 1,024 bytes of arguments");

ca_status
ca_attention_find_instructions(ca_device *device, const ca_forced *forced,
                               const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    if (attention->operands[CA_ATTENTION_QUERY].dtype == CA_BFLOAT16) {
        CA_TRY(ca_device_find_amx(device, error));
        if (forced->kernel != NULL || ca_device_get_info(device)->fast_pairs) {
            CA_TRY(ca_device_find_pairs(device, error));
        }
    }
done:
    return status;
}

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

static ca_span
span_of(const ca_attention *attention, ca_attention_role role)
{
    const ca_operand *operand = &attention->operands[role];
    return (ca_span){.data = operand->memory.data,
                     .bytes = operand->memory.bytes,
                     .access = access_of(attention, role),
                     .block = operand->block,
                     .name = ca_attention_name(role)};
}

/* A launch in the making: its memory, and its steps with their arguments. */
typedef struct {
    ca_launch launch;
    ca_span spans[CA_MAX_SPANS];
    uint8_t arguments[CA_MAX_STEPS][CA_MAX_SPANS];
    ca_attention_params params[CA_MAX_STEPS];
    ca_mark mark;
    const ca_attention *described; /* the problem of the step that was added last; NULL: none */
    int step;                      /* that step's number */
    int arrays;                    /* how many optional operands its kernel takes */
    uint32_t flags;                /* of its params: those of the problem */
} making;

/* The first spans of a launch: of operands that a call lacks, of partial rows, whose memory comes later,
   and of the marks. */
enum { ABSENT, PARTIAL, MARKS, FIXED_SPANS };

/* The kernel of inputs has five optional operands of its own, and writes up to three sums. The others have
   at most CA_OPTIONAL_VIEWS, scores included. */
_Static_assert(FIXED_SPANS + CA_ATTENTION_FIRST_OPTIONAL + CA_OPTIONAL_VIEWS + 5 + 3 <=
                   CA_MAX_SPANS,
               "a launch binds all arguments of its kernels");

/* Add a span, unless the launch has it, and return its number. A kernel may read what a kernel before it
   has written. */
static uint8_t
add_span(making *m, ca_span span)
{
    int n = FIXED_SPANS;
    if (span.bytes == 0) {
        return ABSENT;
    }
    while (n < m->launch.nspans &&
           (m->spans[n].data != span.data || m->spans[n].bytes != span.bytes)) {
        n++;
    }
    if (n == m->launch.nspans) {
        m->spans[m->launch.nspans++] = span;
    } else if (m->spans[n].access == CA_ACCESS_WRITE && span.access == CA_ACCESS_READ) {
        m->spans[n].access = CA_ACCESS_PASS;
    }
    return (uint8_t)n;
}

/* List the arguments of a kernel that takes `arrays` optional operands. Returns how many there are. */
static int
list_arguments(making *m, const ca_attention *attention, int arrays, uint8_t *arguments)
{
    ca_attention_role optional[CA_OPTIONAL_ROLES];
    int count = ca_attention_optional(attention, optional);
    int listed = 0;
    for (int role = 0; role < CA_ATTENTION_FIRST_OPTIONAL; role++) {
        arguments[listed++] = add_span(m, span_of(attention, role));
    }
    for (int n = 0; n < arrays; n++) {
        arguments[listed++] =
            n < count ? add_span(m, span_of(attention, optional[n])) : (uint8_t)ABSENT;
    }
    arguments[listed++] = PARTIAL;
    arguments[listed++] = MARKS;
    return listed;
}

/* Below this a thread alone is done before a second one would have been of use. Counted
   in multiplications and additions of float32; those of float64 take twice as long. */
#define SMALL_WORK 0.6e6

/* The operations of a call, where a score costs as many as `more` columns beside its products. */
static double
work_of(const ca_attention *attention, int64_t more)
{
    bool wide = attention->operands[CA_ATTENTION_QUERY].dtype == CA_FLOAT64;
    double keys = (double)attention->above + (double)attention->below + 1; /* of the band */
    keys = keys < (double)attention->T ? keys : (double)attention->T;
    double work = (wide ? 4 : 2) * keys * (double)(attention->E + attention->Ev + more);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        work *= (double)attention->batch[d];
    }
    return work * (double)attention->L;
}

/* The work of a score's softmax, mask and options, as columns of the head size. */
#define SCORE_COLUMNS 32

static double
work_of_reference(const ca_attention *attention)
{
    bool again = ca_attention_visible_keys(attention) > CA_REFERENCE_KEYS;
    int64_t parts = again ? (attention->Ev - 1) / CA_REFERENCE_COLUMNS : 0; /* after the first */
    return CA_REFERENCE_TIMES *
           work_of(attention, SCORE_COLUMNS + parts * (attention->E + SCORE_COLUMNS));
}

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

static ca_span
span_of_partial(ca_storage *partial)
{
    ca_block *block = ca_storage_block(partial);
    return (ca_span){block->address, block->bytes, CA_ACCESS_WRITE, block, "partial results"};
}

/* Write the params of a step, but for what its plan decides, and list its arguments. Both are mostly those of
   the step before, whose problem this step has, too. */
static void
describe_step(making *m, const ca_attention *attention, int arrays)
{
    int number = m->launch.nsteps;
    uint8_t *arguments = m->arguments[number];
    ca_step *step = &m->launch.steps[number];
    bool again = m->described == attention;
    if (!again) {
        ca_attention_describe(attention, &m->params[number]);
        m->flags = m->params[number].flags;
    } else if (m->step != number) {
        m->params[number] = m->params[m->step];
    }
    m->params[number].flags = m->flags;
    if (again && number > 0 && m->arrays == arrays) {
        step->narguments = m->launch.steps[m->step].narguments;
        memcpy(arguments, m->arguments[m->step], (size_t)step->narguments);
    } else {
        step->narguments = list_arguments(m, attention, arrays, arguments);
    }
    step->arguments = arguments;
    m->described = attention;
    m->step = number;
    m->arrays = arrays;
}

/* Start a launch whose steps have `mark`. */
static void
start(making *m, const ca_attention *attention, ca_mark mark, ca_span marks, bool *left)
{
    m->launch = (ca_launch){.spans = m->spans, .call = attention->call, .left = left};
    m->mark = mark;
    m->launch.mark = &m->mark;
    m->launch.nspans = FIXED_SPANS;
    m->spans[ABSENT] = m->spans[PARTIAL] = (ca_span){.access = CA_ACCESS_READ};
    m->spans[MARKS] = marks;
}

/* Start the first launch of a call, with a mark of its own. */
static ca_status
begin(ca_device *device, making *m, const ca_attention *attention, bool *left, ca_error *error)
{
    ca_mark mark;
    ca_span marks;
    ca_status status = ca_mark_take(device, &mark, &marks, error);
    if (status == CA_OK) {
        m->described = NULL;
        start(m, attention, mark, marks, left);
    }
    return status;
}

/* One kernel of a plan. The product of `grid` is the number of work-items, which whole work-groups
   round up. */
typedef struct {
    const ca_kernel_spec *spec;
    const int64_t *grid;
    size_t local_size;
    bool any_local_size;
    uint32_t flags; /* of the params, beside those of the call */
    double work;
    bool at_most;
} planned_step;

/* Build the kernel, and add it as the launch's next step. */
static ca_status
add_step(ca_device *device, making *m, const ca_attention *attention, const ca_attention_plan *plan,
         const planned_step *step, ca_plan_limits *limits, ca_error *error)
{
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    int64_t items;
    size_t local_size = step->local_size;
    int number = m->launch.nsteps;
    ca_attention_params *params = &m->params[number];
    CA_TRY(ca_kernel_get(device, step->spec, &kernel, error));
    CA_TRY(ca_shape_count(CA_ATTENTION_GRID_DIMS, step->grid, "query", &items, error));
    size_t most = ca_kernel_get_limits(kernel)->work_group;
    if (step->any_local_size && local_size > most && most > 0) {
        local_size = most;
    }
    (void)ca_kernel_tighten(device, kernel, local_size, limits);
    size_t groups = ((size_t)items + local_size - 1) / local_size;
    describe_step(m, attention, plan->arrays);
    ca_attention_describe_plan(plan, params);
    params->redo_slot = m->mark.slot;
    params->redo_mark = m->mark.value;
    params->flags |= step->flags;
    int unused = CA_OPTIONAL_VIEWS - (plan->arrays > 0 ? plan->arrays : 1); /* views, at the end */
    ca_step *added = &m->launch.steps[m->launch.nsteps++];
    added->kernel = kernel;
    added->params = params;
    added->params_size = sizeof(*params) - (size_t)unused * sizeof(ca_view);
    added->global_size = groups * local_size;
    added->local_size = local_size;
    added->work = step->work;
    added->at_most = step->at_most;
done:
    return status;
}

/* Add the kernel that computes inputs. Its failure is no CA_ERROR_KERNEL, for which the variant that attends
   would be left out. */
static ca_status
add_inputs(ca_device *device, making *m, const ca_attention *inputs, ca_error *error)
{
    ca_attention_plan plan;
    ca_attention_plan_inputs(ca_device_get_info(device), inputs, &plan);
    double rows = (double)inputs->T + (double)inputs->L;
    double entries = (double)inputs->batch[0] * (double)inputs->batch[1] * (double)inputs->batch[2];
    const planned_step step = {.spec = &plan.spec,
                               .grid = plan.grid,
                               .local_size = plan.local_size,
                               .any_local_size = plan.any_local_size,
                               .work = entries * rows * (double)ca_attention_key_bytes(inputs)};
    ca_status status = add_step(device, m, inputs, &plan, &step, &(ca_plan_limits){0}, error);
    return status == CA_ERROR_KERNEL ? CA_ERROR_DEVICE : status;
}

/* Add the kernel that writes the scores of attention->scored behind a variant. */
static ca_status
add_scores(ca_device *device, making *m, const ca_attention *attention, int variant,
           ca_plan_limits *limits, ca_error *error)
{
    ca_attention_plan plan;
    const ca_device_info *info = ca_device_get_info(device);
    if (!ca_attention_plan_scores(info, attention, limits, variant, &plan)) {
        return ca_error_set(error, CA_ERROR_KERNEL, "no kernel that writes scores fits the device");
    }
    const ca_attention *scored = attention->scored;
    const planned_step step = {.spec = &plan.spec,
                               .grid = plan.grid,
                               .local_size = plan.local_size,
                               .any_local_size = plan.any_local_size,
                               .work = work_of(scored, SCORE_COLUMNS)};
    return add_step(device, m, scored, &plan, &step, limits, error);
}

/* Add the kernel that computes each row of `attention` again that is not finite. `marked`: there are such
   rows. Otherwise its work-items read the mark. */
static ca_status
add_redo(ca_device *device, making *m, const ca_attention *attention, bool marked, ca_error *error)
{
    ca_attention_plan plan;
    ca_attention_plan_redo(ca_device_get_info(device), attention, marked, &plan);
    const planned_step step = {.spec = &plan.spec,
                               .grid = plan.grid,
                               .local_size = plan.local_size,
                               .any_local_size = plan.any_local_size,
                               .flags = CA_REDOES,
                               .work = marked ? work_of_reference(attention) : 0};
    return add_step(device, m, attention, &plan, &step, &(ca_plan_limits){0}, error);
}

/* Run a launch, some kernel of which may set the mark, and compute the marked rows again. If the host waits
   for the launch, the host reads the mark, and mostly there is nothing to launch. A launch that is left
   pending has the kernel for marked rows as its last step: the next call may read the result before the host
   can know the mark. */
static ca_status
run_and_redo(ca_device *device, const ca_attention *attention, making *m, ca_error *error)
{
    ca_status status = CA_OK;
    bool *left = m->launch.left;
    bool small = m->launch.small;
    bool needed;
    if (m->launch.nsteps < CA_MAX_STEPS && ca_launch_is_left(device, &m->launch)) {
        CA_TRY(add_redo(device, m, attention, false, error));
        m->launch.last_if_left = true;
    }
    CA_TRY(ca_launch_run(device, &m->launch, error));
    needed = *left && !m->launch.last_if_left;
    if (!*left) {
        CA_TRY(ca_mark_is_set(device, &m->mark, &needed, error));
    }
    if (needed) {
        bool marked = !*left;
        start(m, attention, m->mark, m->spans[MARKS], left);
        m->launch.small = small;
        CA_TRY(add_redo(device, m, attention, marked, error));
        for (int n = 0; n < m->launch.nspans; n++) {
            if (m->spans[n].access == CA_ACCESS_WRITE) {
                m->spans[n].access = CA_ACCESS_UPDATE;
            }
        }
        CA_TRY(ca_launch_run(device, &m->launch, error));
    }
done:
    return status;
}

/* Run a launch whose kernels may set the mark or not. */
static ca_status
run(ca_device *device, const ca_attention *attention, making *m, bool redoes, ca_error *error)
{
    return redoes ? run_and_redo(device, attention, m, error)
                  : ca_launch_run(device, &m->launch, error);
}

ca_status
ca_attention_launch(ca_device *device, const ca_attention *attention, const ca_attention_plan *plan,
                    ca_plan_limits *limits, ca_error *error)
{
    ca_status status = CA_OK;
    ca_storage *partial = NULL;
    char sizes[192];
    bool left;
    making m;
    const ca_attention *scored = attention->scored != NULL ? attention->scored : attention;
    attention = plan->variant == CA_INDEX_reference ? scored : attention;
    CA_TRY(begin(device, &m, attention, &left, error));
    m.launch.small = work_of(attention, 0) < SMALL_WORK;
    double work = plan->variant == CA_INDEX_reference ? work_of_reference(attention)
                                                      : work_of(attention, SCORE_COLUMNS);
    if (work > DESCRIBED_WORK) {
        write_sizes(attention, sizes, sizeof sizes);
        m.launch.sizes = sizes;
    }
    if (attention->inputs != NULL) {
        CA_TRY(add_inputs(device, &m, attention->inputs, error));
    }
    const planned_step step = {.spec = &plan->spec,
                               .grid = plan->grid,
                               .local_size = plan->local_size,
                               .any_local_size = plan->any_local_size,
                               .work = work};
    CA_TRY(add_step(device, &m, attention, plan, &step, limits, error));
    if (plan->splits > 1) {
        const int64_t rows[] = {attention->batch[0], attention->batch[1], attention->batch[2],
                                attention->L, (int64_t)plan->merge_local};
        const planned_step merge = {.spec = &plan->merge,
                                    .grid = rows,
                                    .local_size = plan->merge_local,
                                    .flags = CA_MERGES};
        CA_TRY(add_step(device, &m, attention, plan, &merge, limits, error));
        CA_TRY(ca_launch_check(device, &m.launch, error)); /* before memory is taken */
        CA_TRY(allocate_partial(device, plan, attention, &partial, error));
        m.spans[PARTIAL] = span_of_partial(partial);
    }
    if (scored != attention) {
        CA_TRY(add_scores(device, &m, attention, plan->variant, limits, error));
    }
    CA_TRY(run(device, scored, &m, plan->redoes, error));
done:
    ca_storage_release(partial);
    return status;
}

ca_status
ca_attention_launch_inputs(ca_device *device, const ca_attention *inputs, ca_error *error)
{
    ca_status status = CA_OK;
    making m;
    CA_TRY(begin(device, &m, inputs, NULL, error));
    CA_TRY(add_inputs(device, &m, inputs, error));
    CA_TRY(ca_launch_run(device, &m.launch, error));
done:
    return status;
}

/* Add a kernel that a caller has planned. */
static ca_status
add_launched(ca_device *device, making *m, const ca_launched *launched, ca_plan_limits *limits,
             ca_error *error)
{
    const ca_attention_plan *plan = &launched->plan;
    double work = launched->work > 0
                      ? launched->work
                      : launched->products * work_of(&launched->attention, SCORE_COLUMNS);
    const planned_step step = {.spec = &plan->spec,
                               .grid = plan->grid,
                               .local_size = plan->local_size,
                               .any_local_size = plan->any_local_size,
                               .flags = launched->flags,
                               .work = work,
                               .at_most = launched->at_most};
    return add_step(device, m, &launched->attention, plan, &step,
                    limits != NULL ? limits : &(ca_plan_limits){0}, error);
}

ca_status
ca_attention_launch_ragged(ca_device *device, const ca_attention *whole, const ca_launched *steps,
                           int count, ca_storage *partial, ca_error *error)
{
    ca_status status = CA_OK;
    char sizes[192];
    bool left;
    double work = 0;
    bool redoes = false;
    making m;
    CA_TRY(begin(device, &m, whole, &left, error));
    write_sizes(whole, sizes, sizeof sizes);
    m.launch.sizes = sizes;
    for (int n = 0; n < count; n++) {
        work += steps[n].work > 0 ? steps[n].work : INFINITY;
        redoes = redoes || steps[n].plan.redoes;
        CA_TRY(add_launched(device, &m, &steps[n], NULL, error));
    }
    m.launch.small = work < SMALL_WORK;
    if (partial != NULL) {
        m.spans[PARTIAL] = span_of_partial(partial);
    }
    CA_TRY(run(device, whole, &m, redoes, error));
done:
    return status;
}

ca_status
ca_attention_launch_all(ca_device *device, const ca_launched *steps, int count,
                        ca_plan_limits *limits, bool *redoes, ca_error *error)
{
    ca_status status = CA_OK;
    char sizes[192];
    making m;
    if (count == 0) {
        return CA_OK;
    }
    CA_TRY(begin(device, &m, &steps[0].attention, NULL, error));
    write_sizes(&steps[0].attention, sizes, sizeof sizes);
    m.launch.sizes = sizes;
    for (int n = 0; n < count; n++) {
        m.launch.adds = m.launch.adds || steps[n].adds;
        CA_TRY(add_launched(device, &m, &steps[n], limits, error));
    }
    for (int n = 0; m.launch.adds && n < m.launch.nspans; n++) {
        if (m.spans[n].access == CA_ACCESS_WRITE) {
            m.spans[n].access = CA_ACCESS_UPDATE;
        }
    }
    CA_TRY(ca_launch_run(device, &m.launch, error));
    if (redoes != NULL) {
        CA_TRY(ca_mark_is_set(device, &m.mark, redoes, error));
    }
done:
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
    int64_t forced_memory = forced->local_memory > 0 ? forced->local_memory : INT64_MAX;
    ca_plan_limits limits = {info->max_work_group, ca_smaller(info->local_memory, forced_memory)};
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
