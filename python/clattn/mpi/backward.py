"""The gradients of attention of all ranks' rows over the keys of all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from clattn._arguments.arrays import host_array
from clattn._arguments.dtypes import wide
from clattn._arguments.needs import read_needs
from clattn._arguments.operands import FACTORS, Operands
from clattn._parts.ring import Forward, GradientShare
from clattn.gradients import AttentionGradients, scaled_dot_product_attention_backward
from clattn.mpi.forward import attend
from clattn.mpi.messages import communicator, duplicate, moving, together
from clattn.mpi.rounds import Parts, Ring, filled

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from concurrent.futures import Executor
    from typing import Any, Literal

    from clattn._arguments.arrays import Array
    from clattn._arguments.options import Window
    from clattn._parts.ring import Layout

__all__ = ["ring_attention_backward"]

# The base and the sum of rows are computed anew if a log-sum-exp is larger. Smaller ones err by
# 2e-6 at most in float32, and scores of such a size err more.
_LARGE_LSE = 32


def ring_attention_backward(
    grad_output: Array,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    lse: Array,
    *,
    grad_lse: Array | None = None,
    comm: Any = None,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window = None,
    layout: Layout = "contiguous",
    needs: Collection[str] = ("query", "key", "value"),
) -> AttentionGradients:
    """Return the gradients of `ring_attention` for this rank's queries, keys and values.

    As `clattn.scaled_dot_product_attention_backward` on the joined sequence. Keys and values go
    round, and so do their gradients, to which each rank adds those of its rows. All ranks of `comm`
    call the function, with the options of the forward call.

    Parameters
    ----------
    grad_output : array of shape (..., Hq, L, Ev)
        The gradient of the rank's `output`, of query's dtype.
    query : array of shape (..., Hq, L, E)
        The rank's rows, as in the forward call.
    key : array of shape (..., Hk, S, E)
        The rank's keys.
    value : array of shape (..., Hk, S, Ev)
        The values of these keys.
    output : array of shape (..., Hq, L, Ev)
        What the forward call gave this rank.
    lse : array of shape (..., Hq, L)
        What the forward call gave this rank with ``return_lse=True``.
    grad_lse : array of shape (..., Hq, L), optional
        The gradient of `lse`, of its dtype: float32 (float64 for float64). Default: zeros. A rank
        may leave it out where others give it.
    comm, is_causal, scale, enable_gqa, window, layout : optional
        As in the forward call.
    needs : names
        Whose gradients are wanted, any of "query", "key" and "value"; the same on all ranks.

    Returns
    -------
    gradients : AttentionGradients
        Of the rank's query, key and value: each of the shape, dtype and library of what it belongs
        to, a Tensor on its device. None where `needs` does not name it. `attn_mask` and `sinks` are
        None.

    Raises
    ------
    TypeError, ValueError, MemoryError, DeviceError
        What `clattn.scaled_dot_product_attention_backward` raises on any rank, all ranks raise,
        with words that name the ranks.
    ValueError
        Ranks disagree on dtypes, shapes beside L and S, options or `needs` (on all ranks), or
        `comm` is freed (on this one).
    RuntimeError
        Another error of any rank, on all ranks.

    See Also
    --------
    ring_attention : The forward pass.

    Notes
    -----
    A rank sums the gradient of its queries in float32 (float64 for float64). The gradients of keys
    and values are summed in this dtype while they go round. Each is rounded once, at the end. The
    same call on the same devices gives the same bits. Beside its own part of the keys and values a
    rank holds two that go round, and three of their gradients.

    Where a log-sum-exp of any rank is above 32, keys and values go round twice: first to compute
    the sums of the rows anew, for which a log-sum-exp in float32 has no room.

    Examples
    --------
    >>> import numpy as np
    >>> from clattn.mpi import ring_attention
    >>> x = np.ones((1, 2, 6, 8), np.float32)
    >>> output, lse = ring_attention(x, x, x, is_causal=True, return_lse=True)
    >>> gradients = ring_attention_backward(output, x, x, x, output, lse, is_causal=True)
    >>> gradients.key.shape
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
        wanted = read_needs(needs, FACTORS)
        names = [name for name in FACTORS if name in wanted]
        ring = Ring(Operands(query, key, value), layout, options)
        results = {"grad_output": grad_output, "output": output, "lse": lse, "grad_lse": grad_lse}
        blanks = _blanks(ring, results, options, names)
        arrays: dict[str, Any] = {
            name: None if array is None else host_array(array, name)
            for name, array in results.items()
        }
        finite = arrays["lse"][np.isfinite(arrays["lse"])]
        is_large = bool((np.abs(finite) > _LARGE_LSE).any())
    any_large = any(ring.meet(comm, is_large, needs=", ".join(names) or "nothing"))
    comm = duplicate(comm)
    with ThreadPoolExecutor(1) as helper:
        found = _differentiate(ring, comm, helper, arrays, any_large, names) if names else {}
    with together(comm), np.errstate(all="ignore"):
        # Copies: gradients of keys and values lie in a buffer, which may be longer.
        gradients = {n: filled(one, found[n].astype(ring.dtype)) for n, one in blanks.items()}
    return AttentionGradients(**gradients)


