/* SPDX-License-Identifier: MIT */
#include "attention/run.h"

#include <math.h>

#include "attention/alone.h"
#include "attention/backward.h"
#include "attention/fill.h"
#include "attention/inputs.h"
#include "attention/launch.h"
#include "attention/plan.h"
#include "attention/ragged.h"
#include "attention/trial.h"
#include "attention/variants.h"
#include "opencl/prepare.h"
#include "opencl/runtime.h"

#define OPERANDS CA_ATTENTION_OPERANDS

/* ---- problems that need no kernel ---- */

bool
ca_attention_is_trivial(const ca_attention *attention)
{
    bool writes = false;
    for (int role = 0; role < OPERANDS && !writes; role++) {
        writes = ca_attention_is_result(role) && attention->operands[role].memory.bytes != 0;
    }
    writes = writes || (attention->mods != NULL && attention->mods->captured_count > 0);
    return !writes || (attention->T == 0 && !ca_attention_has_gradients(attention));
}

/* Fill a result's extent with `value`. */
static ca_status
fill(const ca_attention *attention, ca_attention_role role, double value, ca_error *error)
{
    const ca_operand *operand = &attention->operands[role];
    const ca_extent extent = ca_attention_extent(attention, role);
    return ca_fill_extent(&extent, operand->block, operand->dtype, value, error);
}

/* Fill the log-sum-exp of rows first … end - 1 of each head: with its sink, or with -inf. */
static ca_status
fill_lse(const ca_attention *attention, int64_t first, int64_t end, bool with_sinks,
         ca_error *error)
{
    ca_status status = CA_OK;
    const int64_t *batch = attention->batch;
    for (int64_t n = 0; first < end && n < batch[0] * batch[1] * batch[2]; n++) {
        ca_attention one = *attention;
        const ca_operand *sink = &one.operands[CA_ATTENTION_SINKS];
        ca_attention_take(&one, 0, n / batch[2] / batch[1], 1);
        ca_attention_take(&one, 1, n / batch[2] % batch[1], 1);
        ca_attention_take(&one, 2, n % batch[2], 1);
        ca_attention_take(&one, CA_BATCH_DIMS, first, end - first);
        double value = !with_sinks                 ? -INFINITY
                       : sink->dtype == CA_FLOAT64 ? *(double *)sink->data
                                                   : *(float *)sink->data;
        CA_TRY(fill(&one, CA_ATTENTION_LSE, value, error));
    }
done:
    return status;
}

/* Returns how many rows belong to a sequence. Those behind them have no sink. */
static int64_t
rows_of_sequences(const ca_attention *attention)
{
    const ca_sequences *sequences = attention->sequences;
    return sequences != NULL ? sequences->rows[sequences->count] : attention->L;
}

/* Fill the log-sum-exp of rows without a key: with the sink of each. */
static ca_status
fill_sinks(const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t rows = rows_of_sequences(attention);
    CA_TRY(fill_lse(attention, 0, rows, true, error));
    CA_TRY(fill_lse(attention, rows, attention->L, false, error));
done:
    return status;
}

/* Fill the bases and the sums of rows without a key. */
static ca_status
fill_base_and_sum(const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention one = *attention;
    ca_operand *lse = &one.operands[CA_ATTENTION_LSE];
    lse->columns = 1;
    CA_TRY(fill(&one, CA_ATTENTION_LSE, -INFINITY, error));
    lse->data = (char *)lse->data + lse->column_stride * (ptrdiff_t)ca_dtype_size(lse->dtype);
    CA_TRY(fill(&one, CA_ATTENTION_LSE, 0, error));
done:
    return status;
}

ca_status
ca_attention_fill(const ca_attention *attention, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(fill(attention, CA_ATTENTION_OUTPUT, 0, error));
    CA_TRY(ca_attention_has(attention, CA_ATTENTION_SINKS) ? fill_sinks(attention, error)
           : attention->operands[CA_ATTENTION_LSE].columns == 2
               ? fill_base_and_sum(attention, error)
               : fill(attention, CA_ATTENTION_LSE, -INFINITY, error));
done:
    return status;
}

/* ---- memory ---- */

/* If two inputs of the host overlap in memory, and their elements lie in step, give both
   the range of both. False where nothing changed. */
