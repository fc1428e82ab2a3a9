/* SPDX-License-Identifier: MIT
 *
 *     module clattn._core:
 *         class Device                            python/device.c
 *         class DeviceError(RuntimeError)         python/error.c
 *         class Tensor                            python/tensor_type.c
 *         tensor(array, device) memory_stats(device) empty_cache(device)
 *         synchronize(device)                     python/memory.c
 *         class Cache                             python/cache.c
 *         all_devices() find_device(device) set_default_device(device)
 *         device_override: ContextVar             python/runtime.c
 *         scaled_dot_product_attention(…)         python/torch.c
 *         diagonal_matrix(…) eye(…) tril(…) triu(…)
 *         directml_diagonal_matrix1(…) directml_diagonal_matrix(…)   python/diagonal.c
 *         onnx_attention(…)                       python/onnx.c
 *         openvino_scaled_dot_product_attention(…) python/openvino.c
 *         directml_multihead_attention(…)         python/directml.c
 *         force(…)                                python/forced.c
 */
#include "python/cache.h"
#include "python/convert.h"
#include "python/device.h"
#include "python/dlpack_export.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/runtime.h"
#include "python/state.h"
#include "python/tensor_type.h"

static int
module_exec(PyObject *module)
{
    ca_state *state = ca_state_get(module);
    ca_mutex_init(&state->lock);
    atomic_init(&state->opening, 0);
    atomic_init(&state->process_id, ca_process_id());
    atomic_init(&state->runtime, NULL);
    atomic_init(&state->default_device, NULL);
    if (ca_py_convert_init() < 0 || ca_py_error_init(module) < 0 || ca_py_device_init(module) < 0 ||
        ca_py_tensor_init(module) < 0 || ca_py_cache_init(module) < 0 ||
        ca_py_dlpack_init(module) < 0 || ca_py_runtime_init(module) < 0 ||
        PyModule_AddStringConstant(module, "__version__", CLATTN_VERSION) < 0 ||
        PyModule_AddFunctions(module, ca_py_runtime_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_memory_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_forced_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_torch_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_diagonal_methods) < 0 ||
        PyModule_AddFunctions(module, ca_py_onnx_methods) < 0 ||
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
    Py_VISIT(state->device_error);
    Py_VISIT(state->device_type);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->producer_type);
    Py_VISIT(state->device_override);
    return 0;
}

static int
module_clear(PyObject *module)
{
    ca_state *state = ca_state_get(module);
    Py_CLEAR(state->device_error);
    Py_CLEAR(state->device_type);
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->producer_type);
    Py_CLEAR(state->device_override);
    return 0;
}

static void
module_free(void *module)
{
    ca_state *state = ca_state_get(module);
    (void)module_clear(module);
    ca_runtime_close(atomic_exchange(&state->runtime, NULL));
    ca_mutex_destroy(&state->lock);
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
