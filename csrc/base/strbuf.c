/* SPDX-License-Identifier: MIT */
#include "base/strbuf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void
ca_strbuf_append(ca_strbuf *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int added = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *data = NULL;
    if (added >= 0 && !text->failed) {
        data = realloc(text->data, text->length + (size_t)added + 1);
    }
    if (data == NULL) {
        text->failed = true;
        return;
    }
    va_start(arguments, format);
    (void)vsnprintf(data + text->length, (size_t)added + 1, format, arguments);
    va_end(arguments);
    text->data = data;
    text->length += (size_t)added;
}

const char *
ca_strbuf_text(const ca_strbuf *text)
{
    return text->data != NULL ? text->data : "";
}

void
ca_strbuf_free(ca_strbuf *text)
{
    free(text->data);
    *text = (ca_strbuf){0};
}
