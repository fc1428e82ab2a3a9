/* SPDX-License-Identifier: MIT
 *
 * A file is a header and the binary. A file that does not fit its header (another version,
 * a cut, a flipped bit) counts as absent.
 */
#include "opencl/cache.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/platform.h"
#include "base/strbuf.h"

/* Change its last letter whenever the file's layout changes. */
static const char cache_magic[8] = {'C', 'L', 'A', 'T', 'T', 'N', 'K', '2'};

typedef struct {
    char magic[8];
    ca_hash identity; /* of what was built */
    ca_hash checksum; /* of the binary */
    uint64_t size;    /* of the binary */
} cache_header;

_Static_assert(sizeof(cache_header) == 48, "headers are compared whole");

/* Two hashes like FNV-1a, of 64 bits, with different primes and seeds, that take eight bytes at
   a time: a first call hashes a source and a binary. Each step stirs the high bits, which FNV
   does poorly. Not for secrets. */
ca_hash
ca_cache_hash(const void *data, size_t size)
{
    const unsigned char *bytes = data;
    uint64_t first = UINT64_C(0xcbf29ce484222325) ^ size;
    uint64_t second = UINT64_C(0x9e3779b97f4a7c15);
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        uint64_t word = 0; /* zeros stand behind the last bytes */
        memcpy(&word, bytes + i, size - i < sizeof word ? size - i : sizeof word);
        first = (first ^ word) * UINT64_C(0x100000001b3);
        first ^= first >> 32;
        second = (second + word) * UINT64_C(0xff51afd7ed558ccd);
        second ^= second >> 29;
    }
    first = (first ^ (first >> 32)) * UINT64_C(0xc4ceb9fe1a85ec53);
    return (ca_hash){.words = {first ^ (first >> 29), second ^ (second >> 32)}};
}

/* Append the path of the file: folder/name-identity.bin. */
static void
cache_path(ca_strbuf *path, const char *folder, const char *name, ca_hash identity)
{
    ca_strbuf_append(path, "%s/%s-%016" PRIx64 "%016" PRIx64 ".bin", folder, name,
                     identity.words[0], identity.words[1]);
}

/* Returns the header of a file that keeps `data`. */
static cache_header
header_of(ca_hash identity, const void *data, size_t size)
{
    cache_header header = {
        .identity = identity,
        .checksum = ca_cache_hash(data, size),
        .size = size,
    };
    memcpy(header.magic, cache_magic, sizeof cache_magic);
    return header;
}

/* True if the file has the header that its binary should have. */
static bool
is_valid(const unsigned char *file, size_t total, ca_hash identity)
{
    if (total <= sizeof(cache_header)) {
        return false;
    }
    const cache_header header = header_of(identity, file + sizeof header, total - sizeof header);
    return memcmp(file, &header, sizeof header) == 0;
}

bool
ca_cache_read(const char *folder, const char *name, ca_hash identity, unsigned char **data,
              size_t *size)
{
    unsigned char *file = NULL;
    size_t total = 0;
    ca_strbuf path = {0};
    *data = NULL;
    *size = 0;
    if (folder == NULL) {
        return false;
    }
    cache_path(&path, folder, name, identity);
    if (!path.failed && ca_file_read(path.data, &file, &total) && is_valid(file, total, identity)) {
        *size = total - sizeof(cache_header);
        memmove(file, file + sizeof(cache_header), *size);
        *data = file;
        file = NULL;
    }
    free(file);
    ca_strbuf_free(&path);
    return *data != NULL;
}

void
ca_cache_write(const char *folder, const char *name, ca_hash identity, const void *data,
               size_t size)
{
    ca_strbuf path = {0};
    if (folder == NULL || size == 0 || size > SIZE_MAX - sizeof(cache_header)) {
        return;
    }
    unsigned char *file = malloc(sizeof(cache_header) + size);
    if (file == NULL) {
        return;
    }
    const cache_header header = header_of(identity, data, size);
    memcpy(file, &header, sizeof header);
    memcpy(file + sizeof header, data, size);
    cache_path(&path, folder, name, identity);
    if (!path.failed) {
        ca_file_write(path.data, file, sizeof header + size);
    }
    free(file);
    ca_strbuf_free(&path);
}
