"""ONNX Runtime's operators as peers of bench."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from clattn._measuring import THREADS
from clattn.bench.peers import Call, Peer
from clattn.bench.rows import Array, Problem

Arrays = dict[str, Array | None]  # None: an input that is left out


class _OnnxRuntime(Peer):
    """One node, in a session whose inputs and outputs are bound beforehand."""

    operator: str
    domain = "com.microsoft"

    def __init__(self, stack: ExitStack) -> None:
        import onnx
        import onnxruntime

        self._onnx, self._ort = onnx, onnxruntime
        self.version = f"onnxruntime {onnxruntime.__version__}"

    def _session(self, inputs: Arrays, outputs: Arrays, attributes: dict[str, Any]) -> Any:
        """Return an onnxruntime session of one node."""
        helper = self._onnx.helper

        def infos(arrays: Arrays) -> list[Any]:
            return [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in arrays.items()
                if a is not None
            ]

        names = [name if array is not None else "" for name, array in inputs.items()]
        node = helper.make_node(
            self.operator, names, list(outputs), domain=self.domain, **attributes
        )
        model = helper.make_model(
            helper.make_graph([node], "bench", infos(inputs), infos(outputs)),
            opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
            ir_version=11,
        )
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.log_severity_level = 4
        return self._ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def _call(
        self, inputs: Arrays, outputs: dict[str, Array], heads: int = 0, **attributes: Any
    ) -> Call:
        """Return the call, whose result is the first output.

        An output present_* is written in the memory of the input past_*, if there is one.
        `heads`: that many heads of the result lie side by side and are taken apart.
        """
        session = self._session(inputs, dict(outputs), attributes)
        binding = session.io_binding()
        make = self._ort.OrtValue.ortvalue_from_numpy
        values = {name: make(a) for name, a in inputs.items() if a is not None}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        written = [
            values.get(name.replace("present", "past")) or make(array)
            for name, array in outputs.items()
        ]
        for name, value in zip(outputs, written, strict=True):
            binding.bind_ortvalue_output(name, value)

        def run() -> None:
            session.run_with_iobinding(binding)

        def result() -> Array:
            run()
            array = np.asarray(written[0].numpy())
            return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2) if heads else array

        return Call(run, result)


def _join_heads(array: Array) -> Array:
    """(B, H, L, E) as (B, L, H · E)."""
    B, H, L, E = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, L, H * E)


class OnnxAttention(_OnnxRuntime):
    """ONNX Attention, opset 23."""

    name, label = "ONNX Runtime Attention", "ORT Attn"
    operator = "Attention"
    domain = ""

    def prepare(self, problem: Problem) -> Call | None:
        """Half and single precision."""
        row, query, mask = problem.row, problem.query, problem.additive_mask
        if row.dtype not in ("float32", "float16"):
            return None
        inputs: Arrays = {"Q": query, "K": problem.key, "V": problem.value, "mask": mask}
        causal = int(row.is_causal and row.window is None)
        return self._call(inputs, {"Y": np.zeros_like(query)}, is_causal=causal)


class OnnxMultiHeadAttention(_OnnxRuntime):
    """com.microsoft MultiHeadAttention."""

    name, label = "ONNX Runtime MultiHeadAttention", "ORT MHA"
    operator = "MultiHeadAttention"

    def prepare(self, problem: Problem) -> Call | None:
        """Half and single precision without grouped heads; masks are added."""
        row, mask = problem.row, problem.additive_mask
        heads = row.shape[1]
        grouped = heads != row.shape[2]
        if row.dtype not in ("float32", "float16") or grouped or row.mask == "bool":
            return None
        query, key, value = (_join_heads(a) for a in (problem.query, problem.key, problem.value))
        inputs: Arrays = {"query": query, "key": key, "value": value}
        if mask is not None:
            inputs |= {"bias": None, "padding": None, "attention_bias": mask[None, None]}
        causal = int(row.is_causal and row.window is None)
        outputs = {"Y": np.zeros_like(query)}
        return self._call(inputs, outputs, heads, num_heads=heads, unidirectional=causal)


class OnnxGroupQueryAttention(_OnnxRuntime):
    """com.microsoft GroupQueryAttention, always causal, aligned to the bottom right.

    With one query row, and all keys but one in the cache, it is plain attention.
    """

    name, label = "ONNX Runtime GroupQueryAttention", "ORT GQA"
    counts = False
    operator = "GroupQueryAttention"

    def prepare(self, problem: Problem) -> Call | None:
        """Half and single precision without masks: causal and square, or one query row."""
        row = problem.row
        B, Hq, Hk, L, S, _ = row.shape
        if row.dtype not in ("float32", "float16") or row.mask is not None:
            return None
        if not (row.is_causal and L == S) and L != 1:
            return None
        past = S - L
        new = (problem.query, problem.key[:, :, past:], problem.value[:, :, past:])
        query, key, value = map(_join_heads, new)
        inputs: Arrays = {
            "query": query,
            "key": key,
            "value": value,
            "past_key": problem.key if past else None,
            "past_value": problem.value if past else None,
            "seqlens_k": np.full(B, S - 1, np.int32),
            "total_sequence_length": np.array(S, np.int32).reshape(1),
        }
        outputs = {
            "Y": np.zeros_like(query),
            "present_key": np.zeros_like(problem.key),
            "present_value": np.zeros_like(problem.value),
        }
        attributes = {"num_heads": Hq, "kv_num_heads": Hk}
        if row.window is not None:
            attributes["local_window_size"] = row.window + 1
        return self._call(inputs, outputs, Hq, **attributes)
