/* SPDX-License-Identifier: MIT */
#include "opencl/table.h"

#include <stdlib.h>
#include <string.h>

/* Hashes the values. Names, of the kernel and of macros, are left to the comparison: hardly two specs differ
   in them alone. */
uint64_t
ca_kernel_spec_hash(const ca_kernel_spec *spec)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; i < spec->ndefines; i++) {
        hash = (hash ^ (uint64_t)spec->defines[i].value) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 32;
    }
    return hash ^ spec->mods_hash[0];
}

static bool
same_text(const char *a, const char *b)
{
    return a == b || strcmp(a, b) == 0;
}

static bool
spec_equal(const ca_kernel_spec *a, const ca_kernel_spec *b)
{
    bool same = a->ndefines == b->ndefines && a->unoptimised == b->unoptimised &&
                a->mods_hash[0] == b->mods_hash[0] && a->mods_hash[1] == b->mods_hash[1] &&
                same_text(a->name, b->name);
    for (int i = 0; i < a->ndefines && same; i++) {
        same = a->defines[i].value == b->defines[i].value &&
               same_text(a->defines[i].name, b->defines[i].name);
    }
    return same;
}

ca_kernel *
ca_kernel_table_find(ca_kernel_table *table, const ca_kernel_spec *spec, uint64_t hash)
{
    for (ca_kernel **at = &table->first; *at != NULL; at = &(*at)->next) {
        ca_kernel *kernel = *at;
        if (kernel->hash == hash && spec_equal(&kernel->spec, spec)) {
            *at = kernel->next;
            ca_kernel_table_insert(table, kernel);
            return kernel;
        }
    }
    return NULL;
}

void
ca_kernel_table_insert(ca_kernel_table *table, ca_kernel *kernel)
{
    kernel->next = table->first;
    table->first = kernel;
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
    free(kernel->notice);
    free(kernel);
}

void
ca_kernel_table_free(ca_kernel_table *table, const ca_cl *cl)
{
    while (table->first != NULL) {
        ca_kernel *kernel = table->first;
        table->first = kernel->next;
        ca_kernel_free(cl, kernel);
    }
}
