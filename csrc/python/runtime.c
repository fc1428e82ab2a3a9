/* SPDX-License-Identifier: MIT */
#include "python/runtime.h"

#include <stdlib.h>
#include <string.h>

#include "opencl/launched.h"
#include "opencl/program.h" /* ca_device_built */
#include "python/device.h"
#include "python/error.h"
#include "python/forced.h"
#include "python/methods.h"
#include "python/scalars.h"

/* A launch may take so long, unless the environment says otherwise. */
#define SECONDS_OF_A_DAY 86400.0

#define HOW_TO_GET_OPENCL                                                                          \
    "; install a driver: pip install intel-opencl-rt intel-cmplr-lib-rt for any x86-64 CPU, or "   \
    "the OpenCL driver of your device's vendor (Debian: apt-get install pocl-opencl-icd); "        \
    "python -m clattn doctor says where drivers were looked for"

/* ---- the runtime ---- */

/* Appends to a message that there is no device: where the loader has looked, and what to do. */
static void
add_advice(ca_error *error)
{
    static const char *const variables[] = {"OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"};
    char *const end = error->message + sizeof error->message;
    char *at = error->message + strlen(error->message);
    for (int i = 0; i < 2; i++) {
        const char *value = getenv(variables[i]);
        if (value != NULL) {
            const int room = (int)(end - at);
            const int length =
                snprintf(at, (size_t)room, "; the loader looks where %s says: '%.200s'",
                         variables[i], value);
            at += length < room ? length : room - 1;
        }
    }
    (void)snprintf(at, (size_t)(end - at), "%s", HOW_TO_GET_OPENCL);
}

/* Returns a NULL-ended array of the strings in a tuple of bytes, which keeps them. */
static const char **
borrow_strings(PyObject *tuple)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    const char **strings = PyMem_Calloc((size_t)n + 1, sizeof(*strings));
    if (strings == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        strings[i] = PyBytes_AsString(PyTuple_GET_ITEM(tuple, i));
        if (strings[i] == NULL) {
            PyMem_Free(strings);
            return NULL;
        }
    }
    return strings;
}

