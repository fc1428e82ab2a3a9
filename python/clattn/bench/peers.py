"""Other implementations that bench times where they are installed. None is needed."""

import functools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clattn._measuring import THREADS
from clattn.bench.rows import Array, Problem

BATCH_SECONDS = 0.01  # of calls that are waited for together
MOST_CALLS = 100


@dataclass(frozen=True)
class Call:
    """A problem, prepared: `run` is timed, `result` gives its array (B, Hq, L, E)."""

    run: Callable[[], object]
    result: Callable[[], Array]
    count: int = 1  # how many calls `run` makes


def repeated(run_some: Callable[[int], object], result: Callable[[], Array]) -> Call:
    """Return a Call of several calls that are waited for together.

    `run_some` makes so many of them. Waiting for each would time the wait as well.
    """
    run_some(1)
    start = time.perf_counter()
    run_some(1)
    seconds = time.perf_counter() - start
    count = min(MOST_CALLS, max(1, math.ceil(BATCH_SECONDS / seconds)))
    return Call(lambda: run_some(count), result, count)


def first_line(error: Exception) -> str:
    """Return the beginning of what an exception says, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


class Peer(Protocol):
    """One implementation. Making it raises ImportError where its package is missing."""

    name: str
    label: str  # a table's column
    counts: bool  # is it one of those that the best peer is chosen from?

    @property
    def version(self) -> str:
        """The package and its version."""

    def prepare(self, problem: Problem) -> Call | None:
        """Return the call of a problem, with all conversion done; None: not supported."""


def torch_arguments(
    problem: Problem, tensor: Callable[[Array], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return query, key and value, and the keywords, of torch's function."""
    row = problem.row
    mask = problem.additive_mask
    options = {
        "attn_mask": None if mask is None else tensor(mask),
        "is_causal": row.is_causal and row.window is None,
        "enable_gqa": row.shape[1] != row.shape[2],
    }
    return [tensor(a) for a in (problem.query, problem.key, problem.value)], options


class Torch:
    """torch.nn.functional.scaled_dot_product_attention."""

    name = "torch"
    label = "torch"
    counts = True

    def __init__(self, stack: ExitStack) -> None:
        import torch

        torch.set_num_threads(THREADS)
        stack.enter_context(torch.inference_mode())
        self._torch = torch
        self.version = f"torch {torch.__version__}"

    def prepare(self, problem: Problem) -> Call:
        """As for every Peer."""
        tensors, options = torch_arguments(problem, self._tensor)
        attend = self._torch.nn.functional.scaled_dot_product_attention

        def run() -> Any:
            return attend(*tensors, **options)

        def result() -> Array:
            output = run()
            is_bfloat16 = problem.row.dtype == "bfloat16"
            array = (output.view(self._torch.int16) if is_bfloat16 else output).numpy()
            return np.asarray(array).view(problem.query.dtype)

        return Call(run, result)

    def _tensor(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view("int16")).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)


class Jax:
    """jax.nn.dot_product_attention, compiled."""

    name = "JAX"
    label = "JAX"
    counts = True

    def __init__(self, stack: ExitStack) -> None:
        del stack
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        self._jax = jax
        self.version = f"jax {jax.__version__}"

    def prepare(self, problem: Problem) -> Call:
        """As for every Peer. JAX wants (B, L, H, E)."""
        row, jax = problem.row, self._jax
        arrays = [
            jax.numpy.asarray(a.swapaxes(1, 2)) for a in (problem.query, problem.key, problem.value)
        ]
        options: dict[str, Any] = {"is_causal": row.is_causal}
        if row.window is not None:
            options["local_window_size"] = (row.window, 0)
        if row.mask is not None:
            word = "bias" if row.mask == "float" else "mask"
            options[word] = jax.numpy.asarray(problem.mask)[None, None]
        named = {name: value for name, value in options.items() if name in ("bias", "mask")}
        fixed = {name: value for name, value in options.items() if name not in named}

        attend = jax.jit(functools.partial(jax.nn.dot_product_attention, **fixed))

        def run() -> Any:
            return attend(*arrays, **named).block_until_ready()

        return Call(run, lambda: np.asarray(run().swapaxes(1, 2)))
