/* SPDX-License-Identifier: MIT
 *
 * The type clattn.Device; python/clattn/_core.pyi lists the attributes.
 */
#include "python/device.h"
#include "opencl/modes.h"
#include "opencl/prepare.h"

#include <stddef.h>

#include "python/error.h"
#include "python/imports.h"
#include "python/methods.h"

/* The module owns the runtime, which owns the device. So each Device keeps the module. */
typedef struct {
    PyObject_HEAD
    PyObject *module;
    ca_device *device;
} device_object;

static const char *const type_names[] = {
    [CA_DEVICE_GPU] = "gpu",
    [CA_DEVICE_ACCELERATOR] = "accelerator",
    [CA_DEVICE_CPU] = "cpu",
};

int
ca_py_device_index(PyObject *module, const ca_device *device)
{
    const ca_runtime *runtime = atomic_load(&ca_state_get(module)->runtime);
    int index = 0;
    while (ca_runtime_device(runtime, index) != device) {
        index++;
    }
    return index;
}

PyObject *
ca_py_wrap_device(PyObject *module, ca_device *device)
{
    device_object *self = PyObject_GC_New(device_object, ca_state_get(module)->device_type);
    if (self != NULL) {
        self->module = Py_NewRef(module);
        self->device = device;
        PyObject_GC_Track(self);
    }
    return (PyObject *)self;
}

const char *
ca_py_device_type_name(const ca_device_info *info)
{
    return type_names[info->type];
}

ca_device *
ca_py_device_get(PyObject *self)
{
    return ((device_object *)self)->device;
}

static const ca_device_info *
info_of(PyObject *self)
{
    return ca_device_get_info(ca_py_device_get(self));
}

