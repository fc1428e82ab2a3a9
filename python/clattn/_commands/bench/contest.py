"""Time and error of a row in every implementation, measured in turn."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import clattn
from clattn import Device
from clattn._commands.bench import onnx_peers, peers, torch_peers
from clattn._commands.bench.exact import PEER_FACTOR, exact_rows
from clattn._commands.bench.exact_gradients import exact_gradients
from clattn._commands.bench.limits import Limits
from clattn._commands.bench.peers import Call, Peer, first_line, joined_heads, repeated, split_heads
from clattn._commands.bench.rows import Array, Problem, Row, contiguous, draw
from clattn._commands.timing import take_turns

Beside = tuple[str, str]  # the words of a device, and the name of another call of clattn's
LEAST_ROUNDS = 2  # of a row that takes longer than it should

# Makes clattn's call of a problem, and those that it stands beside, by name.
MakeCalls = Callable[[Problem, Device], tuple[Call, dict[str, Call]]]


@dataclass(frozen=True)
class Contestants:
    """Everything that is timed: devices by the words that choose them, and peers."""

    devices: dict[str, Device]
    peers: Sequence[Peer]
    limits: dict[str, Limits]
    missing: dict[str, str]  # why a peer is not there

    def all_missing(self) -> dict[str, str]:
        """Return why peers, and limits of devices, are not there; a driver may fail meanwhile."""
        return self.missing | {
            f"limits of {words}": limits.missing
            for words, limits in self.limits.items()
            if limits.missing
        }


@dataclass
class Measured:
    """The results of a row, by device words and peers' labels."""

    row: Row
    allowed: float
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # whose error is too large
    failed: dict[str, str] = field(default_factory=dict)  # devices that gave no result, and why
    notes: list[str] = field(default_factory=list)
    best: str | None = None  # the label of the fastest peer
    limits: dict[str, float] = field(default_factory=dict)  # FLOP/s or bytes/s, by device
    # Seconds by device: of the calls of clattn that the row is compared with, or, in a row of
    # training, of the backward pass alone ("backward").
    beside: dict[str, dict[str, float]] = field(default_factory=dict)

    def ratio(self, words: str, peer: str) -> float:
        """Return a peer's time divided by clattn's on a device."""
        return self.seconds[peer] / self.seconds[words]

    def rate(self, name: str) -> float:
        """Return the work of a second, in bytes or FLOP."""
        return self.row.work / self.seconds[name]

    def limit_share(self, words: str) -> float | None:
        """Return how near a device is to its limit, 1 at most; None: the limit is not known."""
        if not self.limits[words]:
            return None
        if self.row.trains is True:
            return self.row.backward_flop / self.beside[words]["backward"] / self.limits[words]
        return self.rate(words) / self.limits[words]


def peer_classes(on_gpu: bool = False) -> list[type[Peer]]:
    """Return the classes of all peers, in the order of the table."""
    if on_gpu:
        return [torch_peers.Flash, torch_peers.Efficient, torch_peers.Cudnn]
    return [
        torch_peers.Torch,
        onnx_peers.OnnxAttention,
        onnx_peers.OnnxMultiHeadAttention,
        peers.OpenVino,
        peers.Jax,
    ]


def find_peers(
    stack: ExitStack, classes: Sequence[type[Peer]]
) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that are installed, and why the others are not there."""
    found: list[Peer] = []
    missing = {}
    for make in classes:
        try:
            found.append(make(stack))
        except ImportError as error:
            missing[make.label] = f"{error.name or error} is not installed"
        except Exception as error:  # a package that is there and broken
            missing[make.label] = first_line(error)
    return found, missing


def clattn_call(problem: Problem, device: Device) -> Call:
    """Return clattn's call on a device, as a user writes it."""
    row = problem.row
    if row.door == "onnx":
        return _onnx_call(problem, device)
    if row.door == "directml":
        return _directml_call(problem, device)

    def place(array: Array) -> Any:
        return clattn.tensor(array, device) if row.on_device else array

    query, key, value = (place(a) for a in (problem.query, problem.key, problem.value))
    mask = None if problem.mask is None else place(problem.mask)
    options: dict[str, Any] = {
        "is_causal": row.is_causal if not row.is_padded else False,
        "enable_gqa": row.is_grouped,
        "window": None if row.window is None else (row.window, 0),
        "device": device,
    }

    def run() -> Any:
        return clattn.scaled_dot_product_attention(query, key, value, mask, **options)

    def run_some(count: int) -> None:
        for _ in range(count):
            run()
        clattn.synchronize(device)

    if row.on_device:
        return repeated(run_some, lambda: np.asarray(run()))
    return Call(run, run)


