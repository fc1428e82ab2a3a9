/* SPDX-License-Identifier: MIT */
#include "attention/inputs.h"

/* Work-items of a group on GPUs. */
#define GROUP 128

/* Bytes of keys and values that a group copies, about. */
#define BYTES_OF_GROUP (64 << 10)

bool
ca_attention_has_inputs(const ca_attention *attention)
{
    return ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY) ||
           ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS);
}

/* Make memory for the sums of an operand with the input bias. Entries of the batch share sums where they
   share the operand and the bias. */
static ca_status
add_sums(ca_device *device, const ca_attention *attention, ca_attention_role role,
         ca_storage **storage, ca_operand *sums, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_operand *operand = &attention->operands[role];
    const ca_operand *bias = &attention->operands[CA_ATTENTION_INPUT_BIAS];
    int64_t sizes[CA_BATCH_DIMS + 2];
    int64_t count;
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        bool shared = operand->batch[d] == 0 && bias->batch[d] == 0;
        sizes[d] = shared ? 1 : attention->batch[d];
    }
    sizes[CA_BATCH_DIMS] = operand->rows;
    sizes[CA_BATCH_DIMS + 1] = operand->columns;
    CA_TRY(ca_shape_count(CA_BATCH_DIMS + 2, sizes, "a sum with the bias", &count, error));
    size_t bytes = (size_t)count * ca_dtype_size(operand->dtype);
    CA_TRY(ca_storage_new(device, bytes, "sums with the bias", storage, error));
    ca_block *block = ca_storage_block(*storage);
    *sums = (ca_operand){.dtype = operand->dtype,
                         .data = block->address,
                         .block = block,
                         .rows = operand->rows,
                         .columns = operand->columns,
                         .row_stride = operand->columns,
                         .column_stride = 1,
                         .memory = {.data = block->address, .bytes = block->bytes}};
    int64_t stride = operand->rows * operand->columns;
    for (int d = CA_BATCH_DIMS - 1; d >= 0; d--) {
        sums->batch[d] = sizes[d] > 1 ? stride : 0;
        stride *= sizes[d];
    }
done:
    return status;
}

/* Remove the operands that the kernel of inputs neither reads nor writes. */
static void
keep_inputs(ca_attention *inputs)
{
    static const bool kept[CA_ATTENTION_OPERANDS] = {
        [CA_ATTENTION_QUERY] = true,       [CA_ATTENTION_KEY] = true,
        [CA_ATTENTION_VALUE] = true,       [CA_ATTENTION_PAST_KEY] = true,
        [CA_ATTENTION_PAST_VALUE] = true,  [CA_ATTENTION_INPUT_BIAS] = true,
        [CA_ATTENTION_PRESENT_KEY] = true, [CA_ATTENTION_PRESENT_VALUE] = true,
    };
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        if (!kept[role]) {
            ca_attention_remove(inputs, role);
        }
    }
    inputs->mods = NULL;
    inputs->softcap = 0;
    inputs->dropout = 0;
    inputs->band_follows_counts = false;
}

static void
remove_past(ca_attention *attention)
{
    ca_attention_remove(attention, CA_ATTENTION_PAST_KEY);
    ca_attention_remove(attention, CA_ATTENTION_PAST_VALUE);
    attention->P = 0;
}

ca_status
ca_attention_separate(ca_device *device, const ca_attention *attention, ca_separated *separated,
                      ca_error *error)
{
    ca_status status = CA_OK;
    ca_attention *inputs = &separated->inputs;
    ca_attention *attended = &separated->attended;
    ca_storage **sums = separated->sums;
    ca_operand *results = inputs->operands;
    bool biased = ca_attention_has(attention, CA_ATTENTION_INPUT_BIAS);
    bool present = ca_attention_has(attention, CA_ATTENTION_PRESENT_KEY);
    *inputs = *attended = *attention;
    sums[0] = sums[1] = sums[2] = NULL;
    keep_inputs(inputs);
    inputs->L = 0;
    if (biased && attention->L > 0) {
        inputs->L = attention->L;
        CA_TRY(add_sums(device, attention, CA_ATTENTION_QUERY, &sums[0],
                        &results[CA_ATTENTION_OUTPUT], error));
        attended->operands[CA_ATTENTION_QUERY] = results[CA_ATTENTION_OUTPUT];
    }
    if (present) {
        remove_past(attended);
        attended->S = attended->T;
    } else {
        remove_past(inputs);
        inputs->T = inputs->S;
        CA_TRY(add_sums(device, attention, CA_ATTENTION_KEY, &sums[1],
                        &results[CA_ATTENTION_PRESENT_KEY], error));
        CA_TRY(add_sums(device, attention, CA_ATTENTION_VALUE, &sums[2],
                        &results[CA_ATTENTION_PRESENT_VALUE], error));
    }
    attended->operands[CA_ATTENTION_KEY] = results[CA_ATTENTION_PRESENT_KEY];
    attended->operands[CA_ATTENTION_VALUE] = results[CA_ATTENTION_PRESENT_VALUE];
    ca_attention_remove(attended, CA_ATTENTION_INPUT_BIAS);
    ca_attention_remove(attended, CA_ATTENTION_PRESENT_KEY);
    ca_attention_remove(attended, CA_ATTENTION_PRESENT_VALUE);
    attended->inputs = inputs;
done:
    return status;
}

void
ca_separated_release(ca_separated *separated)
{
    for (int n = 0; n < 3; n++) {
        ca_storage_release(separated->sums[n]);
    }
}

/* Copies depend on the width of a dtype alone, so dtypes of one width share a program. */
static ca_dtype
dtype_of_width(ca_dtype dtype)
{
    return dtype == CA_FLOAT16 ? CA_BFLOAT16 : dtype;
}

void
ca_attention_plan_inputs(const ca_device_info *info, const ca_attention *inputs,
                         ca_attention_plan *plan)
{
    bool alone = !info->items_are_lanes;
    bool wide = ca_attention_keys_are(inputs, ca_operand_is_wide) &&
                ca_operand_is_wide(&inputs->operands[CA_ATTENTION_PRESENT_KEY]) &&
                ca_operand_is_wide(&inputs->operands[CA_ATTENTION_PRESENT_VALUE]);
    int64_t longest = inputs->T > inputs->L ? inputs->T : inputs->L;
    int64_t bytes = ca_attention_key_bytes(inputs);
    int64_t group = alone ? 1 : ca_smaller(info->max_work_group, GROUP);
    ca_plan_begin(plan, inputs, "attention_inputs", (size_t)group);
    plan->tiles = bytes < BYTES_OF_GROUP ? BYTES_OF_GROUP / (bytes + 1) : 1;
    plan->grid[3] = ca_divide_up(longest, plan->tiles);
    plan->grid[4] = group;
    plan->any_local_size = true;
    plan->redoes = false;
    ca_attention copied = *inputs;
    if (!ca_attention_has(inputs, CA_ATTENTION_INPUT_BIAS)) {
        ca_dtype *query = &copied.operands[CA_ATTENTION_QUERY].dtype;
        ca_dtype *value = &copied.operands[CA_ATTENTION_VALUE].dtype;
        *query = dtype_of_width(*query);
        *value = dtype_of_width(*value);
    }
    ca_plan_define_data(plan, info, &copied);
    ca_kernel_define(&plan->spec, "ON_CPU", info->type == CA_DEVICE_CPU && alone);
    ca_kernel_define(&plan->spec, "WIDE", wide && !alone);
}
