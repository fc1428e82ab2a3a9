/* SPDX-License-Identifier: MIT
 *
 * Does the unit that copies tensors take a map that the host has made, and how fast does it copy?
 *
 *     address_of   (ulong) address = the device's address of an array
 *     copy_boxes   the box of 64 x 64 x 1 numbers at (x, y, z) of an array of 16-bit numbers, to
 *                  output (groups, 64, 64). It is copied `count` times, RING boxes at a time.
 *
 *     global size  groups * 128, local size 128
 *     map          of the array
 *
 * Both kernels take the array first, so that it is where its address says.
 */
#define DTYPE           CA_KERNEL_FLOAT16
#define VALUE_DTYPE     DTYPE
#define REAL64          0
#define WARP            CA_WARP_PTX_GROUPS
#define LOCAL_ALIGNMENT GROUP_PANEL_BYTES
#include "tools/gpu_check/experiments/tensor_copies.clh"

#define RING      4u
#define BOX_BYTES (64 * GROUP_ROW_BYTES)
#define CHUNKS    (BOX_BYTES / 16)

__kernel void
address_of(__global const uint4 *array, __global ulong *address)
{
    address[0] = (ulong)array;
}

__kernel WARP_KERNEL(128) void copy_boxes(__global const uint4 *array, __global const uint4 *map,
                                          __global uint4 *output, int x, int y, int z, int count)
{
    WARP_DECLARE(warp, 4, memory, RING * CHUNKS + RING);
    const uint phases = warp.start + RING * BOX_BYTES;
    const ulong tensor = tensor_map(map);
    if (get_local_id(0) == 0) {
        WARP_FOR (uint n = 0; n < RING; n++) {
            phase_start(phases + n * PHASE_BYTES, 1);
        }
        group_copies_arrive(); /* shows the barriers to the unit */
        tensor_show(tensor);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* the barriers' starts: their uses */
    for (uint n = 0; n < (uint)count + RING - 1; n++) {
        if (get_local_id(0) == 0 && n < (uint)count) {
            const uint phase = phases + n % RING * PHASE_BYTES;
            phase_expect(phase, BOX_BYTES);
            tensor_copy(warp.start + n % RING * BOX_BYTES, tensor, x, y, z, phase);
        }
        if (n + 1 >= RING) {
            const uint box = n + 1 - RING;
            phase_wait(phases + box % RING * PHASE_BYTES, box / RING & 1u);
        }
        barrier(CLK_LOCAL_MEM_FENCE); /* waits for a box: the next copy over it */
    }
    const uint last = ((uint)count - 1) % RING * CHUNKS;
    output += get_group_id(0) * CHUNKS;
    for (uint n = (uint)get_local_id(0); n < CHUNKS; n += 128) {
        output[n] = memory[last + (n ^ (n >> 3 & 7))];
    }
}