/* Returns the text member of ca_device_info at offset `closure`. */
static PyObject *
get_text(PyObject *self, void *closure)
{
    const char *text = (const char *)info_of(self) + (uintptr_t)closure;
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *
get_integer(PyObject *self, void *closure)
{
    const char *member = (const char *)info_of(self) + (uintptr_t)closure;
    return PyLong_FromLongLong(*(const int64_t *)(const void *)member);
}

static PyObject *
get_flag(PyObject *self, void *closure)
{
    const char *member = (const char *)info_of(self) + (uintptr_t)closure;
    return PyBool_FromLong(*(const bool *)(const void *)member);
}

static PyObject *
get_type(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(ca_py_device_type_name(info_of(self)));
}

static PyObject *
get_memory_mode(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(ca_memory_word(info_of(self)->memory));
}

/* Returns why the device is not usable, or None. The first call makes the device ready. */
static PyObject *
get_reason(PyObject *self, void *Py_UNUSED(closure))
{
    const ca_state *state = ca_state_get(PyType_GetModule(Py_TYPE(self)));
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_py_work_begin(&work, state, &error);
    error.stops = NULL; /* an exception would be no reason */
    ca_status status = ca_device_prepare(ca_py_device_get(self), &error);
    ca_py_work_end(&work);
    if (status == CA_ERROR_STOPPED) {
        return NULL;
    }
    PyObject *reason =
        status == CA_OK
            ? Py_NewRef(Py_None)
            : PyUnicode_DecodeUTF8(error.message, (Py_ssize_t)strlen(error.message), "replace");
    ca_error_clear(&error);
    return reason;
}

static PyObject *
get_usable(PyObject *self, void *closure)
{
    PyObject *reason = get_reason(self, closure);
    PyObject *usable = reason != NULL ? PyBool_FromLong(reason == Py_None) : NULL;
    Py_XDECREF(reason);
    return usable;
}

/* lacks(device) -> {capability: reason}, what its driver reports and does not make right */
static PyObject *
lacks(PyObject *module, PyObject *object)
{
    static const char *const names[] = {
        [CA_WARP_SHUFFLES] = "shuffles of a warp",
        [CA_WARP_VOTES] = "votes of a warp",
        [CA_MATRIX_LOADS] = "loads of matrices",
        [CA_FLOAT16_MATRICES] = "matrices of float16",
        [CA_BFLOAT16_MATRICES] = "matrices of bfloat16",
        [CA_ASYNC_COPIES] = "asynchronous copies",
        [CA_FLOAT16_GROUPS] = "matrices of float16 in groups of warps",
        [CA_BFLOAT16_GROUPS] = "matrices of bfloat16 in groups of warps",
        [CA_LARGE_LOCAL_MEMORY] = "48 KiB of local memory",
        [CA_AMPLE_LOCAL_MEMORY] = "96 KiB of local memory",
        [CA_GROUP_LOCAL_MEMORY] = "192 KiB of local memory",
        [CA_MEMORY_IN_PLACE] = "the host's memory in place",
    };
    if (!Py_IS_TYPE(object, ca_state_get(module)->device_type)) {
        PyErr_Format(PyExc_TypeError, "device must be a Device, not %s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    PyObject *all = PyDict_New();
    for (int n = 0; n < CA_CAPABILITIES && all != NULL; n++) {
        const ca_error *why = ca_device_lacks(ca_py_device_get(object), (ca_capability)n);
        PyObject *reason = why == NULL ? Py_NewRef(Py_None)
                                       : PyUnicode_FromFormat(why->log != NULL ? "%s\n%s" : "%s",
                                                              why->message, why->log);
        if (reason == NULL || (why != NULL && PyDict_SetItemString(all, names[n], reason) < 0)) {
            Py_CLEAR(all);
        }
        Py_XDECREF(reason);
    }
    return all;
}

PyMethodDef ca_py_device_methods[] = {
    {"lacks", lacks, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *
device_repr(PyObject *self)
{
    const ca_device_info *info = info_of(self);
    bool adopted = ca_device_is_adopted(ca_py_device_get(self));
    return PyUnicode_FromFormat("<clattn.Device %s: %s (%s)%s>", type_names[info->type], info->name,
                                info->platform, adopted ? ", in a queue of pyopencl" : "");
}

static PyObject *
device_html(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return ca_py_call_from("clattn._host.html", "of_device", "(O)", self);
}

static PyObject *
from_pyopencl(PyObject *Py_UNUSED(none), PyObject *queue)
{
    return ca_py_call_from("clattn._host.pyopencl", "device_of", "(O)", queue);
}

/* __copy__() and __deepcopy__(memo): Devices never change. */
static PyObject *
copy(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(self);
}

static PyMethodDef device_methods[] = {
    {"__copy__", copy, METH_NOARGS, NULL},
    {"__deepcopy__", copy, METH_O, NULL},
    {"_repr_html_", device_html, METH_NOARGS, "_repr_html_($self)\n--\n\nA table for notebooks."},
    {"from_pyopencl", from_pyopencl, METH_O | METH_STATIC,
     "from_pyopencl(queue, /)\n--\n\n"
     "Return the device that runs calls in a queue of pyopencl.\n\n"
     "The calls are enqueued in that queue, so they run in the order of its other\n"
     "commands. The same queue gives the same device. clattn keeps the queue and its\n"
     "context until the process ends.\n\n"
     "Parameters\n----------\n"
     "queue : pyopencl.CommandQueue\n"
     "    It runs its commands in order, on one of the devices that clattn lists.\n\n"
     "Raises\n------\n"
     "TypeError\n    Not a queue of pyopencl.\n"
     "ValueError\n    The queue is out of order, or of a device that clattn does not list.\n"
     "DeviceError\n    The device is not usable.\n"
     "ImportError\n    pyopencl is not installed."},
    {NULL, NULL, 0, NULL},
};

static PyObject *
device_richcompare(PyObject *self, PyObject *other, int operation)
{
    if (!Py_IS_TYPE(other, Py_TYPE(self)) || (operation != Py_EQ && operation != Py_NE)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    bool same = ca_py_device_get(self) == ca_py_device_get(other);
    return PyBool_FromLong(same == (operation == Py_EQ));
}

static Py_hash_t
device_hash(PyObject *self)
{
    return ca_py_device_index(((device_object *)self)->module, ca_py_device_get(self));
}

static int
device_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((device_object *)self)->module);
    return 0;
}

static void
device_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(((device_object *)self)->module);
    type->tp_free(self);
    Py_DECREF(type);
}

#define INFO(member) (void *)(uintptr_t)offsetof(ca_device_info, member)

static PyGetSetDef device_getset[] = {
    {"name", get_text, NULL, "The device's own name.", INFO(name)},
    {"vendor", get_text, NULL, "Its vendor.", INFO(vendor)},
    {"platform", get_text, NULL, "The OpenCL platform it belongs to.", INFO(platform)},
    {"version", get_text, NULL, "The OpenCL version it speaks.", INFO(version)},
    {"driver_version", get_text, NULL, "The driver's version.", INFO(driver_version)},
    {"c_version", get_text, NULL, "The OpenCL C version it compiles.", INFO(c_version)},
    {"type", get_type, NULL, "\"gpu\", \"accelerator\" or \"cpu\".", NULL},
    {"compute_units", get_integer, NULL, "Cores, in OpenCL's count.", INFO(compute_units)},
    {"memory", get_integer, NULL, "Global memory in bytes.", INFO(global_memory)},
    {"max_allocation", get_integer, NULL, "The largest buffer in bytes.", INFO(max_allocation)},
    {"local_memory", get_integer, NULL, "Local memory of a work-group in bytes.",
     INFO(local_memory)},
    {"float_width", get_integer, NULL, "float32 lanes of its vectors.", INFO(float_width)},
    {"float64", get_flag, NULL, "Whether it computes in float64.", INFO(float64)},
    {"float16", get_flag, NULL, "Whether it computes in float16; storing it needs no support.",
     INFO(float16)},
    {"memory_mode", get_memory_mode, NULL,
     "How kernels reach host memory: \"svm\" (as it is), \"host\" (in place, through a\n"
     "buffer) or \"copy\".",
     NULL},
    {"nvidia_capability", get_integer, NULL,
     "80 for sm_80 where kernels have NVIDIA's instructions; 0: another GPU, or its\n"
     "driver refuses them.",
     INFO(nvidia_capability)},
    {"usable", get_usable, NULL, "Whether it builds and runs kernels.", NULL},
    {"reason", get_reason, NULL, "Why it is not usable, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, "An OpenCL device, as `clattn.devices()` lists them.\n\n"
                "Usable wherever a function takes ``device=``. Two are equal when they\n"
                "name the same device."},
    {Py_tp_repr, device_repr},
    {Py_tp_richcompare, device_richcompare},
    {Py_tp_hash, device_hash},
    {Py_tp_traverse, device_traverse},
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_getset, device_getset},
    {Py_tp_methods, device_methods},
    {0, NULL},
};

PyType_Spec ca_py_device_spec = {
    .name = "clattn.Device",
    .basicsize = sizeof(device_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = device_slots,
};
