/* SPDX-License-Identifier: MIT */
#include "opencl/capabilities.h"

#include <math.h>
#include <string.h>

#include "kernels/probe/params.h"
#include "opencl/device.h"
#include "opencl/launch.h"
#include "opencl/program.h"
#include "opencl/verdict.h"

/* Most programs run on one group of so many work-items, as many as NVIDIA's warps have. */
#define ITEMS 32

/* The program of probe/group.cl runs on one group of so many. */
#define GROUP_ITEMS 128

/* Words of the arrays: a row is one uint4 of each work-item. */
#define ROW    (4 * ITEMS)
#define INPUT  (4 * ROW)
#define OUTPUT (8 * ROW)

/* More local memory than OpenCL promises, which kernels use where a device has it. */
#define PROMISED_LOCAL_BYTES (32 << 10)
#define LARGE_LOCAL_BYTES    (48 << 10)

/* Computes the output that is right for the input. `size` is the trial's. */
typedef void (*expectation)(const uint32_t *input, uint32_t *output, uint32_t size);

typedef struct {
    expectation expect;
    uint32_t size;    /* bytes of local memory */
    bool approximate; /* results are floats that may round otherwise */
    size_t items;     /* work-items; 0: ITEMS */
} capability_trial;

/* ---- numbers ---- */

static float
float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t
bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Input words are floats: multiples of 1/8 from -16 to 16, which both half types hold exactly. */
static uint32_t
input_word(uint32_t n)
{
    uint32_t stirred = (n + 1) * UINT32_C(2654435761);
    return bits_of((float)((int)(stirred >> 24) - 128) / 8);
}

/* Returns x with so many bits of mantissa, rounded to nearest even. */
static float
rounded(float x, int bits)
{
    int exponent;
    float mantissa = frexpf(x, &exponent);
    return ldexpf(nearbyintf(ldexpf(mantissa, bits)), exponent - bits);
}

static uint32_t
float16_bits(float x)
{
    int exponent;
    float mantissa = frexpf(fabsf(rounded(x, 11)), &exponent);
    uint32_t magnitude =
        x == 0 ? 0
               : ((uint32_t)(exponent + 14) << 10) + (uint32_t)ldexpf(mantissa, 11) - (1u << 10);
    return magnitude | (x < 0 ? 0x8000u : 0);
}

static uint32_t
bfloat16_bits(float x)
{
    return bits_of(rounded(x, 8)) >> 16;
}

/* ---- what the programs of probe/exchange.cl and probe/local.cl write ---- */

static void
expect_exchanged(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    const uint32_t apart[] = {1, 2, 4, 16};
    for (uint32_t item = 0; item < ITEMS; item++) {
        for (uint32_t n = 0; n < 4; n++) {
            output[4 * item + n] = input[4 * (item ^ apart[n]) + n];
            output[ROW + 4 * item + n] = bits_of(exp2f(float_of(input[ROW + 4 * item + n])));
        }
    }
}

static void
expect_local_memory(const uint32_t *input, uint32_t *output, uint32_t bytes)
{
    for (uint32_t n = 0; n < bytes / 16; n++) {
        uint32_t reader = ITEMS - 1 - n % ITEMS;
        for (uint32_t word = 0; word < 4; word++) {
            output[4 * reader + word] +=
                (input[4 * (n % ITEMS) + word] + n) * (2 * (n / ITEMS) + 1);
        }
    }
}

/* ---- what the programs of probe/warp.cl write; kernels/support/warp.clh has the layouts ---- */

static void
expect_votes(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    (void)input;
    for (int item = 0; item < ITEMS; item++) {
        const uint32_t any[] = {1, 0, 1, 1};
        memcpy(output + 4 * item, any, sizeof any);
    }
}

/* Returns number `column` of 8 in row `row` of 32, which the host sees as 4 words. */
static uint32_t
half_of(const uint32_t *input, uint32_t row, uint32_t column)
{
    return input[4 * row + column / 2] >> (column % 2 * 16) & 0xffffu;
}

static void
expect_loads(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    for (uint32_t lane = 0; lane < ITEMS; lane++) {
        uint32_t g = lane / 4;
        uint32_t t = lane % 4;
        for (uint32_t n = 0; n < 4; n++) {
            output[4 * lane + n] = input[4 * (8 * n + g) + t];
            output[ROW + 4 * lane + n] =
                half_of(input, 8 * n + 2 * t, g) | half_of(input, 8 * n + 2 * t + 1, g) << 16;
        }
    }
}

/* Returns element (row, k) of the left matrix, 16 x 16: rows 0 and 1 of the input. */
static float
left_of(const uint32_t *input, int row, int k)
{
    int lane = 4 * (row % 8) + k % 8 / 2;
    int number = 4 * (k / 8) + 2 * (row / 8) + k % 2;
    return float_of(input[number / 4 * ROW + 4 * lane + number % 4]);
}

