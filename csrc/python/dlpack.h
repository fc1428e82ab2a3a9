/* SPDX-License-Identifier: MIT
 *
 * Arrays of other libraries by way of DLPack, in and out.
 */
#ifndef CLATTN_PY_DLPACK_H
#define CLATTN_PY_DLPACK_H

#include "base/dlpack.h"
#include "base/tensor.h"
#include "python/state.h"

typedef struct {
    ca_tensor tensor; /* its data may be misaligned */
    PyObject *owner;  /* a new reference that gives the memory back */
    bool read_only;
} ca_py_import;

/* Does the object's type have __dlpack__? */
bool ca_py_has_dlpack(PyObject *object);

/* A `type` exception about argument `name` that cannot be read, whose cause is the
   exception that its `part` raised. */
void ca_py_raise_from(PyObject *type, const char *name, PyObject *object,
                      const char *part);

/* The exchange functions of the object's type, NULL without an exception where it has
   none. */
const ca_dlpack_exchange *ca_py_dlpack_exchange(PyObject *object);

/* What the host memory behind `object`, argument `name`, holds. -1 with a TypeError or a
   ValueError that names it. */
int ca_py_dlpack_import(PyObject *object, const char *name, ca_py_import *import);

/* A struct's tensor. -1 with an exception where there can be none such. */
int ca_py_dlpack_read(const ca_dlpack_tensor *given, const char *name,
                      ca_tensor *tensor);

/* A capsule with `tensor`, whose memory `owner` keeps; `data` and `offset` say where it
   starts on that device; `copied`: nobody else has that memory. */
PyObject *ca_py_dlpack_export(const ca_tensor *tensor, PyObject *owner,
                              ca_dlpack_device device, void *data, uint64_t offset,
                              bool versioned, bool copied);

/* The same, to be given to a ca_dlpack_exchange; NULL with an exception. */
ca_dlpack_versioned *ca_py_dlpack_hand_out(const ca_tensor *tensor, PyObject *owner);

/* The arguments of __dlpack__, which are all keywords. */
typedef struct {
    bool versioned;   /* the consumer knows DLPack 1 */
    bool wants_host;  /* dl_device is the host */
    bool wants_other; /* dl_device is neither None nor the host */
    int64_t type;     /* dl_device, if there is one */
    int64_t id;
    PyObject *copy; /* borrowed: None, True or False */
} ca_py_dlpack_request;

int ca_py_dlpack_parse(PyObject *args, PyObject *kwargs, ca_py_dlpack_request *request);

/* Host memory with __dlpack__, for other libraries to take. */
int ca_py_dlpack_init(PyObject *module);
PyObject *ca_py_dlpack_producer(const ca_state *state, const ca_tensor *tensor,
                                PyObject *owner);

#endif
