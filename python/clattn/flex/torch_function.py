"""FlexAttention with torch's gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from clattn._arguments.torch_tensors import autocast, check_tensors
from clattn.flex import attention
from clattn.flex.backward import ReadInOrder, flex_attention_backward
from clattn.flex.compile import find_learnable
from clattn.flex.opaque import opaque
from clattn.flex.tables import without_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clattn._arguments.arrays import DeviceLike

__all__ = ["flex_attention"]

_NO_RULES = "clattn.torch.flex_attention has no rules for torch.func's transforms"


class _Call(NamedTuple):
    """What a call has beside tensors with gradients."""

    score_mod: Callable[..., Any] | None
    block_mask: Any
    options: dict[str, Any]
    captured: tuple[Tensor, ...]  # the tensors that the score_mod reads, in their order

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
        """Return what `clattn.flex_attention` does."""
        return attention.flex_attention(
            query, key, value, self.score_mod, self.block_mask, **self.options, **more
        )


class _Flex(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        query, key, value, sinks, *_ = map(without_gradients, tensors)
        output, lse = call.forward(query, key, value, sinks=sinks, return_lse=True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        # With those that are captured, torch notices if one changes before the backward pass.
        ctx.save_for_backward(*tensors[:4], output, lse, *call.captured)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any([g is not None and is_legacy_batchedtensor(g) for g in grads]):
            raise NotImplementedError(f"{_NO_RULES}, nor for batched gradients (is_grads_batched)")
        needed = ctx.needs_input_grad[1:]
        return None, *_Backward.apply(ctx.call, needed, *grads, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    """The backward pass, which has no derivative itself."""

    @staticmethod
    def forward(ctx: Any, call: _Call, needed: tuple[bool, ...], *tensors: Any) -> Any:
        found = map(without_gradients, tensors[:8])
        grad_output, grad_lse, query, key, value, sinks, output, lse = found
        names = ("query", "key", "value", "sinks")
        learns = any(needed[len(names) :])
        with torch.set_grad_enabled(learns):  # tells what the score_mod reads
            gradients = flex_attention_backward(
                torch.zeros_like(output) if grad_output is None else grad_output,
                query,
                key,
                value,
                output,
                lse,
                call.score_mod,
                call.block_mask,
                **call.options,
                sinks=sinks,
                grad_lse=grad_lse,
                needs=[name for name, needs in zip(names, needed, strict=False) if needs],
                captured=ReadInOrder(call.captured) if learns else (),
            )
        by_captured = gradients.captured if learns else [None] * len(call.captured)
        return *[getattr(gradients, name) for name in names], *by_captured

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "clattn's attention has no second derivative: call torch's function where one is needed"
        )


@opaque
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    mask_mod: Callable[..., Any] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    query_offset: int | Sequence[int] | Tensor = 0,
    return_aux: Any = None,
    device: DeviceLike | None = None,
) -> Any:
    """Return `clattn.flex_attention` of torch's tensors, with gradients.

    Gradients are those of `clattn.flex_attention_backward`: of query, key, value and sinks, and of
    each tensor that the score_mod reads and that requires one, which it may compute of others:
    ``torch.exp(slopes)[h]``. There is no second derivative. ``torch.compile`` leaves the call to
    Python. Under ``torch.autocast`` query, key and value are cast as torch casts them.

    Parameters
    ----------
    query : Tensor of shape (..., Hq, L, E)
        float16, bfloat16, float32 or float64, on the CPU.
    key : Tensor of shape (..., Hk, S, E)
        Of query's dtype.
    value : Tensor of shape (..., Hk, S, Ev)
        Of query's dtype.
    score_mod, block_mask, scale, enable_gqa, mask_mod : optional
        As in `clattn.flex_attention`.
    softcap, sinks, query_offset, kernel_options, return_aux, device : optional
        As in `clattn.flex_attention`.
    return_lse : bool
        Also return the log-sum-exp, which has a gradient.

    Returns
    -------
    output : Tensor of shape (..., Hq, L, Ev)
        Of query's dtype.
    lse : Tensor of shape (..., Hq, L)
        With `return_lse`: float32, float64 for float64.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, or a function that cannot be traced.
    ValueError
        Shapes, ranges or combinations do not fit. The score_mod has no derivative, or reads more
        than 16 tensors that require gradients.
    MemoryError
        Host or device memory does not suffice.
    DeviceError
        There is no usable OpenCL device, or OpenCL reports an error.
    NotImplementedError
        A transform of ``torch.func`` has changed a tensor, or a second derivative is needed.

    Examples
    --------
    >>> import torch
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> x = torch.ones(1, 2, 4, 8)
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + slopes[h] * (kv_idx - q_idx)
    >>> flex_attention(x, x, x, alibi).sum().backward()
    >>> slopes.grad.shape
    torch.Size([2])
    """
    returns_lse = attention.read_torchs_arguments(return_lse, kernel_options, return_aux)
    options = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "mask_mod": mask_mod,
        "softcap": softcap,
        "query_offset": query_offset,
        "device": device,
    }
    captured: tuple[Any, ...] = ()
    if score_mod is not None and torch.is_grad_enabled():
        captured = find_learnable(score_mod, query)
    tensors = (query, key, value, sinks, *captured)
    if any([isinstance(t, Tensor) and is_functorch_wrapped_tensor(t) for t in tensors]):
        raise NotImplementedError(
            f"{_NO_RULES}; call backward() on what is computed of its output, or "
            "clattn.torch.scaled_dot_product_attention"
        )
    if torch.is_autocast_enabled("cpu"):
        cast = [autocast(t) if isinstance(t, Tensor) else t for t in tensors[:3]]
        tensors = (*cast, *tensors[3:])
    call = _Call(score_mod, block_mask, options, captured)
    if torch.is_grad_enabled() and any([getattr(t, "requires_grad", False) for t in tensors]):
        given = {"query": query, "key": key, "value": value}
        check_tensors("flex_attention", **given | ({} if sinks is None else {"sinks": sinks}))
        output, lse = _Flex.apply(call, *tensors)
        result = (output, lse) if returns_lse else output
    else:
        query, key, value, sinks = map(without_gradients, tensors[:4])
        result = call.forward(query, key, value, sinks=sinks, return_lse=returns_lse)
    return result if return_aux is None else attention.give_aux(result, return_aux)
