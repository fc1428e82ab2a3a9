"""Attention over a sequence that the processes of an MPI program hold together.

Each rank has a part of the queries and a part of the keys and values. ``ring_attention`` gives each
rank the result of its rows over all keys; ``split`` and ``join`` take a sequence apart and put it
together. MPI moves the keys and values, through mpi4py, which the extra ``mpi`` installs.
"""

from __future__ import annotations

import math
import operator
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, overload

import numpy as np

from clattn._arguments.arrays import host_array
from clattn._arguments.dtypes import wide
from clattn._arguments.operands import DIMENSIONS, Operands
from clattn._core import DeviceError, Tensor
from clattn._host.extras import how_to_install
from clattn._parts.checks import check_flag, shape_of_call
from clattn._parts.copies import copy_into
from clattn._parts.ring import LAYOUTS, Schedule, Share, part_lengths, pieces
from clattn.attention import scaled_dot_product_attention
from clattn.device import use_device
from clattn.tensors import tensor

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"clattn.mpi needs mpi4py ({how_to_install('mpi')}) and an MPI library, such as that of "
        f"apt-get install openmpi-bin; {error}"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from typing import Any, Literal, Unpack

    from clattn._arguments.arrays import Array, ArrayT
    from clattn._arguments.options import BandOptions, Window

    Layout = Literal["contiguous", "zigzag"]

    class _Options(BandOptions, total=False):
        comm: Any
        layout: Layout


__all__ = ["join", "ring_attention", "split"]

# The most bytes of one message: MPI libraries count in 32 bits.
_MOST = 1 << 30
# A rank asks MPI again and again whether its messages have arrived, because Open MPI moves large
# messages only when it is asked. It waits this many seconds at first, and at most.
_PAUSES = 0.00001, 0.0005
_KINDS = (TypeError, ValueError, MemoryError, DeviceError)


@overload
def ring_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> ArrayT: ...
@overload
def ring_attention(
    query: Tensor,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[ArrayT, Any]: ...
@overload
def ring_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[_Options],
) -> Any: ...
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    comm: Any = None,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window = None,
    layout: Layout = "contiguous",
    return_lse: bool = False,
) -> Any:
    """Return attention of this rank's rows over the keys of all ranks.

    As `clattn.scaled_dot_product_attention` on the joined sequence, of which each rank gives its
    part and gets its part. Keys and values go round while they are attended to. All ranks of `comm`
    call the function, with the same options.

    Parameters
    ----------
    query : array of shape (..., Hq, L, E)
        The rank's rows; L may differ from rank to rank and may be 0.
    key : array of shape (..., Hk, S, E)
        The rank's keys; S likewise.
    value : array of shape (..., Hk, S, Ev)
        The values of these keys.
    comm : mpi4py.MPI.Intracomm, optional
        Default: ``MPI.COMM_WORLD``.
    is_causal : bool or "lower_right"
        By positions in the joined sequence.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads. Only the Hk heads of keys and values go round.
    window : (int or None, int or None), optional
        By positions in the joined sequence.
    layout : "contiguous" or "zigzag"
        Which part a rank holds, see `split`. In a zigzag part the first half of the entries,
        rounded up, is the first of its two pieces.
    return_lse : bool
        Also return the log-sum-exp of the rank's rows.

    Returns
    -------
    output : array of shape (..., Hq, L, Ev)
        Of the library and the dtype of `query`. A Tensor is on query's device.
    lse : array of shape (..., Hq, L)
        With `return_lse`: float32 (float64 for float64), -inf for a row with no key.

    Raises
    ------
    TypeError, ValueError, MemoryError, DeviceError
        What `clattn.scaled_dot_product_attention` raises on any rank, all ranks raise, with words
        that name the ranks.
    ValueError
        Ranks disagree on dtypes, shapes beside L and S, or options (on all ranks), or `comm` is
        freed (on this one).
    RuntimeError
        Another error of any rank, on all ranks.

    Notes
    -----
    Ring attention is of Liu et al., 2023, arXiv:2310.01889; the zigzag layout is that of the
    training of Llama 3 (2024, arXiv:2407.21783, section 3.3.2).

    Scores and the results of steps are float32 (float64 for float64). They are summed in float64
    and rounded once. So ranks that hold the same rows get the same results up to float32, though
    each sums in its own order; with float64 the last bit may differ. Tensors are staged through
    host memory. Beside its own part of the keys and values a rank holds two that go round.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((1, 2, 6, 8), np.float32)
    >>> part = split(x, MPI.COMM_WORLD, "zigzag")
    >>> out = ring_attention(part, part, part, is_causal=True, layout="zigzag")
    >>> join(out, MPI.COMM_WORLD, "zigzag").shape
    (1, 2, 6, 8)
    """
    comm = _communicator(MPI.COMM_WORLD if comm is None else comm)
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "window": window}
    with _together(comm):
        check_flag("return_lse", return_lse)
        ring = _Ring(Operands(query, key, value), layout, options)
    ring.meet(comm)
    with ThreadPoolExecutor(1) as helper:
        results = ring.go_round(_duplicate(comm), helper)
    return results if return_lse else results[0]


