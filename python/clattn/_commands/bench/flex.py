"""Scores and masks that the user writes, for ``bench --flex``: beside torch's FlexAttention.

First calls, and the memory of a block mask, come from processes of their own: what a process has
built or allocated before would hide them.
"""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import clattn
from clattn import Device
from clattn._commands.bench import torch_peers
from clattn._commands.bench.peers import Call
from clattn._commands.bench.rows import Array, Problem, Row, draw
from clattn._commands.timing import measure_memory, shortest

ROW_SECONDS = 10.0  # after which a row gets no more rounds
# Where programs find the folders of their caches.
CACHES = "XDG_CACHE_HOME", "POCL_CACHE_DIR", "CUDA_CACHE_PATH"
MASK_LENGTH = 32768  # of the block mask that is timed
WARM_LENGTH = 4096  # of one that loads everything before
# Where the documents of a row end, as shares of its length.
ENDS = (0.03, 0.11, 0.25, 0.3, 0.5, 0.56, 0.79, 1)


@dataclass(frozen=True)
class FlexRow(Row):
    """A row whose score and mask are functions that the user writes.

    The mask sees what `is_causal` and `window` say, or, with `documents`, the keys of the query's
    own document. `alibi`: a slope of the head times the distance is added to a score.
    """

    limit: Literal["scores"] = "scores"
    alibi: bool = False
    documents: bool = False
    with_first: bool = True  # its first call is measured too

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, of all heads."""
        return self.shape[0] * self.shape[1] * int(self.attended().sum())

    @property
    def slopes(self) -> NDArray[np.float32]:
        """The slope of each head, (Hq,)."""
        return np.exp2(-np.arange(1, self.shape[1] + 1, dtype=np.float32))

    @property
    def document_of(self) -> NDArray[np.int32]:
        """The number of each position's document."""
        length = self.shape[3]
        ends = (np.array(ENDS) * length).astype(int)
        return np.searchsorted(ends, np.arange(length), side="right").astype(np.int32)

    def attended(self, rows: NDArray[np.intp] | None = None, batch: int = 0) -> NDArray[np.bool_]:
        """Return which keys some query rows see: (rows, S)."""
        seen = super().attended(rows, batch)
        if self.documents:
            number = self.document_of
            seen &= (number if rows is None else number[rows])[:, None] == number
        return seen

    def bias(self, rows: NDArray[np.intp]) -> Array | None:
        """Return what ALiBi adds to the scores of some query rows: (Hq, rows, S)."""
        distance = self.bias_by_slope(rows)
        return None if distance is None else self.slopes[:, None, None] * distance

    def bias_by_slope(self, rows: NDArray[np.intp]) -> Array | None:
        """Return the distance of key and query: (rows, S)."""
        if not self.alibi:
            return None
        return (np.arange(self.shape[4]) - rows[:, None]).astype(np.float32)

    @property
    def own(self) -> dict[str, Any] | None:
        """Options that see the row's keys without functions; None: there are none, or no need."""
        if self.documents or not (self.alibi or self.is_causal):
            return None
        if self.window is not None:
            return {"window": (self.window, 0)}
        return {"is_causal": bool(self.is_causal)}


def _rows(suffix: str, length: int, **options: Any) -> tuple[FlexRow, ...]:
    shape = (1, 8, 8, length, length, 64)
    causal = FlexRow(f"causal{suffix}", shape, is_causal=True, **options)
    return (
        FlexRow(f"plain{suffix}", shape, **options),
        FlexRow(f"alibi{suffix}", shape, alibi=True, **options),
        causal,
        replace(causal, name=f"alibi-causal{suffix}", alibi=True),
        replace(causal, name=f"window{suffix}", window=256),
        FlexRow(f"documents{suffix}", shape, documents=True, **options),
    )


FLEX_ROWS = (*_rows("", 2048), *_rows("-8k", 8192, with_first=False))
FLEX_TRAIN_ROW = FlexRow("train-alibi", (1, 8, 8, 1024, 1024, 64), alibi=True, trains=True)


