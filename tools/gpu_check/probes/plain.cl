/* SPDX-License-Identifier: MIT
 *
 * Half types, local memory, speed: OpenCL C 1.2 for any device.
 *
 *     -DBYTES  of local memory
 */
#define ITEMS 256u

__kernel void
load_halves(__global const half *input, __global float *output)
{
    const size_t i = get_global_id(0);
    output[i] = vload_half(i, input);
}

__kernel void
store_halves(__global const float *input, __global half *output)
{
    const size_t i = get_global_id(0);
    vstore_half_rte(input[i], i, output);
}

/* Counts the bytes of local memory that do not hold what another work-item wrote. */
static inline uint
count_wrong(__local uchar *memory, uint bytes)
{
    uint wrong = 0;
    for (uint i = (uint)get_local_id(0); i < bytes; i += ITEMS) {
        memory[i] = (uchar)(i * 7u + (i >> 8) + 1u);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* all bytes, before others read them */
    for (uint i = ITEMS - 1u - (uint)get_local_id(0); i < bytes; i += ITEMS) {
        wrong += memory[i] != (uchar)(i * 7u + (i >> 8) + 1u);
    }
    return wrong;
}

#ifdef BYTES
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
own_memory(__global uint *wrong)
{
    __local uchar memory[BYTES] __attribute__((aligned(16)));
    wrong[get_local_id(0)] = count_wrong(memory, BYTES);
}
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
given_memory(__global uint *wrong, __local uchar *memory, uint bytes)
{
    wrong[get_local_id(0)] = count_wrong(memory, bytes);
}

__kernel void
nothing(__global uint *p)
{
    if (p == 0) {
        p[0] = 1;
    }
}

__kernel void
write_ends(__global uint *p, ulong last)
{
    p[get_global_id(0) == 0 ? 0 : last] = 77u + (uint)get_global_id(0);
}

__kernel void
read_words(__global const uint4 *input, __global uint *output, uint count)
{
    const uint step = (uint)get_global_size(0);
    uint4 all = (uint4)(0u);
    uint i = (uint)get_global_id(0);
    for (; i + 3u * step < count; i += 4u * step) {
        all ^= input[i] ^ input[i + step] ^ input[i + 2u * step] ^ input[i + 3u * step];
    }
    if ((all.x ^ all.y ^ all.z ^ all.w) == 0x9e3779b9u) { /* the loads are needed */
        output[0] = all.x;
    }
}

__kernel void
write_words(__global uint4 *output, uint count, uint x)
{
    const uint step = (uint)get_global_size(0);
    for (uint i = (uint)get_global_id(0); i < count; i += step) {
        output[i] = (uint4)(x, i, x ^ i, 7u);
    }
}

__kernel void
copy_words(__global const uint4 *input, __global uint4 *output, uint count)
{
    const uint step = (uint)get_global_size(0);
    for (uint i = (uint)get_global_id(0); i < count; i += step) {
        output[i] = input[i];
    }
}

/* 32 independent chains of sums: 128 fma for each step. */
__kernel void
multiply_add(__global float *output, uint count, float x, float y)
{
    float16 a = (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float16 b = a + (float)get_local_id(0);
    for (uint i = 0; i < count; i++) {
        a = fma(a, (float16)(x), (float16)(y));
        b = fma(b, (float16)(x), (float16)(y));
        a = fma(a, (float16)(x), (float16)(y));
        b = fma(b, (float16)(x), (float16)(y));
        a = fma(a, (float16)(x), (float16)(y));
        b = fma(b, (float16)(x), (float16)(y));
        a = fma(a, (float16)(x), (float16)(y));
        b = fma(b, (float16)(x), (float16)(y));
    }
    a += b;
    const float8 c = a.lo + a.hi;
    const float4 d = c.lo + c.hi;
    if (d.x + d.y + d.z + d.w == 12345.678f) {
        output[0] = d.x;
    }
}

/* One chain: a time that the count sets, on few compute units. */
__kernel void
spin(__global float *output, uint count, float x)
{
    float a = (float)get_global_id(0);
    for (uint i = 0; i < count; i++) {
        a = fma(a, x, 0.5f);
    }
    output[get_global_id(0)] = a;
}
