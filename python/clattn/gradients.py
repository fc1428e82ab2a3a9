"""The backward pass of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from clattn import _core
from clattn._arguments.integers import offsets
from clattn._arguments.needs import read_needs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any, Literal

    from clattn._arguments.arrays import Array, DeviceLike
    from clattn._arguments.options import Window

__all__ = ["AttentionGradients", "scaled_dot_product_attention_backward"]


class AttentionGradients(NamedTuple):
    """The gradients of a call of attention; None: not asked for."""

    query: Any = None
    key: Any = None
    value: Any = None
    attn_mask: Any = None
    sinks: Any = None


def scaled_dot_product_attention_backward(
    grad_output: Array,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    lse: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | Literal["lower_right"] = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    grad_lse: Array | None = None,
    needs: Collection[str] = ("query", "key", "value"),
    window: Window = None,
    softcap: float = 0.0,
    seed: int | None = None,
    sinks: Array | None = None,
    query_offset: int | Sequence[int] | Array = 0,
    layout: Literal["BHLE", "BLHE"] = "BHLE",
    out: AttentionGradients | tuple[Array | None, ...] | None = None,
    device: DeviceLike | None = None,
) -> AttentionGradients:
    """Return the gradients of `scaled_dot_product_attention`.

    The arguments are those of the forward call, what it gave, and the gradients of what it gave.
    A gradient is summed over what broadcast and over the query heads of a group. A pair of query
    and key that is excluded, and a row with no key, add nothing, whatever they hold. The same call
    gives the same bits on the same device.

    Parameters
    ----------
    grad_output : array of shape (..., Hq, L, Ev)
        Gradient of `output`, of query's dtype. Any strides, 0 included.
    query, key, value : array
        As in the forward call.
    output : array of shape (..., Hq, L, Ev)
        What the forward call returned.
    lse : array of shape (..., Hq, L)
        What the forward call returned with ``return_lse=True``.
    attn_mask, dropout_p, is_causal, scale, enable_gqa : optional
        As in the forward call.
    grad_lse : array of shape (..., Hq, L), optional
        Gradient of `lse`: float32, float64 for float64. Default: zeros.
    needs : names
        Whose gradients are wanted, any of "query", "key", "value", "attn_mask" and "sinks". Only a
        float mask has a gradient.
    window, softcap, sinks, query_offset, layout : optional
        As in the forward call.
    seed : int, optional
        That of the forward call; needed if `dropout_p` is above 0.
    out : AttentionGradients or tuple of five, optional
        Arrays that the gradients are written to, None where a gradient is not asked for or a new
        array is wanted. They share no memory with an input or with each other.
    device : Device, str or int, optional
        Where to run, see `clattn.devices`. Default: `clattn.get_default_device`.

    Returns
    -------
    gradients : AttentionGradients
        Each of the shape, dtype and library of what it belongs to, C-contiguous; None where `needs`
        does not name it.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype; "attn_mask" in `needs` with a bool mask.
    ValueError
        Shapes, ranges or combinations do not fit; the message names the argument.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.

    See Also
    --------
    scaled_dot_product_attention : The forward pass.

    Notes
    -----
    The formulas are those of FlashAttention-2 (Dao, 2023, arXiv:2307.08691). Weights are computed
    anew from query and key, so scratch memory grows with L and never with L x S. Base and sum of
    each row are computed anew too: weights add up to 1 however large the scores are.

    Examples
    --------
    >>> import numpy as np
    >>> from clattn import scaled_dot_product_attention
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> output, lse = scaled_dot_product_attention(q, k, v, return_lse=True)
    >>> gradients = scaled_dot_product_attention_backward(output, q, k, v, output, lse)
    >>> gradients.key.shape
    (1, 2, 4, 8)
    """
    wanted = read_needs(needs, AttentionGradients._fields)
    if seed is None and dropout_p:
        raise ValueError("seed is None; expected that of the forward call, with dropout_p above 0")
    return AttentionGradients(
        *_core.scaled_dot_product_attention_backward(
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
            out=out,
            device=device,
            sinks=sinks,
            query_offset=query_offset if type(query_offset) is int else offsets(query_offset),
            layout=layout,
            grad_output=grad_output,
            output=output,
            lse=lse,
            grad_lse=grad_lse,
            needs=tuple(name in wanted for name in AttentionGradients._fields),
        )
    )
