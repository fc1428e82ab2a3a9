/* SPDX-License-Identifier: MIT */
#include "base/processor.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

/* The registers of SSE, AVX and AVX-512 that the system has to save. */
#define WIDE_REGISTERS 0xe6u

bool
ca_processor_has_bfloat16_pairs(void)
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
    if ((saved & WIDE_REGISTERS) != WIDE_REGISTERS ||
        !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & bit_AVX512F)) {
        return false;
    }
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 5) != 0;
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
