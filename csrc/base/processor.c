/* SPDX-License-Identifier: MIT */
#define _DEFAULT_SOURCE /* syscall */
#include "base/processor.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Kernels may use registers only if the system saves them. The first number has the bits of all registers
   that AVX-512 needs: those of SSE, AVX and AVX-512. The second number has the bits of AMX's. */
#define WIDE_REGISTERS 0xe6u
#define AMX_REGISTERS  (3u << 17)

/* Bits of cpuid's answer 7. */
#define HAS_AMX            (1u << 24 | 1u << 22) /* in edx: matrix registers, bfloat16 */
#define HAS_BFLOAT16_PAIRS (1u << 5)             /* in eax of its second part */

/* How Linux is asked for the use of AMX, and the number of its data registers. */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define AMX_DATA            18

/* True if the system saves these registers. */
static bool
saves(unsigned registers)
{
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned eax;
    unsigned ebx;
    unsigned ecx;
    unsigned edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) {
        return false;
    }
    unsigned saved;
    __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    return (saved & registers) == registers;
#else
    (void)registers;
    return false;
#endif
}

bool
ca_processor_has_bfloat16_pairs(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned eax;
    unsigned ebx;
    unsigned ecx;
    unsigned edx;
    return saves(WIDE_REGISTERS) && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
           (ebx & bit_AVX512F) != 0 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) &&
           (eax & HAS_BFLOAT16_PAIRS) != 0;
#else
    return false;
#endif
}

bool
ca_processor_has_fast_pairs(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned eax;
    unsigned ebx;
    unsigned ecx;
    unsigned edx;
    return ca_processor_has_bfloat16_pairs() && __get_cpuid(0, &eax, &ebx, &ecx, &edx) &&
           ebx != signature_INTEL_ebx;
#else
    return false;
#endif
}

bool
ca_processor_has_amx(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned eax;
    unsigned ebx;
    unsigned ecx;
    unsigned edx;
    return saves(AMX_REGISTERS) && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
           (edx & HAS_AMX) == HAS_AMX;
#else
    return false;
#endif
}

bool
ca_processor_allow_amx(void)
{
#if defined(__linux__) && defined(__x86_64__)
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, AMX_DATA) == 0;
#else
    return false;
#endif
}

void
ca_processor_describe(uint32_t words[CA_PROCESSOR_WORDS])
{
    for (int n = 0; n < CA_PROCESSOR_WORDS; n++) {
        words[n] = 0;
    }
#if defined(__x86_64__) && defined(__GNUC__)
    /* Answer 1 has the number of the core in ebx. This number differs from call to call, so the
       description leaves it out. */
    uint32_t other;
    (void)__get_cpuid(1, &words[0], &other, &words[1], &words[2]);
    (void)__get_cpuid_count(7, 0, &other, &words[3], &words[4], &words[5]);
    (void)__get_cpuid_count(7, 1, &words[6], &other, &other, &other);
#endif
}