/* Returns a list of Devices, or NULL with an exception. */
static PyObject *
list_devices(ca_state *state, const ca_runtime *runtime)
{
    PyObject *module = PyType_GetModule(state->device_type);
    PyObject *list = module != NULL ? PyList_New(0) : NULL;
    for (int i = 0; list != NULL && i < ca_runtime_device_count(runtime); i++) {
        PyObject *device = ca_py_wrap_device(module, ca_runtime_device(runtime, i));
        if (device == NULL || PyList_Append(list, device) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(device);
    }
    return list;
}

/* Lets clattn._host.tuning set what the tuner has found for the devices. Returns a list of warnings,
   or NULL with an exception. No other thread uses the devices yet. */
static PyObject *
load_tuning(ca_state *state, const ca_runtime *runtime, PyObject *tuning)
{
    PyObject *devices = list_devices(state, runtime);
    PyObject *warnings = devices != NULL ? PyObject_CallMethod(tuning, "load", "O", devices) : NULL;
    Py_XDECREF(devices);
    return warnings;
}

/* Opens OpenCL in the first thread that gets here; clattn._host.drivers.discover() has said where
   to look. The interpreter's lock is not held while the thread waits for another one, or for
   drivers. Handlers of signals and finalizers may run in load_tuning, which is Python: `opener` and
   `opened` let them go on. Only the thread that opens sets `forced`: others may be in calls by
   then. Sets `warnings` as load_tuning does, or to None. */
static ca_status
open_runtime(ca_state *state, const char *const *preload, const char *const *candidates,
             const char *cache_folder, const char *memory, double longest, const ca_forced *forced,
             PyObject *tuning, PyObject **warnings, ca_error *error)
{
    ca_status status = CA_OK;
    ca_runtime *runtime = NULL;
    *warnings = Py_NewRef(Py_None);
    Py_BEGIN_ALLOW_THREADS
        atomic_fetch_add(&state->opening, 1);
        ca_mutex_lock(&state->lock);
    Py_END_ALLOW_THREADS
    ca_py_work work;
    ca_py_work_begin(&work, state, error);
    if (atomic_load(&state->runtime) == NULL) {
        status = ca_runtime_open(preload, candidates, cache_folder, memory, longest,
                                 forced->trials == CA_TRIALS_OFF, &runtime, error);
    }
    ca_py_work_end(&work);
    if (runtime != NULL) {
        state->forced = *forced;
        state->opened = runtime;
        atomic_store(&state->opener, PyThread_get_thread_ident());
        Py_SETREF(*warnings, load_tuning(state, runtime, tuning));
        atomic_store(&state->runtime, runtime);
        atomic_store(&state->opener, 0);
    }
    ca_mutex_unlock(&state->lock);
    atomic_fetch_sub(&state->opening, 1);
    return status;
}

/* Issues the warnings of a list. Returns -1 with an exception. */
static int
warn(PyObject *warnings)
{
    for (Py_ssize_t n = 0; PyList_Check(warnings) && n < PyList_GET_SIZE(warnings); n++) {
        const char *text = PyUnicode_AsUTF8(PyList_GET_ITEM(warnings, n));
        if (text == NULL || PyErr_WarnEx(PyExc_RuntimeWarning, text, 1) < 0) {
            return -1;
        }
    }
    return 0;
}

/* False in a child that was forked while a thread of its parent was opening OpenCL. No thread of
   the child releases the lock, and a driver may be half loaded. */
static bool
may_open(ca_state *state)
{
    int64_t process_id = ca_process_id();
    bool forked = atomic_load(&state->process_id) != process_id;
    if (forked && atomic_load(&state->opening) != 0) {
        return false;
    }
    atomic_store(&state->process_id, process_id);
    return true;
}

/* Reads CLATTN_MAX_SECONDS, the seconds that a launch may take. Returns -1 with an exception. */
static int
read_longest(const ca_state *state, double *longest)
{
    const char *words = getenv("CLATTN_MAX_SECONDS");
    *longest = SECONDS_OF_A_DAY;
    if (words == NULL || words[0] == '\0') {
        return 0;
    }
    *longest = PyOS_string_to_double(words, NULL, NULL);
    PyErr_Clear();
    return *longest > 0 ? 0
                        : ca_py_raise(state->setting_error,
                                      "CLATTN_MAX_SECONDS is \"%.100s\"; expected seconds above 0, "
                                      "such as 3600, or inf",
                                      words);
}

static ca_runtime *
find_and_open(ca_state *state)
{
    ca_runtime *runtime = NULL;
    PyObject *drivers = NULL;
    PyObject *tuning = NULL;
    PyObject *warnings = NULL;
    PyObject *found = NULL;
    const char **preload = NULL;
    const char **candidates = NULL;
    PyObject *preload_tuple;
    PyObject *candidates_tuple;
    const char *cache_folder;
    Py_ssize_t cache_length;
    const char *memory;
    double longest;
    ca_forced forced;

    if (!may_open(state)) {
        PyErr_SetString(state->device_error, "this process was forked while its parent was opening "
                                             "OpenCL; use the 'spawn' start method");
        goto done;
    }
    if (atomic_load(&state->opener) == PyThread_get_thread_ident()) {
        return state->opened;
    }
    drivers = PyImport_ImportModule("clattn._host.drivers");
    tuning = drivers != NULL ? PyImport_ImportModule("clattn._host.tuning") : NULL;
    found = tuning != NULL && read_longest(state, &longest) == 0 &&
                    ca_py_forced_by_environment(state, &forced) == 0
                ? PyObject_CallMethod(drivers, "discover", NULL)
                : NULL;
    if (found == NULL ||
        !PyArg_ParseTuple(found, "O!O!z#s", &PyTuple_Type, &preload_tuple, &PyTuple_Type,
                          &candidates_tuple, &cache_folder, &cache_length, &memory)) {
        goto done;
    }
    preload = borrow_strings(preload_tuple);
    candidates = borrow_strings(candidates_tuple);
    if (preload == NULL || candidates == NULL) {
        goto done;
    }
    CA_NEW_ERROR(error);
    ca_status status = open_runtime(state, preload, candidates, cache_folder, memory, longest,
                                    &forced, tuning, &warnings, &error);
    if (status == CA_ERROR_DEVICE) {
        add_advice(&error);
    }
    if (ca_py_error_check(state, status, &error) == 0 && warnings != NULL && warn(warnings) == 0) {
        runtime = atomic_load(&state->runtime);
    }
done:
    PyMem_Free((void *)preload);
    PyMem_Free((void *)candidates);
    Py_XDECREF(warnings);
    Py_XDECREF(tuning);
    Py_XDECREF(found);
    Py_XDECREF(drivers);
    return runtime;
}

static ca_runtime *
get_runtime(ca_state *state)
{
    ca_runtime *runtime = atomic_load(&state->runtime);
    CA_NEW_ERROR(error);
    if (runtime == NULL) {
        return find_and_open(state);
    }
    ca_status status = ca_runtime_check_fork(runtime, &error);
    return ca_py_error_check(state, status, &error) == 0 ? runtime : NULL;
}

/* ---- arguments ---- */

/* Returns a device's index, an int, as a new reference; NULL with a TypeError. */
static PyObject *
index_of(PyObject *argument)
{
    return ca_py_whole(argument, "device",
                       "a clattn.Device, a string such as \"cpu\" or \"gpu:1\", an index, or None");
}

int
ca_py_check_device(ca_state *state, PyObject *argument)
{
    if (argument == Py_None || PyUnicode_Check(argument) ||
        Py_IS_TYPE(argument, state->device_type)) {
        return 0;
    }
    PyObject *index = index_of(argument);
    Py_XDECREF(index);
    return index != NULL ? 0 : -1;
}

static const char DEVICE_VARIABLE[] = "CLATTN_DEVICE";

/* Finds the device that `words` name; NULL: the runtime's choice. `what` names the words in
   messages. */
static int
find_by_words(ca_state *state, const char *words, const char *what, ca_device **device)
{
    ca_runtime *runtime = get_runtime(state);
    if (runtime == NULL) {
        return -1;
    }
    CA_NEW_ERROR(error);
    ca_py_work work;
    ca_py_work_begin(&work, state, &error);
    ca_status status = words != NULL ? ca_runtime_find_device(runtime, words, what, device, &error)
                                     : ca_runtime_default_device(runtime, device, &error);
    ca_py_work_end(&work);
    if (status == CA_ERROR_VALUE && what == DEVICE_VARIABLE) {
        status = CA_ERROR_SETTING;
    }
    return ca_py_error_check(state, status, &error);
}

/* Finds the device of CLATTN_DEVICE, else the runtime's choice, and remembers it. */
static int
choose_default(ca_state *state, ca_device **device)
{
    const char *words = getenv(DEVICE_VARIABLE);
    bool given = words != NULL && words[0] != '\0';
    if (find_by_words(state, given ? words : NULL, DEVICE_VARIABLE, device) < 0) {
        return -1;
    }
    ca_device *chosen = NULL; /* the choice of another thread stays */
    if (!atomic_compare_exchange_strong(&state->default_device, &chosen, *device)) {
        *device = chosen;
    }
    return 0;
}

/* Finds the device of use_device, else the default. */
static int
find_without_argument(ca_state *state, ca_device **device)
{
    PyObject *override = NULL;
    if (PyContextVar_Get(state->device_override, NULL, &override) < 0) {
        return -1;
    }
    if (override == NULL) {
        *device = atomic_load(&state->default_device);
        return *device != NULL ? 0 : choose_default(state, device);
    }
    bool is_device = Py_IS_TYPE(override, state->device_type);
    *device = is_device ? ca_py_device_get(override) : NULL;
    Py_DECREF(override); /* the context keeps the Device, the module the device */
    return is_device ? 0 : ca_py_raise(PyExc_TypeError, "device_override holds no Device");
}

/* Finds the device that a string names. */
static int
find_by_text(ca_state *state, PyObject *text, ca_device **device)
{
    Py_ssize_t length;
    const char *words = PyUnicode_AsUTF8AndSize(text, &length);
    if (words == NULL && !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        return -1;
    }
    if (words == NULL || strlen(words) != (size_t)length) {
        PyErr_Clear();
        return ca_py_raise(PyExc_ValueError, "device is %A, which names none", text);
    }
    return find_by_words(state, words, "device", device);
}

/* Finds the device that an int names, whose digits are words, too. */
static int
find_by_index(ca_state *state, PyObject *index, ca_device **device)
{
    int overflow;
    (void)PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow != 0) {
        return ca_py_refuse(PyExc_ValueError, "device", index, "an index in clattn.devices()");
    }
    PyObject *digits = PyObject_Str(index);
    int found = digits != NULL ? find_by_text(state, digits, device) : -1;
    Py_XDECREF(digits);
    return found;
}

