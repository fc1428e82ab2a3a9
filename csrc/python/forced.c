/* SPDX-License-Identifier: MIT */
#include "python/forced.h"

#include <stdlib.h>

#include "attention/variants.h"
#include "python/error.h"
#include "python/methods.h"

/* Reads a variant, a limit and where trials run; NULL or "" forces nothing. */
static int
read_words(const ca_state *state, const char *kernel, const char *local_memory, const char *trials,
           ca_forced *forced)
{
    CA_NEW_ERROR(error);
    *forced = (ca_forced){.kernel = NULL};
    ca_status status = ca_forced_parse_local_memory(local_memory, forced, &error);
    if (status == CA_OK) {
        status = ca_forced_parse_trials(trials, forced, &error);
    }
    if (status == CA_OK && kernel != NULL && kernel[0] != '\0') {
        status = ca_variant_force(kernel, forced, &error);
    }
    return ca_py_error_check(state, status, &error);
}

int
ca_py_forced_by_environment(const ca_state *state, ca_forced *forced)
{
    return read_words(state, getenv("CLATTN_KERNEL"), getenv("CLATTN_LOCAL_MEMORY"),
                      getenv("CLATTN_TRIALS"), forced);
}

/* force(kernel="", local_memory="", trials="", /), for tests: takes the words of the variables. A call
   that another thread has begun may see the old words or the new ones. */
static PyObject *
force_words(PyObject *module, PyObject *args)
{
    const char *kernel = "";
    const char *local_memory = "";
    const char *trials = "";
    ca_state *state = ca_state_get(module);
    ca_forced forced;
    if (!PyArg_ParseTuple(args, "|sss", &kernel, &local_memory, &trials) ||
        read_words(state, kernel, local_memory, trials, &forced) < 0) {
        return NULL;
    }
    state->forced = forced;
    Py_RETURN_NONE;
}

PyMethodDef ca_py_forced_methods[] = {
    {"force", force_words, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
