/* SPDX-License-Identifier: MIT */
#include "python/forced.h"

#include <stdlib.h>

#include "attention/variants.h"
#include "python/error.h"
#include "python/methods.h"

/* Forces a variant and limits; NULL or "" forces nothing. */
static int
force(ca_state *state, const char *kernel, const char *sub_groups, const char *local_memory)
{
    ca_error error = {0};
    ca_forced forced = {.kernel = NULL};
    ca_status status = ca_forced_parse_limits(sub_groups, local_memory, &forced, &error);
    if (status == CA_OK && kernel != NULL && kernel[0] != '\0') {
        status = ca_variant_force(kernel, &forced, &error);
    }
    if (status == CA_OK) {
        state->forced = forced;
    }
    return ca_py_error_check(state, status, &error);
}

int
ca_py_force_as_environment_says(ca_state *state)
{
    return force(state, getenv("CLATTN_KERNEL"), getenv("CLATTN_SUB_GROUPS"),
                 getenv("CLATTN_LOCAL_MEMORY"));
}

/* force(kernel="", sub_groups="", local_memory="", /), for tests: takes the words of the variables.
   A call that another thread has begun may see the old words or the new ones. */
static PyObject *
force_words(PyObject *module, PyObject *args)
{
    const char *kernel = "";
    const char *sub_groups = "";
    const char *local_memory = "";
    if (!PyArg_ParseTuple(args, "|sss", &kernel, &sub_groups, &local_memory) ||
        force(ca_state_get(module), kernel, sub_groups, local_memory) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef ca_py_forced_methods[] = {
    {"force", force_words, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
