/* SPDX-License-Identifier: MIT
 *
 * Built kernels in memory, found by their specs. Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_TABLE_H
#define CLATTN_OPENCL_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "opencl/loader.h"
#include "opencl/span.h" /* CA_MAX_SPANS */
#include "opencl/spec.h"

struct ca_kernel {
    cl_program program;
    cl_kernel handle;
    ca_kernel_spec spec;
    ca_kernel *next; /* in the table */
    uint64_t hash;   /* of the spec */
    char *notice;    /* why the device cannot use the kernel, until somebody takes it, or NULL */
    ca_kernel_limits limits;
    _Atomic(double) speed; /* work that it did lately in a second (ca_step); 0: unknown */
    /* Bit i: argument i is set to pointers[i]. Under the device's lock. */
    uint32_t given;
    const void *pointers[CA_MAX_SPANS];
};

/* A list, the kernel that was used last first. A process has few kernels, and uses one of
   them many times in a row. */
typedef struct {
    ca_kernel *first;
} ca_kernel_table;

uint64_t ca_kernel_spec_hash(const ca_kernel_spec *spec);

/* Under the device's lock. NULL: the table has no such kernel. */
ca_kernel *ca_kernel_table_find(ca_kernel_table *table, const ca_kernel_spec *spec, uint64_t hash);

/* Under the device's lock: take the kernel over. */
void ca_kernel_table_insert(ca_kernel_table *table, ca_kernel *kernel);

/* Free the table and its kernels. */
void ca_kernel_table_free(ca_kernel_table *table, const ca_cl *cl);

void ca_kernel_free(const ca_cl *cl, ca_kernel *kernel); /* NULL is fine */

#endif