static bool
join(const ca_operand *a, const ca_operand *b, ca_extent *a_memory, ca_extent *b_memory)
{
    char *a_start = a_memory->data;
    char *b_start = b_memory->data;
    char *a_end = a_start + a_memory->bytes;
    char *b_end = b_start + b_memory->bytes;
    if (!ca_extents_overlap(a_memory, b_memory) || (a_start == b_start && a_end == b_end)) {
        return false;
    }
    char *start = a_start < b_start ? a_start : b_start;
    size_t bytes = (size_t)((a_end > b_end ? a_end : b_end) - start);
    ptrdiff_t a_size = (ptrdiff_t)ca_dtype_size(a->dtype);
    ptrdiff_t b_size = (ptrdiff_t)ca_dtype_size(b->dtype);
    if ((a_start - start) % a_size != 0 || (b_start - start) % b_size != 0) {
        return false;
    }
    a_memory->offset += (a_start - start) / a_size;
    b_memory->offset += (b_start - start) / b_size;
    a_memory->data = b_memory->data = start;
    a_memory->bytes = b_memory->bytes = bytes;
    return true;
}

/* Inputs that overlap, such as slices of a packed array, share one buffer: OpenCL leaves
   overlapping buffers undefined, and they would be copied twice. A shared buffer that is
   too large for the device is given up. */
static void
join_inputs(const ca_device_info *info, ca_attention *attention)
{
    ca_operand *inputs[OPERANDS]; /* those in memory of the host */
    ca_extent memory[OPERANDS];
    int count = 0;
    bool joined = true;
    for (int role = 0; role < OPERANDS; role++) {
        ca_operand *operand = &attention->operands[role];
        if (operand->memory.bytes != 0 && operand->block == NULL && !ca_attention_is_result(role)) {
            inputs[count] = operand;
            memory[count++] = operand->memory;
        }
    }
    while (joined) {
        joined = false;
        for (int a = 0; a < count; a++) {
            for (int b = 0; b < a; b++) {
                joined = join(inputs[a], inputs[b], &memory[a], &memory[b]) || joined;
            }
        }
    }
    if (!ca_exceeds_device(info, memory, count)) {
        for (int n = 0; n < count; n++) {
            inputs[n]->memory = memory[n];
        }
    }
}

/* ---- one problem, by the first variant that works ---- */

/* Build the kernel that writes scores behind the variant of a plan, if the problem has one. *works becomes
   false if the driver cannot build it: then the reference writes the scores. A kernel of a variant that is
   forced has to work. */
static ca_status
prepare_scores(ca_device *device, const ca_forced *forced, const ca_attention *attention,
               const ca_attention_plan *plan, bool *works, ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    const ca_plan_limits limits = {info->max_work_group, info->local_memory};
    ca_attention_plan scores;
    ca_kernel *kernel;
    *works = true;
    if (attention->scored == NULL || plan->variant == CA_INDEX_reference ||
        !ca_attention_plan_scores(info, attention, &limits, plan->variant, &scores)) {
        return CA_OK;
    }
    *works = !ca_device_leaves_out(device, &scores.spec);
    ca_status status = *works ? ca_kernel_get(device, &scores.spec, &kernel, error) : CA_OK;
    if (status == CA_ERROR_KERNEL && forced->kernel == NULL) {
        ca_device_leave_out(device, &scores.spec, error->message);
        ca_error_clear(error);
        *works = false;
        status = CA_OK;
    }
    return status;
}

ca_status
ca_attention_try_variant(ca_device *device, int variant, bool gradients, ca_dtype dtype,
                         ca_dtype value_dtype, int64_t E, int64_t Ev, bool anew, ca_error *error)
{
    ca_status status = CA_OK;
    ca_tried tried = ca_alone_variant(variant);
    if (gradients) {
        CA_TRY(ca_backward_find_tried(variant, &tried, error));
    }
    CA_TRY(ca_attention_try_kernel(device, &tried, dtype, value_dtype, E, Ev, anew, error));
done:
    return status;
}

/* Launches the problem as the best variant that works. A kernel that the driver cannot build, create
   or launch within its limits is left out from now on, and so is a variant that fails its trial. The
   next variant then computes the problem, and a notice tells the caller. The reference is the last
   variant: if it fails, the call fails. */
