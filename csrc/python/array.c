/* SPDX-License-Identifier: MIT */
#include "python/array.h"

#include <string.h>

#include "python/dlpack_export.h"
#include "python/dlpack_import.h"
#include "python/error.h"
#include "python/pyopencl.h"
#include "python/tensor.h"

/* True if NumPy can make an array of the object. */
static bool
numpy_takes(PyObject *object)
{
    return !PyType_Check(object) && !ca_py_is_numpy_scalar(object) &&
           (PyObject_CheckBuffer(object) ||
            PyObject_HasAttrString((PyObject *)Py_TYPE(object), "__array__"));
}

bool
ca_py_is_array(const ca_state *state, PyObject *object)
{
    return ca_py_is_ndarray(object) || ca_py_is_tensor(state, object) ||
           (ca_py_is_numpy_scalar(object) && !PyFloat_Check(object)) ||
           ca_py_has_dlpack(state, object) || ca_py_is_pyopencl(object) || numpy_takes(object);
}

static int
refuse(PyObject *object, const char *name)
{
    const bool is_sequence = PyList_Check(object) || PyTuple_Check(object);
    return ca_py_raise(PyExc_TypeError,
                       "%s must be an array: NumPy's, a clattn.Tensor, or another library's on the "
                       "host; got %.200s%s",
                       name, Py_TYPE(object)->tp_name,
                       is_sequence ? ", of which np.array makes one" : "");
}

static bool
is_aligned(const ca_tensor *tensor)
{
    return (uintptr_t)tensor->data % ca_dtype_size(tensor->dtype) == 0;
}

static int
array_from_dlpack(const ca_state *state, PyObject *object, const char *name, ca_py_dtypes dtypes,
                  ca_tensor *tensor, PyObject **keep)
{
    ca_py_import import;
    if (ca_py_dlpack_import(state, object, name, &import) < 0) {
        return -1;
    }
    *tensor = import.tensor;
    *keep = import.owner;
    if (ca_py_check_dtype(tensor->dtype, dtypes, name) < 0) {
        Py_CLEAR(*keep);
        return -1;
    }
    if (is_aligned(tensor)) {
        return 0;
    }
    PyObject *shell = ca_py_array_over(tensor, NULL, false, *keep);
    PyObject *copy = shell != NULL ? ca_py_contiguous(shell) : NULL;
    Py_XDECREF(shell);
    Py_SETREF(*keep, copy);
    if (copy == NULL) {
        return -1;
    }
    ca_py_array_describe(copy, import.tensor.dtype, tensor);
    return 0;
}

int
ca_py_array(const ca_state *state, PyObject *object, const char *name, ca_py_dtypes dtypes,
            ca_tensor *tensor, PyObject **keep)
{
    if (ca_py_is_ndarray(object)) {
        return ca_py_tensor_from_ndarray(object, name, dtypes, tensor, keep);
    }
    if (ca_py_is_tensor(state, object)) {
        *tensor = ((ca_py_tensor *)object)->view;
        *keep = Py_NewRef(object);
        return ca_py_check_dtype(tensor->dtype, dtypes, name);
    }
    if (ca_py_is_numpy_scalar(object)) {
        return refuse(object, name);
    }
    if (ca_py_has_dlpack(state, object)) {
        return array_from_dlpack(state, object, name, dtypes, tensor, keep);
    }
    if (ca_py_is_pyopencl(object)) {
        *keep = ca_py_pyopencl_tensor(object, name);
        if (*keep == NULL) {
            return -1;
        }
        *tensor = ((ca_py_tensor *)*keep)->view;
        return ca_py_check_dtype(tensor->dtype, dtypes, name);
    }
    if (!numpy_takes(object)) {
        return refuse(object, name);
    }
    PyObject *array = ca_py_ndarray_from(object);
    if (array == NULL) {
        return ca_py_raise_from(PyObject_CheckBuffer(object) ? PyExc_TypeError : PyExc_ValueError,
                                name, object, "buffer or __array__");
    }
    int result = ca_py_tensor_from_ndarray(array, name, dtypes, tensor, keep);
    Py_DECREF(array);
    return result;
}

