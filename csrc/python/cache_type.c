/* SPDX-License-Identifier: MIT
 *
 * The type clattn._core.Cache.
 */
#include "python/cache.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h> /* PyMemberDef */

#include "python/error.h"
#include "python/kv_cache.h"
#include "python/methods.h"
#include "python/pages.h"
#include "python/scalars.h"
#include "python/tensor.h"

static PyObject *
renew_lock(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    ca_py_cache *self = (ca_py_cache *)object;
    if (ca_py_lock_init(&self->lock) < 0) { /* who holds the old one is not in this process */
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
get_length(PyObject *object, void *Py_UNUSED(closure))
{
    ca_py_cache *self = (ca_py_cache *)object;
    ca_mutex_lock(&self->lock.guard);
    int64_t length = self->cache.length;
    ca_mutex_unlock(&self->lock.guard);
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
    PyObject *tuple = ca_py_tuple(ca_cache_batch(&cache), lengths, 1);
    PyMem_RawFree(lengths);
    return tuple;
}

/* Takes the Tensors of keys, of values, `place`, from the arguments. Returns false if they are no cache's. */
static bool
take_tensors(ca_py_cache *self, PyTypeObject *tensor_type, int place, ca_kept *kept)
{
    ca_tensor *const tensors[] = {&kept->pages, &kept->scales, &kept->offsets};
    for (int n = 0; n < CA_KEPT_TENSORS; n++) {
        PyObject *tensor = self->tensors[place + 2 * n];
        ca_tensor_set_absent(tensors[n]);
        if (Py_IS_TYPE(tensor, tensor_type)) {
            *tensors[n] = ((ca_py_tensor *)tensor)->view;
        } else if (n == 0 || tensor != Py_None) {
            return false;
        }
        if (tensor != Py_None &&
            ca_py_tensor_device(tensor) != ca_py_tensor_device(self->tensors[CA_PY_KEY])) {
            return false;
        }
    }
    return ca_kept_is_whole(kept);
}

/* Cache(codes, head_size, v_head_size, key, value, key_scale, value_scale, key_offset, value_offset, /) */
static PyObject *
cache_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *module = PyType_GetModule(type);
    PyTypeObject *tensor_type = ca_state_get(module)->tensor_type;
    PyObject *tensors[CA_PY_CACHE_TENSORS];
    int codes;
    long long sizes[2];
    if (!PyArg_ParseTuple(args, "iLLOOOOOO", &codes, &sizes[0], &sizes[1], &tensors[CA_PY_KEY],
                          &tensors[CA_PY_VALUE], &tensors[CA_PY_KEY_SCALE],
                          &tensors[CA_PY_VALUE_SCALE], &tensors[CA_PY_KEY_OFFSET],
                          &tensors[CA_PY_VALUE_OFFSET])) {
        return NULL;
    }
    ca_py_cache *self = (ca_py_cache *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = Py_NewRef(module);
    for (int n = 0; n < CA_PY_CACHE_TENSORS; n++) {
        self->tensors[n] = Py_NewRef(tensors[n]);
    }
    ca_kept *key = &self->cache.key;
    ca_kept *value = &self->cache.value;
    key->codes = value->codes = codes;
    key->size = sizes[0];
    value->size = sizes[1];
    if (codes < CA_CODES_NONE || codes > CA_CODES_INT4 ||
        !take_tensors(self, tensor_type, CA_PY_KEY, key) ||
        !take_tensors(self, tensor_type, CA_PY_VALUE, value) || key->pages.shape[1] < 1 ||
        key->pages.dtype != value->pages.dtype ||
        memcmp(key->pages.shape, value->pages.shape, 3 * sizeof(int64_t)) != 0) {
        (void)ca_py_raise(PyExc_ValueError, "key and value are no cache's");
        Py_DECREF(self);
        return NULL;
    }
    self->lengths = PyMem_RawCalloc((size_t)ca_cache_batch(&self->cache) + 1, sizeof(int64_t));
    if (self->lengths == NULL) {
        PyErr_NoMemory();
    }
    if (self->lengths == NULL || ca_py_lock_init(&self->lock) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    ca_py_cache *self = (ca_py_cache *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->module);
    for (int n = 0; n < CA_PY_CACHE_TENSORS; n++) {
        Py_VISIT(self->tensors[n]);
    }
    return 0;
}

static void
dealloc(PyObject *object)
{
    ca_py_cache *self = (ca_py_cache *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ca_py_lock_destroy(&self->lock);
    PyMem_RawFree(self->lengths);
    for (int n = 0; n < CA_PY_CACHE_TENSORS; n++) {
        Py_CLEAR(self->tensors[n]);
    }
    Py_CLEAR(self->module);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"append", CA_PY_FASTCALL(ca_py_cache_append), NULL},
    {"attend", CA_PY_NAMED(ca_py_cache_attend),
     CA_PY_SIGNATURE("attend", "$self", CA_PY_CACHE_ATTEND_TAKEN)},
    {"truncate", ca_py_cache_truncate, METH_O, NULL},
    {"reorder", ca_py_cache_reorder, METH_O, NULL},
    {"copy_from", ca_py_cache_copy_from, METH_O, NULL},
    {"count_rows", CA_PY_FASTCALL(ca_py_cache_count_rows), NULL},
    {"write_rows", CA_PY_FASTCALL(ca_py_cache_write_rows), NULL},
    {"copy_rows", ca_py_cache_copy_rows, METH_O, NULL},
    {"hold", CA_PY_FASTCALL(ca_py_cache_hold), NULL},
    {"renew_lock", renew_lock, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define TENSOR(name, place)                                                                        \
    {name, T_OBJECT_EX, offsetof(ca_py_cache, tensors[place]), READONLY, NULL}
static PyMemberDef members[] = {
    TENSOR("key", CA_PY_KEY),
    TENSOR("value", CA_PY_VALUE),
    TENSOR("key_scale", CA_PY_KEY_SCALE),
    TENSOR("value_scale", CA_PY_VALUE_SCALE),
    TENSOR("key_offset", CA_PY_KEY_OFFSET),
    TENSOR("value_offset", CA_PY_VALUE_OFFSET),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"length", get_length, NULL, NULL, NULL},
    {"lengths", get_lengths, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, cache_new},
    {Py_tp_traverse, traverse},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec ca_py_cache_spec = {
    .name = "clattn._core.Cache",
    .basicsize = sizeof(ca_py_cache),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
