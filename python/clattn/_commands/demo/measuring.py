"""Error and time of the demo's problem in clattn, torch and NumPy."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from clattn import Device
from clattn._commands.bench.exact import Exact
from clattn._commands.demo.denoising import Problem, attention, numpy_attention
from clattn._commands.timing import THREADS, shortest

ERROR_ROWS = 256  # query rows that are compared with float64
NUMPY_ROWS = 16384  # query rows that NumPy computes at most; its time is scaled up


@dataclass(frozen=True)
class Timing:
    """One implementation's shortest time and its error."""

    name: str
    seconds: float
    error: float
    note: str = ""


def exact_rows(problem: Problem) -> Exact:
    """Compute rows spread over the whole problem in float64 NumPy."""
    count = len(problem.query)
    rows = np.linspace(0, count - 1, min(ERROR_ROWS, count)).astype(np.intp)
    key, value, mask = (
        array.astype(np.float64) for array in (problem.query, problem.value, problem.mask)
    )
    return Exact(rows, numpy_attention(key[rows], key, value, mask, problem.scale)[None, None])


def time_first_call(problem: Problem, device: Device) -> float:
    """Return the seconds of a call that builds the kernel.

    A few rows are enough, and keep the memory of the compiler out of the figure that is measured
    afterwards.
    """
    start = time.perf_counter()
    attention(problem, device, rows=ERROR_ROWS)
    return time.perf_counter() - start


def time_clattn(problem: Problem, device: Device, exact: Exact) -> Timing:
    """Time clattn."""
    error = exact.error(attention(problem, device)[None, None])
    return Timing("clattn", shortest(lambda: attention(problem, device)), error)


def time_torch(problem: Problem, exact: Exact) -> Timing | None:
    """Time torch with as many threads as there are cores; None if torch is missing."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(THREADS)
    # torch's fused kernel wants four dimensions and values as wide as the keys; without the padding
    # torch holds all scores at once and takes several times as long.
    query, value, mask = (
        torch.from_numpy(array)[None, None]
        for array in (problem.query, problem.value, problem.mask)
    )
    columns = value.shape[-1]
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - columns))

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, query, value, attn_mask=mask, scale=problem.scale
        )

    with torch.inference_mode():
        error = exact.error(call()[..., :columns].numpy())
        seconds = shortest(call)
    return Timing(f"torch {torch.__version__}", seconds, error, f"{THREADS} threads")


def time_numpy(problem: Problem, exact: Exact) -> Timing:
    """Time NumPy in float32, once; for a large problem only the first rows."""
    count = len(problem.query)
    timed = min(count, NUMPY_ROWS)
    key, value, mask, scale = problem.query, problem.value, problem.mask, problem.scale
    start = time.perf_counter()
    numpy_attention(key[:timed], key, value, mask, scale)
    seconds = (time.perf_counter() - start) * count / timed
    sample = numpy_attention(key[exact.rows], key, value, mask, scale)
    error = float(np.abs(sample - exact.result).max())
    note = f"scaled up from {timed:,} rows" if timed < count else ""
    return Timing("NumPy float32", seconds, error, note)
