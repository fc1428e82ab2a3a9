"""A sequence is taken apart, and put together."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, overload

import numpy as np

from clattn._arguments.arrays import host_array
from clattn._core import Tensor
from clattn._parts.ring import check_layout, part_lengths, pieces
from clattn.mpi.messages import communicator, compared, messages, together
from clattn.tensors import tensor

if TYPE_CHECKING:
    from typing import Any

    from clattn._arguments.arrays import Array
    from clattn._parts.ring import Layout

__all__ = ["join", "split"]


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
    comm = communicator(comm)
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
    comm = communicator(comm)
    with together(comm):
        own = np.ascontiguousarray(_sequence(part, "part", layout, axis))
    # A structured dtype has its fields in its text, and not in its name.
    words = {"dtype": str(own.dtype), "layout": str(layout), "axis": str(axis % own.ndim)}
    words["shape beside the axis"] = str(own.shape[1:])
    lengths = compared(comm, words, len(own))
    where = pieces(lengths, layout)
    with together(comm):
        whole = np.empty((sum(lengths), *own.shape[1:]), own.dtype)
        came = np.empty((max(lengths), *own.shape[1:]), own.dtype)
    for rank, length in enumerate(lengths):
        if rank == comm.rank:
            came[:length] = own
        for message in messages(came[:length].reshape(-1).view(np.uint8)):
            comm.Bcast(message, rank)
        at = 0
        for start, count in where.of(rank):
            whole[start : start + count] = came[at : at + count]
            at += count
    return _as_kind(part, whole, axis)


def _sequence(array: Any, name: str, layout: str, axis: Any) -> np.ndarray:
    """Return the elements on the host, with the dimension of the sequence at the front."""
    check_layout(layout)
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
