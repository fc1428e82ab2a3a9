"""The backward pass of attention with scores and masks that the user writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clattn import _core
from clattn._arguments.devices import without_torch
from clattn._arguments.integers import offsets
from clattn._arguments.needs import read_needs
from clattn.flex.attention import read_block_mask
from clattn.flex.compile import trace_backward
from clattn.flex.kinds import DTYPES, REAL
from clattn.flex.opaque import opaque
from clattn.flex.tables import dimensions, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn.flex.blocks import BlockMask

__all__ = ["FlexGradients", "ReadInOrder", "flex_attention_backward"]

_NAMES = ("query", "key", "value", "sinks")
_DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
_FLOATS = [name for name, type_ in DTYPES.items() if type_ == REAL]
_MOST_CAPTURED = 16  # CA_PY_CAPTURED of csrc/python/backward.c


class ReadInOrder(tuple[Any, ...]):
    """Captured tensors of torch, in the order in which the score_mod reads them.

    The score_mod may compute them anew in each call: ``torch.exp(slopes)[h]``.
    """


class FlexGradients(NamedTuple):
    """What `flex_attention_backward` returns.

    Attributes
    ----------
    query, key, value : array or None
        Of the shape and dtype of what they belong to; None if they are not asked for.
    captured : tuple of arrays
        One for each of the captured arrays.
    sinks : array or None
        Of the shape and dtype of sinks.
    """

    query: Any
    key: Any
    value: Any
    captured: tuple[Any, ...]
    sinks: Any


@opaque
def flex_attention_backward(
    grad_output: Array,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    lse: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mask_mod: Callable[..., Any] | None = None,
    grad_lse: Array | None = None,
    needs: Sequence[str] = ("query", "key", "value"),
    captured: Sequence[Any] = (),
    softcap: float = 0.0,
    sinks: Array | None = None,
    query_offset: int | Sequence[int] | Array = 0,
    device: DeviceLike | None = None,
) -> FlexGradients:
    """Return the gradients of `flex_attention`, with those of arrays that the score_mod reads.

    The score_mod is called once, with symbols, and differentiated. Arguments that `flex_attention`
    has, too, are those of the forward call.

    Parameters
    ----------
    grad_output : array of shape (..., Hq, L, Ev)
        The gradient of `output`, of query's dtype.
    query : array of shape (..., Hq, L, E)
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64.
    key : array of shape (..., Hk, S, E)
        Of query's dtype.
    value : array of shape (..., Hk, S, Ev)
        Of query's dtype.
    output : array of shape (..., Hq, L, Ev)
        What the forward call gave.
    lse : array of shape (..., Hq, L)
        What the forward call gave, with ``return_lse=True``: float32 (float64 for float64).
    score_mod, block_mask, scale, enable_gqa, mask_mod : optional
        Those of the forward call.
    softcap, sinks, query_offset : optional
        Those of the forward call.
    grad_lse : array of shape (..., Hq, L), optional
        The gradient of `lse`, of its dtype.
    needs : sequence of str
        Which gradients to compute, of "query", "key", "value" and "sinks".
    captured : sequence of arrays
        Arrays of floats whose gradients are computed too: the very objects that the score_mod
        reads, at most 16. One without dimensions is used as a number.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    FlexGradients
        Arrays of the shape and dtype of what they belong to, C-contiguous.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, or a function that cannot be traced. A captured
        array has no floats.
    ValueError
        Shapes, ranges or combinations do not fit. The score_mod has no derivative, or does not
        read a captured array.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    Derivatives are torch's: ``minimum`` and ``maximum`` of equal numbers have one half each,
    ``abs`` has 0 at 0, and the ends of ``clip`` belong to its inside. Rounding, ``sign`` and
    comparisons have 0. A branch of ``where`` that is not chosen has 0, even if its derivative is
    NaN. An index outside an array adds nothing to the array's gradient. The same call on the same
    device gives the same bits.

    Examples
    --------
    >>> import clattn
    >>> import numpy as np
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + clattn.lookup(slopes, h) * (kv_idx - q_idx)
    >>> output, lse = clattn.flex_attention(q, k, v, alibi, return_lse=True)
    >>> gradients = flex_attention_backward(
    ...     np.ones_like(output), q, k, v, output, lse, alibi, captured=(slopes,))
    >>> gradients.query.shape, gradients.captured[0].shape
    ((1, 2, 4, 8), (2,))
    """
    device = without_torch(device)
    wanted = read_needs(needs, _NAMES)
    arrays = _read_captured(captured)
    block_mask, mask_mod, blocks = read_block_mask(block_mask, mask_mod, query, device)
    mods = None
    apart: tuple[int, ...] = ()
    if score_mod is not None or mask_mod is not None or arrays:
        in_order = isinstance(captured, ReadInOrder)
        mask, mods, apart = trace_backward(score_mod, mask_mod, query, arrays, in_order)
        if block_mask is not None:
            block_mask.check_unchanged(mask)
    positions = offsets(query_offset)
    gradients = _core.scaled_dot_product_attention_backward(
        query,
        key,
        value,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        device=device,
        sinks=sinks,
        query_offset=positions,
        mods=mods,
        block_mask=blocks,
        grad_output=grad_output,
        output=output,
        lse=lse,
        grad_lse=grad_lse,
        needs=("query" in wanted, "key" in wanted, "value" in wanted, False, "sinks" in wanted),
        captured=tuple(map(_describe, arrays, _kept_apart(apart, positions))),
    )
    by_query, by_key, by_value, _, by_sinks, *by_captured = gradients
    return FlexGradients(by_query, by_key, by_value, tuple(by_captured), by_sinks)


# ---- arguments ----


def _read_captured(captured: Any) -> tuple[Any, ...]:
    if dimensions(captured) is not None:
        raise TypeError("captured is an array; expected a tuple of arrays: (array,)")
    arrays = tuple(captured)
    if len(arrays) > _MOST_CAPTURED:
        raise ValueError(f"captured has {len(arrays)} arrays; expected at most {_MOST_CAPTURED}")
    for n, array in enumerate(arrays):
        if dimensions(array) is None or not hasattr(array, "dtype"):
            raise TypeError(
                f"captured[{n}] is of type {type(array).__name__}; expected an array, also for a "
                "number: numpy.array(0.5)"
            )
        if dtype_name(array.dtype) not in _FLOATS:
            raise TypeError(
                f"captured[{n}] has dtype {array.dtype}; expected one of {', '.join(_FLOATS)}, "
                "which have gradients"
            )
        if any(array is other for other in arrays[:n]):
            raise ValueError(f"captured[{n}] is among the arrays before; expected each once")
    return arrays


def _describe(array: Any, apart: int) -> tuple[Any, int, tuple[int, ...], int]:
    """Return what the core needs of a captured array, which it does not read."""
    like = np.empty(()) if isinstance(array, np.generic) else array
    return like, _DTYPE_NUMBERS[dtype_name(array.dtype)], tuple(map(int, array.shape)), apart


def _kept_apart(apart: tuple[int, ...], positions: int | np.ndarray) -> list[int]:
    """Return the bits of what keeps rows apart: that of rows holds if no position is negative."""
    rows = isinstance(positions, int) and positions >= 0
    return [bits if rows else bits & ~4 for bits in apart]
