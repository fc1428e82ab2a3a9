/* SPDX-License-Identifier: MIT
 *
 * What one instance of the extension module keeps: no static holds a Python object or
 * a device.
 */
#ifndef CLATTN_PY_STATE_H
#define CLATTN_PY_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>

#include "base/platform.h"
#include "opencl/forced.h"
#include "opencl/runtime.h"

typedef struct {
    PyObject *device_error;      /* clattn.DeviceError */
    PyTypeObject *device_type;   /* clattn.Device */
    PyTypeObject *tensor_type;   /* clattn.Tensor */
    PyTypeObject *producer_type; /* of python/dlpack.h */
    PyObject *device_override;   /* the ContextVar that use_device sets */

    ca_mutex lock;               /* guards the opening of `runtime` */
    atomic_int opening;          /* threads that are at it */
    _Atomic(int64_t) process_id; /* that may open; another one is a forked child */
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