def _onnx_call(problem: Problem, device: Device) -> Call:
    """Return clattn.onnx.attention on projections (B, L, H * E)."""
    _, Hq, Hk, _, _, _ = problem.row.shape
    arrays = [joined_heads(a) for a in (problem.query, problem.key, problem.value)]

    def run() -> Any:
        return clattn.onnx.attention(*arrays, q_num_heads=Hq, kv_num_heads=Hk, device=device)

    return Call(run, lambda: split_heads(run()[0], Hq))


def _directml_call(problem: Problem, device: Device) -> Call:
    """Return clattn.directml.multihead_attention on one stacked array (B, L, H, 3, E)."""
    B, H, _, L, _, E = problem.row.shape
    assert problem.query.base is not None
    stacked = problem.query.base.reshape(B, L, H, 3, E)

    def run() -> Any:
        return clattn.directml.multihead_attention(
            stacked_query_key_value=stacked, scale=E**-0.5, head_count=H, device=device
        )

    return Call(run, lambda: split_heads(run()[0], H))


def clattn_calls(problem: Problem, device: Device) -> tuple[Call, dict[str, Call]]:
    """Return clattn's call, and, for a row of views, its function on contiguous copies."""
    call = clattn_call(problem, device)
    if problem.row.is_plain:
        return call, {}
    return call, {"contiguous": clattn_call(contiguous(problem), device)}


def measure(
    row: Row,
    contestants: Contestants,
    rounds: int,
    make_calls: MakeCalls = clattn_calls,
    seconds: float = math.inf,
) -> Measured:
    """Check a row, then time it in rounds, all in turn.

    No round but the first two begins after so many `seconds`.
    """
    measured, calls = _check(row, contestants, make_calls)
    runs = {name: call.run for name, call in calls.items()}
    best = dict.fromkeys(runs, math.inf)
    measured.limits = {words: 0.0 for words in contestants.devices if words in runs}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        for words, limit in measured.limits.items():
            measured.limits[words] = max(limit, contestants.limits[words].measure(row))
        take_turns(runs, best)
    for name, call in calls.items():
        if isinstance(name, str):
            measured.seconds[name] = best[name] / call.count
        else:
            measured.beside.setdefault(name[0], {})[name[1]] = best[name] / call.count
    labels = [peer.label for peer in contestants.peers if peer.label in runs]
    measured.best = min(labels, key=lambda label: measured.seconds[label], default=None)
    return measured


def _check(
    row: Row, contestants: Contestants, make_calls: MakeCalls
) -> tuple[Measured, dict[str | Beside, Call]]:
    """Return the errors of everything that runs the row, and the calls to be timed.

    A peer that fails, or whose result is wrong, is left out with a note.
    """
    problem = draw(row)
    exact = exact_gradients(problem) if row.trains else exact_rows(problem)
    measured = Measured(row, exact.allowed)
    calls: dict[str | Beside, Call] = {}
    for words, device in contestants.devices.items():
        if row.dtype == "float64" and not device.float64:
            continue
        try:
            call, beside = make_calls(problem, device)
            result = call.result()
            for other in beside.values():
                other.run()  # the first one may prepare something
        except (clattn.DeviceError, MemoryError, ValueError) as failure:
            measured.failed[words] = first_line(failure)
            continue
        calls[words], measured.errors[words] = call, exact.error(result)
        calls |= {(words, name): other for name, other in beside.items()}
        if not exact.is_right(result):
            measured.wrong.append(words)
    for peer in contestants.peers:
        try:
            prepared = peer.prepare(problem)
            if prepared is None:
                continue
            result = prepared.result()
            error = exact.error(result)
        except Exception as failure:
            measured.notes.append(f"{peer.label}: {first_line(failure)}")
            continue
        if exact.is_right(result, PEER_FACTOR):
            calls[peer.label], measured.errors[peer.label] = prepared, error
        else:
            measured.notes.append(f"{peer.label}: left out, its error is {error:.1e}")
    return measured, calls
