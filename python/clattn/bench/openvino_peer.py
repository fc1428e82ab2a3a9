"""OpenVINO's ScaledDotProductAttention as a peer of bench."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from clattn._measuring import THREADS
from clattn.bench.peers import Call
from clattn.bench.rows import Array, Problem


class OpenVino:
    """A compiled model of one ScaledDotProductAttention node on OpenVINO's CPU device."""

    name = "OpenVINO"
    label = "OpenVINO"
    counts = True

    def __init__(self, stack: ExitStack) -> None:
        del stack
        import openvino

        self._ov = openvino
        self._core = openvino.Core()
        self.version = f"openvino {openvino.__version__.partition('-')[0]}"

    def prepare(self, problem: Problem) -> Call | None:
        """As for every Peer."""
        row = problem.row
        if row.dtype == "float64":
            return None  # it would be computed in float32
        grouped = row.shape[1] != row.shape[2]
        mask = problem.additive_mask
        if grouped and (mask is not None or row.is_causal):
            return None
        arrays = [problem.query, problem.key, problem.value]
        if mask is not None:
            arrays.append(mask)
        request = self._compile(arrays, problem).create_infer_request()
        tensors = [self._tensor(array) for array in arrays]
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)
        output = np.zeros_like(problem.query)
        request.set_output_tensor(0, self._tensor(output))

        def run() -> None:
            request.infer(share_inputs=True, share_outputs=True)

        def result() -> Array:
            run()
            return output

        return Call(run, result)

    def _compile(self, arrays: list[Array], problem: Problem) -> Any:
        opset = self._ov.opset13
        row = problem.row
        inputs = [opset.parameter(array.shape, self._type(array)) for array in arrays]
        query = inputs[0]
        grouped = row.shape[1] != row.shape[2]
        if grouped:
            # The node has no grouped heads; without a mask the group's rows can be its rows.
            B, Hq, Hk, L, _, E = row.shape
            query = self._reshape(query, (B, Hk, Hq // Hk * L, E))
        causal = row.is_causal and row.window is None
        node = opset.scaled_dot_product_attention(query, *inputs[1:], causal=causal)
        if grouped:
            node = self._reshape(node, problem.query.shape)
        model = self._ov.Model([node], inputs, "bench")
        return self._core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": THREADS,
                "PERFORMANCE_HINT": "LATENCY",
                # By default float32 is computed in bfloat16 where the processor has it.
                "INFERENCE_PRECISION_HINT": "bf16" if row.dtype == "bfloat16" else "f32",
            },
        )

    def _reshape(self, node: Any, shape: tuple[int, ...]) -> Any:
        return self._ov.opset13.reshape(node, np.array(shape, np.int64), special_zero=False)

    def _type(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            return self._ov.Type.bf16
        return self._ov.Type(array.dtype)

    def _tensor(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            return self._ov.Tensor(
                array.view(np.uint16), self._ov.Shape(array.shape), self._ov.Type.bf16
            )
        return self._ov.Tensor(array, shared_memory=True)