/* ---- results ---- */

/* Returns the imported package of an array's type, for libraries without __array_namespace__. NULL,
   without an exception, if there is none. */
static PyObject *
package_of(PyObject *like)
{
    PyObject *package = NULL;
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(like), "__module__");
    const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
    if (text != NULL) {
        PyObject *root = PyUnicode_FromStringAndSize(text, (Py_ssize_t)strcspn(text, "."));
        package = root != NULL ? PyImport_GetModule(root) : NULL;
        Py_XDECREF(root);
    }
    Py_XDECREF(name);
    PyErr_Clear();
    return package;
}

/* Returns the library's from_dlpack, a new reference. NULL without an exception: NumPy's array is
   the result. NULL with an exception that is no Exception, such as KeyboardInterrupt. */
static PyObject *
taker_of(PyObject *like)
{
    PyObject *library = PyObject_CallMethod(like, "__array_namespace__", NULL);
    if (library == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return NULL;
        }
        PyErr_Clear();
        library = package_of(like);
    }
    PyObject *taker = library != NULL ? PyObject_GetAttrString(library, "from_dlpack") : NULL;
    Py_XDECREF(library);
    if (taker == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
    return taker;
}

PyObject *
ca_py_host_result(const ca_state *state, PyObject *like, ca_dtype dtype, int ndim,
                  const int64_t *shape, ca_tensor *tensor)
{
    PyObject *descr = NULL;
    if (like != NULL && ca_py_is_ndarray(like) && ca_py_array_has_dtype(like, dtype)) {
        descr = ca_py_native_descr(like);
    } else if (like != NULL && ca_py_has_dlpack(state, like)) {
        descr = ca_py_moving_descr(dtype);
    } else {
        descr = ca_py_descr(dtype);
    }
    if (descr == NULL) {
        return NULL;
    }
    PyObject *memory = ca_py_array_new(CA_PAGES_ANY, descr, dtype, ndim, shape, tensor);
    Py_DECREF(descr);
    return memory;
}

/* Makes the library's array of the memory, by the exchange functions of its type. */
static PyObject *
exchange(const ca_dlpack_exchange *functions, const ca_tensor *tensor, PyObject *memory)
{
    void *given = NULL;
    ca_dlpack_versioned *handed = ca_py_dlpack_hand_out(tensor, memory);
    return handed != NULL && functions->to_object(handed, &given) == 0 ? given : NULL;
}

PyObject *
ca_py_give(const ca_state *state, PyObject *like, ca_dtype dtype, PyObject *memory)
{
    if (like == NULL || ca_py_is_ndarray(like) || !ca_py_has_dlpack(state, like)) {
        return Py_NewRef(memory);
    }
    ca_tensor tensor;
    (void)ca_py_array_describe(memory, dtype, &tensor);
    const ca_dlpack_exchange *functions = ca_py_dlpack_exchange(state, like);
    if (functions != NULL) {
        return exchange(functions, &tensor, memory);
    }
    PyObject *taker = taker_of(like);
    if (taker == NULL) {
        return PyErr_Occurred() ? NULL : Py_NewRef(memory);
    }
    PyObject *given = NULL;
    PyObject *producer = ca_py_dlpack_producer(state, &tensor, memory);
    if (producer != NULL) {
        given = PyObject_CallOneArg(taker, producer);
        Py_DECREF(producer);
    }
    Py_DECREF(taker);
    return given;
}

/* ---- out ---- */