int
ca_py_find_device(ca_state *state, PyObject *argument, ca_device **device)
{
    if (argument == Py_None) {
        return find_without_argument(state, device);
    }
    if (Py_IS_TYPE(argument, state->device_type)) {
        *device = ca_py_device_get(argument);
        return 0;
    }
    if (PyUnicode_Check(argument)) {
        return find_by_text(state, argument, device);
    }
    PyObject *index = index_of(argument);
    int found = index != NULL ? find_by_index(state, index, device) : -1;
    Py_XDECREF(index);
    return found;
}

/* ---- module functions ---- */

/* all_devices() -> list[Device] */
static PyObject *
all_devices(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    ca_runtime *runtime = get_runtime(ca_state_get(module));
    if (runtime == NULL) {
        return NULL;
    }
    return list_devices(ca_state_get(module), runtime);
}

/* find_device(device) -> Device: the one that a device= argument names */
static PyObject *
find_device(PyObject *module, PyObject *argument)
{
    ca_device *device = NULL;
    if (ca_py_find_device(ca_state_get(module), argument, &device) < 0) {
        return NULL;
    }
    return ca_py_wrap_device(module, device);
}

/* adopt_queue(queue, /) -> Device: of a cl_command_queue that clattn._host.pyopencl has checked */
static PyObject *
adopt_queue(PyObject *module, PyObject *argument)
{
    ca_state *state = ca_state_get(module);
    void *queue = PyLong_AsVoidPtr(argument);
    ca_runtime *runtime = queue != NULL ? get_runtime(state) : NULL;
    ca_device *device = NULL;
    CA_NEW_ERROR(error);
    ca_py_work work;
    if (runtime == NULL) {
        return NULL;
    }
    ca_py_work_begin(&work, state, &error);
    ca_status status = ca_runtime_adopt(runtime, queue, &device, &error);
    ca_py_work_end(&work);
    return ca_py_error_check(state, status, &error) < 0 ? NULL : ca_py_wrap_device(module, device);
}