/* Returns element (k, column) of the right matrix, 16 x 8: row 2 of the input. */
static float
right_of(const uint32_t *input, int k, int column)
{
    int lane = 4 * column + k % 8 / 2;
    return float_of(input[2 * ROW + 4 * lane + 2 * (k / 8) + k % 2]);
}

/* The program adds the product of two matrices to row 3 of the input. It also rounds row 3, times
   a factor, to the half type. */
static void
expect_matrices(const uint32_t *input, uint32_t *output, uint32_t (*half_bits)(float))
{
    for (int lane = 0; lane < ITEMS; lane++) {
        for (int n = 0; n < 4; n++) {
            float start = float_of(input[3 * ROW + 4 * lane + n]);
            float sum = start;
            for (int k = 0; k < 16; k++) {
                sum += left_of(input, lane / 4 + n / 2 * 8, k) *
                       right_of(input, k, lane % 4 * 2 + n % 2);
            }
            output[4 * lane + n] = bits_of(sum);
            output[ROW + 4 * lane + n / 2] |= half_bits(start * CA_PROBE_FACTOR) << (n % 2 * 16);
        }
    }
}

static void
expect_float16_matrices(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    expect_matrices(input, output, float16_bits);
}

static void
expect_bfloat16_matrices(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    expect_matrices(input, output, bfloat16_bits);
}

/* The program copies rows 0 and 2 of the input, and the parts of row 1 with odd numbers. It writes
   the parts of each row in reverse order, with zeros for parts that it has not copied. */
static void
expect_copies(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    for (int item = 0; item < ITEMS; item++) {
        int from = ITEMS - 1 - item;
        for (int row = 0; row < 3; row++) {
            if (row != 1 || from % 2 != 0) {
                memcpy(output + row * ROW + 4 * item, input + row * ROW + 4 * from,
                       4 * sizeof *output);
            }
        }
    }
}

/* ---- what the program of probe/group.cl writes; its head says what it computes ---- */

static float
number_of(const uint32_t *input, int n)
{
    return float_of(input[n % CA_PROBE_NUMBERS]);
}

/* Returns element (row, column) of a panel, in number n of its 64 rows. */
static float
panel_of(const uint32_t *input, int panel, int row, int column)
{
    return number_of(input, (panel * 64 + row) * 64 + column);
}

static void
expect_groups(const uint32_t *input, uint32_t *output, uint32_t size)
{
    (void)size;
    for (int item = 0; item < GROUP_ITEMS; item++) {
        for (int n = 0; n < 4; n++) {
            int row = item / 32 * 16 + item % 32 / 4 + n / 2 * 8;
            float tiles = 0;
            float rows = 0;
            for (int fragment = 0; fragment < 16; fragment++) {
                int column = fragment * 8 + item % 4 * 2 + n % 2;
                float product = 0;
                for (int k = 0; k < 16; k++) {
                    product += number_of(input, row * 16 + k) *
                               panel_of(input, 1 + column / 64, 16 + k, column % 64);
                }
                rows += product * (float)(fragment + 1);
                product = 0;
                for (int k = 16; k < 32 && column < 64; k++) {
                    product += panel_of(input, 0, row, k) * panel_of(input, 1, column, k);
                }
                tiles += product * (float)(fragment + 1);
            }
            output[4 * item + n] = bits_of(tiles);
            output[4 * (GROUP_ITEMS + item) + n] = bits_of(rows);
        }
    }
}

/* ---- trials ---- */

static bool
is_right(const capability_trial *trial, uint32_t found, uint32_t wanted)
{
    float x = float_of(found);
    float y = float_of(wanted);
    return found == wanted || (trial->approximate && fabsf(x - y) <= 1e-6f * fabsf(y));
}

static ca_status
try_capability(ca_device *device, const ca_kernel_spec *spec, const void *context, ca_error *error)
{
    ca_status status = CA_OK;
    ca_kernel *kernel = NULL;
    uint32_t input[INPUT];
    uint32_t output[OUTPUT] = {0};
    uint32_t wanted[OUTPUT] = {0};
    for (uint32_t n = 0; n < INPUT; n++) {
        input[n] = input_word(n);
    }
    const capability_trial *trial = context;
    const size_t items = trial->items != 0 ? trial->items : ITEMS;
    trial->expect(input, wanted, trial->size);
    CA_TRY(ca_kernel_get_locked(device, spec, &kernel, error));
    const ca_span spans[] = {
        {.data = input, .bytes = sizeof input, .access = CA_ACCESS_READ},
        {.data = output, .bytes = sizeof output, .access = CA_ACCESS_UPDATE},
    };
    const ca_launch launch = {
        .spans = spans,
        .nspans = sizeof spans / sizeof spans[0],
        .steps = {{.kernel = kernel, .global_size = items, .local_size = items}},
        .nsteps = 1,
        .call = "the probe",
    };
    status = ca_launch_run(device, &launch, error);
    if (status == CA_ERROR_KERNEL) { /* which may be for a while only: no verdict */
        status = CA_ERROR_DEVICE;
    }
    CA_TRY(status);
    for (int n = 0; n < OUTPUT; n++) {
        if (!is_right(trial, output[n], wanted[n])) {
            CA_TRY(ca_error_set(error, CA_ERROR_KERNEL,
                                "wrong results: word %d of work-item %d is 0x%08x; expected "
                                "0x%08x",
                                n / ROW * 4 + n % 4, n % ROW / 4, (unsigned)output[n],
                                (unsigned)wanted[n]));
        }
    }
done:
    return status;
}

