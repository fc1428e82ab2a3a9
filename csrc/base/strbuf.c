/* SPDX-License-Identifier: MIT */
#include "base/strbuf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Makes room for `extra` more characters and the NUL. */
static bool
strbuf_reserve(ca_strbuf *text, size_t extra)
{
    if (extra < text->capacity - text->length) {
        return true;
    }
    size_t capacity = text->capacity < 64 ? 64 : text->capacity;
    while (capacity - text->length <= extra) {
        if (capacity > SIZE_MAX / 2) {
            return false;
        }
        capacity *= 2;
    }
    char *data = realloc(text->data, capacity);
    if (data == NULL) {
        return false;
    }
    text->data = data;
    text->capacity = capacity;
    return true;
}

void
ca_strbuf_append(ca_strbuf *text, const char *format, ...)
{
    va_list arguments;
    if (text->failed) {
        return;
    }
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0 || !strbuf_reserve(text, (size_t)length)) {
        text->failed = true;
        return;
    }
    va_start(arguments, format);
    vsnprintf(text->data + text->length, (size_t)length + 1, format, arguments);
    va_end(arguments);
    text->length += (size_t)length;
}

bool
ca_strbuf_ok(const ca_strbuf *text)
{
    return !text->failed;
}

void
ca_strbuf_free(ca_strbuf *text)
{
    free(text->data);
    *text = (ca_strbuf){0};
}