def make_alibi(slopes: Any) -> Callable[..., Any]:
    """Return a score_mod that adds a head's slope times the distance of key and query."""

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def make_mods(
    row: FlexRow, place: Callable[[Array], Any]
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return new functions of a row, score and mask, that torch takes too.

    `place` puts a captured array where the library reads it.
    """
    number, width = place(row.document_of), row.window

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return number[q_idx] == number[kv_idx]

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    score_mod = make_alibi(place(row.slopes)) if row.alibi else None
    if row.documents:
        return score_mod, documents
    if row.window is not None:
        return score_mod, window
    return score_mod, causal if row.is_causal else None


def flex_calls(problem: Problem, device: Device) -> tuple[Call, dict[str, Call]]:
    """Return clattn's call with functions, and its own call without, see `FlexRow.own`."""
    row = problem.row
    assert isinstance(row, FlexRow)
    score_mod, mask_mod = make_mods(row, lambda array: clattn.tensor(array, device))
    block_mask = None
    if mask_mod is not None:
        block_mask = clattn.create_block_mask(mask_mod, None, None, *row.shape[3:5], device)
    arrays = (problem.query, problem.key, problem.value)
    run = functools.partial(clattn.flex_attention, *arrays, score_mod, block_mask, device=device)
    if row.own is None:
        return Call(run, run), {}
    attend = clattn.scaled_dot_product_attention
    own = functools.partial(attend, *arrays, device=device, **row.own)
    return Call(run, run), {"own": Call(own, own)}


class TorchFlex(torch_peers.Torch):
    """torch.nn.attention.flex_attention, compiled for each row, with an empty cache."""

    name = "torch's FlexAttention, compiled"

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        from torch.nn.attention import flex_attention

        compiler = (os.environ.get("CXX") or "g++").split()[0]
        if shutil.which(compiler) is None:
            raise RuntimeError(f"torch.compile needs a C++ compiler, and there is no {compiler}")
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(folder)
        stack.callback(os.environ.pop, "TORCHINDUCTOR_CACHE_DIR", None)
        self._flex = flex_attention

    def prepare(self, problem: Problem) -> Call:
        """Compile for this row's functions and lengths, with its block mask."""
        row = problem.row
        assert isinstance(row, FlexRow)
        tensors = [self._tensor(a) for a in (problem.query, problem.key, problem.value)]
        score_mod, mask_mod = make_mods(row, self._tensor)
        block_mask = None
        if mask_mod is not None:
            # Not compiled: that takes seconds, and makes no other mask.
            block_mask = self._flex.create_block_mask(
                mask_mod, None, None, *row.shape[3:5], device="cpu"
            )
        attend = functools.partial(
            self.compile(), *tensors, score_mod=score_mod, block_mask=block_mask
        )
        return Call(attend, lambda: np.asarray(attend().numpy()))

    def compile(self) -> Any:
        """Return torch's function, compiled."""
        # torch compiles a function for eight kinds of arguments, and then no more: it forgets.
        self._torch.compiler.reset()
        return self._torch.compile(self._flex.flex_attention, dynamic=False)


@dataclass(frozen=True)
class MaskCost:
    """The cost of a block mask; memory in bytes beyond the result, None: not known."""

    length: int
    seconds: float
    memory: int | None

    def __str__(self) -> str:
        text = f"create_block_mask, {self.length} x {self.length}: {self.seconds * 1e3:.3g} ms"
        return text if self.memory is None else f"{text}, {self.memory / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Alone:
    """What child processes measure; `missing` says what they could not, and why.

    `mask` is None for torch.
    """

    first: dict[str, float]  # seconds of a first call, by row
    mask: MaskCost | None
    missing: dict[str, str]


def measure_alone(words: str, rows: Sequence[Row], divisor: int) -> Alone:
    """Measure first calls of rows, and a block mask, each in a process without caches.

    `words` name a device, or are `TorchFlex.label`.
    """
    first: dict[str, float] = {}
    missing: dict[str, str] = {}

    def ask(what: str, *arguments: str) -> Any:
        command = [sys.executable, "-m", "clattn._commands.bench.flex", words, *arguments]
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | dict.fromkeys(CACHES, folder)
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        missing[what] = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
        return None

    for row in rows:
        if isinstance(row, FlexRow) and row.with_first:
            seconds = ask(f"{row.name}, first call", row.name, str(divisor))
            first |= {} if seconds is None else {row.name: seconds}
    mask = None
    if words != TorchFlex.label:
        mask = ask("create_block_mask", "", str(divisor))
    return Alone(first, None if mask is None else MaskCost(*mask), missing)


def _first_call(words: str, row: FlexRow) -> float:
    """Return the seconds to a first result, block mask and start of driver or compiler included."""
    problem = draw(row)
    with ExitStack() as stack:
        if words == TorchFlex.label:
            torch = TorchFlex(stack)
            start = time.perf_counter()
            torch.prepare(problem).run()
        else:
            start = time.perf_counter()
            device = stack.enter_context(clattn.use_device(words))
            flex_calls(problem, device)[0].run()
        return time.perf_counter() - start


def _mask_cost(words: str, length: int) -> tuple[int, float, int | None]:
    """Return the length, the seconds, and the bytes beyond the result of a causal block mask."""
    _, causal = make_mods(FlexRow("", (1, 1, 1, 1, 1, 1), is_causal=True), np.asarray)
    assert causal is not None
    with clattn.use_device(words) as device:

        def make(size: int = length) -> clattn.BlockMask:
            mask = clattn.create_block_mask(causal, None, None, size, size)
            clattn.synchronize(device)
            return mask

        make(min(WARM_LENGTH, length))
        before = clattn.memory_stats(device)["allocated_bytes"]
        mask, memory = measure_memory(make)
        if device.type != "cpu":
            memory = clattn.memory_stats(device)["peak_bytes"] - before
        if memory is not None:
            memory = max(0, memory - mask.entries.nbytes)
        return length, shortest(make, 1.0, 3, math.inf), memory


def main(words: str, name: str, divisor: int) -> int:
    """Print the seconds of a row's first call, or the cost of a block mask, as JSON."""
    if name:
        [row] = [row for row in FLEX_ROWS if row.name == name]
        print(json.dumps(_first_call(words, row.scaled(divisor))))
    else:
        print(json.dumps(_mask_cost(words, max(1, MASK_LENGTH // divisor))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
