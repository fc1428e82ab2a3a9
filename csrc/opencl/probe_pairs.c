/* SPDX-License-Identifier: MIT
 *
 * Whether a device multiplies pairs of bfloat16: the processor has to have the
 * instruction, the driver's compiler to take it (kernels/probe/pairs.cl), and the sums
 * to be right. What the driver says is kept on disk, as a refusal takes it as long as a
 * build.
 */
#include <stdlib.h>
#include <string.h>

#include "opencl/internal.h"
#include "opencl/launch.h"

#define LANES 16
#define START 0.5f

static const ca_kernel_spec probe = {.name = "probe_pairs"};

/* Bits of a small integer as bfloat16, which holds it exactly. */
static uint16_t
bfloat16_bits(int x)
{
    float value = (float)x;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Build and run the probe, under the build_lock. *right is whether the device passed;
   an error says that it could not be told. */
static ca_status
run_probe(ca_device *device, bool *right, ca_error *error)
{
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
    *right = false;
    CA_TRY(ca_kernel_get_locked(device, &probe, &kernel, error));
    const ca_span spans[] = {
        {.data = a, .bytes = sizeof a, .access = CA_ACCESS_READ},
        {.data = b, .bytes = sizeof b, .access = CA_ACCESS_READ},
        {.data = sums, .bytes = sizeof sums, .access = CA_ACCESS_WRITE},
    };
    const ca_launch launch = {
        .spans = spans,
        .nspans = sizeof spans / sizeof spans[0],
        .steps = {{kernel, &start, sizeof start, 1, 1}},
        .nsteps = 1,
        .call = "the probe",
    };
    CA_TRY(ca_launch_run(device, &launch, error));
    *right = true;
    for (int i = 0; i < LANES; i++) {
        int first = (2 * i - 5) * (6 * i + 1);
        int second = (2 * i - 4) * (6 * i + 4);
        *right = *right && sums[i] == START + (float)(first + second);
    }
done:
    return status;
}

/* What the probe says, or said in another process. A compiler's refusal is an answer,
   a lack of memory is none. */
static bool
driver_takes_pairs(ca_device *device)
{
    const char *folder = device->runtime->cache_folder;
    unsigned char *found = NULL;
    size_t size;
    ca_hash identity;
    if (!ca_kernel_identity(device, &probe, &identity)) {
        return false;
    }
    bool right;
    if (ca_cache_read(folder, "pairs", identity, &found, &size)) {
        right = found[0] != 0;
    } else {
        ca_error refusal = {0};
        ca_status status = run_probe(device, &right, &refusal);
        ca_error_clear(&refusal);
        if (status == CA_OK || status == CA_ERROR_DEVICE) {
            ca_cache_write(folder, "pairs", identity, &right, sizeof right);
        }
    }
    free(found);
    return right;
}

ca_status
ca_device_find_pairs(ca_device *device, ca_error *error)
{
    ca_status status = ca_device_prepare(device, error);
    if (status != CA_OK ||
        atomic_load_explicit(&device->pairs_known, memory_order_acquire)) {
        return status;
    }
    ca_mutex_lock(&device->build_lock);
    if (!atomic_load(&device->pairs_known)) {
        ca_device_info *info = &device->info;
        info->bfloat16_pairs = device->is_host && info->float_width >= LANES &&
                               ca_processor_has_bfloat16_pairs() &&
                               driver_takes_pairs(device);
        atomic_store(&device->pairs_known, true);
    }
    ca_mutex_unlock(&device->build_lock);
    return CA_OK;
}
