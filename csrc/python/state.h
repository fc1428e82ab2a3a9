/* SPDX-License-Identifier: MIT
 *
 * The state of one instance of the extension module. No static holds a Python object or a device.
 */
#ifndef CLATTN_PYTHON_STATE_H
#define CLATTN_PYTHON_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>

#include "base/platform.h"
#include "opencl/forced.h"
#include "opencl/runtime.h"

/* Threads that work without the GIL. */
typedef struct {
    _Atomic(unsigned long) main; /* the thread that runs the handlers of signals */
    atomic_int count;
    atomic_bool stop; /* the interpreter ends: long work of other threads than `main` stops */
} ca_py_workers;

/* Names of attributes that calls look up, as strings of Python. */
typedef enum {
    CA_NAME_DLPACK,
    CA_NAME_DLPACK_DEVICE,
    CA_NAME_DLPACK_EXCHANGE,
    CA_NAME_REQUIRES_GRAD,
    CA_NAME_IS_NEG,
    CA_NAME_IS_NESTED,
    CA_NAME_COUNT,
} ca_py_name;

/* Functions that take arguments by name; see python/arguments.h. */
typedef enum {
    CA_PY_SDPA,
    CA_PY_SDPA_BACKWARD,
    CA_PY_VARLEN,
    CA_PY_CACHE_ATTEND,
    CA_PY_ONNX,
    CA_PY_OPENVINO,
    CA_PY_MULTIHEAD,
    CA_PY_DIAGONAL,
    CA_PY_FUNCTIONS,
} ca_py_function;

/* What such a function takes, 63 arguments at most: an entry for each slot. */
typedef struct {
    PyObject *names;       /* a tuple of interned strings */
    PyObject *defaults;    /* a tuple */
    Py_ssize_t positional; /* the first so many may be given without a name */
    Py_ssize_t required;   /* the first so many have no default */
} ca_py_signature;

typedef struct {
    PyObject *names[CA_NAME_COUNT];
    ca_py_signature signatures[CA_PY_FUNCTIONS];
    PyObject *device_error;      /* clattn.DeviceError */
    PyObject *setting_error;     /* clattn._core.SettingError, a ValueError */
    PyTypeObject *device_type;   /* clattn.Device */
    PyTypeObject *tensor_type;   /* clattn.Tensor */
    PyTypeObject *cache_type;    /* clattn._core.Cache */
    PyTypeObject *hold_type;     /* python/pages.c's */
    PyTypeObject *producer_type; /* python/dlpack_export.c's */
    PyObject *device_override;   /* the ContextVar that use_device sets */
    PyObject *base_and_sum;      /* as return_lse: not the log-sum-exp, but two numbers */
    PyObject *only_check;        /* as return_lse: nothing is computed; gives the result's shape */

    ca_py_workers *workers;
    PyObject *end; /* see python/end.h; borrowed; NULL: none is left */

    ca_mutex lock;               /* guards the opening of `runtime` */
    atomic_int opening;          /* threads that open it now */
    _Atomic(uint64_t) opener;    /* a thread that has opened it, and reads its tuning; 0: none */
    ca_runtime *opened;          /* by the opener; other threads do not see it yet */
    _Atomic(int64_t) process_id; /* may open it; a forked child has another */
    _Atomic(ca_runtime *) runtime;
    _Atomic(ca_device *) default_device; /* NULL: not chosen yet */
    ca_forced forced;                    /* see python/forced.h */
} ca_state;

static inline ca_state *
ca_state_get(PyObject *module)
{
    return (ca_state *)PyModule_GetState(module);
}

#endif
