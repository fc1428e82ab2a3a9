/* SPDX-License-Identifier: MIT
 *
 * Errors as values. A fallible function returns a ca_status, gives its results by
 * out-pointers, and puts the words into the caller's ca_error. Nothing here prints,
 * exits or keeps a global.
 */
#ifndef CLATTN_STATUS_H
#define CLATTN_STATUS_H

typedef enum {
    CA_OK = 0,
    CA_ERROR_TYPE,   /* wrong kind of object or dtype    -> TypeError */
    CA_ERROR_VALUE,  /* shape, range or combination      -> ValueError */
    CA_ERROR_MEMORY, /* host or device memory ran out    -> MemoryError */
    CA_ERROR_DEVICE, /* everything else OpenCL reports   -> clattn.DeviceError */
} ca_status;

/* Owned by the caller, zero-initialised: `ca_error error = {0};`. */
typedef struct {
    char message[1024];
    char *log; /* a compiler's build log, or NULL; freed by ca_error_clear */
} ca_error;

#if defined(__GNUC__)
#define CA_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define CA_PRINTF(string, first)
#endif

/* Write the message (truncated to fit) and return `status`. */
ca_status ca_error_set(ca_error *error, ca_status status, const char *format, ...)
    CA_PRINTF(3, 4);

/* Attach a copy of `log`, which ends at its NUL; without memory for it, it is dropped.
 */
void ca_error_set_log(ca_error *error, const char *log);

/* Free the log and empty the message. */
void ca_error_clear(ca_error *error);

/* Needs `ca_status status` and a label `done:` in the calling function. */
#define CA_TRY(expression)                                                             \
    do {                                                                               \
        status = (expression);                                                         \
        if (status != CA_OK) {                                                         \
            goto done;                                                                 \
        }                                                                              \
    } while (0)

#endif
