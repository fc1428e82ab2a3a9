/* SPDX-License-Identifier: MIT
 *
 * The type clattn.Device: a name for one device of this process.
 */
#ifndef CLATTN_PY_DEVICE_H
#define CLATTN_PY_DEVICE_H

#include "python/state.h"

/* Create the type and add it to the module. -1 with an exception set. */
int ca_py_device_init(PyObject *module);

/* A handle on device `index` of the module's runtime. */
PyObject *ca_py_device_new(PyObject *module, ca_device *device, int index);

/* The handle on `device` of the module's runtime, and its index. */
PyObject *ca_py_wrap_device(PyObject *module, ca_device *device);
int ca_py_device_index(PyObject *module, const ca_device *device);

/* "gpu", "accelerator" or "cpu". */
const char *ca_py_device_type_name(const ca_device_info *info);

/* The device behind an instance of Device. */
ca_device *ca_py_device_get(PyObject *self);

#endif