@overload
def split(array: Tensor, comm: Any, layout: Layout = "contiguous", axis: int = -2) -> Tensor: ...
@overload
def split(array: Array, comm: Any, layout: Layout = "contiguous", axis: int = -2) -> np.ndarray: ...
def split(array: Array, comm: Any, layout: Layout = "contiguous", axis: int = -2) -> Any:
    """Return this rank's part of a sequence that every rank has as a whole.

    Parameters
    ----------
    array : array
        The whole, the same on every rank.
    comm : mpi4py.MPI.Intracomm
        Its size n and this rank's number r choose the part.
    layout : "contiguous" or "zigzag"
        The sequence is cut into n parts, of which rank r gets part r; or into 2n, of which it gets
        part r and part 2n - 1 - r. The first parts are longer by 1 where the length is no multiple.
    axis : int
        The dimension of the sequence.

    Returns
    -------
    part : array
        New: a Tensor for a Tensor, else a NumPy array.

    Raises
    ------
    TypeError, ValueError
        Not an array, a communicator, a layout or a dimension.
    MemoryError
        Memory does not suffice, that of the device for a Tensor.
    DeviceError
        OpenCL reports an error, for a Tensor.
    """
    comm = _communicator(comm)
    whole = _sequence(array, "array", layout, axis)
    where = pieces(part_lengths(len(whole), comm.size, layout), layout)
    cuts = [whole[start : start + length] for start, length in where.of(comm.rank)]
    return _as_kind(array, np.concatenate(cuts), axis)


@overload
def join(part: Tensor, comm: Any, layout: Layout = "contiguous", axis: int = -2) -> Tensor: ...
@overload
def join(part: Array, comm: Any, layout: Layout = "contiguous", axis: int = -2) -> np.ndarray: ...
def join(part: Array, comm: Any, layout: Layout = "contiguous", axis: int = -2) -> Any:
    """Return, on every rank, the sequence of which each rank has a part: the inverse of `split`.

    All ranks of `comm` call the function.

    Parameters
    ----------
    part : array
        This rank's part, of any length.
    comm : mpi4py.MPI.Intracomm
        Its ranks hold the parts.
    layout : "contiguous" or "zigzag"
        As for `split`.
    axis : int
        The dimension of the sequence.

    Returns
    -------
    array : array
        New: a Tensor for a Tensor, else a NumPy array.

    Raises
    ------
    TypeError, ValueError
        On all ranks: not an array, a layout or a dimension, or ranks disagree on dtypes, layouts,
        dimensions or shapes beside the part's length. A freed `comm` is refused by this rank alone.
    MemoryError
        Memory does not suffice: on all ranks, but for a Tensor of the result on this one.
    DeviceError
        OpenCL reports an error, for a Tensor.
    """
    comm = _communicator(comm)
    with _together(comm):
        own = np.ascontiguousarray(_sequence(part, "part", layout, axis))
    # A structured dtype has its fields in its text, and not in its name.
    words = {"dtype": str(own.dtype), "layout": str(layout), "axis": str(axis % own.ndim)}
    words["shape beside the axis"] = str(own.shape[1:])
    lengths = _compared(comm, words, len(own))
    where = pieces(lengths, layout)
    with _together(comm):
        whole = np.empty((sum(lengths), *own.shape[1:]), own.dtype)
        came = np.empty((max(lengths), *own.shape[1:]), own.dtype)
    for rank, length in enumerate(lengths):
        if rank == comm.rank:
            came[:length] = own
        for message in _messages(came[:length].reshape(-1).view(np.uint8)):
            comm.Bcast(message, rank)
        at = 0
        for start, count in where.of(rank):
            whole[start : start + count] = came[at : at + count]
            at += count
    return _as_kind(part, whole, axis)


