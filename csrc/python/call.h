/* SPDX-License-Identifier: MIT
 *
 * One call of an operator: its arrays, the device it runs on, its results. Every front
 * door goes begin, arrays, ready, its own checks, results, run, give, end.
 */
#ifndef CLATTN_PY_CALL_H
#define CLATTN_PY_CALL_H

#include "attention/problem.h"
#include "python/array.h"
#include "python/state.h"

#define CA_PY_CALL_ARRAYS 12

typedef struct {
    ca_state *state;
    const char *name; /* of the function, for messages */
    PyObject *device_argument;
    ca_device *device;  /* of the Tensors among the arrays; NULL: there are none */
    const char *holder; /* the first of them */
    PyObject *keep[CA_PY_CALL_ARRAYS]; /* own the arrays' memory */
    int kept;
} ca_py_call;

/* -1 with a TypeError where a function got another number of arguments than it
   takes. */
int ca_py_check_count(Py_ssize_t given, int expected);

/* Start a call of the function `name`, with that check. ca_py_call_end follows in any
   case. */
int ca_py_call_begin(ca_py_call *call, PyObject *module, const char *name,
                     Py_ssize_t given, int expected);
void ca_py_call_end(ca_py_call *call);

/* `object`, argument `name`, as a tensor whose memory the call keeps. -1 with a
   TypeError for what is no array of such a dtype, with a ValueError for a Tensor of
   another device than those before, or another library's array that cannot be read. */
int ca_py_call_array(ca_py_call *call, PyObject *object, const char *name,
                     ca_py_dtypes dtypes, ca_tensor *tensor);

/* The same, or an absent tensor for None. */
int ca_py_call_optional(ca_py_call *call, PyObject *object, const char *name,
                        ca_py_dtypes dtypes, ca_tensor *tensor);

/* As optional, but in the host's memory whatever it is, for what is read here; a NumPy
   scalar is taken as an array without dimensions. */
int ca_py_call_host_array(ca_py_call *call, PyObject *object, const char *name,
                          ca_py_dtypes dtypes, ca_tensor *tensor);

/* Note that `object`, argument `name`, is a Tensor, if it is. -1 with a ValueError
   where that is on another device than those before. */
int ca_py_call_note(ca_py_call *call, PyObject *object, const char *name);

/* Once the arrays are known: check the kind of the device argument. -1 with an
   exception. */
int ca_py_call_ready(ca_py_call *call, PyObject *device_argument);

/* The device that the call runs on. -1 with an exception. */
int ca_py_call_device(const ca_py_call *call, ca_device **device);

/* A new result of `like`'s kind, which *tensor describes: a Tensor on the call's device
   where `like` is one, else memory of the host, which ca_py_call_give turns into an
   array of `like`'s library. `like` NULL: NumPy's. */
PyObject *ca_py_call_result(const ca_py_call *call, PyObject *like, ca_dtype dtype,
                            int ndim, const int64_t *shape, ca_tensor *tensor);
PyObject *ca_py_call_give(const ca_py_call *call, PyObject *like, ca_dtype dtype,
                          PyObject *result);

/* One of several results of a call. */
typedef struct {
    bool wanted;    /* None is given for the others */
    PyObject *like; /* borrowed */
    ca_dtype dtype;
    int ndim;
    const int64_t *shape;
    ca_tensor *tensor; /* describes its memory; absent where it is not wanted */
    PyObject *result;  /* NULL at first; owned, see ca_py_call_clear */
    PyObject *out;     /* borrowed: given in the result's stead; NULL: none */
} ca_py_output;

static inline ca_py_output
ca_py_output_of(bool wanted, PyObject *like, ca_dtype dtype, int ndim,
                const int64_t *shape, ca_tensor *tensor)
{
    return (ca_py_output){wanted, like, dtype, ndim, shape, tensor, NULL, NULL};
}

/* Make their memory; -1 with an exception. Give them as a tuple. Release what was
   made. */
int ca_py_call_outputs(const ca_py_call *call, ca_py_output *outputs, int count);
PyObject *ca_py_call_give_all(const ca_py_call *call, const ca_py_output *outputs,
                              int count);
void ca_py_call_clear(ca_py_output *outputs, int count);

/* out[...] = result, which is a Tensor where `out` is one, else both are NumPy arrays.
   -1 with an exception. */
int ca_py_call_copy(const ca_py_call *call, PyObject *out, PyObject *result);

/* Run on the call's device; problems without work need none. -1 with an exception. */
int ca_py_call_attention(const ca_py_call *call, ca_attention *attention);

#endif
