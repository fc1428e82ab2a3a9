"""A call of all ranks, in which their keys and values go round."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np

from clattn._arguments.arrays import host_array
from clattn._arguments.operands import DIMENSIONS, Operands
from clattn._core import Tensor
from clattn._parts.checks import shape_of_call
from clattn._parts.copies import copy_into
from clattn._parts.ring import Schedule, check_layout, pieces
from clattn.attention import scaled_dot_product_attention
from clattn.device import use_device
from clattn.mpi.messages import compared, messages, moving, together
from clattn.tensors import tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor
    from typing import Any

    from clattn._parts.ring import Layout

__all__ = ["Parts", "Ring", "filled"]


class Parts:
    """Arrays of keys, of which each rank has its part.

    The arrays of a part lie in a buffer, one after the other.
    """

    def __init__(self, comm: Any, own: Mapping[str, np.ndarray], lengths: Sequence[int]) -> None:
        self._comm, self._own, self._lengths = comm, own, lengths

    def buffer(self) -> np.ndarray:
        """Return memory for the part of any rank; its numbers are zeros."""
        return np.zeros(max(map(self._size, self._lengths)), np.uint8)

    def views(self, buffer: np.ndarray, source: int) -> dict[str, np.ndarray]:
        """Return the arrays of the part of rank `source` that lies in a buffer."""
        views, start = {}, 0
        for name, array in self._own.items():
            shape = _shape(name, array, S=self._lengths[source])
            end = start + math.prod(shape) * array.itemsize
            views[name] = buffer[start:end].view(array.dtype).reshape(shape)
            start = end
        return views

    def pass_on(self, now: np.ndarray, coming: np.ndarray, source: int, hops: int = 1) -> list[Any]:
        """Begin to send the part of rank `source` that many ranks on, and to receive another one.

        All ranks call the function, each with the part that it has.
        """
        comm = self._comm
        before, after = (comm.rank - hops) % comm.size, (comm.rank + hops) % comm.size
        came = self._size(self._lengths[(source - hops) % comm.size])
        sent = self._size(self._lengths[source])
        moves = [comm.Irecv(message, before) for message in messages(coming[:came])]
        return moves + [comm.Isend(message, after) for message in messages(now[:sent])]

    def _size(self, keys: int) -> int:
        """Return the bytes of a part."""
        return sum(
            math.prod(_shape(name, array, S=keys)) * array.itemsize
            for name, array in self._own.items()
        )


class _Behind(Protocol):
    """What goes round behind the keys: in each step, in which the part of rank `source` is visited.

    ``start`` begins to move it; ``arrive`` comes when the step's messages have arrived, and the
    part has been visited.
    """

    def start(self, step: int, source: int) -> list[Any]: ...
    def arrive(self, source: int) -> None: ...


class Ring:
    """A call on this rank: its arrays, checked by the rules of the function for one machine."""

    def __init__(self, operands: Operands, layout: Layout, options: dict[str, Any]) -> None:
        check_layout(layout)
        given = operands.given()
        self.shape = shape_of_call(scaled_dot_product_attention, **given, **options)
        arrays = {name: host_array(array, name) for name, array in given.items()}
        self.given, self.operands = operands, Operands(**arrays)
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

    def meet(self, comm: Any, fact: Any = None, **words: str) -> list[Any]:
        """Compare the call with those of the other ranks, and find out what each rank holds.

        Returns the facts of all ranks. `words` have to be the same on all of them.
        """
        words |= {name: str(option) for name, option in self.options.items()}
        words |= {"layout": self.layout, "dtype": self.dtype.name}
        for name, array in self.operands.given().items():
            words[f"shape of {name} without L and S"] = str(_shape(name, array, L=None, S=None))
        lengths = self.operands.query.shape[-2], self.operands.key.shape[-2]
        rows, self.lengths, facts = zip(*compared(comm, words, (*lengths, fact)), strict=True)
        where = pieces(rows, self.layout), pieces(self.lengths, self.layout)
        self.schedule = Schedule(*where, self.options["is_causal"], self.options["window"])
        return [*facts]

    def rows_of(self, rank: int) -> dict[str, Any]:
        """Return where the rows of a rank lie, and the options of its calls."""
        options = self.options | {"is_causal": bool(self.options["is_causal"])}
        schedule = self.schedule
        return {"rows": schedule.rows.of(rank), "shift": schedule.band.shift, **options}

    def go_round(
        self,
        comm: Any,
        helper: Executor,
        visit: Callable[..., None],
        behind: _Behind | None = None,
    ) -> None:
        """Visit the keys of one rank after the other, while they go round.

        `visit` gets the arrays of a part, where its pieces lie, and which pieces of rows see them.
        `helper` has a thread that looks at messages.
        """
        schedule, rank = self.schedule, comm.rank
        with together(comm):
            parts = Parts(comm, self.moving, self.lengths)
            now, coming = parts.buffer(), parts.buffer()
            for name, view in parts.views(now, rank).items():
                view[...] = self.moving[name]
        for step in range(schedule.steps):
            source = (rank - step) % comm.size
            goes_on = step + 1 < schedule.steps
            with together(comm):
                moves = parts.pass_on(now, coming, source) if goes_on else []
                moves += behind.start(step, source) if behind else []
                with moving(moves, helper), self.computing():
                    where, seen = schedule.keys.of(source), schedule.seen(step)[rank]
                    visit(parts.views(now, source), where, seen)
                if behind:
                    behind.arrive(source)
            now, coming = coming, now

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


def filled(blank: Any, array: np.ndarray) -> Any:
    """Return the array as one of the blank's library."""
    if isinstance(blank, np.ndarray):
        return array
    if isinstance(blank, Tensor):
        return tensor(array, blank.device)
    if hasattr(blank, "__array_namespace__"):
        return blank.__array_namespace__().asarray(array)
    copy_into(blank[None], array[None])
    return blank