static ca_status
launch_best(ca_device *device, const ca_forced *forced, const ca_attention *attention,
            ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention_plan plan;
    bool again = true;
    bool scored;
    uint32_t passed_over = forced->left_out;
    CA_TRY(ca_attention_find_instructions(device, forced, attention, error));
    CA_TRY(ca_device_prepare(device, error));
    passed_over |= ca_attention_wrong(device, attention);
    while (again) {
        ca_forced now = *forced;
        now.left_out = passed_over;
        CA_TRY(ca_attention_make_plan(ca_device_get_info(device), &now, attention, &plan, error));
        bool may_choose = forced->kernel == NULL && plan.variant != CA_INDEX_reference;
        passed_over |= UINT32_C(1) << plan.variant;
        again = may_choose && ca_device_leaves_out(device, &plan.spec);
        if (again) {
            continue;
        }
        CA_TRY(prepare_scores(device, forced, attention, &plan, &scored, error));
        if (!scored) {
            passed_over = ~(UINT32_C(1) << CA_INDEX_reference);
            again = true;
            continue;
        }
        if (forced->kernel == NULL && forced->trials != CA_TRIALS_OFF) {
            const ca_tried tried = ca_alone_variant(plan.variant);
            status = ca_attention_try(device, attention, &tried, &plan.spec, error);
        }
        if (status == CA_OK) {
            status = ca_attention_launch_within(device, forced, attention, &plan, error);
        }
        again = may_choose && status == CA_ERROR_KERNEL;
        if (again) {
            ca_device_leave_out(device, &plan.spec, error->message);
            ca_error_clear(error);
            status = CA_OK;
        }
    }
done:
    return status;
}

/* Launches a problem whose scores, if it has any, a kernel behind writes. */
static ca_status
launch_scored(ca_device *device, const ca_forced *forced, const ca_attention *attention,
              ca_error *error)
{
    if (!ca_attention_has(attention, CA_ATTENTION_SCORES)) {
        return launch_best(device, forced, attention, error);
    }
    ca_attention attended = *attention;
    ca_attention_remove(&attended, CA_ATTENTION_SCORES);
    attended.scored = attention;
    return launch_best(device, forced, &attended, error);
}

/* Launches a problem that may have inputs to compute first. A problem without query rows has nothing else to
   compute. */
static ca_status
launch_whole(ca_device *device, const ca_forced *forced, const ca_attention *attention,
             ca_error *error)
{
    ca_status status = CA_OK;
    ca_separated separated;
    if (!ca_attention_has_inputs(attention)) {
        return launch_scored(device, forced, attention, error);
    }
    status = ca_device_prepare(device, error);
    if (status != CA_OK) {
        return status;
    }
    CA_TRY(ca_attention_separate(device, attention, &separated, error));
    status = attention->L > 0 ? launch_scored(device, forced, &separated.attended, error)
                              : ca_attention_launch_inputs(device, &separated.inputs, error);
done:
    ca_separated_release(&separated);
    return status;
}

/* Launches a problem of sequences. */
static ca_status
launch_ragged(ca_device *device, const ca_forced *forced, const ca_attention *attention,
              ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(ca_attention_run_ragged(device, forced, attention, error));
    if (ca_attention_has(attention, CA_ATTENTION_SINKS) &&
        ca_attention_has(attention, CA_ATTENTION_LSE)) {
        CA_TRY(fill_lse(attention, rows_of_sequences(attention), attention->L, false, error));
    }
done:
    return status;
}

/* ---- halves, where a device cannot hold the memory of one launch ---- */

/* The outermost leading dimension above 1, else the rows. Halves keep the order of rows,
   by which dropout numbers them. */
static int
dimension_to_halve(const ca_attention *attention)
{
    int d = 0;
    while (d < CA_BATCH_DIMS && attention->batch[d] == 1) {
        d++;
    }
    return d;
}

ca_status
ca_attention_run(ca_device *device, const ca_forced *forced, ca_attention *attention,
                 ca_error *error)
{
    const ca_device_info *info = ca_device_get_info(device);
    bool backward = ca_attention_has_gradients(attention);
    bool ragged = attention->sequences != NULL;
    int d = dimension_to_halve(attention);
    int64_t size = d < CA_BATCH_DIMS ? attention->batch[d] : attention->L;
    bool held = true;
    for (int role = 0; role < OPERANDS; role++) {
        held = held && !ca_exceeds_device(info, &attention->operands[role].memory, 1);
    }
    /* A gradient is a sum over what halves would divide, and a sequence may lie in both halves. */
    if (held || size <= 1 || backward || ragged) {
        if (info->memory != CA_MEMORY_SVM) {
            join_inputs(info, attention);
        }
        return ragged     ? launch_ragged(device, forced, attention, error)
               : backward ? ca_attention_run_backward(device, forced, attention, error)
                          : launch_whole(device, forced, attention, error);
    }
    ca_attention half = *attention;
    ca_attention_take(&half, d, 0, size / 2);
    ca_status status = ca_attention_run(device, forced, &half, error);
    if (status == CA_OK) {
        half = *attention;
        ca_attention_take(&half, d, size / 2, size - size / 2);
        status = ca_attention_run(device, forced, &half, error);
    }
    return status;
}
