/* SPDX-License-Identifier: MIT */
#include "python/dlpack_import.h"

#include <string.h>

#include "python/dlpack_export.h" /* ca_py_dlpack_set_dtype */
#include "python/error.h"

/* Calls the deleter of the struct of `owner`, which may run Python code. Keeps a set exception. */
static void
give_back(PyObject *owner)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyCapsule_GetContext(owner) != NULL) {
        ca_dlpack_versioned *managed = PyCapsule_GetPointer(owner, NULL);
        if (managed->deleter != NULL) {
            managed->deleter(managed);
        }
    } else {
        ca_dlpack_managed *managed = PyCapsule_GetPointer(owner, NULL);
        if (managed->deleter != NULL) {
            managed->deleter(managed);
        }
    }
    PyErr_Restore(type, value, traceback);
}

int
ca_py_dlpack_init(ca_state *state)
{
    static const char *const names[] = {
        [CA_NAME_DLPACK] = "__dlpack__",
        [CA_NAME_DLPACK_DEVICE] = "__dlpack_device__",
        [CA_NAME_DLPACK_EXCHANGE] = "__dlpack_c_exchange_api__",
        [CA_NAME_REQUIRES_GRAD] = "requires_grad",
        [CA_NAME_IS_NEG] = "is_neg",
        [CA_NAME_IS_NESTED] = "is_nested",
    };
    for (int n = 0; n < CA_NAME_COUNT; n++) {
        state->names[n] = PyUnicode_InternFromString(names[n]);
        if (state->names[n] == NULL) {
            return -1;
        }
    }
    return 0;
}

bool
ca_py_has_dlpack(const ca_state *state, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    return PyObject_HasAttr(type, state->names[CA_NAME_DLPACK]) &&
           PyObject_HasAttr(type, state->names[CA_NAME_DLPACK_DEVICE]);
}

int
ca_py_raise_from(PyObject *exception, const char *name, PyObject *object, const char *source)
{
    PyObject *type;
    PyObject *cause;
    PyObject *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return -1;
    }
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(cause, traceback);
    }
    if (strcmp(Py_TYPE(cause)->tp_name, "TracerArrayConversionError") == 0) {
        PyErr_Format(exception,
                     "%s (%.200s) cannot be read: jax traces it; clattn.jax.dot_product_attention "
                     "works under jax.jit, jax.vmap and jax.grad",
                     name, Py_TYPE(object)->tp_name);
    } else {
        PyErr_Format(exception, "%s (%.200s) cannot be read: its %s raised %.100s: %S", name,
                     Py_TYPE(object)->tp_name, source, Py_TYPE(cause)->tp_name, cause);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    PyObject *raised;
    PyErr_Fetch(&type, &raised, &traceback);
    PyErr_NormalizeException(&type, &raised, &traceback);
    PyException_SetCause(raised, Py_NewRef(cause));
    PyException_SetContext(raised, cause);
    PyErr_Restore(type, raised, traceback);
    return -1;
}

/* Returns 1 if object.name, or object.name() if `calls`, is True, else 0; -1 with an exception. */
static int
is_true(PyObject *object, PyObject *name, bool calls)
{
    PyObject *flag =
        calls ? PyObject_CallMethodNoArgs(object, name) : PyObject_GetAttr(object, name);
    if (flag == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 0;
    }
    int result = flag == NULL ? -1 : flag == Py_True;
    Py_XDECREF(flag);
    return result;
}

/* Refuses a torch tensor that requires gradients, or whose signs are not turned yet: a capsule does
   not say either. Of a nested tensor torch makes no capsule. */
static int
check_torch(const ca_state *state, PyObject *object, const char *name)
{
    PyObject *requires_grad = state->names[CA_NAME_REQUIRES_GRAD];
    if (!PyObject_HasAttr((PyObject *)Py_TYPE(object), requires_grad)) {
        return 0;
    }
    int nested = is_true(object, state->names[CA_NAME_IS_NESTED], false);
    int gradient = nested == 0 ? is_true(object, requires_grad, false) : nested < 0 ? -1 : 0;
    int negative =
        nested == 0 && gradient == 0 ? is_true(object, state->names[CA_NAME_IS_NEG], true) : 0;
    if (nested > 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s is a nested tensor; expected an array: clattn.torch."
                     "scaled_dot_product_attention takes jagged ones, clattn.varlen_attn packed "
                     "rows or a list of arrays",
                     name);
    } else if (gradient > 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s requires gradients, which this function does not record: clattn.torch "
                     "has functions that do; without gradients, pass %s.detach()",
                     name, name);
    } else if (negative > 0) {
        PyErr_Format(PyExc_ValueError, "%s is a view with turned signs; pass %s.resolve_neg()",
                     name, name);
    }
    if (gradient < 0 || negative < 0) {
        return ca_py_raise_from(PyExc_ValueError, name, object, "flags");
    }
    return nested == 0 && gradient == 0 && negative == 0 ? 0 : -1;
}

