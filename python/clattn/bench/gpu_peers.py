"""torch on CUDA as peers of ``bench --gpu``, a peer for each of its ways to do attention."""

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from clattn.bench.peers import Call, repeated, torch_arguments
from clattn.bench.rows import Array, Problem

PRODUCT_SIZE = 8192  # rows and columns of the matrices that torch multiplies
PRODUCT_CALLS = 10


class _TorchCuda:
    """scaled_dot_product_attention with one backend and no other in its place."""

    name: str
    label: str
    backend: str  # of torch.nn.attention.SDPBackend
    half_only = False
    counts = True
    place = "cuda"

    def __init__(self, stack: ExitStack) -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.place == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        stack.enter_context(torch.inference_mode())
        self._torch = torch
        self._only: Any = functools.partial(sdpa_kernel, getattr(SDPBackend, self.backend))
        self.version = f"torch {torch.__version__}"

    def prepare(self, problem: Problem) -> Call | None:
        """As for every Peer. Rows on the host's arrays are for clattn alone."""
        row = problem.row
        if not row.on_device or (self.half_only and row.dtype == "float32"):
            return None
        tensors, options = torch_arguments(problem, self._tensor)
        attend: Any = self._torch.nn.functional.scaled_dot_product_attention
        bind, wait = self._only, self._wait

        def start() -> Any:
            return attend(*tensors, **options)

        def run_some(count: int) -> None:
            with bind():
                for _ in range(count):
                    start()
            wait()

        def result() -> Array:
            with bind():
                output = start().cpu()
            is_bfloat16 = row.dtype == "bfloat16"
            array = (output.view(self._torch.int16) if is_bfloat16 else output).numpy()
            return np.asarray(array).view(problem.query.dtype)

        result()  # raises where the backend does not take the problem
        return repeated(run_some, result)

    def _wait(self) -> None:
        if self.place == "cuda":
            self._torch.cuda.synchronize()

    def _tensor(self, array: Array) -> Any:
        torch = self._torch
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16).to(self.place)
        return torch.from_numpy(array).to(self.place)


class Flash(_TorchCuda):
    """FlashAttention, as torch has it."""

    name = "torch, flash attention"
    label = "flash"
    backend = "FLASH_ATTENTION"
    half_only = True


class Efficient(_TorchCuda):
    """The memory-efficient backend."""

    name = "torch, memory-efficient attention"
    label = "efficient"
    backend = "EFFICIENT_ATTENTION"


class Cudnn(_TorchCuda):
    """The backend that calls cuDNN."""

    name = "torch, cuDNN"
    label = "cuDNN"
    backend = "CUDNN_ATTENTION"
    half_only = True


def peer_classes() -> list[Any]:
    """Return the classes of all peers on GPUs, in the order of the table."""
    return [Flash, Efficient, Cudnn]


def find_product() -> Callable[[str], float] | None:
    """Return what measures torch's matrix product of a dtype in FLOP/s; None: no CUDA."""
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
            matrices[dtype] @ matrices[dtype]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PRODUCT_CALLS):
            matrices[dtype] @ matrices[dtype]
        torch.cuda.synchronize()
        return 2 * PRODUCT_SIZE**3 * PRODUCT_CALLS / (time.perf_counter() - start)

    return measure
