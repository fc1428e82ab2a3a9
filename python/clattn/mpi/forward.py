"""Attention of a rank's rows over the keys of all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np
from mpi4py import MPI

from clattn._arguments.dtypes import wide
from clattn._arguments.operands import Operands
from clattn._parts.checks import check_flag
from clattn._parts.ring import Share
from clattn.attention import scaled_dot_product_attention
from clattn.mpi.messages import communicator, duplicate, together
from clattn.mpi.rounds import Ring, filled

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from typing import Any, Literal, Unpack

    from clattn._arguments.arrays import Array, ArrayT
    from clattn._arguments.options import RingOptions, Window
    from clattn._core import Tensor
    from clattn._parts.ring import Layout

__all__ = ["attend", "ring_attention"]


@overload
def ring_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RingOptions],
) -> ArrayT: ...
@overload
def ring_attention(
    query: Tensor,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def ring_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[RingOptions],
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
    >>> from clattn.mpi import join, split
    >>> x = np.ones((1, 2, 6, 8), np.float32)
    >>> part = split(x, MPI.COMM_WORLD, "zigzag")
    >>> out = ring_attention(part, part, part, is_causal=True, layout="zigzag")
    >>> join(out, MPI.COMM_WORLD, "zigzag").shape
    (1, 2, 6, 8)
    """
    comm = communicator(MPI.COMM_WORLD if comm is None else comm)
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "window": window,
    }
    with together(comm):
        check_flag("return_lse", return_lse)
        ring = Ring(Operands(query, key, value), layout, options)
        # The results of a call without keys have the shapes, the dtypes and the library of those to
        # come; their memory is filled in the end.
        no_keys = replace(ring.operands.cut("S", slice(0)), query=query)
        blank = scaled_dot_product_attention(**no_keys.given(), return_lse=True, **options)
    ring.meet(comm)
    comm = duplicate(comm)
    with ThreadPoolExecutor(1) as helper:
        share = attend(ring, comm, helper)
    with together(comm):
        # The blank results of NumPy are zeros and -inf: the results of rows without keys.
        out, lse = (
            one if isinstance(one, np.ndarray) else np.full(one.shape, number, dtype)
            for one, number, dtype in zip(
                blank, (0, -np.inf), (ring.dtype, wide(ring.dtype)), strict=True
            )
        )
        share.write(out, lse)
        results = filled(blank[0], out), filled(blank[1], lse)
    return results if return_lse else results[0]


def attend(ring: Ring, comm: Any, helper: Executor) -> Share:
    """Let the rows of each rank attend to all keys; `comm` is that of clattn's messages."""
    with together(comm):
        share = Share(ring.operands, **ring.rows_of(comm.rank))
    ring.go_round(comm, helper, share.attend)
    return share
