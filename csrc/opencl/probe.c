/* SPDX-License-Identifier: MIT */
#include "opencl/probe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/processor.h"
#include "kernels/probe/params.h"
#include "opencl/apart.h"
#include "opencl/device.h"
#include "opencl/launch.h"
#include "opencl/program.h"
#include "opencl/verdict.h"

/* ---- the test that every device has to pass ---- */

#define PROBE_COUNT 32

_Static_assert(sizeof(ca_probe_params) == CA_PROBE_PARAMS_SIZE, "as in probe/device.cl");

typedef struct {
    uint16_t input[PROBE_COUNT];
    uint16_t rounded[PROBE_COUNT];
    float powers[PROBE_COUNT];
    int64_t sums[PROBE_COUNT];
} probe_data;

/* All strides differ and need more than 32 bits, so that a member read from a wrong place shows. */
static const ca_probe_params probe_params = {
    .count = PROBE_COUNT,
    .views =
        {
            {.offset = INT64_C(1) << 40, .strides = {INT64_C(3) << 33, -7, 1000003}},
            {.offset = -(INT64_C(5) << 35), .strides = {11, -(INT64_C(9) << 34), 13}},
        },
    .scale = 1.0f + 3.0f / 2048.0f, /* half-way between two halves */
    .bias = 0.5f,
};

/* Half i is 2^(i - 15), with alternating signs; half 0 is the largest subnormal power of two. */
static uint16_t
probe_input(int i)
{
    int magnitude = i == 0 ? 0x0200 : (i < 31 ? i : 30) << 10;
    return (uint16_t)(magnitude | (i % 2 == 0 ? 0 : 0x8000));
}

/* Returns the value of input i. */
static float
probe_value(int i)
{
    float magnitude = ldexpf(1.0f, (i < 31 ? i : 30) - 15);
    return i % 2 == 0 ? magnitude : -magnitude;
}

/* The tie 1 + 3/2048 goes to the even neighbour 1 + 4/2048, two steps of a half above 1.
   A step of the subnormal is 2/1024 of its value, so the product is one step above. */
static uint16_t
probe_rounded(int i)
{
    uint16_t input = probe_input(i);
    return (uint16_t)(input + (i == 0 ? 1 : 2));
}

/* Returns the number that the kernel should write to sums[i]. */
static int64_t
probe_sum(int i)
{
    int64_t sum = 0;
    for (int v = 0; v < 2; v++) {
        sum += probe_params.views[v].offset;
        for (int n = 0; n < 3; n++) {
            sum += (int64_t)(i + v + n) * probe_params.views[v].strides[n];
        }
    }
    return sum;
}

/* Returns the name of the first test that fails, or NULL. */
static const char *
probe_verify(const probe_data *data)
{
    for (int i = 0; i < PROBE_COUNT; i++) {
        float power = exp2f(probe_value(i) + probe_params.bias);
        if (data->sums[i] != probe_sum(i)) {
            return "64-bit arithmetic on a struct argument";
        }
        if (data->rounded[i] != probe_rounded(i)) {
            return "loading and storing float16";
        }
        /* Huge inputs give infinity or 0 on both sides. */
        if (!(data->powers[i] == power || fabsf(data->powers[i] - power) <= 1e-5f * power)) {
            return "exp2";
        }
    }
    return NULL;
}

static ca_status
run_device_probe(ca_device *device, const ca_kernel_spec *spec, const void *context,
                 ca_error *error)
{
    (void)context;
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    probe_data data;
    memset(&data, 0xee, sizeof data);
    for (int i = 0; i < PROBE_COUNT; i++) {
        data.input[i] = probe_input(i);
    }
    CA_TRY(ca_kernel_get_locked(device, spec, &kernel, error));
    const ca_span spans[] = {
        {.data = data.input, .bytes = sizeof data.input, .access = CA_ACCESS_READ},
        {.data = data.rounded, .bytes = sizeof data.rounded, .access = CA_ACCESS_WRITE},
        {.data = data.powers, .bytes = sizeof data.powers, .access = CA_ACCESS_WRITE},
        {.data = data.sums, .bytes = sizeof data.sums, .access = CA_ACCESS_WRITE},
        {.access = CA_ACCESS_READ},
    };
    const ca_launch launch = {
        .spans = spans,
        .nspans = sizeof spans / sizeof spans[0],
        .steps = {{.kernel = kernel,
                   .params = &probe_params,
                   .params_size = sizeof probe_params,
                   .global_size = PROBE_COUNT,
                   .local_size = 1}},
        .nsteps = 1,
        .call = "the probe",
    };
    CA_TRY(ca_launch_run(device, &launch, error));
    const char *wrong = probe_verify(&data);
    if (wrong != NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_KERNEL, "device '%s' gives wrong results: %s",
                            device->info.name, wrong));
    }
done:
    return status;
}