/* True if the device has the capability. If not, device->lacks says why. */
static bool
has(ca_device *device, ca_capability capability, const ca_kernel_spec *spec, capability_trial trial)
{
    return ca_verdict_find(device, spec, "", true, try_capability, &trial,
                           &device->lacks[capability]) == CA_OK;
}

static bool
has_shuffles(ca_device *device)
{
    const ca_kernel_spec spec = {.name = "probe_exchange", .is_probe = true};
    return has(device, CA_WARP_SHUFFLES, &spec,
               (capability_trial){.expect = expect_exchanged, .approximate = true});
}

static bool
has_warp(ca_device *device, ca_capability capability, int test, expectation expect)
{
    const ca_kernel_spec spec = {
        .name = "probe_warp", .is_probe = true, .ndefines = 1, .defines = {{"TEST", test}}};
    return has(device, capability, &spec, (capability_trial){.expect = expect});
}

static bool
has_groups(ca_device *device, ca_capability capability, int test)
{
    const ca_kernel_spec spec = {.name = "probe_group",
                                 .is_probe = true,
                                 .for_90a = true,
                                 .ndefines = 1,
                                 .defines = {{"TEST", test}}};
    return has(device, capability, &spec,
               (capability_trial){.expect = expect_groups, .items = GROUP_ITEMS});
}

/* Kernels use no PTX at all on a device whose shuffles fail. */
static void
try_ptx(ca_device *device)
{
    ca_device_info *info = &device->info;
    if (info->warp_shuffles && !has_shuffles(device)) {
        info->warp_shuffles = info->float16_matrices = info->bfloat16_matrices = false;
        info->nvidia_capability = 0;
    }
    if (info->float16_matrices) {
        bool votes = has_warp(device, CA_WARP_VOTES, CA_PROBE_VOTES, expect_votes);
        bool loads = has_warp(device, CA_MATRIX_LOADS, CA_PROBE_LOADS, expect_loads);
        bool copies = has_warp(device, CA_ASYNC_COPIES, CA_PROBE_COPIES, expect_copies);
        bool all = votes && loads && copies;
        info->float16_matrices = has_warp(device, CA_FLOAT16_MATRICES, CA_PROBE_FLOAT16_MATRICES,
                                          expect_float16_matrices) &&
                                 all;
        info->bfloat16_matrices = has_warp(device, CA_BFLOAT16_MATRICES, CA_PROBE_BFLOAT16_MATRICES,
                                           expect_bfloat16_matrices) &&
                                  all;
    }
}

static bool
has_local_bytes(ca_device *device, ca_capability capability, uint32_t bytes)
{
    const ca_kernel_spec spec = {
        .name = "probe_local", .is_probe = true, .ndefines = 1, .defines = {{"BYTES", bytes}}};
    return has(device, capability, &spec,
               (capability_trial){.expect = expect_local_memory, .size = bytes});
}

static void
try_local_memory(ca_device *device)
{
    ca_device_info *info = &device->info;
    if (info->local_memory >= LARGE_LOCAL_BYTES &&
        !has_local_bytes(device, CA_LARGE_LOCAL_MEMORY, LARGE_LOCAL_BYTES)) {
        info->local_memory = PROMISED_LOCAL_BYTES;
    }
    info->ample_local_memory = info->ample_local_memory &&
                               info->local_memory >= LARGE_LOCAL_BYTES &&
                               has_local_bytes(device, CA_AMPLE_LOCAL_MEMORY, CA_AMPLE_LOCAL_BYTES);
}

/* Kernels whose warps multiply together use all other capabilities of PTX too, so this comes last. */
static void
try_groups(ca_device *device)
{
    ca_device_info *info = &device->info;
    info->group_matrices = info->group_matrices && info->float16_matrices &&
                           info->bfloat16_matrices && info->ample_local_memory &&
                           has_groups(device, CA_FLOAT16_GROUPS, CA_PROBE_FLOAT16_MATRICES) &&
                           has_groups(device, CA_BFLOAT16_GROUPS, CA_PROBE_BFLOAT16_MATRICES) &&
                           has_local_bytes(device, CA_GROUP_LOCAL_MEMORY, CA_GROUP_LOCAL_BYTES);
}

/* The host tries nothing on CPUs, whose kernels use none of these capabilities. */
void
ca_probe_capabilities(ca_device *device)
{
    if (device->info.type != CA_DEVICE_CPU) {
        try_ptx(device);
        try_local_memory(device);
        try_groups(device);
    }
}
