/* SPDX-License-Identifier: MIT
 *
 * The type clattn.Tensor; python/clattn/_core.pyi lists attributes and methods.
 */
#include "python/convert.h"

#include <stddef.h>
#include <structmember.h> /* PyMemberDef */

#include "python/device.h"
#include "python/dlpack_export.h"
#include "python/error.h"
#include "python/imports.h"
#include "python/methods.h"
#include "python/runtime.h"
#include "python/scalars.h"
#include "python/tensor.h"
#include "python/tensor_view.h"

static const ca_tensor *
view_of(PyObject *self)
{
    return &((ca_py_tensor *)self)->view;
}

static ca_storage *
storage_of(PyObject *self)
{
    return ((ca_py_tensor *)self)->storage;
}

static ca_state *
state_of(PyObject *self)
{
    return ca_state_get(((ca_py_tensor *)self)->module);
}

/* ---- views ---- */

/* Returns the view as a Tensor; NULL if `made` is -1, which says that there is no view. */
static PyObject *
view_as(PyObject *self, int made, const ca_tensor *view)
{
    return made < 0 ? NULL : ca_py_tensor_new(state_of(self), storage_of(self), view);
}

/* Returns the first of the keys whose type has the method `__clattn_lookup__`, borrowed; NULL if none
   has. Such a key is a symbol of python/clattn/flex. */
static PyObject *
find_symbol(PyObject *key)
{
    bool several = PyTuple_Check(key);
    Py_ssize_t count = several ? PyTuple_GET_SIZE(key) : 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = several ? PyTuple_GET_ITEM(key, i) : key;
        bool plain =
            PyLong_CheckExact(one) || PySlice_Check(one) || one == Py_Ellipsis || one == Py_None;
        if (!plain && PyObject_HasAttrString((PyObject *)Py_TYPE(one), "__clattn_lookup__")) {
            return one;
        }
    }
    return NULL;
}

/* tensor[key]: a view; with symbols in the key, what they make of it. */
static PyObject *
subscript(PyObject *self, PyObject *key)
{
    ca_tensor view;
    PyObject *symbol = find_symbol(key);
    if (symbol != NULL) {
        return PyObject_CallMethod(symbol, "__clattn_lookup__", "OO", self, key);
    }
    return view_as(self, ca_py_view_index(view_of(self), key, &view), &view);
}

static Py_ssize_t
length(PyObject *self)
{
    const ca_tensor *view = view_of(self);
    if (view->ndim == 0) {
        return ca_py_raise(PyExc_TypeError, "a Tensor without dimensions has no length");
    }
    return (Py_ssize_t)view->shape[0];
}

/* Returns tensor[index]. Python adds the length to a negative index before it calls this slot; this
   function undoes the sum if it is still negative, so that the message has the caller's index. */
static PyObject *
item(PyObject *self, Py_ssize_t index)
{
    const ca_tensor *view = view_of(self);
    bool before = index < 0 && view->ndim > 0;
    PyObject *key = PyLong_FromSsize_t(before ? index - view->shape[0] : index);
    PyObject *element = key != NULL ? subscript(self, key) : NULL;
    Py_XDECREF(key);
    return element;
}

/* Comparing elements would make the host wait and read them. */
static int
contains(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(element))
{
    return ca_py_raise(PyExc_TypeError, "a Tensor's elements are not compared; use tensor.numpy()");
}

static int
truth(PyObject *Py_UNUSED(self))
{
    return ca_py_raise(PyExc_TypeError, "a Tensor is neither true nor false; use tensor.numpy()");
}

static PyObject *
iterate(PyObject *self)
{
    return length(self) < 0 ? NULL : PySeqIter_New(self);
}

/* tensor.transpose(*axes) */
static PyObject *
transpose(PyObject *self, PyObject *args)
{
    ca_tensor view;
    return view_as(self, ca_py_view_transpose(view_of(self), args, &view), &view);
}

/* tensor.reshape(*shape) */
static PyObject *
reshape(PyObject *self, PyObject *args)
{
    const ca_tensor *view = view_of(self);
    ca_tensor reshaped;
    int ndim;
    int64_t shape[CA_MAX_DIMS];
    if (ca_py_shape_argument(view, args, &ndim, shape) < 0) {
        return NULL;
    }
    if (ca_py_view_reshape(view, ndim, shape, &reshaped)) {
        return view_as(self, 0, &reshaped);
    }
    PyObject *copy =
        ca_py_tensor_copy(state_of(self), ca_py_tensor_device(self), view, self, "Tensor.reshape");
    PyObject *result = NULL;
    if (copy != NULL) {
        (void)ca_py_view_reshape(view_of(copy), ndim, shape, &reshaped);
        result = view_as(copy, 0, &reshaped);
        Py_DECREF(copy);
    }
    return result;
}

