/* SPDX-License-Identifier: MIT
 *
 * One call of an operator: its arrays, the device it runs on, its results. Each door's function
 * calls begin, array, ready, its own checks, result, attention, give and end.
 */
#ifndef CLATTN_PYTHON_CALL_H
#define CLATTN_PYTHON_CALL_H

#include "attention/problem.h"
#include "python/array.h"
#include "python/state.h"

#define CA_PY_CALL_ARRAYS 16
#define CA_PY_CALL_KEPT   (2 * CA_PY_CALL_ARRAYS + 1) /* ca_py_hold's too, and that of `out` */

typedef struct {
    ca_state *state;
    const char *name; /* the function's, for messages */
    PyObject *device_argument;
    ca_device *device;  /* that the Tensors among the arrays are on; NULL: no Tensors */
    const char *holder; /* the name of the first one */
    PyObject *keep[CA_PY_CALL_KEPT]; /* own the arrays' memory */
    int kept;
} ca_py_call;

/* Returns -1 with a TypeError if the number of arguments is wrong. */
int ca_py_check_count(Py_ssize_t given, int expected);

/* Starts a call of the function `name`. ca_py_call_end always follows. */
void ca_py_call_begin(ca_py_call *call, PyObject *module, const char *name);
void ca_py_call_end(ca_py_call *call);

/* Reads `object`, argument `name`, as a tensor whose memory the call keeps. Returns -1 with a
   TypeError if it is no array of one of the dtypes; with a ValueError if it is a Tensor on another
   device than earlier ones, or if its library does not hand it out. */
int ca_py_call_array(ca_py_call *call, PyObject *object, const char *name, ca_py_dtypes dtypes,
                     ca_tensor *tensor);

/* The same; None gives an absent tensor. */
int ca_py_call_optional(ca_py_call *call, PyObject *object, const char *name, ca_py_dtypes dtypes,
                        ca_tensor *tensor);

/* The same, in host memory. A NumPy scalar counts as an array without dimensions. */
int ca_py_call_host_array(ca_py_call *call, PyObject *object, const char *name, ca_py_dtypes dtypes,
                          ca_tensor *tensor);

/* Reads contiguous int64 numbers of one dimension, in host memory. */
int ca_py_call_int64s(ca_py_call *call, PyObject *object, const char *name, ca_tensor *tensor);

/* Notes the device of `object`, argument `name`, if it is a Tensor. Returns -1 with a ValueError if
   earlier Tensors are on another device. */
int ca_py_call_note(ca_py_call *call, PyObject *object, const char *name);

/* Does the same for `out`, and keeps a NumPy array's memory from being resized. */
int ca_py_call_note_out(ca_py_call *call, PyObject *object);

/* Takes the device argument, after all arrays. Returns -1 with an exception if it is of a wrong
   type, or if it names another device than that of the Tensors. */
int ca_py_call_ready(ca_py_call *call, PyObject *device_argument);

/* Finds the device that the call runs on. Returns -1 with an exception. */
int ca_py_call_device(const ca_py_call *call, ca_device **device);

/* Makes a new result of the kind of `like`, described by *tensor: a Tensor on the call's device if
   `like` is a Tensor or an Array of pyopencl, which ca_py_call_give turns into an
   Array again; else memory of the host, which ca_py_call_give turns into an array of the
   library of `like`. `like` NULL: NumPy's. */
PyObject *ca_py_call_result(const ca_py_call *call, PyObject *like, ca_dtype dtype, int ndim,
                            const int64_t *shape, ca_tensor *tensor);
PyObject *ca_py_call_give(const ca_py_call *call, PyObject *like, ca_dtype dtype, PyObject *result);

/* One of several results of a call. */
typedef struct {
    bool wanted;    /* else None is given */
    PyObject *like; /* borrowed */
    ca_dtype dtype;
    int ndim;
    const int64_t *shape;
    ca_tensor *tensor; /* describes its memory; absent if it is not wanted */
    PyObject *result;  /* NULL at first; owned, see ca_py_call_clear */
    PyObject *out;     /* borrowed: given instead of the result, unless NULL */
} ca_py_output;

static inline ca_py_output
ca_py_output_of(bool wanted, PyObject *like, ca_dtype dtype, int ndim, const int64_t *shape,
                ca_tensor *tensor)
{
    return (ca_py_output){wanted, like, dtype, ndim, shape, tensor, NULL, NULL};
}

/* Make the memory of the results, or return -1 with an exception; give the results, as a tuple
   unless `count` is 1; release their memory. */
int ca_py_call_outputs(const ca_py_call *call, ca_py_output *outputs, int count);
PyObject *ca_py_call_give_all(const ca_py_call *call, const ca_py_output *outputs, int count);
void ca_py_call_clear(ca_py_output *outputs, int count);

/* out[...] = result, both Tensors or both NumPy arrays. Returns -1 with an exception. */
int ca_py_call_copy(const ca_py_call *call, PyObject *out, PyObject *result);

/* Folds the views and runs each problem; a trivial one needs no device. -1 with an exception. */
int ca_py_call_attention(const ca_py_call *call, ca_attention *attention,
                         const ca_tensor views[CA_ATTENTION_OPERANDS]);

#endif
