/* SPDX-License-Identifier: MIT */
#include "py_value.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "py_convert.h" /* ca_py_is_other_scalar */

static int
wrong_type(PyObject *object, const char *name)
{
    PyErr_Format(PyExc_TypeError, "%s must be a real number, got %.200s", name,
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* ---- float types ---- */

/* A whole number beyond the range of double is rounded too. */
static int
to_double(PyObject *object, const char *name, double *value)
{
    *value = PyFloat_AsDouble(object);
    if (*value != -1 || !PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        return wrong_type(object, name);
    }
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Clear();
    PyObject *zero = PyLong_FromLong(0);
    if (zero == NULL) {
        return -1;
    }
    int negative = PyObject_RichCompareBool(object, zero, Py_LT);
    Py_DECREF(zero);
    *value = negative == 1 ? -INFINITY : INFINITY;
    return negative < 0 ? -1 : 0;
}

static int
to_float16(double value, uint64_t *bits)
{
    unsigned char bytes[2];
    if (PyFloat_Pack2(value, (char *)bytes, 1) == 0) {
        *bits = (uint64_t)(bytes[0] | bytes[1] << 8);
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Clear();
    *bits = value < 0 ? 0xfc00 : 0x7c00;
    return 0;
}

static uint32_t
float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* By way of float, as ml_dtypes does. */
static uint64_t
bfloat16_bits(float value)
{
    uint32_t bits = float_bits(value);
    if (isnan(value)) {
        return (bits >> 16 & 0x8000) | 0x7fc0;
    }
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static int
float_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits)
{
    double value;
    if (to_double(object, name, &value) < 0) {
        return -1;
    }
    switch (dtype) {
    case CA_FLOAT16:
        return to_float16(value, bits);
    case CA_BFLOAT16:
        *bits = bfloat16_bits((float)value);
        return 0;
    case CA_FLOAT32:
        *bits = float_bits((float)value);
        return 0;
    default:
        memcpy(bits, &value, sizeof(*bits));
        return 0;
    }
}

/* ---- bool and integers ---- */

/* int(object), a new reference; NULL without an exception where there is no such number.
 */
static PyObject *
to_whole(PyObject *object, const char *name)
{
    PyObject *whole =
        PyIndex_Check(object) ? PyNumber_Index(object) : PyNumber_Long(object);
    if (whole == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        (void)wrong_type(object, name);
    } else if (whole == NULL && (PyErr_ExceptionMatches(PyExc_ValueError) ||
                                 PyErr_ExceptionMatches(PyExc_OverflowError))) {
        PyErr_Clear(); /* NaN, an infinity */
    }
    return whole;
}

/* -1 where it is not among them, -2 with an exception. */
static int
whole_bits(PyObject *whole, int64_t lowest, uint64_t highest, uint64_t *bits)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(whole, &overflow);
    if (number == -1 && overflow == 0 && PyErr_Occurred()) {
        return -2;
    }
    if (overflow > 0) {
        *bits = PyLong_AsUnsignedLongLong(whole);
        if (*bits == UINT64_MAX && PyErr_Occurred()) {
            PyErr_Clear();
            return -1;
        }
        return *bits <= highest ? 0 : -1;
    }
    *bits = (uint64_t)number;
    bool fits = overflow == 0 && number >= lowest &&
                (number < 0 || (uint64_t)number <= highest);
    return fits ? 0 : -1;
}

static int
integer_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits)
{
    unsigned width = 8 * (unsigned)ca_dtype_size(dtype);
    bool is_signed = dtype >= CA_INT8 && dtype <= CA_INT64;
    uint64_t all = UINT64_MAX >> (64 - width);
    uint64_t highest = dtype == CA_BOOL ? 1 : is_signed ? all >> 1 : all;
    int64_t lowest = is_signed ? -(int64_t)highest - 1 : 0;

    PyObject *whole = to_whole(object, name);
    if (whole == NULL && PyErr_Occurred()) {
        return -1;
    }
    int exact = whole != NULL ? PyObject_RichCompareBool(whole, object, Py_EQ) : 0;
    int result = exact < 0    ? -2
                 : exact == 0 ? -1
                              : whole_bits(whole, lowest, highest, bits);
    Py_XDECREF(whole);
    if (result == -1) {
        PyErr_Format(PyExc_ValueError,
                     "%s is %R; expected a whole number from %lld to %llu, which %s "
                     "holds",
                     name, object, (long long)lowest, (unsigned long long)highest,
                     ca_dtype_name(dtype));
    }
    *bits &= all;
    return result < 0 ? -1 : 0;
}

int
ca_py_value(PyObject *object, const char *name, ca_dtype dtype, uint64_t *bits)
{
    *bits = 0;
    /* An array of one element has __float__ too, but is not a number. */
    if (!PyNumber_Check(object) || PyObject_HasAttrString(object, "__len__") ||
        ca_py_is_other_scalar(object)) {
        return wrong_type(object, name);
    }
    return ca_dtype_is_float(dtype) ? float_value(object, name, dtype, bits)
                                    : integer_value(object, name, dtype, bits);
}