/* tensor.to(device) */
static PyObject *
to(PyObject *self, PyObject *argument)
{
    ca_device *device;
    if (ca_py_find_device(state_of(self), argument, &device) < 0) {
        return NULL;
    }
    if (device == ca_py_tensor_device(self)) {
        return Py_NewRef(self);
    }
    return ca_py_tensor_copy(state_of(self), device, view_of(self), self, "Tensor.to");
}

/* ---- the elements on the host ---- */

/* Returns a NumPy array to read now: of the Tensor's memory if the host has it, else a copy. */
static PyObject *
look(PyObject *self)
{
    if (!ca_storage_is_host(storage_of(self))) {
        return ca_py_tensor_fetch(state_of(self), self, false);
    }
    PyObject *descr = ca_py_descr(view_of(self)->dtype);
    PyObject *array = NULL;
    if (descr != NULL && ca_py_tensor_wait(state_of(self), self) == 0) {
        array = ca_py_array_over(view_of(self), descr, true, self);
    }
    Py_XDECREF(descr);
    return array;
}

/* numpy(): the same array, for the caller to keep. From now on, calls that use the shared memory
   are waited for. */
static PyObject *
numpy(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    if (ca_storage_is_host(storage_of(self))) {
        ca_storage_share(storage_of(self));
    }
    return look(self);
}

/* __array__(dtype=None, copy=None) */
static PyObject *
array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None;
    PyObject *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", names, &dtype, &copy)) {
        return NULL;
    }
    if (copy != Py_None && !PyBool_Check(copy)) {
        (void)ca_py_wrong_type("copy", "True, False or None", copy);
        return NULL;
    }
    if (copy == Py_False && !ca_storage_is_host(storage_of(self))) {
        return PyErr_Format(PyExc_ValueError,
                            "copy is False, but the Tensor is in memory that only its device has");
    }
    PyObject *elements =
        copy == Py_True ? ca_py_tensor_fetch(state_of(self), self, false) : numpy(self, NULL);
    if (elements == NULL || dtype == Py_None) {
        return elements;
    }
    PyObject *cast = ca_py_array_cast(elements, dtype, copy == Py_False);
    Py_DECREF(elements);
    return cast;
}

/* ---- DLPack ---- */

static ca_dlpack_device
device_of(PyObject *self)
{
    return ca_storage_is_host(storage_of(self))
               ? (ca_dlpack_device){CA_DLPACK_CPU, 0}
               : (ca_dlpack_device){
                     CA_DLPACK_OPENCL,
                     ca_py_device_index(((ca_py_tensor *)self)->module, ca_py_tensor_device(self))};
}

static PyObject *
dlpack_device(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    ca_dlpack_device device = device_of(self);
    return Py_BuildValue("(ii)", device.type, device.id);
}

/* Returns a capsule of a copy in new host memory. */
static PyObject *
export_copy(PyObject *self, bool versioned)
{
    PyObject *copy = ca_py_tensor_fetch(state_of(self), self, true);
    if (copy == NULL) {
        return NULL;
    }
    ca_tensor tensor;
    (void)ca_py_array_describe(copy, view_of(self)->dtype, &tensor);
    PyObject *capsule = ca_py_dlpack_export(&tensor, copy, NULL, versioned, true);
    Py_DECREF(copy);
    return capsule;
}

static bool
has_negative_strides(const ca_tensor *view)
{
    bool found = false;
    for (int d = 0; d < view->ndim; d++) {
        found = found || view->strides[d] < 0;
    }
    return found;
}

/* Returns a capsule of the Tensor's own memory. */
static PyObject *
export_memory(PyObject *self, bool versioned, bool copied)
{
    const ca_tensor *view = view_of(self);
    ca_storage *storage = storage_of(self);
    ca_storage_share(storage);
    if (ca_py_tensor_wait(state_of(self), self) < 0) {
        return NULL;
    }
    ca_dlpack_tensor start = {.data = view->data, .device = device_of(self)};
    if (!ca_storage_is_host(storage)) {
        start.data = ca_storage_buffer(storage);
        start.byte_offset = (uint64_t)((char *)view->data - (char *)view->block->address);
    }
    return ca_py_dlpack_export(view, self, &start, versioned, copied);
}

