/* SPDX-License-Identifier: MIT */
#include "python/arguments.h"

#include <stdbool.h>
#include <string.h>

#include "python/error.h"
#include "python/methods.h"

/* Returns what the text of a default means, a new reference; None for a required argument. */
static PyObject *
default_of(const char *text)
{
    switch (text[0]) {
    case '\0':
    case 'N':
        return Py_NewRef(Py_None);
    case 'F':
        return Py_NewRef(Py_False);
    case '\'':
        return PyUnicode_FromStringAndSize(text + 1, (Py_ssize_t)strlen(text) - 2);
    default:
        return strchr(text, '.') != NULL
                   ? PyFloat_FromDouble(PyOS_string_to_double(text, NULL, NULL))
                   : PyLong_FromString(text, NULL, 10);
    }
}

static int
read_texts(const char *const *texts, ca_py_signature *signature)
{
    Py_ssize_t count = 0;
    signature->positional = 0;
    signature->required = 0;
    for (int n = 0; texts[n] != NULL; n++) {
        count += texts[n][0] != '*';
    }
    signature->names = PyTuple_New(count);
    signature->defaults = PyTuple_New(count);
    if (signature->names == NULL || signature->defaults == NULL) {
        return -1;
    }
    Py_ssize_t slot = 0;
    for (int n = 0; texts[n] != NULL; n++) {
        if (texts[n][0] == '*') {
            signature->positional = slot;
            continue;
        }
        const size_t length = strcspn(texts[n], "=");
        const bool required = texts[n][length] == '\0';
        PyObject *name = PyUnicode_FromStringAndSize(texts[n], (Py_ssize_t)length);
        PyObject *value = default_of(texts[n] + length + !required);
        if (name != NULL) {
            PyUnicode_InternInPlace(&name);
        }
        PyTuple_SET_ITEM(signature->names, slot, name);
        PyTuple_SET_ITEM(signature->defaults, slot, value);
        if (name == NULL || value == NULL) {
            return -1;
        }
        slot++;
        signature->required = required ? slot : signature->required;
    }
    return 0;
}

int
ca_py_arguments_init(ca_state *state)
{
    static const char *const *const texts[CA_PY_FUNCTIONS] = {
        [CA_PY_SDPA] = ca_py_sdpa_arguments,
        [CA_PY_SDPA_BACKWARD] = ca_py_backward_arguments,
        [CA_PY_VARLEN] = ca_py_varlen_arguments,
        [CA_PY_CACHE_ATTEND] = ca_py_cache_attend_arguments,
        [CA_PY_ONNX] = ca_py_onnx_arguments,
        [CA_PY_OPENVINO] = ca_py_openvino_arguments,
        [CA_PY_MULTIHEAD] = ca_py_multihead_arguments,
        [CA_PY_DIAGONAL] = ca_py_diagonal_arguments,
    };
    for (int n = 0; n < CA_PY_FUNCTIONS; n++) {
        if (read_texts(texts[n], &state->signatures[n]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Finds the slot of an argument; -1 if there is none. Callers write names as Python keeps them, one
   string for each name, and mostly in the order of the slots: the search begins at slot `next`. */
static Py_ssize_t
find_slot(PyObject *names, PyObject *name, Py_ssize_t next)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(names);
    for (Py_ssize_t n = 0; n < count; n++, next++) {
        next = next < count ? next : 0;
        if (PyTuple_GET_ITEM(names, next) == name) {
            return next;
        }
    }
    for (Py_ssize_t n = 0; n < count; n++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, n), name) == 0) {
            return n;
        }
    }
    return -1;
}

int
ca_py_arguments(const ca_state *state, ca_py_function function, PyObject *const *args,
                Py_ssize_t nargs, PyObject *names, PyObject **slots)
{
    const ca_py_signature *signature = &state->signatures[function];
    const Py_ssize_t count = PyTuple_GET_SIZE(signature->names);
    const Py_ssize_t named = names != NULL ? PyTuple_GET_SIZE(names) : 0;
    if (nargs > signature->positional) {
        return ca_py_raise(PyExc_TypeError,
                           "expected at most %zd arguments without a name, got %zd",
                           signature->positional, nargs);
    }
    memcpy(slots, PySequence_Fast_ITEMS(signature->defaults), (size_t)count * sizeof(*slots));
    for (Py_ssize_t n = 0; n < nargs; n++) {
        slots[n] = args[n];
    }
    uint64_t set = ((uint64_t)1 << nargs) - 1; /* a bit for each slot */
    Py_ssize_t next = nargs;
    for (Py_ssize_t n = 0; n < named; n++, next++) {
        PyObject *name = PyTuple_GET_ITEM(names, n);
        next = find_slot(signature->names, name, next);
        const uint64_t bit = next < 0 ? 0 : (uint64_t)1 << next;
        if (bit == 0 || (set & bit) != 0) {
            return ca_py_raise(PyExc_TypeError, "argument %R is %s", name,
                               bit == 0 ? "not known" : "given twice");
        }
        set |= bit;
        slots[next] = args[nargs + n];
    }
    for (Py_ssize_t n = nargs; n < signature->required; n++) {
        if ((set >> n & 1) == 0) {
            return ca_py_raise(PyExc_TypeError, "argument %R is missing",
                               PyTuple_GET_ITEM(signature->names, n));
        }
    }
    return 0;
}
