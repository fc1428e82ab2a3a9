/* SPDX-License-Identifier: MIT */
#include "python/dlpack_export.h"

#include <stdlib.h>
#include <string.h>

#include "base/platform.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"

/* ---- capsules ---- */

/* The memory of one export; the consumer gets one of the two structs. */
typedef struct export {
    union {
        ca_dlpack_managed managed;
        ca_dlpack_versioned versioned;
    } as;
    PyObject *owner;
    uintptr_t number;              /* of exports with a capsule, from 1; 0: no capsule */
    struct export *before, *after; /* in `exports` */
    int64_t sizes[];               /* shape, then strides */
} export;

/* Exports with a capsule that nobody has deleted. A capsule knows its export by number, and holds
   nothing. For some consumers call the deleter, then fail and leave the capsule as it was; others
   take the destructor from a capsule. */
static struct {
    export *first;
    uintptr_t last_number;
    ca_mutex guard; /* the interpreter's lock may not exist, or not any more */
} exports = {.guard = CA_STATIC_MUTEX};

static void
list_export(export *exported)
{
    ca_mutex_lock(&exports.guard);
    exported->number = ++exports.last_number;
    exported->after = exports.first;
    if (exports.first != NULL) {
        exports.first->before = exported;
    }
    exports.first = exported;
    ca_mutex_unlock(&exports.guard);
}

static void
unlist_export(export *exported)
{
    if (exported->number == 0) {
        return;
    }
    ca_mutex_lock(&exports.guard);
    if (exported->before != NULL) {
        exported->before->after = exported->after;
    } else {
        exports.first = exported->after;
    }
    if (exported->after != NULL) {
        exported->after->before = exported->before;
    }
    ca_mutex_unlock(&exports.guard);
}

/* Returns the export of a number, or NULL if it has been deleted. */
static export *
find_export(uintptr_t number)
{
    ca_mutex_lock(&exports.guard);
    export *exported = exports.first;
    while (exported != NULL && exported->number != number) {
        exported = exported->after;
    }
    ca_mutex_unlock(&exports.guard);
    return exported;
}

/* Runs in any thread, with or without the interpreter's lock, and after the interpreter's end. */
static void
delete_export(export *exported)
{
    const bool running = Py_IsInitialized();
    PyGILState_STATE gil = running ? PyGILState_Ensure() : PyGILState_UNLOCKED;
    unlist_export(exported);
    if (running) {
        Py_DECREF(exported->owner);
        PyGILState_Release(gil);
    }
    free(exported);
}

static void
delete_managed(ca_dlpack_managed *self)
{
    delete_export(self->context);
}

static void
delete_versioned(ca_dlpack_versioned *self)
{
    delete_export(self->context);
}

/* A capsule that nobody consumed still has its name. */
static void
free_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor") ||
        PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        export *exported = find_export((uintptr_t)PyCapsule_GetContext(capsule));
        if (exported != NULL) {
            delete_export(exported);
        }
    }
}

void
ca_py_dlpack_set_dtype(ca_dlpack_tensor *tensor, ca_dtype dtype)
{
    tensor->code = dtype == CA_BOOL           ? CA_DLPACK_BOOL
                   : dtype == CA_BFLOAT16     ? CA_DLPACK_BFLOAT
                   : ca_dtype_is_float(dtype) ? CA_DLPACK_FLOAT
                   : dtype >= CA_UINT8        ? CA_DLPACK_UINT
                                              : CA_DLPACK_INT;
    tensor->bits = (uint8_t)(8 * ca_dtype_size(dtype));
    tensor->lanes = 1;
}