/* __dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None) */
static PyObject *
dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
    ca_py_dlpack_request request;
    if (ca_py_dlpack_parse(args, kwargs, &request) < 0) {
        return NULL;
    }
    ca_dlpack_device here = device_of(self);
    const bool on_host = here.type == CA_DLPACK_CPU;
    bool moves = request.wants_host && !on_host;
    bool flips = on_host && has_negative_strides(view_of(self));
    if (request.wants_other && (request.type != here.type || request.id != here.id)) {
        return PyErr_Format(PyExc_BufferError,
                            "dl_device is (%lld, %lld); expected None, the host (1, 0) or the "
                            "Tensor's own (%d, %d)",
                            (long long)request.type, (long long)request.id, here.type, here.id);
    }
    if (moves && request.copy == Py_False) {
        return PyErr_Format(PyExc_BufferError,
                            "copy is False, but the host does not have the Tensor's memory");
    }
    if (flips && request.copy == Py_False) {
        return PyErr_Format(
            PyExc_BufferError,
            "copy is False, but a stride is negative, which not every library takes");
    }
    if (moves || flips || (request.copy == Py_True && on_host)) {
        return export_copy(self, request.versioned);
    }
    if (request.copy != Py_True) {
        return export_memory(self, request.versioned, false);
    }
    PyObject *copy = ca_py_tensor_copy(state_of(self), ca_py_tensor_device(self), view_of(self),
                                       self, "Tensor.__dlpack__");
    PyObject *capsule = copy != NULL ? export_memory(copy, request.versioned, true) : NULL;
    Py_XDECREF(copy);
    return capsule;
}

/* ---- attributes ---- */

static PyObject *
get_shape(PyObject *self, void *Py_UNUSED(closure))
{
    return ca_py_tuple(view_of(self)->ndim, view_of(self)->shape, 1);
}

static PyObject *
get_strides(PyObject *self, void *Py_UNUSED(closure))
{
    const ca_tensor *view = view_of(self);
    return ca_py_tuple(view->ndim, view->strides, (int64_t)ca_dtype_size(view->dtype));
}

static PyObject *
get_dtype(PyObject *self, void *Py_UNUSED(closure))
{
    return ca_py_descr(view_of(self)->dtype);
}

static PyObject *
get_device(PyObject *self, void *Py_UNUSED(closure))
{
    return ca_py_wrap_device(((ca_py_tensor *)self)->module, ca_py_tensor_device(self));
}

enum { NDIM, SIZE, ITEMSIZE, NBYTES };

/* `closure` is one of the above. */
static PyObject *
get_number(PyObject *self, void *closure)
{
    const ca_tensor *view = view_of(self);
    int64_t count = ca_tensor_count(view);
    int64_t itemsize = (int64_t)ca_dtype_size(view->dtype);
    const int64_t numbers[] = {
        [NDIM] = view->ndim, [SIZE] = count, [ITEMSIZE] = itemsize, [NBYTES] = count * itemsize};
    return PyLong_FromLongLong(numbers[(uintptr_t)closure]);
}

static PyObject *
get_T(PyObject *self, void *Py_UNUSED(closure))
{
    return transpose(self, NULL);
}

/* ---- the type ---- */

/* NumPy prints at most so many elements. */
#define SUMMARISED 1000

/* clattn.Tensor([…], dtype=…, device='…'), with the shape if the elements do not show it */
static PyObject *
represent(PyObject *self)
{
    PyObject *text = NULL;
    PyObject *values = NULL;
    char shape[160];
    const ca_tensor *view = view_of(self);
    const ca_device_info *info = ca_device_get_info(ca_py_tensor_device(self));
    int64_t count = ca_tensor_count(view);
    bool shown = count > 0 && count <= SUMMARISED;
    (void)ca_shape_format(view->ndim, view->shape, shape, sizeof(shape));
    PyObject *elements = look(self);
    if (elements != NULL) {
        values = ca_py_call_from("numpy", "array2string", "(OOOOss)", elements, Py_None, Py_None,
                                 Py_None, ", ", "clattn.Tensor(");
    }
    if (values != NULL) {
        text = PyUnicode_FromFormat("clattn.Tensor(%U, %s%s%sdtype=%s, device='%s: %s')", values,
                                    shown ? "" : "shape=", shown ? "" : shape, shown ? "" : ", ",
                                    ca_dtype_name(view->dtype), ca_py_device_type_name(info),
                                    info->name);
    }
    Py_XDECREF(values);
    Py_XDECREF(elements);
    return text;
}

