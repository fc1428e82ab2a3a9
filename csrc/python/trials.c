/* SPDX-License-Identifier: MIT
 *
 * Trials of variants, for clattn/_host/apart.py and the listing.
 */
#include "attention/run.h" /* ca_attention_try_variant */
#include "attention/variants.h"
#include "python/device.h"
#include "python/error.h"
#include "python/methods.h"

/* Reads the name of a float dtype. Returns -1 with a ValueError. */
static int
read_dtype(const char *name, ca_dtype *dtype)
{
    *dtype = CA_FLOAT16;
    while (*dtype < CA_FLOAT64 && strcmp(ca_dtype_name(*dtype), name) != 0) {
        (*dtype)++;
    }
    return strcmp(ca_dtype_name(*dtype), name) == 0
               ? 0
               : ca_py_raise(PyExc_ValueError, "dtype is %s; expected a float dtype", name);
}

/* Reads the word of a variant. Returns -1 with a ValueError. */
static int
read_variant(const ca_state *state, const char *word, int *variant)
{
    ca_forced forced = {.kernel = NULL};
    CA_NEW_ERROR(error);
    ca_status status = ca_variant_force(word, &forced, &error);
    for (int n = 0; n < CA_VARIANT_COUNT; n++) {
        *variant = ca_variant_at(n)->word == forced.kernel ? n : *variant;
    }
    return ca_py_error_check(state, status, &error);
}

/* try_variant(device, what, word, dtype, value_dtype, head_size, v_head_size, anew, /) -> None, or why the
   variant is not used. `what` is "attention" or "gradients". A ValueError if it does not take such calls. */
static PyObject *
try_variant(PyObject *module, PyObject *args)
{
    ca_state *state = ca_state_get(module);
    PyObject *device;
    const char *what;
    const char *word;
    const char *name;
    const char *value_name;
    ca_dtype dtype;
    ca_dtype value_dtype;
    long long E;
    long long Ev;
    int anew;
    int variant = CA_INDEX_reference;
    if (!PyArg_ParseTuple(args, "O!ssssLLp", state->device_type, &device, &what, &word, &name,
                          &value_name, &E, &Ev, &anew) ||
        read_variant(state, word, &variant) < 0 || read_dtype(name, &dtype) < 0 ||
        read_dtype(value_name, &value_dtype) < 0) {
        return NULL;
    }
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_py_work_begin(&work, state, &error);
    bool gradients = strcmp(what, "gradients") == 0;
    ca_status status = ca_attention_try_variant(ca_py_device_get(device), variant, gradients, dtype,
                                                value_dtype, E, Ev, anew != 0, &error);
    ca_py_work_end(&work);
    if (status == CA_ERROR_KERNEL) {
        PyObject *reason = PyUnicode_FromString(error.message);
        ca_error_clear(&error);
        return reason;
    }
    return ca_py_error_check(state, status, &error) < 0 ? NULL : Py_NewRef(Py_None);
}

/* fast_variants(device, dtype, /) -> list of the words of those that are made for such a device */
static PyObject *
fast_variants(PyObject *module, PyObject *args)
{
    ca_state *state = ca_state_get(module);
    PyObject *device;
    const char *name;
    ca_dtype dtype;
    if (!PyArg_ParseTuple(args, "O!s", state->device_type, &device, &name) ||
        read_dtype(name, &dtype) < 0) {
        return NULL;
    }
    const ca_device_info *info = ca_device_get_info(ca_py_device_get(device));
    PyObject *words = PyList_New(0);
    for (int n = 0; n < CA_VARIANT_COUNT && words != NULL; n++) {
        if (!ca_variant_is_fast_on(info, n, dtype)) {
            continue;
        }
        PyObject *word = PyUnicode_FromString(ca_variant_at(n)->word);
        if (word == NULL || PyList_Append(words, word) < 0) {
            Py_CLEAR(words);
        }
        Py_XDECREF(word);
    }
    return words;
}

/* is_known(device, /) -> bool: the driver is not tried in another process */
static PyObject *
is_known(PyObject *module, PyObject *object)
{
    return Py_IS_TYPE(object, ca_state_get(module)->device_type)
               ? PyBool_FromLong(ca_device_get_info(ca_py_device_get(object))->is_known)
               : PyErr_Format(PyExc_TypeError, "device must be a Device, not %s",
                              Py_TYPE(object)->tp_name);
}

PyMethodDef ca_py_trials_methods[] = {
    {"is_known", is_known, METH_O, NULL},
    {"try_variant", try_variant, METH_VARARGS, NULL},
    {"fast_variants", fast_variants, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
