/* SPDX-License-Identifier: MIT */
#include "opencl/table.h"

#include <stdlib.h>
#include <string.h>

/* Hashes the kernel's name and the values. Two specs of one kernel hardly ever differ in
   the defines' names alone, so these are left to the comparison. */
uint64_t
ca_kernel_spec_hash(const ca_kernel_spec *spec)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (const char *at = spec->name; *at != '\0'; at++) {
        hash = (hash ^ (unsigned char)*at) * UINT64_C(0x100000001b3);
    }
    for (int i = 0; i < spec->ndefines; i++) {
        hash = (hash ^ (uint64_t)spec->defines[i].value) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 32;
    }
    return hash;
}

static bool
same_text(const char *a, const char *b)
{
    return a == b || strcmp(a, b) == 0;
}

static bool
spec_equal(const ca_kernel_spec *a, const ca_kernel_spec *b)
{
    if (a->ndefines != b->ndefines || a->in_c30 != b->in_c30 ||
        !same_text(a->name, b->name)) {
        return false;
    }
    for (int i = 0; i < a->ndefines; i++) {
        if (a->defines[i].value != b->defines[i].value ||
            !same_text(a->defines[i].name, b->defines[i].name)) {
            return false;
        }
    }
    return true;
}

ca_kernel *
ca_kernel_table_find(const ca_kernel_table *table, const ca_kernel_spec *spec,
                     uint64_t hash)
{
    if (table->capacity == 0) {
        return NULL;
    }
    size_t mask = table->capacity - 1;
    for (size_t at = hash & mask; table->slots[at] != NULL; at = (at + 1) & mask) {
        ca_kernel *kernel = table->slots[at];
        if (kernel->hash == hash && spec_equal(&kernel->spec, spec)) {
            return kernel;
        }
    }
    return NULL;
}

static void
put(ca_kernel_table *table, ca_kernel *kernel)
{
    size_t mask = table->capacity - 1;
    size_t at = kernel->hash & mask;
    while (table->slots[at] != NULL) {
        at = (at + 1) & mask;
    }
    table->slots[at] = kernel;
    table->count++;
}

bool
ca_kernel_table_insert(ca_kernel_table *table, ca_kernel *kernel)
{
    if (2 * (table->count + 1) > table->capacity) {
        ca_kernel_table larger = {
            .capacity = table->capacity == 0 ? 64 : 2 * table->capacity,
        };
        larger.slots = calloc(larger.capacity, sizeof(ca_kernel *));
        if (larger.slots == NULL) {
            return false;
        }
        for (size_t i = 0; i < table->capacity; i++) {
            if (table->slots[i] != NULL) {
                put(&larger, table->slots[i]);
            }
        }
        free(table->slots);
        *table = larger;
    }
    put(table, kernel);
    return true;
}

void
ca_kernel_free(const ca_cl *cl, ca_kernel *kernel)
{
    if (kernel == NULL) {
        return;
    }
    if (kernel->handle != NULL) {
        cl->clReleaseKernel(kernel->handle);
    }
    if (kernel->program != NULL) {
        cl->clReleaseProgram(kernel->program);
    }
    free(kernel);
}

void
ca_kernel_table_free(ca_kernel_table *table, const ca_cl *cl)
{
    for (size_t i = 0; i < table->capacity; i++) {
        ca_kernel_free(cl, table->slots[i]);
    }
    free(table->slots);
    *table = (ca_kernel_table){0};
}
