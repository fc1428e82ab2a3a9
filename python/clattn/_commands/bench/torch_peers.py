"""torch as a peer of bench: on the host, and on CUDA a peer for each of its backends."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from clattn._commands.bench.peers import Call, Peer, repeated
from clattn._commands.bench.rows import Array, Problem
from clattn._commands.bench.serving import ServeRow
from clattn._commands.timing import THREADS

PRODUCT_SIZE = 8192  # rows and columns of the matrices that torch multiplies
PRODUCT_CALLS = 10


class Torch(Peer):
    """torch.nn.functional.scaled_dot_product_attention."""

    name = label = "torch"
    place = "cpu"
    backend = ""  # of torch.nn.attention.SDPBackend: it alone, and only on arrays of the device
    half_only = False
    trains = False  # records gradients

    def __init__(self, stack: ExitStack) -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.place == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        torch.set_num_threads(THREADS)
        stack.enter_context(torch.inference_mode(not self.trains))
        self._torch = torch
        self._only: Callable[[], Any] = contextlib.nullcontext
        if self.backend:
            self._only = functools.partial(sdpa_kernel, getattr(SDPBackend, self.backend))
        self.version = f"torch {torch.__version__}"

    def prepare(self, problem: Problem) -> Call | None:
        """Return calls that torch computes with the backend and no other in its place."""
        row = problem.row
        is_left_out = not row.on_device or (self.half_only and row.dtype == "float32")
        if self.backend and is_left_out:
            return None
        if isinstance(row, ServeRow):
            return self._prepare_sequences(problem, row)
        if row.trains == "backward":
            return self._prepare_backward(problem)
        tensors = [self._tensor(a) for a in (problem.query, problem.key, problem.value)]
        attend = self._attention(tensors, problem)

        def result() -> Array:
            with self._only():
                return self._array(attend().cpu(), problem.query.dtype)

        if not self.backend:
            return Call(attend, result)
        result()  # raises where the backend does not take the problem
        return repeated(self._together(attend), result)

    def _together(self, call: Callable[[], Any]) -> Callable[[int], None]:
        """Return a function of so many calls that are waited for together."""

        def run_some(count: int) -> None:
            with self._only():
                for _ in range(count):
                    call()
            if self.place == "cuda":
                self._torch.cuda.synchronize()

        return run_some

    def _prepare_backward(self, problem: Problem) -> Call:
        """Return autograd's backward pass alone, of a forward pass by the backend."""
        torch = self._torch
        with torch.inference_mode(False):
            given = (problem.query, problem.key, problem.value)
            leaves = [self._tensor(a).requires_grad_() for a in given]
            grad = self._tensor(problem.grad_output)
            with self._only():  # raises where the backend does not take the problem
                output = self._attention(leaves, problem)()

        def run() -> Any:
            with torch.inference_mode(False):
                return torch.autograd.grad(output, leaves, grad, retain_graph=True)

        def result() -> tuple[Array, ...]:
            return tuple(self._array(a.cpu(), problem.query.dtype) for a in run())

        return repeated(self._together(run), result)

    def _prepare_sequences(self, problem: Problem, row: ServeRow) -> Call | None:
        """Return a call of packed sequences; only flash attention has one."""
        return None

    def _attention(self, tensors: Sequence[Any], problem: Problem) -> Callable[[], Any]:
        row, mask = problem.row, problem.additive_mask
        return functools.partial(
            self._torch.nn.functional.scaled_dot_product_attention,
            *tensors,
            attn_mask=None if mask is None else self._tensor(mask),
            is_causal=row.is_causal_only,
            enable_gqa=row.is_grouped,
        )

    def _array(self, tensor: Any, dtype: np.dtype[Any]) -> Array:
        if dtype.name == "bfloat16":
            return np.asarray(tensor.view(self._torch.int16).numpy()).view(dtype)
        return np.asarray(tensor.numpy())

    def _tensor(self, array: Array) -> Any:
        torch = self._torch
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16).to(self.place)
        return torch.from_numpy(array).to(self.place)


class Flash(Torch):
    """torch's own FlashAttention."""

    name, label = "torch, flash attention", "flash"
    place, backend, half_only = "cuda", "FLASH_ATTENTION", True

    def _prepare_sequences(self, problem: Problem, row: ServeRow) -> Call:
        """Return varlen_attn of torch, on packed keys or on pages whose order is that of keys."""
        if row.code:
            raise NotImplementedError("varlen_attn takes no codes")
        from torch.nn.attention.varlen import varlen_attn  # of torch 2.10 and later

        torch = self._torch
        given = (problem.query, problem.key, problem.value)
        query, key, value = (self._tensor(_packed(a)) for a in given)
        ends = [torch.from_numpy(a.astype(np.int32)).to(self.place) for a in row.ends]
        longest = [max(one) for one in zip(*row.lengths, strict=True)]
        options: dict[str, Any] = {"window_size": (-1, 0)}  # aligned to the lower right
        if row.is_grouped:
            options["enable_gqa"] = True
        if row.page_size:
            lengths = [keys for _, keys in row.lengths]
            key, value = (a.unflatten(0, (-1, row.page_size)) for a in (key, value))
            pages = np.arange(len(key), dtype=np.int32).reshape(len(lengths), -1)
            options["block_table"] = torch.from_numpy(pages).to(self.place)
            options["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device=self.place)
        starts = (ends[0], None if row.page_size else ends[1])
        arguments = (query, key, value, *starts, *longest)

        def attend() -> Any:
            return varlen_attn(*arguments, **options)

        def result() -> Array:
            return self._array(attend().cpu(), problem.query.dtype).swapaxes(0, 1)[None]

        return repeated(self._together(attend), result)


class Efficient(Torch):
    """The memory-efficient backend."""

    name, label = "torch, memory-efficient attention", "efficient"
    place, backend = "cuda", "EFFICIENT_ATTENTION"


class Cudnn(Torch):
    """The backend that calls cuDNN."""

    name, label = "torch, cuDNN", "cuDNN"
    place, backend, half_only = "cuda", "CUDNN_ATTENTION", True


def _packed(array: Array) -> Array:
    """(1, H, total, E) as (total, H, E)."""
    return np.ascontiguousarray(array[0].swapaxes(0, 1))


def find_product() -> Callable[[str], float] | None:
    """Return a function that measures torch's matrix product of a dtype in FLOP/s.

    None where torch has no CUDA.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    matrices: dict[str, Any] = {}

    def measure(dtype: str) -> float:
        if dtype not in matrices:
            size = (PRODUCT_SIZE, PRODUCT_SIZE)
            matrices[dtype] = torch.randn(size, device="cuda").to(getattr(torch, dtype))
            torch.matmul(matrices[dtype], matrices[dtype])
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PRODUCT_CALLS):
            torch.matmul(matrices[dtype], matrices[dtype])
        torch.cuda.synchronize()
        return 2 * PRODUCT_SIZE**3 * PRODUCT_CALLS / (time.perf_counter() - start)

    return measure
