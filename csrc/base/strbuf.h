/* SPDX-License-Identifier: MIT
 *
 * A string that grows. Append to it freely, then check once whether it failed.
 */
#ifndef CLATTN_STRBUF_H
#define CLATTN_STRBUF_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h" /* CA_PRINTF */

/* Zero-initialised: `ca_strbuf text = {0};`. */
typedef struct {
    char *data; /* NUL-terminated once something was appended; else NULL */
    size_t length;
    bool failed; /* an append ran out of memory; later ones did nothing */
} ca_strbuf;

void ca_strbuf_append(ca_strbuf *text, const char *format, ...) CA_PRINTF(2, 3);

/* Returns everything that was appended before a failure. */
const char *ca_strbuf_text(const ca_strbuf *text);

void ca_strbuf_free(ca_strbuf *text);

#endif
