/* SPDX-License-Identifier: MIT
 *
 * Ways of writing inline PTX. FORM picks one; each adds 3 to its number.
 */
__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void
forms(__global uint *numbers)
{
    const uint item = (uint)get_local_id(0);
    uint x = numbers[item];
    uint y = 0;
#if FORM == 0
    __asm__ volatile("add.u32 %0, %1, 3;" : "=r"(y) : "r"(x));
#elif FORM == 1
    asm volatile("add.u32 %0, %1, 3;" : "=r"(y) : "r"(x));
#elif FORM == 2
    __asm__("add.u32 %0, %1, 3;" : "=r"(y) : "r"(x));
#elif FORM == 3
    __asm__ volatile("add.u32 %0, %0, 3;" : "+r"(x));
    y = x;
#elif FORM == 4
    __asm__ volatile("{ .reg .u32 t; add.u32 t, %1, 1; add.u32 %0, t, 2; }" : "=r"(y) : "r"(x));
#elif FORM == 5
    __asm__ volatile("add.u32 %0, %1, 3;" : "=r"(y) : "r"(x) : "memory");
#elif FORM == 6
    __asm__ volatile("add.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "n"(3));
#elif FORM == 7
    __asm__ volatile("ld.global.u32 %0, [%1];" : "=r"(y) : "l"(numbers + item));
    y += 3;
#elif FORM == 8
    __local uint shared[32] __attribute__((aligned(16)));
    shared[item] = x + 3;
    barrier(CLK_LOCAL_MEM_FENCE);
    __asm__ volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"((uint)(size_t)(shared + item)));
#elif FORM == 9
    __local uint shared[32] __attribute__((aligned(16)));
    shared[item] = x + 3;
    barrier(CLK_LOCAL_MEM_FENCE);
    __asm__ volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "l"(shared + item));
#elif FORM == 10
    uint lane;
    __asm__ volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    y = x + (lane == item ? 3 : 0);
#elif FORM == 11
    ushort h;
    float f;
    __asm__ volatile("add.u16 %0, %1, 1;" : "=h"(h) : "h"((ushort)0));
    __asm__ volatile("add.f32 %0, %1, 0f40000000;" : "=f"(f) : "f"(0.0f));
    y = x + h + (uint)f;
#elif FORM == 12
    y = x;
    _Pragma("unroll") for (uint n = 0; n < 3; n++)
    {
        y += 1;
    }
#elif FORM == 13
    y = x;
    __attribute__((opencl_unroll_hint(3))) for (uint n = 0; n < 3; n++) {
        y += 1;
    }
#else
    __asm__ volatile("// add.u32 %0, %1, 100;\n\tadd.u32 %0, %1, 3;" : "=r"(y) : "r"(x));
#endif
    numbers[item] = y;
}
