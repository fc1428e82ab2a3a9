/* SPDX-License-Identifier: MIT */
#include "py_attention.h"

#include <stdlib.h>

#include "py_error.h"
#include "py_runtime.h"

int
ca_py_check_count(Py_ssize_t given, int expected)
{
    if (given != expected) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", expected,
                     given);
        return -1;
    }
    return 0;
}

int
ca_py_check_device_and_kernel(ca_state *state, PyObject *device_argument,
                              ca_variant *variant)
{
    ca_error error = {0};
    ca_status status = ca_variant_parse(getenv("CLATTN_KERNEL"), variant, &error);
    return ca_py_error_check(state, status, &error) < 0
               ? -1
               : ca_py_check_device(state, device_argument);
}

int
ca_py_run_attention(ca_state *state, PyObject *device_argument, ca_variant variant,
                    ca_attention *attention)
{
    if (ca_attention_is_trivial(attention)) {
        ca_attention_fill(attention);
        return 0;
    }
    attention->variant = variant;
    ca_device *device;
    if (ca_py_find_device(state, device_argument, &device) < 0) {
        return -1;
    }
    ca_error error = {0};
    ca_status status;
    Py_BEGIN_ALLOW_THREADS
        status = ca_attention_run(device, attention, &error);
    Py_END_ALLOW_THREADS
    return ca_py_error_check(state, status, &error);
}