/* Returns an export that owns a new reference to `owner`. NULL with an exception. */
static export *
new_export(const ca_tensor *tensor, PyObject *owner, const ca_dlpack_tensor *start, bool versioned)
{
    size_t ndim = (size_t)tensor->ndim;
    export *exported = malloc(sizeof(*exported) + 2 * ndim * sizeof(int64_t) + 1);
    if (exported == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    memset(exported, 0, sizeof(*exported));
    memcpy(exported->sizes, tensor->shape, ndim * sizeof(int64_t));
    memcpy(exported->sizes + ndim, tensor->strides, ndim * sizeof(int64_t));
    ca_dlpack_tensor *handed =
        versioned ? &exported->as.versioned.tensor : &exported->as.managed.tensor;
    *handed = start != NULL
                  ? *start
                  : (ca_dlpack_tensor){.data = tensor->data, .device = {CA_DLPACK_CPU, 0}};
    handed->ndim = (int32_t)ndim;
    handed->shape = exported->sizes;
    handed->strides = exported->sizes + ndim;
    ca_py_dlpack_set_dtype(handed, tensor->dtype);
    if (versioned) {
        exported->as.versioned.major = 1;
        exported->as.versioned.context = exported;
        exported->as.versioned.deleter = delete_versioned;
    } else {
        exported->as.managed.context = exported;
        exported->as.managed.deleter = delete_managed;
    }
    exported->owner = Py_NewRef(owner);
    return exported;
}

PyObject *
ca_py_dlpack_export(const ca_tensor *tensor, PyObject *owner, const ca_dlpack_tensor *start,
                    bool versioned, bool copied)
{
    export *exported = new_export(tensor, owner, start, versioned);
    if (exported == NULL) {
        return NULL;
    }
    if (versioned && copied) {
        exported->as.versioned.flags = CA_DLPACK_COPIED;
    }
    PyObject *capsule =
        PyCapsule_New(&exported->as, versioned ? "dltensor_versioned" : "dltensor", free_capsule);
    if (capsule == NULL) {
        delete_export(exported);
        return NULL;
    }
    list_export(exported);
    (void)PyCapsule_SetContext(capsule, (void *)exported->number); /* cannot fail for a capsule */
    return capsule;
}

ca_dlpack_versioned *
ca_py_dlpack_hand_out(const ca_tensor *tensor, PyObject *owner)
{
    export *exported = new_export(tensor, owner, NULL, true);
    return exported != NULL ? &exported->as.versioned : NULL;
}

/* ---- the arguments of __dlpack__ ---- */

/* Reads two whole numbers of any size; None leaves *pair. */
static int
parse_pair(PyObject *object, const char *name, int64_t pair[2])
{
    if (object == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2) {
        return ca_py_wrong_type(name, "a pair of integers or None", object);
    }
    return ca_py_any_int(PyTuple_GET_ITEM(object, 0), name, &pair[0]) < 0
               ? -1
               : ca_py_any_int(PyTuple_GET_ITEM(object, 1), name, &pair[1]);
}

int
ca_py_dlpack_parse(PyObject *args, PyObject *kwargs, ca_py_dlpack_request *request)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None;
    PyObject *version = Py_None;
    PyObject *device = Py_None;
    int64_t highest[2] = {0};
    int64_t wanted[2] = {0};
    request->copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream, &version,
                                     &device, &request->copy)) {
        return -1;
    }
    if (stream != Py_None) {
        return ca_py_refuse(PyExc_BufferError, "stream", stream,
                            "None, for OpenCL and the host have none");
    }
    if (request->copy != Py_None && !PyBool_Check(request->copy)) {
        return ca_py_wrong_type("copy", "True, False or None", request->copy);
    }
    if (parse_pair(version, "max_version", highest) < 0 ||
        parse_pair(device, "dl_device", wanted) < 0) {
        return -1;
    }
    request->versioned = highest[0] >= 1;
    request->type = wanted[0];
    request->id = wanted[1];
    request->wants_host = wanted[0] == CA_DLPACK_CPU && wanted[1] == 0;
    request->wants_other = device != Py_None && !request->wants_host;
    return 0;
}

/* ---- the type of ca_py_dlpack_producer ---- */

typedef struct {
    PyObject_HEAD
    PyObject *owner;
    ca_tensor tensor;
} producer_object;

PyObject *
ca_py_dlpack_producer(const ca_state *state, const ca_tensor *tensor, PyObject *owner)
{
    producer_object *self = PyObject_New(producer_object, state->producer_type);
    if (self != NULL) {
        self->owner = Py_NewRef(owner);
        self->tensor = *tensor;
    }
    return (PyObject *)self;
}

static void
producer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((producer_object *)self)->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
producer_dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const producer_object *producer = (producer_object *)self;
    ca_py_dlpack_request request;
    if (ca_py_dlpack_parse(args, kwargs, &request) < 0) {
        return NULL;
    }
    if (request.wants_other || request.copy == Py_True) {
        return PyErr_Format(PyExc_BufferError, "a result lies in the host's memory");
    }
    return ca_py_dlpack_export(&producer->tensor, producer->owner, NULL, request.versioned, false);
}

static PyObject *
producer_device(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue("(ii)", CA_DLPACK_CPU, 0);
}

static PyMethodDef producer_methods[] = {
    {"__dlpack__", CA_PY_KEYWORDS(producer_dlpack), NULL},
    {"__dlpack_device__", producer_device, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot producer_slots[] = {
    {Py_tp_dealloc, producer_dealloc},
    {Py_tp_methods, producer_methods},
    {0, NULL},
};

PyType_Spec ca_py_producer_spec = {
    .name = "clattn._core.Producer",
    .basicsize = sizeof(producer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = producer_slots,
};