static int
check_host(ca_dlpack_device device, PyObject *object, const char *name)
{
    static const char *const names[] = {
        [1] = "CPU",        [2] = "CUDA",          [3] = "CUDA host", [4] = "OpenCL",
        [7] = "Vulkan",     [8] = "Metal",         [9] = "VPI",       [10] = "ROCm",
        [12] = "extension", [13] = "CUDA managed", [14] = "oneAPI",   [15] = "WebGPU",
        [16] = "Hexagon",
    };
    if (device.type == CA_DLPACK_CPU || device.type == CA_DLPACK_CUDA_HOST ||
        device.type == CA_DLPACK_ROCM_HOST) {
        return 0;
    }
    bool known = device.type > 0 && (size_t)device.type < sizeof(names) / sizeof(names[0]) &&
                 names[device.type] != NULL;
    return ca_py_raise(PyExc_ValueError,
                       "%s (%.200s) lies on device %d of type %d%s%s%s; expected the host's "
                       "memory: copy it there, as torch's .cpu() does",
                       name, Py_TYPE(object)->tp_name, (int)device.id, (int)device.type,
                       known ? " (" : "", known ? names[device.type] : "", known ? ")" : "");
}

static int
check_device(PyObject *object, const char *name)
{
    int type;
    int id;
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    if (device == NULL) {
        return ca_py_raise_from(PyExc_ValueError, name, object, "__dlpack_device__");
    }
    bool parsed = PyTuple_Check(device) && PyArg_ParseTuple(device, "ii", &type, &id);
    if (!parsed) {
        PyObject *text = ca_py_repr(device);
        if (text != NULL) {
            PyErr_Format(
                PyExc_TypeError,
                "%s (%.200s) has a __dlpack_device__ that returns %U; expected a pair of integers",
                name, Py_TYPE(object)->tp_name, text);
            Py_DECREF(text);
        }
    }
    Py_DECREF(device);
    return parsed ? check_host((ca_dlpack_device){type, id}, object, name) : -1;
}

/* Returns the capsule of object.__dlpack__(). Older libraries know no max_version. */
static PyObject *
call_dlpack(PyObject *object, const char *name)
{
    PyObject *capsule = NULL;
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *nothing = PyTuple_New(0);
    PyObject *version = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
    if (method != NULL && nothing != NULL && version != NULL) {
        capsule = PyObject_Call(method, nothing, version);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = PyObject_Call(method, nothing, NULL);
        }
    }
    if (capsule == NULL) {
        (void)ca_py_raise_from(PyExc_ValueError, name, object, "__dlpack__");
    }
    Py_XDECREF(version);
    Py_XDECREF(nothing);
    Py_XDECREF(method);
    return capsule;
}

/* Returns a new capsule of `managed`, which does not call give_back yet. NULL with an exception:
   then `managed` still belongs to the other library. */
static PyObject *
owner_of(void *managed, bool versioned)
{
    PyObject *owner = PyCapsule_New(managed, NULL, NULL);
    if (owner != NULL && PyCapsule_SetContext(owner, versioned ? managed : NULL) < 0) {
        Py_CLEAR(owner);
    }
    return owner;
}

/* Takes over the struct of a capsule. At its end *owner calls the deleter. */
static int
take_over(PyObject *capsule, const char *name, PyObject **owner)
{
    if (!PyCapsule_CheckExact(capsule)) {
        return ca_py_raise(PyExc_TypeError,
                           "%s has a __dlpack__ that returns %.200s; expected a capsule", name,
                           Py_TYPE(capsule)->tp_name);
    }
    const char *given = PyCapsule_GetName(capsule);
    bool versioned = given != NULL && strcmp(given, "dltensor_versioned") == 0;
    if (!versioned && (given == NULL || strcmp(given, "dltensor") != 0)) {
        bool used = given != NULL && strncmp(given, "used_dltensor", 13) == 0;
        return ca_py_raise(PyExc_ValueError,
                           "%s has a __dlpack__ that returns a capsule '%.100s'%s; expected "
                           "'dltensor_versioned' or 'dltensor'",
                           name, given != NULL ? given : "",
                           used ? ", which was consumed before" : "");
    }
    void *managed = PyCapsule_GetPointer(capsule, given);
    *owner = managed != NULL ? owner_of(managed, versioned) : NULL;
    if (*owner == NULL ||
        PyCapsule_SetName(capsule, versioned ? "used_dltensor_versioned" : "used_dltensor") < 0) {
        Py_CLEAR(*owner);
        return -1;
    }
    /* From here on *owner has the struct. */
    return PyCapsule_SetDestructor(*owner, give_back);
}

