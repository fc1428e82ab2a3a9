/* SPDX-License-Identifier: MIT
 *
 * Memory that other libraries take through DLPack.
 */
#ifndef CLATTN_PYTHON_DLPACK_EXPORT_H
#define CLATTN_PYTHON_DLPACK_EXPORT_H

#include "base/dlpack.h"
#include "base/tensor.h"
#include "python/state.h"

/* Sets the members that describe the dtype of the elements. */
void ca_py_dlpack_set_dtype(ca_dlpack_tensor *tensor, ca_dtype dtype);

/* The arguments of __dlpack__, which are all keywords. */
typedef struct {
    bool versioned;   /* the consumer knows DLPack 1 */
    bool wants_host;  /* dl_device is the host */
    bool wants_other; /* dl_device is neither None nor the host */
    int64_t type;     /* dl_device, if it is given */
    int64_t id;
    PyObject *copy; /* borrowed: None, True or False */
} ca_py_dlpack_request;

/* Returns -1 with an exception. */
int ca_py_dlpack_parse(PyObject *args, PyObject *kwargs, ca_py_dlpack_request *request);

/* Returns a capsule with `tensor`, whose memory `owner` keeps. The device, data and byte_offset of
   `start` say where the tensor starts; NULL: in host memory. `copied`: the memory is a new copy. */
PyObject *ca_py_dlpack_export(const ca_tensor *tensor, PyObject *owner,
                              const ca_dlpack_tensor *start, bool versioned, bool copied);

/* Returns host memory as a struct for a ca_dlpack_exchange. NULL with an exception. */
ca_dlpack_versioned *ca_py_dlpack_hand_out(const ca_tensor *tensor, PyObject *owner);

/* Returns an object whose __dlpack__ method hands out the tensor's host memory. */
PyObject *ca_py_dlpack_producer(const ca_state *state, const ca_tensor *tensor, PyObject *owner);

#endif
