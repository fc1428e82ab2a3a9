/* SPDX-License-Identifier: MIT
 *
 * Guard zones: bytes in front of memory and behind it that no kernel may write to. Only a build with
 * the option CLATTN_GUARDS has them; elsewhere they have no bytes. Only this room includes this
 * header.
 */
#ifndef CLATTN_OPENCL_GUARDS_H
#define CLATTN_OPENCL_GUARDS_H

#include <stddef.h>

#include "base/status.h"

/* Bytes of a zone. As large as a page, so that memory is aligned as it is without zones. */
#ifdef CLATTN_GUARDS
#define CA_GUARD ((size_t)4096)
#else
#define CA_GUARD ((size_t)0)
#endif

/* Allocate memory between two zones, which are filled. NULL if there is none. */
void *ca_guards_allocate(size_t bytes);

/* Free memory of ca_guards_allocate. NULL frees nothing. */
void ca_guards_free(void *memory);

/* Fill the zones again; the second one begins behind `bytes`, at most what was allocated. NULL has no
   zones. */
void ca_guards_fill(void *memory, size_t bytes);

/* CA_ERROR_DEVICE if a byte of the zones has changed. The message says that `call` wrote outside of
   `name`, and where. */
ca_status ca_guards_check(const void *memory, size_t bytes, const char *call, const char *name,
                          ca_error *error);

#endif