def _blanks(
    ring: Ring, results: Mapping[str, Any], options: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Check what the forward pass gave; return gradients of the right shapes and libraries.

    The gradients of a call without keys, or without rows, are zeros, and nothing is computed.
    """
    given = ring.given
    no_keys = replace(ring.operands.cut("S", slice(0)), query=given.query)
    blank = scaled_dot_product_attention_backward(
        **no_keys.given(), **results, **options, needs={"query"} & {*names}
    )
    no_rows = replace(ring.operands.cut("L", slice(0)), key=given.key, value=given.value)
    empty = np.zeros((*ring.shape[:-2], 0, ring.shape[-1]), ring.dtype)
    blank_keys = scaled_dot_product_attention_backward(
        empty,
        **no_rows.given(),
        output=empty,
        lse=np.zeros(empty.shape[:-1], wide(ring.dtype)),
        **options,
        needs={"key", "value"} & {*names},
    )
    blanks = blank._replace(key=blank_keys.key, value=blank_keys.value)
    return {name: getattr(blanks, name) for name in names}


def _differentiate(
    ring: Ring,
    comm: Any,
    helper: Executor,
    results: Mapping[str, Any],
    is_large: bool,
    names: Sequence[str],
) -> dict[str, np.ndarray]:
    """Return the gradients, float32 or float64; `comm` is that of clattn's messages."""
    sums = attend(ring, comm, helper) if is_large else None
    with together(comm):
        lse = results["lse"]
        base, total = lse, np.where(np.isneginf(lse), 0.0, 1.0)
        if sums is not None:
            base, total = np.full(lse.shape, -np.inf), np.zeros(lse.shape)
            for piece, part in sums.results():
                base[..., piece], total[..., piece] = part.base, part.total
        forward = Forward(
            results["grad_output"], results["output"], base, total, results["grad_lse"]
        )
        share = GradientShare(
            ring.operands, **ring.rows_of(comm.rank), forward=forward, needs=names
        )
        gradients = _Gradients(ring, comm, [name for name in names if name in ring.moving])

    def visit(keys: Any, where: Any, seen: Any) -> None:
        share.differentiate(keys, where, seen, gradients.own)

    ring.go_round(comm, helper, visit, gradients)
    with together(comm):
        return {"query": share.query, **gradients.go_home(ring.schedule.steps, helper)}


class _Gradients:
    """Gradients of keys and values: they go round one step behind these, and grow at each rank."""

    def __init__(self, ring: Ring, comm: Any, names: Sequence[str]) -> None:
        dtype = wide(ring.dtype)
        own = {name: np.empty(ring.moving[name].shape, dtype) for name in names}
        self._comm = comm
        self._parts = Parts(comm, own, ring.lengths)
        self._now, self._coming, self._added = (self._parts.buffer() for _ in range(3))
        self.own: dict[str, np.ndarray] = {}

    def start(self, step: int, source: int) -> list[Any]:
        """Begin to pass on what the step before has left, and to receive what this one adds to."""
        self.own = self._parts.views(self._added, source)
        for array in self.own.values():
            array.fill(0)
        last = (source + 1) % self._comm.size
        return self._parts.pass_on(self._now, self._coming, last) if step > 0 else []

    def arrive(self, source: int) -> None:
        """Add the gradients of this rank's rows to those that have arrived."""
        with np.errstate(all="ignore"):
            for name, array in self._parts.views(self._coming, source).items():
                array += self.own[name]
        self._now, self._coming = self._coming, self._now

    def go_home(self, steps: int, helper: Executor) -> dict[str, np.ndarray]:
        """Send the gradients to the rank whose keys they belong to; return those of this rank."""
        rank = self._comm.rank
        if steps > 1:
            last = (rank + 1 - steps) % self._comm.size
            moves = self._parts.pass_on(self._now, self._coming, last, hops=1 - steps)
            with moving(moves, helper):
                pass
            self._now, self._coming = self._coming, self._now
        return self._parts.views(self._now, rank)
