"""Other implementations that bench times where they are installed. None is needed.

Each is a Peer: OpenVINO and JAX here, torch in torch_peers.py, ONNX Runtime in onnx_peers.py.
"""

import functools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from clattn._commands.bench.rows import Array, Problem
from clattn._commands.timing import THREADS

BATCH_SECONDS = 0.01  # of calls that are waited for together
MOST_CALLS = 100


@dataclass(frozen=True)
class Call:
    """A prepared problem: `run` is timed, `result` returns its array (B, Hq, L, E).

    Of a row of training the result is a tuple: the gradients of query, key and value, and of what
    else has one.
    """

    run: Callable[[], object]
    result: Callable[[], Any]
    count: int = 1  # how many calls `run` makes


def repeated(run_some: Callable[[int], object], result: Callable[[], Any]) -> Call:
    """Return a Call of several calls that are waited for together.

    `run_some(n)` makes n calls. A wait after each call would be timed too.
    """
    run_some(1)
    start = time.perf_counter()
    run_some(1)
    seconds = time.perf_counter() - start
    count = min(MOST_CALLS, max(1, math.ceil(BATCH_SECONDS / seconds)))
    return Call(lambda: run_some(count), result, count)


def first_line(error: Exception) -> str:
    """Return the beginning of an exception's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def joined_heads(array: Array) -> Array:
    """(B, H, L, E) as (B, L, H · E)."""
    B, H, L, E = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, L, H * E)


def split_heads(array: Array, heads: int) -> Array:
    """(B, L, H · E) as (B, H, L, E)."""
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def as_4d(mask: Array) -> Array:
    """(L, S) as (1, 1, L, S)."""
    return mask if mask.ndim == 4 else mask[None, None]


class Peer:
    """One implementation. Its constructor raises ImportError where its package is missing."""

    name: ClassVar[str]
    label: ClassVar[str]  # a table's column
    version: str  # the package and its version

    def __init__(self, stack: ExitStack) -> None:
        """Import the package; `stack` closes the contexts of the peer after its last call."""

    def prepare(self, problem: Problem) -> Call | None:
        """Return the call of a problem, with all conversion done; None: not supported."""
        raise NotImplementedError


class Jax(Peer):
    """jax.nn.dot_product_attention, compiled."""

    name = label = "JAX"

    def __init__(self, stack: ExitStack) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        self._jax = jax
        self.version = f"jax {jax.__version__}"

    def prepare(self, problem: Problem) -> Call:
        """Return the compiled call; JAX takes arrays (B, L, H, E)."""
        row, jax = problem.row, self._jax
        arrays = [
            jax.numpy.asarray(a.swapaxes(1, 2)) for a in (problem.query, problem.key, problem.value)
        ]
        fixed: dict[str, Any] = {"is_causal": row.is_causal is True and not row.is_padded}
        if row.window is not None:
            fixed["local_window_size"] = (row.window, 0)
        mask = problem.mask if row.window is not None else problem.additive_mask
        masks: dict[str, Any] = {}
        if mask is not None:
            masks["mask" if mask.dtype == bool else "bias"] = jax.numpy.asarray(as_4d(mask))
        attend = jax.jit(functools.partial(jax.nn.dot_product_attention, **fixed))

        def run() -> Any:
            return attend(*arrays, **masks).block_until_ready()

        return Call(run, lambda: np.asarray(run().swapaxes(1, 2)))


class OpenVino(Peer):
    """A compiled model of one ScaledDotProductAttention node on OpenVINO's CPU device."""

    name = label = "OpenVINO"

    def __init__(self, stack: ExitStack) -> None:
        import openvino

        self._ov: Any = openvino
        self._core = openvino.Core()
        self.version = f"openvino {openvino.__version__.partition('-')[0]}"

    def prepare(self, problem: Problem) -> Call | None:
        """Return None for float64, which the node computes in float32.

        The node has no grouped heads: they need rows that are all alike.
        """
        row, mask = problem.row, problem.additive_mask
        if row.dtype == "float64" or (row.is_grouped and (mask is not None or row.is_causal)):
            return None
        arrays = [problem.query, problem.key, problem.value]
        if row.layout != "heads":  # (B, L, H, E), which the model transposes
            arrays = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
        output = np.zeros_like(arrays[0])
        if mask is not None:
            arrays.append(mask)
        request = self._compile(arrays, problem).create_infer_request()
        tensors = [self._tensor(array) for array in arrays]
        self._shared = arrays  # a request does not keep them alive
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)
        request.set_output_tensor(0, self._tensor(output))

        def run() -> None:
            request.infer(share_inputs=True, share_outputs=True)

        def result() -> Array:
            run()
            return output if row.layout == "heads" else output.swapaxes(1, 2)

        return Call(run, result)

    def _compile(self, arrays: list[Array], problem: Problem) -> Any:
        opset, row = self._ov.opset13, problem.row

        def reshape(node: Any, shape: tuple[int, ...]) -> Any:
            return opset.reshape(node, np.array(shape, np.int64), special_zero=False)

        def transpose(node: Any) -> Any:
            return opset.transpose(node, np.array([0, 2, 1, 3], np.int64))

        inputs = [opset.parameter(array.shape, self._type(array)) for array in arrays]
        query, key, value = inputs[:3]
        if row.layout != "heads":
            query, key, value = transpose(query), transpose(key), transpose(value)
        if row.is_grouped:  # without a mask, the rows of a group's heads are rows of one head
            B, Hq, Hk, L, _, E = row.shape
            query = reshape(query, (B, Hk, Hq // Hk * L, E))
        node = opset.scaled_dot_product_attention(
            query, key, value, *inputs[3:], causal=row.is_causal_only
        )
        if row.is_grouped:
            node = reshape(node, problem.query.shape)
        if row.layout != "heads":
            node = transpose(node)
        settings = {
            "INFERENCE_NUM_THREADS": THREADS,
            "PERFORMANCE_HINT": "LATENCY",
            # By default float32 is computed in bfloat16 where the processor has it.
            "INFERENCE_PRECISION_HINT": "bf16" if row.dtype == "bfloat16" else "f32",
        }
        return self._core.compile_model(self._ov.Model([node], inputs, "bench"), "CPU", settings)

    def _type(self, array: Array) -> Any:
        return self._ov.Type.bf16 if array.dtype.name == "bfloat16" else self._ov.Type(array.dtype)

    def _tensor(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            shape = self._ov.Shape(array.shape)
            return self._ov.Tensor(array.view(np.uint16), shape, self._ov.Type.bf16)
        return self._ov.Tensor(array, shared_memory=True)
