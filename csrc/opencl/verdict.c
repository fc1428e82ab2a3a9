/* SPDX-License-Identifier: MIT */
#include "opencl/verdict.h"

#include <stdlib.h>
#include <string.h>

#include "opencl/cache.h"
#include "opencl/device.h"
#include "opencl/program.h"

/* Part of the identity of each verdict. Raise the number whenever the host's side of a trial
   changes: its input, or the results that pass. */
#define EDITION 3

/* The file of a verdict: two texts, each with its final 0, the message and the compiler's log. Both
   are empty if the kernel passes. */
#define NAME "verdict"

/* A hash of everything that a verdict depends on. */
static bool
verdict_identity(const ca_device *device, const ca_kernel_spec *spec, const char *what,
                 ca_hash *identity)
{
    ca_hash program;
    const ca_hash tried = ca_cache_hash(what, strlen(what));
    if (!ca_kernel_identity(device, spec, &program)) {
        return false;
    }
    const uint64_t parts[] = {program.words[0],
                              program.words[1],
                              tried.words[0],
                              tried.words[1],
                              (uint64_t)device->info.memory,
                              EDITION};
    *identity = ca_cache_hash(parts, sizeof parts);
    return true;
}

/* Read a verdict. False if there is none, or if the file holds something else. */
static bool
read_verdict(const ca_device *device, ca_hash identity, ca_status *status, ca_error *error)
{
    unsigned char *found = NULL;
    size_t size;
    if (!ca_cache_read(device->cache_folder, NAME, identity, &found, &size)) {
        return false;
    }
    const char *message = (const char *)found;
    const char *end = memchr(message, '\0', size);
    bool whole = end != NULL && end + 1 < message + size && message[size - 1] == '\0';
    if (whole) {
        const char *log = end + 1;
        *status = CA_OK;
        if (message[0] != '\0') {
            *status = ca_error_set(error, CA_ERROR_KERNEL, "%s", message);
        }
        if (log[0] != '\0') {
            ca_error_set_log(error, log);
        }
    }
    free(found);
    return whole;
}

static void
keep_verdict(const ca_device *device, ca_hash identity, const ca_error *error)
{
    const char *log = error->log != NULL ? error->log : "";
    size_t length = strlen(error->message) + 1;
    size_t size = length + strlen(log) + 1;
    char *texts = malloc(size);
    if (texts != NULL) {
        memcpy(texts, error->message, length);
        memcpy(texts + length, log, size - length);
        ca_cache_write(device->cache_folder, NAME, identity, texts, size);
    }
    free(texts);
}

ca_status
ca_verdict_find(ca_device *device, const ca_kernel_spec *spec, const char *what,
                bool keeps_failures, ca_trial trial, const void *context, ca_error *error)
{
    ca_status status;
    ca_hash identity;
    bool identified = verdict_identity(device, spec, what, &identity);
    if (identified && read_verdict(device, identity, &status, error)) {
        return status;
    }
    status = trial(device, spec, context, error);
    if (identified && (status == CA_OK || (status == CA_ERROR_KERNEL && keeps_failures))) {
        keep_verdict(device, identity, error);
    }
    return status;
}

void
ca_verdict_keep_pass(const ca_device *device, const ca_kernel_spec *spec)
{
    ca_hash identity;
    CA_NEW_ERROR(none);
    if (verdict_identity(device, spec, "", &identity)) {
        keep_verdict(device, identity, &none);
    }
}