/* set_default_device(device): None forgets the choice */
static PyObject *
set_default_device(PyObject *module, PyObject *argument)
{
    ca_device *device = NULL;
    ca_state *state = ca_state_get(module);
    if (argument != Py_None && ca_py_find_device(state, argument, &device) < 0) {
        return NULL;
    }
    atomic_store(&state->default_device, device);
    Py_RETURN_NONE;
}

/* built_programs() -> (int, float), for tests: the ca_build_stats of all devices */
static PyObject *
built_programs(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    ca_runtime *runtime = get_runtime(ca_state_get(module));
    ca_build_stats sum = {0};
    if (runtime == NULL) {
        return NULL;
    }
    for (int i = 0; i < ca_runtime_device_count(runtime); i++) {
        ca_build_stats built = ca_device_built(ca_runtime_device(runtime, i));
        sum.programs += built.programs;
        sum.seconds += built.seconds;
    }
    return Py_BuildValue("(Ld)", (long long)sum.programs, sum.seconds);
}

/* (name, macros, work-groups) of a step */
static PyObject *
describe_step(const ca_launched_step *step)
{
    const ca_kernel_spec *spec = step->spec;
    PyObject *macros = PyDict_New();
    for (int n = 0; n < spec->ndefines && macros != NULL; n++) {
        PyObject *value = PyLong_FromLongLong(spec->defines[n].value);
        if (value == NULL || PyDict_SetItemString(macros, spec->defines[n].name, value) < 0) {
            Py_CLEAR(macros);
        }
        Py_XDECREF(value);
    }
    if (macros != NULL && spec->mods_hash[0] != 0) {
        PyObject *hash = PyLong_FromUnsignedLongLong(spec->mods_hash[0]);
        if (hash == NULL || PyDict_SetItemString(macros, "MODS", hash) < 0) {
            Py_CLEAR(macros);
        }
        Py_XDECREF(hash);
    }
    return macros != NULL
               ? Py_BuildValue("(sNK)", spec->name, macros, (unsigned long long)step->groups)
               : NULL;
}

/* launched() -> list[tuple[str, dict[str, int], int]], for tests: see opencl/launched.h */
static PyObject *
launched(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    ca_launched_step steps[CA_MAX_LAUNCHED];
    ca_runtime *runtime = get_runtime(ca_state_get(module));
    PyObject *list = runtime != NULL ? PyList_New(0) : NULL;
    ca_device *device;
    for (int i = 0; list != NULL && (device = ca_runtime_device(runtime, i)) != NULL; i++) {
        int count = ca_launched_take(device, steps);
        for (int n = 0; n < count && list != NULL; n++) {
            PyObject *step = describe_step(&steps[n]);
            if (step == NULL || PyList_Append(list, step) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(step);
        }
    }
    return list;
}

int
ca_py_runtime_init(PyObject *module)
{
    PyObject *variable = PyContextVar_New("clattn.device", NULL);
    ca_state_get(module)->device_override = variable;
    return PyModule_AddObjectRef(module, "device_override", variable);
}

PyMethodDef ca_py_runtime_methods[] = {
    {"all_devices", all_devices, METH_NOARGS, NULL},
    {"find_device", find_device, METH_O, NULL},
    {"adopt_queue", adopt_queue, METH_O, NULL},
    {"set_default_device", set_default_device, METH_O, NULL},
    {"built_programs", built_programs, METH_NOARGS, NULL},
    {"launched", launched, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
