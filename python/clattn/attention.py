"""Attention with the signature of ``torch.nn.functional``."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from clattn import _core
from clattn._arguments.integers import offsets

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Literal, Unpack

    from clattn._arguments.arrays import Array, ArrayT, DeviceLike
    from clattn._arguments.options import AttentionOptions, Window
    from clattn._core import Tensor
__all__ = ["scaled_dot_product_attention"]


@overload
def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> ArrayT: ...
@overload
def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, Any]: ...
@overload
def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, Any, ArrayT]: ...
@overload
def scaled_dot_product_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any: ...
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window = None,
    softcap: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    device: DeviceLike | None = None,
    sinks: Array | None = None,
    query_offset: int | Sequence[int] | Array = 0,
    return_weights: bool = False,
    layout: Literal["BHLE", "BLHE"] = "BHLE",
) -> Any:
    """Return ``softmax(scale * query @ key.T + attn_mask) @ value``.

    As ``torch.nn.functional.scaled_dot_product_attention``, with additions. Leading dimensions
    broadcast, any strides are accepted, inputs are never modified. An array is a NumPy array, a
    `Tensor`, or an array of another library on the host; results are of the library of `query`.
    Scores and softmax are computed in float32 at least (float64 for float64). A row with no key to
    attend to gives zeros. A key that the mask, causality or the window excludes does not matter,
    even if it is NaN.

    Parameters
    ----------
    query : array of shape (..., Hq, L, E)
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64; two dimensions or more.
        E and Ev are 65,536 at most.
    key : array of shape (..., Hk, S, E)
        Of query's dtype.
    value : array of shape (..., Hk, S, Ev)
        Of query's dtype.
    attn_mask : array, optional
        Broadcasts to (..., Hq, L, S). bool (True attends) or any float dtype (added to the
        scaled scores; -inf excludes).
    dropout_p : float
        Probability with which each weight is dropped, 0 to 1; the others are multiplied by
        ``1 / (1 - dropout_p)``.
    is_causal : bool or "lower_right"
        True: row i attends key j where ``j <= i``; "lower_right": where ``j <= i + S - L``.
        Composes with `attn_mask`.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads: Hq is a multiple of Hk, query head h reads key and value head
        ``h // (Hq // Hk)``.
    window : (int or None, int or None), optional
        ``(left, right)`` keeps the keys ``p - left ... p + right`` of row i, where p is i, or
        ``i + S - L`` with "lower_right"; `query_offset` is added. None leaves a side unbounded.
    softcap : float
        Above 0, a scaled score s becomes ``softcap * tanh(s / softcap)`` before the mask.
    seed : int, optional
        Fixes which weights are dropped, 0 to 2**64 - 1: the choice depends on the seed and the
        position (batch, head, row, key) alone, not on device or kernel. Default: a new seed
        for each call, from the operating system.
    return_lse : bool
        Also return the log-sum-exp of the masked scores.
    out : array of shape (..., Hq, L, Ev), optional
        The result is written here and `out` is returned; of query's dtype, with any strides.
        It may share memory with an input; no two of its elements may share any. Undefined if an
        exception ends the call midway.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.
    sinks : array of shape (Hq,), optional
        A logit for each query head, of any float dtype, that takes part in the softmax's sum and
        in no value. So the weights add up to less than 1. It is neither scaled nor capped; -inf is
        no sink. More dimensions of size 1 do not count: (1, Hq, 1, 1) will do.
    query_offset : int or integers of shape (B,)
        Row i stands at position ``i + query_offset`` for `is_causal` and `window`. Several integers
        are one for each entry of the first dimension of `query`, which then has four dimensions
        or more.
    return_weights : bool
        Also return the weights, before any are dropped. They take memory for (..., Hq, L, S).
    layout : {"BHLE", "BLHE"}
        "BLHE": `query`, `key`, `value`, `out` and the result have their heads after their rows,
        (..., L, H, E); `attn_mask`, log-sum-exp and weights have the same shape in both layouts.
        Arrays in the wrong layout give wrong results, without an error where their shapes fit.

    Returns
    -------
    output : array of shape (..., Hq, L, Ev)
        Of query's dtype.
    lse : array of shape (..., Hq, L)
        With `return_lse`: natural logarithm, float32 (float64 for float64), -inf for a row
        with no key. A sink is part of the sum.
    weights : array of shape (..., Hq, L, S)
        With `return_weights`, the last result: of query's dtype, zeros for a row with no key.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        Shapes, ranges or combinations do not fit; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    The algorithm is FlashAttention-2 (Dao, 2023, arXiv:2307.08691): the scores are never in
    memory, and scratch space does not grow with S. Dropout uses Philox 4x32-10 (Salmon et al.,
    2011, "Parallel random numbers: as easy as 1, 2, 3").

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (1, 2, 4, 8)
    """
    return _core.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        softcap=softcap,
        seed=seed,
        return_lse=return_lse,
        out=out,
        device=device,
        sinks=sinks,
        query_offset=query_offset if type(query_offset) is int else offsets(query_offset),
        return_weights=return_weights,
        layout=layout,
    )
