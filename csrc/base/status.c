/* SPDX-License-Identifier: MIT */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/platform.h" /* ca_seconds */

#undef ca_error_set /* the analyzers' macro */

ca_status
ca_error_set(ca_error *error, ca_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return status;
}

void
ca_error_set_log(ca_error *error, const char *log)
{
    size_t size = strlen(log) + 1;
    char *copy = malloc(size);
    free(error->log);
    error->log = copy;
    if (copy != NULL) {
        memcpy(copy, log, size);
    }
}

void
ca_error_clear(ca_error *error)
{
    free(error->log);
    error->log = NULL;
    error->message[0] = '\0';
}

ca_status
ca_error_ask(const ca_error *error)
{
    return error->stops != NULL && error->stops(error->caller) ? CA_ERROR_STOPPED : CA_OK;
}

#define ASKING_SECONDS 0.05

ca_status
ca_error_ask_now_and_then(const ca_error *error, double *asked)
{
    double now = ca_seconds();
    if (now - *asked < ASKING_SECONDS) {
        return CA_OK;
    }
    *asked = now;
    return ca_error_ask(error);
}
