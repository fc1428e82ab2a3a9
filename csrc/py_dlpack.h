/* SPDX-License-Identifier: MIT
 *
 * Arrays of other libraries by way of DLPack, in and out.
 */
#ifndef CLATTN_PY_DLPACK_H
#define CLATTN_PY_DLPACK_H

#include "dlpack.h"
#include "py_state.h"
#include "tensor.h"

typedef struct {
    ca_tensor tensor; /* its data may be misaligned */
    PyObject *owner;  /* a new reference that gives the memory back */
    bool read_only;
} ca_py_import;

/* Does the object's type have __dlpack__? */
bool ca_py_has_dlpack(PyObject *object);

/* What the host memory behind `object`, argument `name`, holds. -1 with a TypeError or a
   ValueError that names it. */
int ca_py_dlpack_import(PyObject *object, const char *name, ca_py_import *import);

/* A capsule with `tensor`, whose memory `owner` keeps; `data` and `offset` say where it
   starts on that device. */
PyObject *ca_py_dlpack_export(const ca_tensor *tensor, PyObject *owner,
                              ca_dlpack_device device, void *data, uint64_t offset,
                              bool versioned);

/* The arguments of __dlpack__, which are all keywords. */
typedef struct {
    bool versioned;   /* the consumer knows DLPack 1 */
    bool wants_host;  /* dl_device is the host */
    bool wants_other; /* dl_device is neither None nor the host */
    ca_dlpack_device device;
    PyObject *copy; /* borrowed: None, True or False */
} ca_py_dlpack_request;

int ca_py_dlpack_parse(PyObject *args, PyObject *kwargs, ca_py_dlpack_request *request);

/* Host memory with __dlpack__, for other libraries to take. */
int ca_py_dlpack_init(PyObject *module);
PyObject *ca_py_dlpack_producer(const ca_state *state, const ca_tensor *tensor,
                                PyObject *owner);

#endif