#ifndef Py_BEGIN_CRITICAL_SECTION /* before Python 3.13 the interpreter has a lock */
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION()         }
#endif

/* The same, for one thread at a time: the next one sees that the capsule was consumed. */
static int
consume(PyObject *capsule, const char *name, PyObject **owner)
{
    int result;
    Py_BEGIN_CRITICAL_SECTION(capsule);
    result = take_over(capsule, name, owner);
    Py_END_CRITICAL_SECTION();
    return result;
}

const ca_dlpack_exchange *
ca_py_dlpack_exchange(const ca_state *state, PyObject *object)
{
    static const char name[] = "dlpack_exchange_api";
    const ca_dlpack_exchange *exchange = NULL;
    PyObject *capsule =
        PyObject_GetAttr((PyObject *)Py_TYPE(object), state->names[CA_NAME_DLPACK_EXCHANGE]);
    if (capsule != NULL && PyCapsule_IsValid(capsule, name)) {
        exchange = PyCapsule_GetPointer(capsule, name);
    }
    Py_XDECREF(capsule);
    PyErr_Clear();
    return exchange != NULL && exchange->major == 1 ? exchange : NULL;
}

/* Takes the object by the exchange functions of its type. Returns 0 without an owner if the
   functions refuse: then __dlpack__ says why. */
