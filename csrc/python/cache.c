/* SPDX-License-Identifier: MIT */
#include "python/cache.h"

#include <string.h>

#include "python/tensor.h"

int
ca_py_cache_look(ca_py_cache *self, ca_cache *cache, int64_t **lengths)
{
    size_t size = (size_t)self->cache.key.shape[0] * sizeof(**lengths);
    *lengths = NULL;
    ca_mutex_lock(&self->guard);
    *cache = self->cache;
    if (cache->lengths != NULL && (*lengths = PyMem_RawMalloc(size)) != NULL) {
        memcpy(*lengths, cache->lengths, size);
    }
    ca_mutex_unlock(&self->guard);
    if (cache->lengths != NULL && *lengths == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    cache->lengths = *lengths;
    return 0;
}

static PyObject *
cache_renew_lock(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    ca_py_cache *self = (ca_py_cache *)object;
    PyThread_type_lock lock = PyThread_allocate_lock();
    if (lock == NULL) {
        return PyErr_NoMemory();
    }
    self->changing = lock; /* the other one is a thread's that is gone */
    ca_mutex_init(&self->guard);
    Py_RETURN_NONE;
}

static PyObject *
get_key(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((ca_py_cache *)self)->key);
}

static PyObject *
get_value(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((ca_py_cache *)self)->value);
}

static PyObject *
get_length(PyObject *object, void *Py_UNUSED(closure))
{
    ca_py_cache *self = (ca_py_cache *)object;
    ca_mutex_lock(&self->guard);
    int64_t length = self->cache.length;
    ca_mutex_unlock(&self->guard);
    return PyLong_FromLongLong(length);
}

static PyObject *
get_lengths(PyObject *object, void *Py_UNUSED(closure))
{
    ca_cache cache;
    int64_t *lengths;
    if (ca_py_cache_look((ca_py_cache *)object, &cache, &lengths) < 0) {
        return NULL;
    }
    int64_t B = cache.key.shape[0];
    PyObject *tuple = PyTuple_New((Py_ssize_t)B);
    for (int64_t b = 0; tuple != NULL && b < B; b++) {
        PyObject *number = PyLong_FromLongLong(ca_cache_length(&cache, b));
        if (number == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, (Py_ssize_t)b, number);
        }
    }
    PyMem_RawFree(lengths);
    return tuple;
}

/* ---- the type ---- */

/* Cache(key, value) */
static PyObject *
cache_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *module = PyType_GetModule(type);
    PyTypeObject *tensor_type = ca_state_get(module)->tensor_type;
    PyObject *key;
    PyObject *value;
    if (!PyArg_ParseTuple(args, "O!O!", tensor_type, &key, tensor_type, &value)) {
        return NULL;
    }
    const ca_tensor *keys = &((ca_py_tensor *)key)->view;
    const ca_tensor *values = &((ca_py_tensor *)value)->view;
    if (keys->ndim != 4 || values->ndim != 4 || keys->shape[0] < 1 ||
        keys->shape[1] < 1 ||
        memcmp(keys->shape, values->shape, 3 * sizeof(*keys->shape)) != 0 ||
        ca_py_tensor_device(key) != ca_py_tensor_device(value)) {
        PyErr_SetString(PyExc_ValueError, "key and value are no cache's");
        return NULL;
    }
    ca_py_cache *self = (ca_py_cache *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = Py_NewRef(module);
    self->key = Py_NewRef(key);
    self->value = Py_NewRef(value);
    self->cache = (ca_cache){.key = *keys, .value = *values};
    ca_mutex_init(&self->guard);
    self->changing = PyThread_allocate_lock();
    self->lengths = PyMem_RawCalloc((size_t)keys->shape[0], sizeof(*self->lengths));
    if (self->changing == NULL || self->lengths == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    ca_py_cache *self = (ca_py_cache *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->module);
    Py_VISIT(self->key);
    Py_VISIT(self->value);
    return 0;
}

static void
dealloc(PyObject *object)
{
    ca_py_cache *self = (ca_py_cache *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->changing != NULL) {
        PyThread_free_lock(self->changing);
    }
    ca_mutex_destroy(&self->guard);
    PyMem_RawFree(self->lengths);
    Py_CLEAR(self->key);
    Py_CLEAR(self->value);
    Py_CLEAR(self->module);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)(void (*)(void))ca_py_cache_append, METH_FASTCALL, NULL},
    {"attend", (PyCFunction)(void (*)(void))ca_py_cache_attend, METH_FASTCALL, NULL},
    {"truncate", ca_py_cache_truncate, METH_O, NULL},
    {"renew_lock", cache_renew_lock, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"key", get_key, NULL, NULL, NULL},
    {"value", get_value, NULL, NULL, NULL},
    {"length", get_length, NULL, NULL, NULL},
    {"lengths", get_lengths, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, cache_new},   {Py_tp_traverse, traverse}, {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods}, {Py_tp_getset, getset},     {0, NULL},
};

static PyType_Spec spec = {
    .name = "clattn._core.Cache",
    .basicsize = sizeof(ca_py_cache),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
ca_py_cache_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int result = type != NULL ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return result;
}