class _Ring:
    """A call on this rank: its arrays, checked by the rules of the function for one machine."""

    def __init__(self, operands: Operands, layout: Layout, options: dict[str, Any]) -> None:
        _check_layout(layout)
        given = operands.given()
        shape_of_call(scaled_dot_product_attention, **given, **options)
        arrays = {name: host_array(array, name) for name, array in given.items()}
        self.operands = Operands(**arrays)
        self.rows, self.keys = arrays["query"].shape[-2], arrays["key"].shape[-2]
        # The results of a call without keys have the shapes, the dtypes and the library of those to
        # come; their memory is filled in the end.
        no_keys = replace(self.operands.cut("S", slice(0)), query=operands.query)
        self.blank: tuple[Any, Any] = scaled_dot_product_attention(
            **no_keys.given(), return_lse=True, **options
        )
        self.dtype = arrays["query"].dtype
        # What goes round: arrays of keys, not of rows and keys.
        self.moving = {n: a for n, a in arrays.items() if {"S", "L"} & {*DIMENSIONS[n]} == {"S"}}
        tensors = (array for array in given.values() if isinstance(array, Tensor))
        self.device = next((array.device for array in tensors), None)
        self.layout = layout
        scale, window = options["scale"], options["window"]
        window = (None, None) if window is None else window
        self.options = options | {
            "scale": None if scale is None else float(scale),
            "window": tuple(None if bound is None else int(bound) for bound in window),
        }

    def meet(self, comm: Any) -> None:
        """Compare the call with those of the other ranks, and find out what each rank holds."""
        words = {name: str(option) for name, option in self.options.items()}
        words |= {"layout": self.layout, "dtype": self.dtype.name}
        for name, array in self.operands.given().items():
            words[f"shape of {name} without L and S"] = str(_shape(name, array, L=None, S=None))
        lengths = _compared(comm, words, (self.rows, self.keys))
        rows, self.lengths = zip(*lengths, strict=True)
        where = pieces(rows, self.layout), pieces(self.lengths, self.layout)
        self.schedule = Schedule(*where, self.options["is_causal"], self.options["window"])

    def go_round(self, comm: Any, helper: Executor) -> tuple[Any, Any]:
        """Attend to the keys of one rank after the other; return output and lse.

        `helper` has a thread that looks at messages.
        """
        schedule, rank = self.schedule, comm.rank
        with _together(comm):
            options = self.options | {"is_causal": bool(self.options["is_causal"])}
            share = Share(self.operands, schedule.rows.of(rank), schedule.band.shift, **options)
            most = self.size(max(self.lengths))
            buffers = [np.empty(most, np.uint8) for _ in range(2)]
            for name, view in self.views(buffers[0], self.lengths[rank]).items():
                view[...] = self.moving[name]
        for step in range(schedule.steps):
            source = (rank - step) % comm.size
            goes_on = step + 1 < schedule.steps
            with (
                _together(comm),
                _moving(self.start(comm, buffers, source) if goes_on else [], helper),
                self.computing(),
            ):
                keys = self.views(buffers[0], self.lengths[source])
                share.attend(keys, schedule.keys.of(source), schedule.seen(step)[rank])
            buffers.reverse()
        with _together(comm):
            # The blank results of NumPy are zeros and -inf: the results of rows without keys.
            out, lse = (
                blank if isinstance(blank, np.ndarray) else np.full(blank.shape, number, dtype)
                for blank, number, dtype in zip(
                    self.blank, (0, -np.inf), (self.dtype, wide(self.dtype)), strict=True
                )
            )
            share.write(out, lse)
            results = _filled(self.blank[0], out), _filled(self.blank[1], lse)
        return results

    def size(self, keys: int) -> int:
        """Return the bytes of a part that goes round."""
        shapes = {name: _shape(name, array, S=keys) for name, array in self.moving.items()}
        return sum(math.prod(shape) * self.moving[name].itemsize for name, shape in shapes.items())

    def views(self, buffer: np.ndarray, keys: int) -> dict[str, np.ndarray]:
        """Return the arrays of a part that lies in a buffer."""
        views, start = {}, 0
        for name, array in self.moving.items():
            shape = _shape(name, array, S=keys)
            end = start + math.prod(shape) * array.itemsize
            views[name] = buffer[start:end].view(array.dtype).reshape(shape)
            start = end
        return views

    def start(self, comm: Any, buffers: Sequence[np.ndarray], source: int) -> list[Any]:
        """Begin to pass the part of a rank on, and to receive the one that comes after it."""
        sent, came = (self.size(self.lengths[of]) for of in (source, source - 1))
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        moves = [comm.Irecv(message, before) for message in _messages(buffers[1][:came])]
        return moves + [comm.Isend(message, after) for message in _messages(buffers[0][:sent])]

    def computing(self) -> Any:
        """Return a context in which attention runs on the device of the Tensors."""
        return nullcontext() if self.device is None else use_device(self.device)


