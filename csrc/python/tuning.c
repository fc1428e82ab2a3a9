/* SPDX-License-Identifier: MIT
 *
 * The tuner's numbers, for clattn/_host/tuning.py, which keeps them, and for the tuner, which
 * tries them.
 */
#include "attention/tuning.h"

#include <inttypes.h>
#include <stdio.h>

#include "opencl/program.h" /* ca_kernels_identity */
#include "python/device.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/state.h"

/* Sets dict[key] to a new reference, which may be NULL. Returns -1 with an exception. */
static int
put(PyObject *dict, const char *key, PyObject *value)
{
    int failed = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return failed;
}

static int
append(PyObject *list, PyObject *value)
{
    int failed = value == NULL ? -1 : PyList_Append(list, value);
    Py_XDECREF(value);
    return failed;
}

/* Returns {knob: [value, …]}. */
static PyObject *
legal_values(const ca_knob *knobs)
{
    PyObject *found = PyDict_New();
    for (int n = 0; found != NULL && knobs[n].name != NULL; n++) {
        PyObject *values = PyList_New(0);
        for (int i = 0; values != NULL && i < CA_KNOB_VALUES && knobs[n].values[i] != 0; i++) {
            if (append(values, PyLong_FromLongLong(knobs[n].values[i])) < 0) {
                Py_CLEAR(values);
            }
        }
        if (put(found, knobs[n].name, values) < 0) {
            Py_CLEAR(found);
        }
    }
    return found;
}

/* tunables() -> (names of all classes, {variant: {knob: [each value that it may have]}}) */
static PyObject *
tunables(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *classes = PyList_New(0);
    PyObject *variants = PyDict_New();
    bool failed = classes == NULL || variants == NULL;
    for (int n = 0; n < CA_CLASSES && !failed; n++) {
        char name[CA_CLASS_NAME_SIZE];
        ca_class_name(n, name);
        failed = append(classes, PyUnicode_FromString(name)) < 0;
    }
    for (int n = 0; n < CA_VARIANT_COUNT && !failed; n++) {
        const ca_variant *variant = ca_variant_at(n);
        failed = variant->knobs != NULL &&
                 put(variants, variant->word, legal_values(variant->knobs)) < 0;
    }
    PyObject *all = failed ? NULL : PyTuple_Pack(2, classes, variants);
    Py_XDECREF(classes);
    Py_XDECREF(variants);
    return all;
}

/* Reads a copy of the dict: another thread may change the caller's. Returns -1 with an exception. */
static int
read_knobs(const ca_state *state, int variant, PyObject *knobs, uint64_t *word)
{
    int result = -1;
    Py_ssize_t position = 0;
    PyObject *key;
    PyObject *value;
    PyObject *dict = PyDict_Copy(knobs);
    while (dict != NULL && PyDict_Next(dict, &position, &key, &value)) {
        CA_NEW_ERROR(error);
        const char *name = PyUnicode_AsUTF8(key);
        long long number = name != NULL ? PyLong_AsLongLong(value) : -1;
        if (PyErr_Occurred()) {
            goto done;
        }
        ca_status status = ca_tuning_add(variant, name, number, word, &error);
        if (ca_py_error_check(state, status, &error) < 0) {
            goto done;
        }
    }
    result = dict != NULL ? 0 : -1;
done:
    Py_XDECREF(dict);
    return result;
}

/* tune(device, class, variant, knobs, /): {} for the plan's rules */
static PyObject *
tune(PyObject *module, PyObject *args)
{
    ca_state *state = ca_state_get(module);
    PyObject *device;
    const char *class_name;
    const char *variant_word;
    PyObject *dict;
    CA_NEW_ERROR(error);
    int number = 0;
    int variant = 0;
    uint64_t word = 0;
    if (!PyArg_ParseTuple(args, "O!ssO!", state->device_type, &device, &class_name, &variant_word,
                          &PyDict_Type, &dict)) {
        return NULL;
    }
    ca_status status = ca_tuning_find_class(class_name, &number, &error);
    if (status == CA_OK) {
        status = ca_tuning_find_variant(variant_word, &variant, &error);
    }
    if (ca_py_error_check(state, status, &error) < 0 ||
        read_knobs(state, variant, dict, &word) < 0) {
        return NULL;
    }
    ca_tuning_set(ca_device_get_info(ca_py_device_get(device)), number, variant, word);
    Py_RETURN_NONE;
}

/* Returns {knob: value} of a word. */
static PyObject *
knobs_of_word(const ca_knob *list, uint64_t word)
{
    const ca_knobs knobs = {.list = list, .word = word};
    PyObject *found = PyDict_New();
    for (int n = 0; found != NULL && list[n].name != NULL; n++) {
        int64_t value = ca_knob_value(&knobs, n, 0);
        if (value != 0 && put(found, list[n].name, PyLong_FromLongLong(value)) < 0) {
            Py_CLEAR(found);
        }
    }
    return found;
}

/* Appends (class, variant, {knob: value}) for each variant whose knobs the tuner has chosen in a class. */
static int
append_class(PyObject *list, const ca_device_info *info, int number)
{
    char name[CA_CLASS_NAME_SIZE];
    ca_class_name(number, name);
    for (int n = 0; n < CA_VARIANT_COUNT; n++) {
        uint64_t word = ca_tuning_get(info, number, n);
        const ca_variant *variant = ca_variant_at(n);
        if (word == 0) {
            continue;
        }
        PyObject *knobs = knobs_of_word(variant->knobs, word);
        if (knobs == NULL || append(list, Py_BuildValue("(ssN)", name, variant->word, knobs)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* tuned(device, /) -> [(class, variant, {knob: value}), …]: what is in use */
static PyObject *
tuned(PyObject *module, PyObject *device)
{
    if (!Py_IS_TYPE(device, ca_state_get(module)->device_type)) {
        ca_py_raise(PyExc_TypeError, "device must be a clattn.Device, got %s",
                    Py_TYPE(device)->tp_name);
        return NULL;
    }
    const ca_device_info *info = ca_device_get_info(ca_py_device_get(device));
    PyObject *list = PyList_New(0);
    for (int n = 0; list != NULL && n < CA_CLASSES; n++) {
        if (append_class(list, info, n) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* kernels_identity() -> str: another text if a kernel is changed */
static PyObject *
kernels_identity(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    ca_hash hash = ca_kernels_identity();
    char text[33];
    (void)snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, hash.words[0], hash.words[1]);
    return PyUnicode_FromString(text);
}

PyMethodDef ca_py_tuning_methods[] = {
    {"tunables", tunables, METH_NOARGS, NULL},
    {"tune", tune, METH_VARARGS, NULL},
    {"tuned", tuned, METH_O, NULL},
    {"kernels_identity", kernels_identity, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
