/* SPDX-License-Identifier: MIT
 *
 * A target of libFuzzer: files of the cache, words for devices, limits that tests force. The first
 * byte of an input chooses; tools/fuzz_parsers.py builds and runs the program.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/platform.h"
#include "opencl/cache.h"
#include "opencl/forced.h"
#include "opencl/words.h"

enum { DEVICES = 4, HEADER = 48 };

static const char *folder;
static ca_device devices[DEVICES];

static void
expect(int is_right, const char *what)
{
    if (!is_right) {
        (void)fprintf(stderr, "%s\n", what);
        abort();
    }
}

int
LLVMFuzzerInitialize(int *count, char ***arguments)
{
    static const char *const names[] = {"NVIDIA CUDA", "Intel(R) OpenCL",
                                        "Portable Computing Language", "Intel(R) OpenCL Graphics"};
    (void)count;
    (void)arguments;
    folder = getenv("FUZZ_FOLDER");
    expect(folder != NULL, "FUZZ_FOLDER is not set");
    for (int i = 0; i < DEVICES; i++) {
        devices[i].info.type = i % 3 == 0 ? CA_DEVICE_GPU : CA_DEVICE_CPU;
        (void)snprintf(devices[i].info.platform, sizeof devices[i].info.platform, "%s", names[i]);
        (void)snprintf(devices[i].info.name, sizeof devices[i].info.name, "Device %d", i);
    }
    return 0;
}

/* A file of these bytes is a program only with the right header. Then the bytes from HEADER on are
   written as a program, and the input's first bytes change the file's. */
static void
try_file(const unsigned char *bytes, size_t size)
{
    const ca_hash identity = {{1, 2}};
    unsigned char *file = NULL;
    unsigned char *data = NULL;
    size_t total = 0;
    size_t found = 0;
    char path[512];
    (void)snprintf(path, sizeof path, "%s/k-%016d%016d.bin", folder, 1, 2);
    (void)ca_file_write(path, bytes, size);
    if (ca_cache_read(folder, "k", identity, &data, &found)) {
        expect(size > HEADER && found == size - HEADER, "any bytes are a program");
        expect(memcmp(data, bytes + HEADER, found) == 0, "other bytes");
        free(data);
    }
    if (size <= HEADER) {
        return;
    }
    ca_cache_write(folder, "k", identity, bytes + HEADER, size - HEADER);
    expect(ca_cache_read(folder, "k", identity, &data, &found), "a program is not read");
    expect(found == size - HEADER && memcmp(data, bytes + HEADER, found) == 0, "other bytes");
    free(data);
    expect(ca_file_read(path, &file, &total) && total == size, "the file is not read");
    bool changed = false;
    for (size_t i = 0; i + 3 < HEADER; i += 4) { /* a place of two bytes, what to add, unless 0 */
        size_t place = ((size_t)bytes[i] << 8 | bytes[i + 1]) % total;
        file[place] = (unsigned char)(file[place] + bytes[i + 2]);
        changed = changed || bytes[i + 2] != 0;
    }
    size_t cut = bytes[HEADER - 1] % 3 == 0 ? bytes[HEADER - 2] % total : 0;
    (void)ca_file_write(path, file, total - cut);
    free(file);
    if (ca_cache_read(folder, "k", identity, &data, &found)) {
        expect(cut == 0 && memcmp(data, bytes + HEADER, found) == 0, "a damaged file is read");
        free(data);
    } else {
        expect(changed || cut > 0, "a good file is not read");
    }
}

static void
try_words(const char *words)
{
    ca_device_words request;
    CA_NEW_ERROR(error);
    if (ca_words_read(&request, words, "device", devices, DEVICES, &error) != CA_OK) {
        expect(error.message[0] != '\0', "no message");
        return;
    }
    for (int i = 0; i < DEVICES; i++) {
        (void)ca_words_fit(&request, &devices[i].info);
    }
    (void)ca_words_error("fits none", words, "device", devices, DEVICES, &error);
    ca_error_clear(&error);
}

static void
try_limits(const char *words)
{
    ca_forced forced = {.kernel = NULL};
    CA_NEW_ERROR(error);
    if (ca_forced_parse_local_memory(words, &forced, &error) == CA_OK) {
        ca_device_info limited;
        ca_forced_limit(&forced, &devices[0].info, &limited);
    } else {
        expect(error.message[0] != '\0', "no message");
    }
    ca_error_clear(&error);
}

int
LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t size)
{
    if (size == 0) {
        return 0;
    }
    char *text = calloc(size, 1); /* ends with a zero */
    expect(text != NULL, "no memory");
    memcpy(text, bytes + 1, size - 1);
    switch (bytes[0] % 3) {
    case 0:
        try_file(bytes + 1, size - 1);
        break;
    case 1:
        try_words(text);
        break;
    default:
        try_limits(text);
        break;
    }
    free(text);
    return 0;
}