/* A failure is not kept on disk, and the next process probes the device again: its user reads the
   reason and the compiler's log, and a driver that only lacked something for a while passes. */
ca_status
ca_probe_device(ca_device *device, ca_error *error)
{
    const ca_kernel_spec spec = {.name = "probe_device", .is_probe = true};
    return ca_verdict_find(device, &spec, "", false, run_device_probe, NULL, error);
}

/* ---- loops, of drivers that are not known ---- */

#define ROUNDS 100000

static ca_status
run_loops_probe(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    (void)context;
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    const int64_t rounds = ROUNDS;
    uint32_t found = 0;
    uint32_t x = 1;
    uint32_t sum = 0;
    for (int64_t n = 0; n < rounds; n++) {
        x = x * UINT32_C(1664525) + UINT32_C(1013904223);
        sum += x >> 16;
    }
    CA_TRY(ca_kernel_get_locked(device, spec, &kernel, error));
    const ca_span spans[] = {{.data = &found, .bytes = sizeof found, .access = CA_ACCESS_WRITE}};
    const ca_launch launch = {
        .spans = spans,
        .nspans = 1,
        .steps = {{.kernel = kernel,
                   .params = &rounds,
                   .params_size = sizeof rounds,
                   .global_size = 1,
                   .local_size = 1}},
        .nsteps = 1,
        .call = "the probe",
    };
    CA_TRY(ca_launch_run(device, &launch, error));
    if (found != sum) {
        CA_TRY(ca_error_set(error, CA_ERROR_KERNEL,
                            "device '%s' gives wrong results: loops of %d rounds end early; try "
                            "another version of its driver",
                            device->info.name, ROUNDS));
    }
done:
    return status;
}

ca_status
ca_probe_loops(ca_device *device, ca_error *error)
{
    const ca_kernel_spec spec = {.name = "probe_loops", .is_probe = true};
    return device->info.is_known
               ? CA_OK
               : ca_verdict_find(device, &spec, "", false, run_loops_probe, NULL, error);
}

ca_status
ca_probe_apart(ca_device *device, ca_error *error)
{
    const ca_kernel_spec spec = {.name = "probe_device", .is_probe = true};
    return ca_apart_try(device, &spec, "open", error);
}

/* ---- pairs of bfloat16 ---- */

#define LANES 16
#define START 0.5f

/* Bits of a small integer as bfloat16, which holds it exactly. */
static uint16_t
bfloat16_bits(int x)
{
    float value = (float)x;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static ca_status
run_pairs_probe(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    (void)context;
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    uint16_t a[2 * LANES];
    uint16_t b[2 * LANES];
    float sums[LANES] = {0};
    const float start = START;
    for (int i = 0; i < 2 * LANES; i++) {
        a[i] = bfloat16_bits(i - 5);
        b[i] = bfloat16_bits(3 * i + 1);
    }
    CA_TRY(ca_kernel_get_locked(device, spec, &kernel, error));
    const ca_span spans[] = {
        {.data = a, .bytes = sizeof a, .access = CA_ACCESS_READ},
        {.data = b, .bytes = sizeof b, .access = CA_ACCESS_READ},
        {.data = sums, .bytes = sizeof sums, .access = CA_ACCESS_WRITE},
    };
    const ca_launch launch = {
        .spans = spans,
        .nspans = sizeof spans / sizeof spans[0],
        .steps = {{.kernel = kernel,
                   .params = &start,
                   .params_size = sizeof start,
                   .global_size = 1,
                   .local_size = 1}},
        .nsteps = 1,
        .call = "the probe",
    };
    CA_TRY(ca_launch_run(device, &launch, error));
    for (int i = 0; i < LANES; i++) {
        int first = (2 * i - 5) * (6 * i + 1);
        int second = (2 * i - 4) * (6 * i + 4);
        if (sums[i] != START + (float)(first + second)) {
            CA_TRY(ca_error_set(error, CA_ERROR_KERNEL, "sum %d is %g", i, (double)sums[i]));
        }
    }
done:
    return status;
}

/* Only drivers that are known are given instructions of the processor. */
static bool
has_lanes(const ca_device *device)
{
    return device->is_host && device->info.is_known && device->info.float_width >= LANES;
}

/* A refusal is kept on disk: refusing takes a driver as long as building, and calls without pairs are
   slower, but right. */
bool
ca_probe_pairs(ca_device *device)
{
    const ca_kernel_spec spec = {.name = "probe_pairs", .is_probe = true};
    CA_NEW_ERROR(ignored);
    bool passes =
        has_lanes(device) && ca_processor_has_bfloat16_pairs() &&
        ca_verdict_find(device, &spec, "", true, run_pairs_probe, NULL, &ignored) == CA_OK;
    ca_error_clear(&ignored);
    return passes;
}

bool
ca_may_use_amx(ca_device *device)
{
    return has_lanes(device) && ca_processor_has_amx() && ca_processor_allow_amx();
}
