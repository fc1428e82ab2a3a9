"""ONNX Runtime's operators as peers of bench."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from clattn._commands.bench.peers import Call, Peer, as_4d, joined_heads, split_heads
from clattn._commands.bench.rows import Array, Problem
from clattn._commands.timing import THREADS

Arrays = dict[str, Array | None]  # None: an input that is left out


class _OnnxRuntime(Peer):
    """One node, in a session whose inputs and outputs are bound beforehand."""

    operator: str

    def __init__(self, stack: ExitStack) -> None:
        import onnx.parser
        import onnxruntime

        self._parse, self._ort = onnx.parser.parse_model, onnxruntime
        self.version = f"onnxruntime {onnxruntime.__version__}"

    def _session(self, inputs: Arrays, output: Array, attributes: str) -> Any:
        def declare(arrays: Arrays) -> str:
            return ", ".join(
                f"{a.dtype.name.replace('float32', 'float')}{list(a.shape)} {name}"
                for name, a in arrays.items()
                if a is not None
            )

        names = ", ".join(name if array is not None else "" for name, array in inputs.items())
        model = self._parse(
            '<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>'
            f"bench ({declare(inputs)}) => ({declare({'Y': output})})"
            f"{{ Y = {self.operator}<{attributes}>({names}) }}"
        )
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        return self._ort.InferenceSession(model.SerializeToString(), options, providers)

    def _call(self, inputs: Arrays, output: Array, heads: int = 0, **attributes: int) -> Call:
        """Return the call, whose result is written to an array like `output`.

        `heads`: the result has that many heads side by side, which are taken apart.
        """
        text = ", ".join(f"{name} = {value}" for name, value in attributes.items())
        session = self._session(inputs, output, text)
        binding = session.io_binding()
        make = self._ort.OrtValue.ortvalue_from_numpy
        values = {name: make(a) for name, a in inputs.items() if a is not None}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        written = make(output)
        binding.bind_ortvalue_output("Y", written)

        def run() -> None:
            session.run_with_iobinding(binding)

        def result() -> Array:
            run()
            array = np.asarray(written.numpy())
            return split_heads(array, heads) if heads else array

        return Call(run, result)


class OnnxAttention(_OnnxRuntime):
    """ONNX Attention, opset 23."""

    name, label = "ONNX Runtime Attention", "ORT Attn"
    operator = "Attention"

    def prepare(self, problem: Problem) -> Call | None:
        """Return the call for float16 and float32, else None.

        Arrays are (B, L, H * E) unless their heads are contiguous.
        """
        row, mask = problem.row, problem.additive_mask
        if row.dtype not in ("float32", "float16"):
            return None
        arrays: list[Array] = [problem.query, problem.key, problem.value]
        attributes = {"is_causal": int(row.is_causal_only)}
        heads = 0
        if row.layout != "heads":
            arrays = [joined_heads(array) for array in arrays]
            heads = row.shape[1]
            attributes |= {"q_num_heads": heads, "kv_num_heads": row.shape[2]}
        inputs: Arrays = {**dict(zip("QKV", arrays, strict=True)), "mask": mask}
        return self._call(inputs, np.zeros_like(arrays[0]), heads, **attributes)


class OnnxMultiHeadAttention(_OnnxRuntime):
    """com.microsoft MultiHeadAttention."""

    name, label = "ONNX Runtime MultiHeadAttention", "ORT MHA"
    operator = "com.microsoft.MultiHeadAttention"

    def prepare(self, problem: Problem) -> Call | None:
        """Return the call for float16 and float32; None for grouped heads and bool masks."""
        row, mask = problem.row, problem.additive_mask
        if row.dtype not in ("float32", "float16") or row.is_grouped:
            return None
        if mask is not None and mask.dtype == bool:
            return None
        query, key, value = (joined_heads(a) for a in (problem.query, problem.key, problem.value))
        inputs: Arrays = {"query": query, "key": key, "value": value}
        if mask is not None:
            inputs |= {"bias": None, "padding": None, "attention_bias": as_4d(mask)}
        heads, causal = row.shape[1], int(row.is_causal_only)
        output = np.zeros_like(query)
        return self._call(inputs, output, heads, num_heads=heads, unidirectional=causal)
