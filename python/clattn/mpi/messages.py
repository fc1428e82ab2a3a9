"""Messages between ranks, and errors that all of them raise."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from clattn._core import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from typing import Any

__all__ = ["communicator", "compared", "duplicate", "messages", "moving", "together"]

# The most bytes of one message: MPI libraries count in 32 bits.
_MOST = 1 << 30
# A rank asks MPI again and again whether its messages have arrived, because Open MPI moves large
# messages only when it is asked. It waits this many seconds at first, and at most.
_PAUSES = 0.00001, 0.0005
_KINDS = (TypeError, ValueError, MemoryError, DeviceError)


def communicator(comm: Any) -> Any:
    """Return the argument if it is a communicator of ranks that MPI has not freed."""
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL or has been freed; expected a communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, got {type(comm).__name__}")
    return comm


@cache
def _duplicate_key() -> Any:
    """Return the key under which a communicator keeps the duplicate for clattn's messages.

    Both are freed together. All ranks take part in freeing one, so a call does not: other ranks may
    not reach the end of the call. It is made in a call, because MPI ends a process that makes it
    before MPI is initialised.
    """
    return MPI.Comm.Create_keyval(delete_fn=lambda comm, key, own: own.Free())


def duplicate(comm: Any) -> Any:
    """Return the communicator of clattn's own messages to the ranks of `comm`."""
    key = _duplicate_key()
    own = comm.Get_attr(key)
    if own is None:
        own = comm.Dup()
        comm.Set_attr(key, own)
    return own


@contextmanager
def together(comm: Any) -> Iterator[None]:
    """Wait for the block's end on all ranks; if it raises on some of them, raise on all.

    What is no Exception, such as KeyboardInterrupt, is raised as it is by its own rank.
    """
    fault: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        fault = caught
    failed, any_failed = np.array([fault is not None]), np.empty(1, bool)
    # A blocking Allreduce keeps a core busy until the slowest rank has called it.
    _wait([comm.Iallreduce(failed, any_failed, MPI.LOR)])
    if not any_failed:
        return
    own = None if fault is None else (_number_of_kind(fault), str(fault) or repr(fault))
    faults = comm.allgather(own)  # (number of the kind, words) of each rank, None where all is well
    if fault is not None and not isinstance(fault, Exception):
        raise fault
    first = next(one[0] for one in faults if one is not None)
    kind = _KINDS[first] if first < len(_KINDS) else RuntimeError
    raise kind(_by_rank([None if one is None else one[1] for one in faults])) from fault


def _number_of_kind(fault: BaseException) -> int:
    """Return which of _KINDS a fault is; their number if it is none."""
    return next((n for n, kind in enumerate(_KINDS) if isinstance(fault, kind)), len(_KINDS))


def compared(comm: Any, words: dict[str, str], fact: Any) -> list[Any]:
    """Return the facts of all ranks.

    Raises
    ------
    ValueError
        The words, which have the same names on all ranks, differ.
    """
    said = comm.allgather((words, fact))
    for name in words:
        each = [other.get(name) for other, _ in said]
        if len(set(each)) > 1:
            raise ValueError(f"ranks disagree on {name}: {_by_rank(each)}")
    return [fact for _, fact in said]


def _by_rank(words: Sequence[str | None]) -> str:
    """Return "ranks 0, 2: these; rank 1: those", without the ranks that say None."""
    groups: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        if word is not None:
            groups.setdefault(word, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
        f"{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}: {word}"
        for word, ranks in groups.items()
    )


def messages(memory: np.ndarray) -> list[Any]:
    """Return bytes as messages of a size that every MPI library takes."""
    return [[memory[at : at + _MOST], MPI.BYTE] for at in range(0, memory.size, _MOST)]


def _wait(moves: list[Any]) -> None:
    pause, most = _PAUSES
    while not MPI.Request.Testall(moves):
        time.sleep(pause)
        pause = min(2 * pause, most)


@contextmanager
def moving(moves: list[Any], helper: Executor) -> Iterator[None]:
    """Move messages during the block, and wait for them at its end."""
    threads = moves and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    arrival = helper.submit(_wait, moves) if threads else None
    try:
        yield
    finally:
        arrival.result() if arrival else _wait(moves)
