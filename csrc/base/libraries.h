/* SPDX-License-Identifier: MIT
 *
 * The shared libraries of this process, of which only glibc tells.
 */
#ifndef CLATTN_LIBRARIES_H
#define CLATTN_LIBRARIES_H

/* Calls `found` with the path of each library of this process, in the order in which they were
   opened. `found` opens none. Where the system has no such list, nothing is called (all but glibc). */
void ca_libraries_list(void (*found)(void *context, const char *path), void *context);

/* Returns the path of the library that defines the function `name` of that version for the library
   at `path`: itself, or one that it is linked to. NULL: none does, `path` is not open in this
   process, or the system has no versions. */
const char *ca_library_defining(const char *path, const char *name, const char *version);

/* Returns the path of the library in which `address` lies, NULL if the system does not say. Paths are
   as in the list, and valid until the library is closed. */
const char *ca_library_at(const void *address);

#endif
