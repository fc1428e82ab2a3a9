/* SPDX-License-Identifier: MIT
 *
 * The type clattn.Device: a name for one device of this process.
 */
#ifndef CLATTN_PYTHON_DEVICE_H
#define CLATTN_PYTHON_DEVICE_H

#include "python/state.h"

/* Returns the Device of one of the runtime's devices. */
PyObject *ca_py_wrap_device(PyObject *module, ca_device *device);

/* Returns the index of a device in the runtime's list. */
int ca_py_device_index(PyObject *module, const ca_device *device);

/* Returns "gpu", "accelerator" or "cpu". */
const char *ca_py_device_type_name(const ca_device_info *info);

/* Returns the device behind an instance of Device. */
ca_device *ca_py_device_get(PyObject *self);

#endif
