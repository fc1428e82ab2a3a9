/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* dl_iterate_phdr, dlvsym, dladdr */

#include "base/libraries.h"

#include <string.h>

#ifdef __GLIBC__
#include <dlfcn.h>
#include <link.h>

typedef struct {
    void (*found)(void *context, const char *path);
    void *context;
} library_listing;

static int
pass_on(struct dl_phdr_info *info, size_t size, void *argument)
{
    const library_listing *listing = argument;
    (void)size;
    if (strchr(info->dlpi_name, '/') != NULL) { /* a file; the program itself has no name */
        listing->found(listing->context, info->dlpi_name);
    }
    return 0;
}

void
ca_libraries_list(void (*found)(void *context, const char *path), void *context)
{
    library_listing listing = {found, context};
    (void)dl_iterate_phdr(pass_on, &listing);
}

const char *
ca_library_defining(const char *path, const char *name, const char *version)
{
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    const void *function = library != NULL ? dlvsym(library, name, version) : NULL;
    const char *definer = function != NULL ? ca_library_at(function) : NULL;
    if (library != NULL) {
        (void)dlclose(library); /* it stays open: somebody else has opened it */
    }
    return definer;
}

const char *
ca_library_at(const void *address)
{
    Dl_info found;
    return dladdr(address, &found) != 0 ? found.dli_fname : NULL;
}
#else
void
ca_libraries_list(void (*found)(void *context, const char *path), void *context)
{
    (void)found;
    (void)context;
}

const char *
ca_library_defining(const char *path, const char *name, const char *version)
{
    (void)path;
    (void)name;
    (void)version;
    return NULL;
}

const char *
ca_library_at(const void *address)
{
    (void)address;
    return NULL;
}
#endif