static int
exchange_owner(const ca_dlpack_exchange *exchange, PyObject *object, PyObject **owner)
{
    ca_dlpack_versioned *taken = NULL;
    if (exchange->from_object(object, &taken) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    *owner = owner_of(taken, true);
    if (*owner == NULL) {
        if (taken->deleter != NULL) {
            taken->deleter(taken);
        }
        return -1;
    }
    return PyCapsule_SetDestructor(*owner, give_back);
}

static int
capsule_owner(PyObject *object, const char *name, PyObject **owner)
{
    PyObject *capsule = check_device(object, name) == 0 ? call_dlpack(object, name) : NULL;
    int result = capsule != NULL ? consume(capsule, name, owner) : -1;
    PyObject *type; /* the end of the capsule may run Python code */
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(capsule);
    PyErr_Restore(type, value, traceback);
    return result;
}

/* ---- reading the struct ---- */

static bool
dtype_of(const ca_dlpack_tensor *tensor, ca_dtype *dtype)
{
    for (int d = 0; d < CA_DTYPE_COUNT; d++) {
        ca_dlpack_tensor known;
        ca_py_dlpack_set_dtype(&known, (ca_dtype)d);
        if (tensor->code == known.code && tensor->bits == known.bits &&
            tensor->lanes == known.lanes) {
            *dtype = (ca_dtype)d;
            return true;
        }
    }
    return false;
}

static int
check_dtype(const ca_dlpack_tensor *given, const char *name, ca_dtype *dtype)
{
    static const char *const kinds[] = {
        "int",   "uint",  "float", "opaque", "bfloat", "complex", "bool",  "float", "float",
        "float", "float", "float", "float",  "float",  "float",   "float", "float", "float",
    };
    if (dtype_of(given, dtype)) {
        return 0;
    }
    const char *kind =
        given->code < sizeof(kinds) / sizeof(kinds[0]) ? kinds[given->code] : "unknown type of ";
    char lanes[32] = "";
    if (given->lanes != 1) {
        (void)snprintf(lanes, sizeof(lanes), " with %d lanes", (int)given->lanes);
    }
    return ca_py_raise(PyExc_TypeError,
                       "%s has dtype %s%d%s; expected bool, an integer type, float16, bfloat16, "
                       "float32 or float64",
                       name, kind, (int)given->bits, lanes);
}

static int
fault(const char *name, const char *what)
{
    return ca_py_raise(PyExc_ValueError, "%s has a __dlpack__ whose tensor has %s", name, what);
}

/* Refuses negative sizes, and more bytes than 63 bits count. */
static int
check_shape(const ca_dlpack_tensor *given, const char *name, size_t size, bool *empty)
{
    int64_t bytes = (int64_t)size;
    *empty = false;
    if (given->ndim < 0 || given->ndim > CA_MAX_DIMS - 1) {
        return ca_py_raise(PyExc_ValueError, "%s has %d dimensions; expected 0 to %d", name,
                           (int)given->ndim, CA_MAX_DIMS - 1);
    }
    if (given->ndim > 0 && given->shape == NULL) {
        return fault(name, "no shape");
    }
    for (int d = 0; d < given->ndim; d++) {
        if (given->shape[d] < 0) {
            return ca_py_raise(PyExc_ValueError,
                               "%s has a __dlpack__ whose tensor has size %lld in dimension %d; "
                               "expected 0 or more",
                               name, (long long)given->shape[d], d);
        }
        *empty = *empty || given->shape[d] == 0;
    }
    for (int d = 0; d < given->ndim && !*empty; d++) {
        if (bytes > INT64_MAX / given->shape[d]) {
            return fault(name, "more elements than 63 bits count");
        }
        bytes *= given->shape[d];
    }
    return 0;
}

/* Reads the strides, and refuses those that leave the address space. */
static int
set_strides(const ca_dlpack_tensor *given, const char *name, bool empty, ca_tensor *tensor)
{
    int64_t stride = 1;
    int64_t reach = 0;
    int64_t limit = INT64_MAX / (int64_t)ca_dtype_size(tensor->dtype) / 2;
    for (int d = given->ndim - 1; d >= 0; d--) {
        int64_t size = given->shape[d];
        tensor->shape[d] = size;
        tensor->strides[d] = 0;
        if (size > 1 && !empty) {
            int64_t step = given->strides != NULL ? given->strides[d] : stride;
            int64_t room = (limit - reach) / (size - 1);
            if (step > room || step < -room) {
                return fault(name, "strides that leave the address space");
            }
            tensor->strides[d] = step;
            reach += (step < 0 ? -step : step) * (size - 1);
            stride *= size;
        }
    }
    return 0;
}

/* True if all bytes lie in the address space. The tensor has sizes and strides, and elements. */
static bool
is_in_address_space(const ca_dlpack_tensor *given, const ca_tensor *tensor)
{
    const uint64_t size = ca_dtype_size(tensor->dtype);
    const uint64_t data = (uintptr_t)given->data;
    const uint64_t start = data + given->byte_offset;
    uint64_t below = 0;
    uint64_t above = size; /* set_strides has seen that no sum overflows */
    for (int d = 0; d < given->ndim; d++) {
        int64_t reach = tensor->strides[d] * (tensor->shape[d] - 1) * (int64_t)size;
        *(reach < 0 ? &below : &above) += (uint64_t)(reach < 0 ? -reach : reach);
    }
    return start >= data && below <= start && above <= UINTPTR_MAX - start;
}

/* Makes `tensor` describe the memory of another library. */
static int
read_tensor(const ca_dlpack_tensor *given, const char *name, ca_tensor *tensor)
{
    static const char nowhere[sizeof(double)] = {0}; /* the address of empty arrays */
    bool empty;
    if (check_dtype(given, name, &tensor->dtype) < 0 ||
        check_shape(given, name, ca_dtype_size(tensor->dtype), &empty) < 0 ||
        set_strides(given, name, empty, tensor) < 0) {
        return -1;
    }
    if (given->data == NULL && !empty) {
        return fault(name, "no memory");
    }
    if (!empty && !is_in_address_space(given, tensor)) {
        return fault(name, "a byte_offset or strides that leave the address space");
    }
    tensor->ndim = given->ndim;
    tensor->block = NULL;
    tensor->data = empty ? (void *)nowhere : (void *)((char *)given->data + given->byte_offset);
    return 0;
}

int
ca_py_dlpack_import(const ca_state *state, PyObject *object, const char *name, ca_py_import *import)
{
    const ca_dlpack_exchange *exchange = ca_py_dlpack_exchange(state, object);
    import->owner = NULL;
    if (check_torch(state, object, name) < 0 ||
        (exchange != NULL && exchange_owner(exchange, object, &import->owner) < 0) ||
        (import->owner == NULL && capsule_owner(object, name, &import->owner) < 0)) {
        return -1;
    }
    const ca_dlpack_tensor *given;
    const ca_dlpack_versioned *versioned = PyCapsule_GetContext(import->owner);
    if (versioned != NULL) {
        given = &versioned->tensor;
        import->read_only = (versioned->flags & CA_DLPACK_READ_ONLY) != 0;
    } else {
        const ca_dlpack_managed *managed = PyCapsule_GetPointer(import->owner, NULL);
        given = &managed->tensor;
        import->read_only = true; /* the struct cannot say */
    }
    bool wrong = versioned != NULL && versioned->major != 1;
    if (wrong) {
        PyErr_Format(PyExc_ValueError, "%s has a __dlpack__ of version %u.%u; expected 1", name,
                     (unsigned)versioned->major, (unsigned)versioned->minor);
    }
    if (wrong || check_host(given->device, object, name) < 0 ||
        read_tensor(given, name, &import->tensor) < 0) {
        Py_CLEAR(import->owner);
        return -1;
    }
    return 0;
}
