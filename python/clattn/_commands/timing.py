"""Time and memory of calls, for the commands."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

TURN_SECONDS = 0.02
LONG_SECONDS = 1.0  # of a call beside which threads that spin do not matter
THREADS = os.cpu_count() or 1  # of torch and other implementations

T = TypeVar("T")
Name = TypeVar("Name")


def measure_memory(call: Callable[[], T]) -> tuple[T, int | None]:
    """Return the result of `call`, and by how many bytes the process grew at its peak.

    The figure is an upper bound if the system does not let a process reset its recorded peak,
    and None if the system does not tell.
    """
    before = memory_field("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    result = call()
    peak = memory_field("VmHWM")
    return result, None if before is None or peak is None else max(0, peak - before)


def memory_field(name: str) -> int | None:
    """Return a figure of /proc/self/status in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def shortest(
    call: Callable[[], object], seconds: float = 2.0, least: int = 3, most: float = 50
) -> float:
    """Return the seconds of the shortest of several calls.

    Makes at least `least` calls, and more until `seconds` have passed or `most` calls are made.
    """
    best, calls = math.inf, 0
    start = begin = time.perf_counter()
    while calls < least or (start - begin < seconds and calls < most):
        call()
        end = time.perf_counter()
        best, start, calls = min(best, end - start), end, calls + 1
    return best


def take_turns(calls: Mapping[Name, Callable[[], object]], best: dict[Name, float]) -> None:
    """Time each call once more; `best` keeps the shortest seconds of each.

    A turn is several calls. The first does not count: threads of the previous implementation
    may still be spinning. A long call is a turn.
    """
    for name, call in calls.items():
        seconds = shortest(call, 0, 1)
        if seconds < LONG_SECONDS:
            seconds = shortest(call, TURN_SECONDS, 1, math.inf)
        best[name] = min(best[name], seconds)
