/* SPDX-License-Identifier: MIT
 *
 * A string that grows. Append to it freely, then check once with ca_strbuf_ok.
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
    size_t capacity;
    bool failed;
} ca_strbuf;

void ca_strbuf_append(ca_strbuf *text, const char *format, ...) CA_PRINTF(2, 3);

/* False if any append ran out of memory. */
bool ca_strbuf_ok(const ca_strbuf *text);

void ca_strbuf_free(ca_strbuf *text);

#endif
