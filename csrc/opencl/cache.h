/* SPDX-License-Identifier: MIT
 *
 * Binaries of built programs and verdicts of probes on disk. "Binary" stands for both below.
 */
#ifndef CLATTN_OPENCL_CACHE_H
#define CLATTN_OPENCL_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of everything that a binary depends on. */
typedef struct {
    uint64_t words[2];
} ca_hash;

ca_hash ca_cache_hash(const void *data, size_t size);

/* Read the binary of that name and identity; the caller frees *data. False, and NULL, if
   the folder is NULL, the file is absent, or the file is damaged. */
bool ca_cache_read(const char *folder, const char *name, ca_hash identity, unsigned char **data,
                   size_t *size);

/* Fails silently: the cache only saves time. */
void ca_cache_write(const char *folder, const char *name, ca_hash identity, const void *data,
                    size_t size);

#endif
