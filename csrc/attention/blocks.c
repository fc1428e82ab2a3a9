/* SPDX-License-Identifier: MIT */
#include "attention/blocks.h"

#include "attention/launch.h"
#include "attention/plan.h"
#include "opencl/prepare.h"
#include "opencl/runtime.h"

#define GPU_GROUP 64

static ca_attention_plan
make_plan(const ca_device_info *info, const ca_attention *attention)
{
    const ca_operand *output = &attention->operands[CA_ATTENTION_OUTPUT];
    ca_attention_plan plan;
    bool alone = !info->items_are_lanes;
    ca_plan_begin(&plan, attention, "attention_blocks",
                  alone ? 1 : (size_t)ca_smaller(info->max_work_group, GPU_GROUP));
    plan.grid[3] = output->rows;
    plan.grid[4] = output->columns;
    plan.any_local_size = true;
    plan.redoes = false;
    if (alone) {
        ca_plan_define_lanes(&plan, info, attention);
    } else {
        ca_plan_define_data(&plan, info, attention);
    }
    return plan;
}

ca_status
ca_attention_find_blocks(ca_device *device, ca_mods *mods, const ca_mask_sizes *sizes,
                         const ca_tensor *entries, ca_error *error)
{
    ca_status status = CA_OK;
    ca_tensor absent[CA_ATTENTION_OPERANDS];
    ca_attention attention = {
        .batch = {1, sizes->B, sizes->H},
        .L = sizes->rows,
        .S = sizes->keys,
        .T = sizes->keys,
        .E = 1, /* by which launches tell small problems */
        .Ev = 1,
    };
    ca_attention_init(&attention, absent);
    attention.call = "create_block_mask";
    for (int role = 0; role < CA_ATTENTION_OPERANDS; role++) {
        attention.operands[role].dtype = CA_FLOAT32;
    }
    mods->numbers[CA_NUMBER_OF_ROWS] = sizes->rows;
    mods->numbers[CA_NUMBER_OF_HEADS] = sizes->H;
    mods->numbers[CA_NUMBER_OF_POSITION] = 0;
    mods->numbers[CA_NUMBER_OF_BLOCK_ROWS] = sizes->block_rows;
    mods->numbers[CA_NUMBER_OF_BLOCK_KEYS] = sizes->block_keys;
    ca_attention_set_mods(&attention, mods);
    ca_attention_set_output(&attention, entries);
    CA_TRY(ca_device_prepare(device, error));
    ca_attention_plan plan = make_plan(ca_device_get_info(device), &attention);
    CA_TRY(ca_attention_launch(device, &attention, &plan, &(ca_plan_limits){0}, error));
done:
    return status;
}
