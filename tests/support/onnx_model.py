# SPDX-License-Identifier: MIT
"""Models of one node, run by ONNX Runtime on the CPU, where both packages are installed."""

import numpy as np
import pytest


def run_model(operator, arrays, outputs, domain="", opset=24, **attributes):
    """Return the outputs of a model of one node, computed on one thread.

    `arrays` are the inputs by the node's names, None for one that is left out. An output whose
    name is empty is None.
    """
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    names = [name if array is not None else "" for name, array in arrays.items()]
    while not names[-1]:
        names.pop()
    given = {name: np.ascontiguousarray(a) for name, a in arrays.items() if a is not None}
    node = helper.make_node(operator, names, outputs, domain=domain, **attributes)
    told = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in given.items()
    ]
    dtype = told[0].type.tensor_type.elem_type
    asked = [helper.make_tensor_value_info(name, dtype, None) for name in outputs if name]
    model = helper.make_model(
        helper.make_graph([node], "one", told, asked),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    answers = iter(session.run(None, given))
    return [next(answers) if name else None for name in outputs]
