/* SPDX-License-Identifier: MIT
 *
 * For machine_code: functions of OpenCL C that libclc lacks on NVPTX, by the instructions that
 * drivers use for them. Not for use on a device.
 */
#define SHIM static inline __attribute__((overloadable))

SHIM float
native_exp2(float x)
{
    float y;
    __asm__("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SHIM float
native_log2(float x)
{
    float y;
    __asm__("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SHIM float
native_exp(float x)
{
    return native_exp2(x * 1.44269504f);
}

SHIM float
native_log(float x)
{
    return native_log2(x) * 0.693147181f;
}
