/* SPDX-License-Identifier: MIT */
#include "attention/alone.h"

#include "attention/launch.h"
#include "attention/plan.h"
#include "attention/variants.h"
#include "opencl/runtime.h"

/* Plan a problem by a variant alone, for its trial. */
static ca_status
plan_alone(ca_device *device, const ca_attention *attention, const void *variant,
           ca_attention_plan *plan, ca_error *error)
{
    const ca_forced forced = {.kernel = ((const ca_variant *)variant)->word};
    return ca_attention_make_plan(ca_device_get_info(device), &forced, attention, plan, error);
}

static ca_status
find_program(ca_device *device, const ca_attention *attention, const void *variant,
             ca_kernel_spec *spec, ca_error *error)
{
    ca_attention_plan plan;
    ca_status status = plan_alone(device, attention, variant, &plan, error);
    if (status == CA_OK) {
        *spec = plan.spec;
    }
    return status;
}

static ca_status
run_alone(ca_device *device, const ca_attention *attention, const void *variant, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_forced none = {.kernel = NULL};
    ca_attention_plan plan;
    CA_TRY(plan_alone(device, attention, variant, &plan, error));
    CA_TRY(ca_attention_launch_within(device, &none, attention, &plan, error));
done:
    return status;
}

ca_tried
ca_alone_variant(int variant)
{
    return (ca_tried){.number = variant,
                      .variant = variant,
                      .kernel = ca_variant_at(variant),
                      .plan = find_program,
                      .run = run_alone};
}