def _shape(name: str, array: np.ndarray, **sizes: int | None) -> tuple[int, ...]:
    """Return the shape of an operand with other sizes of dimensions; None: without this one."""
    shape: list[int | None] = [*array.shape]
    last = DIMENSIONS[name]
    for dimension in sizes.keys() & {*last}:
        shape[last.index(dimension) - len(last)] = sizes[dimension]
    return tuple(size for size in shape if size is not None)


def _communicator(comm: Any) -> Any:
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


def _duplicate(comm: Any) -> Any:
    """Return the communicator of clattn's own messages to the ranks of `comm`."""
    key = _duplicate_key()
    own = comm.Get_attr(key)
    if own is None:
        own = comm.Dup()
        comm.Set_attr(key, own)
    return own


@contextmanager
def _together(comm: Any) -> Iterator[None]:
    """Wait for the block's end on all ranks; if it raises on some of them, raise on all.

    What is no Exception, such as KeyboardInterrupt, is raised as it is by its own rank.
    """
    fault: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        fault = caught
    failed, any_failed = np.array([fault is not None]), np.empty(1, bool)
    # A call that waits for the slowest rank would keep a core busy.
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


def _compared(comm: Any, words: dict[str, str], fact: Any) -> list[Any]:
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


def _messages(memory: np.ndarray) -> list[Any]:
    """Return bytes as messages of a size that every MPI library takes."""
    return [[memory[at : at + _MOST], MPI.BYTE] for at in range(0, memory.size, _MOST)]


def _wait(moves: list[Any]) -> None:
    pause, most = _PAUSES
    while not MPI.Request.Testall(moves):
        time.sleep(pause)
        pause = min(2 * pause, most)


@contextmanager
def _moving(moves: list[Any], helper: Executor) -> Iterator[None]:
    """Move messages during the block, and wait for them at its end."""
    threads = moves and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    arrival = helper.submit(_wait, moves) if threads else None
    try:
        yield
    finally:
        arrival.result() if arrival else _wait(moves)


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected 'contiguous' or 'zigzag'")


def _sequence(array: Any, name: str, layout: str, axis: Any) -> np.ndarray:
    """Return the elements on the host, with the dimension of the sequence at the front."""
    _check_layout(layout)
    host = host_array(array, name)
    if host.dtype.hasobject:
        raise TypeError(f"{name} has dtype {host.dtype}; expected numbers")
    if isinstance(axis, bool | np.bool) or not hasattr(type(axis), "__index__"):
        raise TypeError(f"axis must be an int, got {type(axis).__name__}")
    if not -host.ndim <= operator.index(axis) < host.ndim:
        raise ValueError(
            f"axis is {axis}; expected a dimension of {name}, which has shape {host.shape}"
        )
    return np.moveaxis(host, axis, 0)


def _as_kind(like: Any, array: np.ndarray, axis: int) -> Any:
    """Move the sequence from the front to its dimension; return a Tensor if `like` is one."""
    array = np.ascontiguousarray(np.moveaxis(array, 0, axis))
    return tensor(array, like.device) if isinstance(like, Tensor) else array


def _filled(blank: Any, array: np.ndarray) -> Any:
    """Return the array as one of the blank's library."""
    if isinstance(blank, np.ndarray):
        return array
    if isinstance(blank, Tensor):
        return tensor(array, blank.device)
    if hasattr(blank, "__array_namespace__"):
        return blank.__array_namespace__().asarray(array)
    copy_into(blank[None], array[None])
    return blank
