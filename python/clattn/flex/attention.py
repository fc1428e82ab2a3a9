"""Attention with scores and masks that the user writes."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from clattn import _core
from clattn._arguments.devices import without_torch
from clattn._arguments.integers import offsets
from clattn.flex.blocks import BlockMask, from_torch
from clattn.flex.compile import trace_both
from clattn.flex.opaque import opaque

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal, TypedDict, Unpack

    import numpy as np

    from clattn._arguments.arrays import Array, ArrayT, DeviceLike
    from clattn._core import Tensor
    from clattn.flex.blocks import ForKernels
    from clattn.flex.compile import Mods

    class _Options(TypedDict, total=False):
        mask_mod: Callable[..., Any] | None
        softcap: float
        sinks: Array | None
        query_offset: int | Sequence[int] | Array
        out: Array | None
        device: DeviceLike | None
        kernel_options: dict[str, Any] | None


__all__ = [
    "attend_with_mods",
    "flex_attention",
    "give_aux",
    "read_block_mask",
    "read_torchs_arguments",
]


@overload
def flex_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> ArrayT: ...
@overload
def flex_attention(
    query: Tensor,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[ArrayT, Any]: ...
@overload
def flex_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[_Options],
) -> Any: ...
@overload
def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_aux: Any,
    **options: Unpack[_Options],
) -> Any: ...
@opaque
def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mask_mod: Callable[..., Any] | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    sinks: Array | None = None,
    query_offset: int | Sequence[int] | Array = 0,
    out: Array | None = None,
    device: DeviceLike | None = None,
    kernel_options: dict[str, Any] | None = None,
    return_aux: Any = None,
) -> Any:
    """Return attention whose scores and mask are functions that the user writes.

    As ``torch.nn.attention.flex_attention.flex_attention``, with additions. Score and mask
    functions are called once with symbols, and become a part of the kernel (`clattn.flex`).
    Numbers and arrays that they capture are data, read at the time of the call: other values
    need no other program. A finite one beyond the range of the call's floats becomes the largest
    of them. Arrays, dtypes and results are those of `clattn.scaled_dot_product_attention`.

    Parameters
    ----------
    query : array of shape (..., Hq, L, E)
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64; two dimensions or more.
        E and Ev are 65,536 at most.
    key : array of shape (..., Hk, S, E)
        Of query's dtype.
    value : array of shape (..., Hk, S, Ev)
        Of query's dtype.
    score_mod : callable, optional
        A function of (score, b, h, q_idx, kv_idx) that returns the score to use: after the scale,
        before softcap and softmax. -inf excludes the key. h is the query's head, b counts the
        entries of all dimensions before the heads, q_idx and kv_idx are the positions of row and
        key. They are int32.
    block_mask : BlockMask, optional
        Of `create_block_mask`: a mask_mod, and its blocks that are skipped or need no mask. It
        has a row for each position of the queries, S keys or more, and 1 or as many batches and
        heads as the result. What the mask_mod captures has to be as it was then: other numbers, and
        arrays on the host with other elements, are refused. A Tensor is not compared. Torch's own
        block masks are taken too, with their blocks, and nothing is compared.
    scale : float, optional
        Default ``1 / sqrt(E)``.
    enable_gqa : bool
        Grouped heads: Hq is a multiple of Hk, query head h reads key and value head
        ``h // (Hq // Hk)``.
    mask_mod : callable, optional
        A function of (b, h, q_idx, kv_idx) that says what is attended to, in place of a block
        mask. It is asked for every key.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    softcap : float
        Above 0, a score s becomes ``softcap * tanh(s / softcap)``, after `score_mod`.
    sinks : array of shape (Hq,), optional
        A logit for each query head, of any float dtype, that takes part in the softmax's sum and
        in no value.
    query_offset : int, or integers
        Row i stands at position ``i + query_offset``: its q_idx, and its row of the block mask.
        Integers: one for each entry of the first dimension of query.
    out : array of shape (..., Hq, L, Ev), optional
        The result is written here and `out` is returned; of query's dtype, with any strides.
        No two of its elements may share memory.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`, also for
        torch's CPU.
    kernel_options : dict, optional
        Torch's argument, without effect; the first one is warned of.
    return_aux : AuxRequest, optional
        Torch's argument: with `lse` in it, the second result is an AuxOutput with the `lse`.

    Returns
    -------
    output : array of shape (..., Hq, L, Ev)
        Of query's dtype and library.
    lse : array of shape (..., Hq, L)
        With `return_lse`: natural logarithm, float32 (float64 for float64), -inf for a row
        with no key.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, or a function that cannot be traced; the message
        shows its line.
    ValueError
        Shapes, ranges or combinations do not fit; the message names the argument. A captured
        tensor requires gradients while torch computes them.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    Notes
    -----
    FlexAttention: Dong et al., 2024, arXiv:2412.05496. An index outside a captured array makes a
    score NaN and a mask False, also in the branch of ``np.where`` that is not chosen.

    Examples
    --------
    >>> import clattn
    >>> import numpy as np
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + clattn.lookup(slopes, h) * (kv_idx - q_idx)
    >>> flex_attention(q, k, v, score_mod=alibi).shape
    (1, 2, 4, 8)
    """
    device = without_torch(device)
    if getattr(query, "is_nested", False):
        raise ValueError(
            "query is a nested tensor; expected one of equal lengths: clattn.varlen_attn takes "
            "packed sequences with mods"
        )
    returns_lse = read_torchs_arguments(return_lse, kernel_options, return_aux)
    block_mask, mask_mod, blocks = read_block_mask(block_mask, mask_mod, query, device)
    mods = None
    if score_mod is not None or mask_mod is not None:
        mask, mods = trace_both(score_mod, mask_mod, query)
        if block_mask is not None:
            block_mask.check_unchanged(mask)
    result = attend_with_mods(
        query,
        key,
        value,
        mods=mods,
        blocks=blocks,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=returns_lse,
        softcap=softcap,
        sinks=sinks,
        query_offset=offsets(query_offset),
        out=out,
        device=device,
    )
    return result if return_aux is None else give_aux(result, return_aux)


def read_block_mask(
    block_mask: Any,
    mask_mod: Callable[..., Any] | None,
    query: Array,
    device: DeviceLike | None,
) -> tuple[BlockMask | None, Callable[..., Any] | None, ForKernels | None]:
    """Return a call's block mask, its mask_mod, and what kernels need of its blocks."""
    if block_mask is None:
        return None, mask_mod, None
    if mask_mod is not None:
        raise TypeError("mask_mod and block_mask are both given; expected one of them")
    given, there = block_mask, _device_of(query, device)
    if not isinstance(given, BlockMask):
        given = from_torch(given, there)
    if given is None:
        raise TypeError(
            f"block_mask is of type {type(block_mask).__name__}; expected a BlockMask, which "
            "create_block_mask makes, or mask_mod=… for a function"
        )
    return given, given.mask_mod, given.for_kernels(there)


# ---- torch's arguments ----


class AuxOutput(NamedTuple):
    """What torch returns under this name, where torch has none.

    Attributes
    ----------
    lse : array or None
        The log-sum-exp of the scores.
    max_scores : None
        Not computed.
    """

    lse: Any = None
    max_scores: None = None


def read_torchs_arguments(return_lse: bool, kernel_options: Any, return_aux: Any) -> bool:
    """Check torch's arguments; return whether the log-sum-exp is asked for."""
    if kernel_options is not None:
        _warn_of_kernel_options()
    if return_aux is None:
        return return_lse
    _check_request(return_aux, return_lse)
    return bool(return_aux.lse)


def give_aux(result: Any, return_aux: Any) -> tuple[Any, Any]:
    """Return a result, output or (output, lse), in the form that a request has."""
    output, lse = result if return_aux.lse else (result, None)
    return output, _output_for(return_aux)(lse)


def _output_for(request: Any) -> Callable[..., Any]:
    """Return the class of the output that belongs to a request: that of the same module."""
    module = sys.modules.get(type(request).__module__)
    return getattr(module, "AuxOutput", AuxOutput)


def _check_request(request: Any, return_lse: Any) -> None:
    if not (hasattr(request, "lse") and hasattr(request, "max_scores")):
        raise TypeError(
            f"return_aux is of type {type(request).__name__}; expected torch's AuxRequest(lse=True)"
        )
    if request.max_scores:
        raise ValueError("return_aux requests max_scores; expected AuxRequest(lse=True)")
    if return_lse:
        raise ValueError("return_lse and return_aux are both given; expected one of them")


def _device_of(query: Any, device: DeviceLike | None) -> DeviceLike | None:
    """Return the device of a call: that of a Tensor, unless one is named."""
    return query.device if device is None and isinstance(query, _core.Tensor) else device


_warned = False


def _level_of_caller() -> int:
    """Return the stack level of the caller's frame, for the function that calls this one."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("clattn.", "torch.")):
        frame, level = frame.f_back, level + 1
    return level


def _warn_of_kernel_options() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "kernel_options of flex_attention has no effect: clattn chooses its kernels itself",
            stacklevel=_level_of_caller(),
        )


def attend_with_mods(
    query: Array,
    key: Array,
    value: Array,
    *,
    mods: Mods | None,
    blocks: ForKernels | None = None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: Any,
    softcap: float = 0.0,
    sinks: Array | None = None,
    query_offset: int | np.ndarray = 0,
    out: Array | None = None,
    device: DeviceLike | None,
) -> Any:
    """Return `flex_attention` of functions that are traced, and of `BlockMask.for_kernels`."""
    return _core.scaled_dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        return_lse=return_lse,
        out=out,
        device=device,
        sinks=sinks,
        query_offset=query_offset,
        mods=mods,
        block_mask=blocks,
    )
