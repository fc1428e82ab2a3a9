/* SPDX-License-Identifier: MIT
 *
 * Which kernel, built with which macros.
 */
#ifndef CLATTN_OPENCL_SPEC_H
#define CLATTN_OPENCL_SPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name; /* a string literal: "E" */
    int64_t value;
} ca_define;

#define CA_MAX_DEFINES 32

/* attention_cpu is the kernel in kernels/attention/cpu.cl. Two specs are the same if their
   defines are, in the same order. */
typedef struct {
    const char *name; /* a string literal */
    bool unoptimised; /* built with -cl-opt-disable */
    bool is_probe;    /* its binary is not kept on disk: the verdict is */
    bool for_90a;     /* written for compute capability 9.0a; see ca_ptx_retarget */
    /* OpenCL C that the program begins with, as the macro MODS; NULL: none. Specs compare its
       hash, so that they need the text only while their kernel is built. */
    const char *mods;
    uint64_t mods_hash[2];
    int ndefines; /* more than CA_MAX_DEFINES: the kernel is refused */
    ca_define defines[CA_MAX_DEFINES];
} ca_kernel_spec;

/* Make the spec one without macros. */
static inline void
ca_kernel_spec_begin(ca_kernel_spec *spec, const char *name)
{
    spec->name = name;
    spec->unoptimised = spec->is_probe = spec->for_90a = false;
    spec->mods = NULL;
    spec->mods_hash[0] = spec->mods_hash[1] = 0;
    spec->ndefines = 0;
}

/* Add a macro. */
static inline void
ca_kernel_define(ca_kernel_spec *spec, const char *name, int64_t value)
{
    if (spec->ndefines < CA_MAX_DEFINES) {
        spec->defines[spec->ndefines] = (ca_define){name, value};
    }
    spec->ndefines++;
}

typedef struct ca_kernel ca_kernel; /* a built kernel; lives as long as its device */

/* What a driver says of a built kernel. */
typedef struct {
    size_t
        work_group; /* most work-items of a group; registers may allow fewer than the device does */
    uint64_t local_memory; /* bytes that it takes, with what the compiler adds */
} ca_kernel_limits;

/* What a plan may ask for: at most what the device has. */
typedef struct {
    int64_t group;        /* work-items */
    int64_t local_memory; /* bytes */
} ca_plan_limits;

#endif
