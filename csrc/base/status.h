/* SPDX-License-Identifier: MIT
 *
 * Errors as values. A function that can fail returns a ca_status, writes its results
 * through pointers, and writes the message into the caller's ca_error. Nothing prints,
 * exits or keeps a global.
 */
#ifndef CLATTN_STATUS_H
#define CLATTN_STATUS_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    CA_OK = 0,
    CA_ERROR_TYPE,    /* wrong kind of object or dtype    -> TypeError */
    CA_ERROR_VALUE,   /* shape, range or combination      -> ValueError */
    CA_ERROR_SETTING, /* words of a CLATTN_ variable, or a call that the variable
                        does not allow                   -> clattn._core.SettingError */
    CA_ERROR_MEMORY,  /* host or device memory ran out    -> MemoryError */
    CA_ERROR_KERNEL,  /* the driver cannot build, create or launch a kernel, or the kernel
                        gives wrong results              -> clattn.DeviceError */
    CA_ERROR_DEVICE,  /* everything else OpenCL reports   -> clattn.DeviceError */
    CA_ERROR_STOPPED, /* the caller's `stops` ended the call, and knows why */
} ca_status;

/* Owned by the caller, who declares it by CA_NEW_ERROR. Between the parts of long work the work asks
   `stops`, unless it is NULL, and ends if the answer is true. Unless `apart` is NULL, it does what a
   request says in another process (opencl/apart.h). */
typedef struct ca_error ca_error;
struct ca_error {
    char message[1024];
    char *log; /* a compiler's build log, or NULL; freed by ca_error_clear */
    bool (*stops)(void *caller);
    ca_status (*apart)(void *caller, const char *request, ca_error *error);
    void *caller;
};

#if defined(__MINGW32__) && !defined(__clang__)
#define CA_PRINTF(string, first) __attribute__((format(gnu_printf, string, first)))
#elif defined(__GNUC__)
#define CA_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define CA_PRINTF(string, first)
#endif

/* CA_NEW_ERROR(name); declares a ca_error that has no message. The macro writes only the first byte of
   `message`, because to zero the whole array takes 2 % of the time of a tiny call. */
#define CA_NEW_ERROR(name)                                                                         \
    ca_error name;                                                                                 \
    ca_error_init(&(name))

static inline void
ca_error_init(ca_error *error)
{
    error->message[0] = '\0';
    error->log = NULL;
    error->stops = NULL;
    error->apart = NULL;
    error->caller = NULL;
}

/* CA_NEW_ERROR_FOR(name, error); declares one for a part of the work, which has the same caller. */
#define CA_NEW_ERROR_FOR(name, error)                                                              \
    CA_NEW_ERROR(name);                                                                            \
    (name).stops = (error)->stops;                                                                 \
    (name).apart = (error)->apart;                                                                 \
    (name).caller = (error)->caller

/* Writes the message, cut to fit. Returns `status`. */
ca_status ca_error_set(ca_error *error, ca_status status, const char *format, ...) CA_PRINTF(3, 4);

#ifdef CLATTN_ANALYZER /* sees one file at a time, and so would not know what this returns */
#define ca_error_set(error, status, ...) (ca_error_set(error, status, __VA_ARGS__), (status))
#endif

/* Attaches a copy of `log`, or none if there is no memory for it. */
void ca_error_set_log(ca_error *error, const char *log);

/* Frees the log and empties the message. */
void ca_error_clear(ca_error *error);

/* CA_ERROR_STOPPED if the caller wants the work to end, else CA_OK. The calling thread holds no
   lock. */
ca_status ca_error_ask(const ca_error *error);

/* The same for work of many short parts: asks only if some time has passed since `*asked`, which starts
   as ca_seconds(). */
ca_status ca_error_ask_now_and_then(const ca_error *error, double *asked);

/* Jumps to `done:` if the expression fails. The calling function needs that label and
   a `ca_status status`. */
#define CA_TRY(expression)                                                                         \
    do {                                                                                           \
        status = (expression);                                                                     \
        if (status != CA_OK) {                                                                     \
            goto done;                                                                             \
        }                                                                                          \
    } while (0)

#endif
