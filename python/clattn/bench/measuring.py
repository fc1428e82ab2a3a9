"""Time and error of a row in every implementation, measured in turn."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import clattn
from clattn import Device
from clattn._measuring import shortest
from clattn.bench import onnx_peers, openvino_peer, peers
from clattn.bench.exact import PEER_FACTOR, exact_rows
from clattn.bench.limits import Limits
from clattn.bench.peers import Call, Peer
from clattn.bench.rows import Problem, Row, draw

TURN_SECONDS = 0.02


@dataclass(frozen=True)
class Contestants:
    """Everything that is timed: devices by the words that choose them, and peers."""

    devices: dict[str, Device]
    peers: Sequence[Peer]
    limits: dict[str, Limits]
    missing: dict[str, str]  # why a peer is not there, by its label


@dataclass
class Measured:
    """What was measured of a row, by device words and peers' labels."""

    row: Row
    allowed: float
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # whose error is too large
    notes: list[str] = field(default_factory=list)
    best: str | None = None  # the label of the fastest peer of those that count

    def ratio(self, words: str, peer: str) -> float:
        """Return a peer's time divided by clattn's on a device."""
        return self.seconds[peer] / self.seconds[words]


def peer_classes() -> list[Any]:
    """Return the classes of all peers, in the order of the table."""
    return [
        peers.Torch,
        onnx_peers.OnnxAttention,
        onnx_peers.OnnxMultiHeadAttention,
        openvino_peer.OpenVino,
        peers.Jax,
        onnx_peers.OnnxGroupQueryAttention,
    ]


def find_peers(stack: ExitStack) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that are installed, and why the others are not there.

    `stack` takes what has to last as long as peers are called.
    """
    found: list[Peer] = []
    missing = {}
    for make in peer_classes():
        try:
            found.append(make(stack))
        except ImportError as error:
            missing[make.label] = f"{error.name or error} is not installed"
        except Exception as error:  # a package that is there and broken
            missing[make.label] = first_line(error)
    return found, missing


def first_line(error: Exception) -> str:
    """Return the beginning of what an exception says, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def clattn_call(problem: Problem, device: Device) -> Call:
    """Return clattn's call on a device, as a user writes it."""
    row = problem.row
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    causal, grouped = row.is_causal, row.shape[1] != row.shape[2]
    window = None if row.window is None else (row.window, 0)

    def run() -> object:
        return clattn.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=causal,
            enable_gqa=grouped,
            window=window,
            device=device,
        )

    return Call(run, run)  # type: ignore[arg-type]


def measure(
    row: Row, contestants: Contestants, rounds: int, advance: Callable[[], None]
) -> Measured:
    """Check and time a row: so many rounds of all in turn; `advance` is called after each."""
    problem = draw(row)
    exact = exact_rows(problem)
    measured = Measured(row, exact.allowed)
    calls: dict[str, Call] = {}
    for words, device in contestants.devices.items():
        if row.dtype != "float64" or device.float64:
            calls[words] = clattn_call(problem, device)
            measured.errors[words] = exact.error(calls[words].result())
            if not measured.errors[words] <= exact.allowed:
                measured.wrong.append(words)
    for peer in contestants.peers:
        try:
            call = peer.prepare(problem)
            if call is None:
                continue
            error = exact.error(call.result())
        except Exception as failure:
            measured.notes.append(f"{peer.label}: {first_line(failure)}")
            continue
        if error <= PEER_FACTOR * exact.allowed:
            calls[peer.label], measured.errors[peer.label] = call, error
        else:
            measured.notes.append(f"{peer.label}: left out, its error is {error:.1e}")

    measured.seconds = dict.fromkeys(calls, math.inf)
    for number in range(rounds):
        if number in (0, rounds - 1):
            for words in contestants.devices.keys() & calls.keys():
                contestants.limits[words].measure(row)
        for name, call in calls.items():
            call.run()  # threads of the one before may still be spinning
            seconds = shortest(call.run, TURN_SECONDS, 1, math.inf)
            measured.seconds[name] = min(measured.seconds[name], seconds)
        advance()
    labels = [peer.label for peer in contestants.peers if peer.counts and peer.label in calls]
    measured.best = min(labels, key=lambda label: measured.seconds[label], default=None)
    return measured
