/* SPDX-License-Identifier: MIT
 *
 * The module clattn._core; python/clattn/_core.pyi lists what it has.
 */
#include "doors/common.h" /* CA_MOST_HEAD_SIZE */
#include "python/arguments.h"
#include "python/convert.h"
#include "python/dlpack_import.h"
#include "python/end.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/runtime.h"
#include "python/state.h"

/* Makes a type that the module keeps. Returns -1 with an exception. */
static int
make_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type != NULL ? 0 : -1;
}

/* Refuses sub-interpreters: NumPy does not support them, and the consumer of a DLPack capsule ends
   it by PyGILState_Ensure, which only knows the main interpreter. Comes before NumPy is imported. */
static int
check_interpreter(void)
{
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) {
        return 0;
    }
    return ca_py_raise(PyExc_ImportError,
                       "clattn cannot be imported in a sub-interpreter, which NumPy does not "
                       "support; use the main interpreter or another process");
}

/* Adds an object that is equal to no other. */
static int
add_object(PyObject *module, const char *name, PyObject **object)
{
    *object = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    return PyModule_AddObjectRef(module, name, *object);
}

static int
module_exec(PyObject *module)
{
    ca_state *state = ca_state_get(module);
    ca_mutex_init(&state->lock);
    atomic_init(&state->opening, 0);
    atomic_init(&state->process_id, ca_process_id());
    atomic_init(&state->runtime, NULL);
    atomic_init(&state->default_device, NULL);
    if (check_interpreter() < 0 || ca_py_end_init(module) < 0 || ca_py_convert_init() < 0 ||
        ca_py_dlpack_init(state) < 0 || ca_py_arguments_init(state) < 0 ||
        ca_py_error_init(module) < 0 || ca_py_runtime_init(module) < 0 ||
        make_type(module, &ca_py_device_spec, &state->device_type) < 0 ||
        make_type(module, &ca_py_tensor_spec, &state->tensor_type) < 0 ||
        make_type(module, &ca_py_cache_spec, &state->cache_type) < 0 ||
        make_type(module, &ca_py_hold_spec, &state->hold_type) < 0 ||
        make_type(module, &ca_py_producer_spec, &state->producer_type) < 0 ||
        PyModule_AddType(module, state->device_type) < 0 ||
        PyModule_AddType(module, state->tensor_type) < 0 ||
        PyModule_AddType(module, state->cache_type) < 0 ||
        PyModule_AddStringConstant(module, "__version__", CLATTN_VERSION) < 0 ||
        PyModule_AddIntConstant(module, "MOST_HEAD_SIZE", CA_MOST_HEAD_SIZE) < 0 ||
        add_object(module, "base_and_sum", &state->base_and_sum) < 0 ||
        add_object(module, "only_check", &state->only_check) < 0 ||
        PyModule_AddFunctions(module, ca_py_runtime_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_loaders_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_end_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_memory_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_device_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_forced_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_tuning_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_torch_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_backward_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_varlen_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_mods_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_trials_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_pyopencl_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_diagonal_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_onnx_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_scatter_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_openvino_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_directml_methods) < 0) {
        return -1;
    }
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ca_state *state = ca_state_get(module);
    for (int n = 0; n < CA_NAME_COUNT; n++) {
        Py_VISIT(state->names[n]);
    }
    for (int n = 0; n < CA_PY_FUNCTIONS; n++) {
        Py_VISIT(state->signatures[n].names);
        Py_VISIT(state->signatures[n].defaults);
    }
    Py_VISIT(state->device_error);
    Py_VISIT(state->setting_error);
    Py_VISIT(state->device_type);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->cache_type);
    Py_VISIT(state->hold_type);
    Py_VISIT(state->producer_type);
    Py_VISIT(state->device_override);
    Py_VISIT(state->base_and_sum);
    Py_VISIT(state->only_check);
    return 0;
}

static int
module_clear(PyObject *module)
{
    ca_state *state = ca_state_get(module);
    for (int n = 0; n < CA_NAME_COUNT; n++) {
        Py_CLEAR(state->names[n]);
    }
    for (int n = 0; n < CA_PY_FUNCTIONS; n++) {
        Py_CLEAR(state->signatures[n].names);
        Py_CLEAR(state->signatures[n].defaults);
    }
    Py_CLEAR(state->device_error);
    Py_CLEAR(state->setting_error);
    Py_CLEAR(state->device_type);
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->cache_type);
    Py_CLEAR(state->hold_type);
    Py_CLEAR(state->producer_type);
    Py_CLEAR(state->device_override);
    Py_CLEAR(state->base_and_sum);
    Py_CLEAR(state->only_check);
    return 0;
}

static void
module_free(void *module)
{
    ca_state *state = ca_state_get(module);
    (void)module_clear(module);
    ca_runtime_close(atomic_exchange(&state->runtime, NULL));
    ca_mutex_destroy(&state->lock);
    ca_py_end_free(state);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef module_definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "clattn._core",
    .m_size = sizeof(ca_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&module_definition);
}