static PyObject *
html(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return ca_py_call_from("clattn._host.html", "of_tensor", "(O)", self);
}

/* __copy__() and __deepcopy__(memo) */
static PyObject *
copy(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return ca_py_tensor_copy(state_of(self), ca_py_tensor_device(self), view_of(self), self,
                             "copy of a Tensor");
}

static PyObject *
refuse_pickling(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored))
{
    return PyErr_Format(PyExc_TypeError,
                        "a clattn.Tensor cannot be pickled; pickle tensor.numpy()");
}

static PyObject *
refuse_making(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    return PyErr_Format(PyExc_TypeError,
                        "clattn.Tensor cannot be called; use clattn.tensor(array)");
}

static int
traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((ca_py_tensor *)self)->module);
    Py_VISIT(((ca_py_tensor *)self)->owner);
    return 0;
}

static void
dealloc(PyObject *object)
{
    ca_py_tensor *self = (ca_py_tensor *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    PyObject_ClearWeakRefs(object);
    ca_storage_release(self->storage);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->module);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyGetSetDef getset[] = {
    {"shape", get_shape, NULL, "Sizes of the dimensions.", NULL},
    {"strides", get_strides, NULL, "Bytes from one element to the next, by dimension.", NULL},
    {"dtype", get_dtype, NULL, "NumPy's dtype; of bfloat16 that of ml_dtypes.", NULL},
    {"device", get_device, NULL, "The device it is on.", NULL},
    {"ndim", get_number, NULL, "The number of dimensions.", (void *)(uintptr_t)NDIM},
    {"size", get_number, NULL, "The number of elements.", (void *)(uintptr_t)SIZE},
    {"itemsize", get_number, NULL, "Bytes of an element.", (void *)(uintptr_t)ITEMSIZE},
    {"nbytes", get_number, NULL, "Bytes of all elements.", (void *)(uintptr_t)NBYTES},
    {"T", get_T, NULL, "A view with the dimensions in reverse.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ca_py_tensor, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"reshape", reshape, METH_VARARGS,
     "reshape($self, *shape)\n--\n\n"
     "The same elements in another shape, one size of which may be -1. A view where\n"
     "the strides allow one, else a copy."},
    {"transpose", transpose, METH_VARARGS,
     "transpose($self, *axes)\n--\n\n"
     "A view with the dimensions in that order; without axes in reverse."},
    {"to", to, METH_O,
     "to($self, device, /)\n--\n\n"
     "The Tensor itself if it is on that device, else a copy there."},
    {"_repr_html_", html, METH_NOARGS, "_repr_html_($self)\n--\n\nA table for notebooks."},
    {"__copy__", copy, METH_NOARGS, NULL},
    {"__deepcopy__", copy, METH_O, NULL},
    {"__reduce__", refuse_pickling, METH_NOARGS, NULL},
    {"__reduce_ex__", refuse_pickling, METH_O, NULL},
    {"numpy", numpy, METH_NOARGS,
     "numpy($self)\n--\n\n"
     "The elements as a NumPy array: of the same memory where the host has that too,\n"
     "else a copy. Waits for the calls that use the memory; once the host shares it,\n"
     "later calls that use it are waited for too."},
    {"__array__", CA_PY_KEYWORDS(array),
     "__array__($self, dtype=None, copy=None)\n--\n\nNumPy's protocol, as `numpy`."},
    {"__dlpack__", CA_PY_KEYWORDS(dlpack),
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "A DLPack capsule of the memory, or of a copy on the host."},
    {"__dlpack_device__", dlpack_device, METH_NOARGS,
     "__dlpack_device__($self)\n--\n\n"
     "(1, 0), the host, where that has the memory too; else (4, index), OpenCL."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An array in a device's memory, as `clattn.tensor()` and the operators make it.\n\n"
                "Usable wherever a function takes an array; the call then runs on the Tensor's\n"
                "device. Indexing with integers, slices, ... and None gives views."},
    {Py_tp_new, refuse_making},
    {Py_tp_repr, represent},
    {Py_tp_iter, iterate},
    {Py_mp_subscript, subscript},
    {Py_mp_length, length},
    {Py_sq_item, item},
    {Py_sq_length, length},
    {Py_sq_contains, contains},
    {Py_nb_bool, truth},
    {Py_tp_traverse, traverse},
    {Py_tp_dealloc, dealloc},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec ca_py_tensor_spec = {
    .name = "clattn.Tensor",
    .basicsize = sizeof(ca_py_tensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
