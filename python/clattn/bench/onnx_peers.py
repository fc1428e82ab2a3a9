"""ONNX Runtime's operators as peers of bench."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from clattn._measuring import THREADS
from clattn.bench.peers import Call
from clattn.bench.rows import Array, Problem


class _OnnxRuntime:
    """One node, in a session whose inputs and outputs are bound beforehand."""

    operator: str
    domain = "com.microsoft"

    def __init__(self, stack: ExitStack) -> None:
        del stack
        import onnx
        import onnxruntime

        self._onnx, self._ort = onnx, onnxruntime
        self.version = f"onnxruntime {onnxruntime.__version__}"

    def _session(self, inputs: dict[str, Any], outputs: dict[str, Any], **attributes: Any) -> Any:
        """Return an onnxruntime session of one node; an empty name is an input left out."""
        helper = self._onnx.helper

        def infos(arrays: dict[str, Array]) -> list[Any]:
            return [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape
                )
                for name, a in arrays.items()
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
        self,
        inputs: dict[str, Array | None],
        outputs: dict[str, Array],
        shared: dict[str, str] | None = None,
        **attributes: Any,
    ) -> Call:
        """Return the call, whose result is the first output.

        `shared`: outputs that are written in the memory of an input.
        """
        session = self._session(inputs, outputs, **attributes)
        binding = session.io_binding()
        make = self._ort.OrtValue.ortvalue_from_numpy
        values = {name: make(a) for name, a in inputs.items() if a is not None}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        written = {
            name: values[shared[name]] if shared and name in shared else make(array)
            for name, array in outputs.items()
        }
        for name, value in written.items():
            binding.bind_ortvalue_output(name, value)
        output = written[next(iter(outputs))]

        def run() -> None:
            session.run_with_iobinding(binding)

        def result() -> Array:
            run()
            return np.asarray(output.numpy())

        return Call(run, result)


def _join_heads(array: Array) -> Array:
    """(B, H, L, E) as (B, L, H · E)."""
    B, H, L, E = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, L, H * E)


def _split_heads(call: Call, heads: int) -> Call:
    """Return the call with its result (B, L, H · E) as (B, H, L, E)."""

    def result() -> Array:
        joined = call.result()
        B, L, width = joined.shape
        return joined.reshape(B, L, heads, width // heads).swapaxes(1, 2)

    return Call(call.run, result)


class OnnxAttention(_OnnxRuntime):
    """ONNX Attention, opset 23."""

    name = "ONNX Runtime Attention"
    label = "ORT Attn"
    counts = True
    operator = "Attention"
    domain = ""

    def prepare(self, problem: Problem) -> Call | None:
        """As for every Peer."""
        row = problem.row
        if row.dtype not in ("float32", "float16"):
            return None
        inputs = {
            "Q": problem.query,
            "K": problem.key,
            "V": problem.value,
            "mask": problem.additive_mask,
        }
        causal = int(row.is_causal and row.window is None)
        return self._call(inputs, {"Y": np.zeros_like(problem.query)}, is_causal=causal)


class OnnxMultiHeadAttention(_OnnxRuntime):
    """com.microsoft MultiHeadAttention."""

    name = "ONNX Runtime MultiHeadAttention"
    label = "ORT MHA"
    counts = True
    operator = "MultiHeadAttention"

    def prepare(self, problem: Problem) -> Call | None:
        """As for every Peer. Heads are not grouped; masks are added."""
        row = problem.row
        heads = row.shape[1]
        grouped = heads != row.shape[2]
        if row.dtype not in ("float32", "float16") or grouped or row.mask == "bool":
            return None
        mask = problem.additive_mask
        query, key, value = (_join_heads(a) for a in (problem.query, problem.key, problem.value))
        inputs: dict[str, Array | None] = {"query": query, "key": key, "value": value}
        if mask is not None:
            inputs |= {"bias": None, "padding": None, "attention_bias": mask[None, None]}
        causal = int(row.is_causal and row.window is None)
        call = self._call(
            inputs, {"Y": np.zeros_like(query)}, num_heads=heads, unidirectional=causal
        )
        return _split_heads(call, heads)


class OnnxGroupQueryAttention(_OnnxRuntime):
    """com.microsoft GroupQueryAttention, always causal, aligned to the bottom right.

    With one query row, whose keys are all but one in the cache, that is plain attention.
    """

    name = "ONNX Runtime GroupQueryAttention"
    label = "ORT GQA"
    counts = False
    operator = "GroupQueryAttention"

    def prepare(self, problem: Problem) -> Call | None:
        """As for every Peer."""
        row = problem.row
        B, Hq, Hk, L, S, _ = row.shape
        if row.dtype not in ("float32", "float16") or row.mask is not None:
            return None
        if not (row.is_causal and L == S) and L != 1:
            return None
        past = S - L
        query, key, value = (
            _join_heads(a)
            for a in (problem.query, problem.key[:, :, past:], problem.value[:, :, past:])
        )
        inputs: dict[str, Array | None] = {"query": query, "key": key, "value": value}
        inputs |= {
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
        shared = {"present_key": "past_key", "present_value": "past_value"} if past else None
        call = self._call(inputs, outputs, shared, **attributes)
        return _split_heads(call, Hq)