static int
open_ndarray(PyObject *object, ca_dtype dtype, const char *origin, ca_py_out *out)
{
    PyObject *keep = NULL;
    out->shell = Py_NewRef(object);
    out->target = Py_NewRef(object);
    if (!ca_py_array_has_dtype(object, dtype)) {
        PyObject *descr = PyObject_GetAttrString(object, "dtype");
        if (descr != NULL) {
            PyErr_Format(PyExc_TypeError, "out has dtype %S; expected %s, %s", descr,
                         ca_dtype_name(dtype), origin);
        }
        Py_XDECREF(descr);
        return -1;
    }
    if (ca_py_tensor_from_ndarray(object, "out", CA_TAKES_NUMBERS, &out->tensor, &keep) < 0) {
        return -1;
    }
    out->usable = keep == object;
    out->writeable = ca_py_array_is_writeable(object);
    Py_DECREF(keep);
    return 0;
}

static int
open_other(const ca_state *state, PyObject *object, ca_py_out *out)
{
    PyObject *keep = NULL;
    out->usable = true;
    out->writeable = true;
    if (ca_py_is_tensor(state, object)) {
        out->tensor = ((ca_py_tensor *)object)->view;
        keep = Py_NewRef(object);
    } else if (ca_py_has_dlpack(state, object)) {
        ca_py_import import;
        if (ca_py_dlpack_import(state, object, "out", &import) < 0) {
            return -1;
        }
        keep = import.owner;
        out->tensor = import.tensor;
        out->usable = is_aligned(&out->tensor);
        out->writeable = !import.read_only;
    } else if (ca_py_is_pyopencl(object)) {
        keep = ca_py_pyopencl_tensor(object, "out");
        if (keep == NULL) {
            return -1;
        }
        out->tensor = ((ca_py_tensor *)keep)->view;
        out->writeable = ca_storage_is_writeable(((ca_py_tensor *)keep)->storage);
    } else {
        return refuse(object, "out");
    }
    out->shell = ca_py_array_over(&out->tensor, NULL, true, keep);
    out->target = out->tensor.block != NULL ? Py_NewRef(keep) : Py_XNewRef(out->shell);
    Py_DECREF(keep);
    return out->shell != NULL ? 0 : -1;
}

void
ca_py_out_close(ca_py_out *out)
{
    Py_CLEAR(out->shell);
    Py_CLEAR(out->target);
}

/* Refuses an array of which two elements share memory: the last one written would stay. */
static int
check_repeats(const ca_state *state, PyObject *shell)
{
    ca_tensor bytes;
    bool repeats;
    CA_NEW_ERROR(error);
    ca_py_array_describe_bytes(shell, &bytes);
    ca_status status = ca_tensor_find_repeats(&bytes, &repeats, &error);
    if (ca_py_error_check(state, status, &error) < 0) {
        return -1;
    }
    return repeats ? ca_py_raise(PyExc_ValueError,
                                 "out has elements that share memory, such as those of a stride of "
                                 "0; expected an array in which each has its own")
                   : 0;
}

int
ca_py_out_open(const ca_state *state, PyObject *object, ca_dtype dtype, const char *origin,
               int ndim, const int64_t *shape, ca_py_out *out)
{
    bool numpy = ca_py_is_ndarray(object);
    if ((numpy ? open_ndarray(object, dtype, origin, out) : open_other(state, object, out)) < 0) {
        return -1;
    }
    if (out->tensor.dtype != dtype) {
        return ca_py_raise(PyExc_TypeError, "out has dtype %s; expected %s, %s",
                           ca_dtype_name(out->tensor.dtype), ca_dtype_name(dtype), origin);
    }
    const ca_tensor *given = &out->tensor;
    if (given->ndim != ndim || memcmp(given->shape, shape, (size_t)ndim * sizeof(*shape)) != 0) {
        return ca_py_raise(PyExc_ValueError, "out has shape %s; expected %s", CA_SHAPE_OF(given),
                           CA_SHAPE_WORDS(ndim, shape));
    }
    if (!out->writeable) {
        return ca_py_raise(PyExc_ValueError, "out is read-only; expected a writeable array");
    }
    return check_repeats(state, out->shell);
}
