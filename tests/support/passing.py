# SPDX-License-Identifier: MIT
"""The operators called with Tensors in the place of arrays: how tests marked `tensors` run twice.

The second time conftest.py puts functions in the operators' places that copy every array to the
device, call the operator, and give the test arrays again, so that nothing else of it changes.
"""

import functools

import clattn
import numpy as np
from support.tensors import same_bits, strided

OPERATORS = (
    (clattn, ("scaled_dot_product_attention", "diagonal_matrix", "tril", "triu")),
    (clattn.onnx, ("attention", "tensor_scatter")),
    (clattn.openvino, ("scaled_dot_product_attention",)),
    (clattn.directml, ("multihead_attention", "diagonal_matrix1", "diagonal_matrix")),
)


def pass_tensors(patch):
    """Until the patch is undone."""
    for module, names in OPERATORS:
        for name in names:
            patch.setattr(module, name, with_tensors(getattr(module, name)))


def with_tensors(operator):
    """The operator, called with a Tensor for each array, all of them on the call's device."""

    @functools.wraps(operator)
    def call(*args, **options):
        moved = {}  # where the array lies -> the array, its Tensor; the same one twice is one

        def move(array):
            if type(array) is not np.ndarray:
                return array
            place = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
            if place not in moved:
                moved[place] = array, strided(array, options.get("device"))
            return moved[place][1]

        passed = [move(a) for a in args], {name: move(a) for name, a in options.items()}
        answer = operator(*passed[0], **passed[1])
        if not moved:
            return answer
        out, given = passed[1].get("out"), options.get("out")
        for array, tensor in moved.values():
            if tensor is not out:
                same_bits(tensor, array, "an input was modified")
        if given is not None:
            given[...] = out.numpy()

        def back(result):
            if result is None:
                return None
            assert type(result) is clattn.Tensor
            return given if result is out else result.numpy()

        if not isinstance(answer, tuple):
            return back(answer)
        results = [back(result) for result in answer]
        return type(answer)(*results) if hasattr(answer, "_fields") else tuple(results)

    return call
