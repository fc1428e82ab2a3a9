"""Attention as operators of torch: with gradients, for ``torch.compile`` and ``torch.func``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack

from clattn import attention, gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn._core import Device

__all__ = [
    "OPTIONS",
    "Options",
    "attend",
    "causal_word",
    "define",
    "device_number",
    "device_of",
    "draw_seed",
    "wide",
]

# A schema's types are words: an operator takes a device by its number here.
_devices: list[Device | None] = [None]


class Options(NamedTuple):
    """What an operator takes beside tensors."""

    dropout_p: float = 0.0
    causal: str = ""  # "", "upper_left" or "lower_right"
    scale: float | None = None
    enable_gqa: bool = False
    left: int | None = None  # the window's sides
    right: int | None = None
    softcap: float = 0.0
    position: int = 0  # of row 0, without offsets
    device: int = 0

    def keywords(self, seed: Tensor | None, offsets: Tensor | None) -> dict[str, Any]:
        """Return them as arguments of clattn's functions."""
        bounded = self.left is not None or self.right is not None
        return {
            **self.common(),
            "dropout_p": self.dropout_p,
            "window": (self.left, self.right) if bounded else None,
            "query_offset": self.position if offsets is None else offsets,
            "seed": None if seed is None else int(seed.item()) & (1 << 64) - 1,
        }

    def window_size(self) -> tuple[int, int]:
        """Return the window as `clattn.varlen_attn` takes it."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right

    def common(self) -> dict[str, Any]:
        """Return those that `clattn.varlen_attn` takes too, but for the window."""
        return {
            "is_causal": {"": False, "upper_left": True}.get(self.causal, self.causal),
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
            "softcap": self.softcap,
            "device": _devices[self.device],
        }


def device_number(device: Device | None) -> int:
    """Return the number by which operators know a device. None: the default one, at each call."""
    if device not in _devices:
        _devices.append(device)
    return _devices.index(device)


def device_of(number: int) -> Device | None:
    """Return the device of a number. None: the default one."""
    return _devices[number]


def causal_word(is_causal: Any) -> str:
    """Return a schema's word for the argument."""
    if isinstance(is_causal, bool | np.bool):
        return "upper_left" if is_causal else ""
    if is_causal == "lower_right":
        return "lower_right"
    raise ValueError(f"is_causal is {is_causal!r:.80}; expected True, False or 'lower_right'")


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a log-sum-exp."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def draw_seed() -> Tensor:
    """Draw a seed for dropout from torch's generator, which checkpoints restore."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64)


def allocate(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Tensor:
    """Allocate the result, laid out as torch's is.

    Where the heads of a query are views of one row, (B, L, Hq, E) transposed, they stay so, and
    joining them again needs no copy. That is for four dimensions, of which key and value bring no
    batch and no heads of their own, and Ev = E.
    """
    queries, keys, values = query.shape, key.shape, value.shape
    if len(queries) == len(keys) == len(values) == 4:
        (B, H, L, E), (Bk, Hk, _, _), (Bv, Hv, _, Ev) = queries, keys, values
        if B == Bk == Bv and (enable_gqa or H == Hk == Hv):
            if Ev == E and query.stride(3) == 1:
                return torch.empty_like(query)
            return query.new_empty((B, H, L, Ev))
    first = 3 if enable_gqa else 2
    leading = torch.broadcast_shapes(
        *(shape[: max(len(shape) - first, 0)] for shape in (queries, keys, values))
    )
    heads = queries[-3:-2] if enable_gqa else ()
    return query.new_empty((*leading, *heads, queries[-2], values[-1]))


_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, Tensor? offsets, "
    "Tensor? seed"
)
OPTIONS = (
    "float dropout_p, str causal, float? scale, bool enable_gqa, SymInt? left, SymInt? right, "
    "float softcap, SymInt position, int device"
)


class _Operands(NamedTuple):
    """The tensors of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    sinks: Tensor | None
    offsets: Tensor | None
    seed: Tensor | None

    def arrays(self) -> dict[str, Any]:
        """Return those that have gradients, as arguments of clattn's functions."""
        named = self._asdict()
        return {
            name: None if named[name] is None else named[name].detach()
            for name in gradients.AttentionGradients._fields
        }


_COUNT = len(_Operands._fields)


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    operands, options = _Operands(*args[:_COUNT]), Options(*args[_COUNT:])
    out = allocate(operands.query, operands.key, operands.value, options.enable_gqa)
    _, lse = attention.scaled_dot_product_attention(
        **operands.arrays(),
        return_lse=True,
        out=out,
        **options.keywords(operands.seed, operands.offsets),
    )
    return out, lse


def _fake_attention(*args: Any) -> tuple[Tensor, Tensor]:
    operands, options = _Operands(*args[:_COUNT]), Options(*args[_COUNT:])
    output = allocate(operands.query, operands.key, operands.value, options.enable_gqa)
    return output, output.new_empty(output.shape[:-1], dtype=wide(output))


def _backward(
    out: tuple[Tensor | None, ...],
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    *args: Any,
) -> None:
    operands, options = _Operands(*args[:_COUNT]), Options(*args[_COUNT:])
    names = gradients.AttentionGradients._fields
    gradients.scaled_dot_product_attention_backward(
        grad_output,
        output=output,
        lse=lse,
        grad_lse=grad_lse,
        needs=[name for name, one in zip(names, out, strict=True) if one is not None],
        out=out,
        **operands.arrays(),
        **options.keywords(operands.seed, operands.offsets),
    )


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "clattn's attention has no second derivative: call torch's function where one is needed"
    )


def _one_by_one(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """Call an operator for each entry of a dimension that vmap goes over."""
    results = [
        op(*(a.select(d, n) if type(d) is int else a for a, d in zip(args, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(list(one)) for one in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _callable(
    op: Any, compute: Any, keep: Any, differentiate: Any
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that calls an operator, or what it computes where nothing watches.

    An operator's dispatch takes as long as a small call. The transforms of ``torch.func`` take the
    rules of a Function with `setup_context`, which takes long in other calls.
    """

    class Direct(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        backward = staticmethod(differentiate)

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = compute(*args)
            keep(ctx, args, results)
            return results

    class Transformed(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        setup_context = staticmethod(keep)
        backward = staticmethod(differentiate)

        @staticmethod
        def forward(*args: Any) -> Any:
            return compute(*args)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return _one_by_one(call, info, in_dims, *args)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0:
            return op(*args)
        if peek_interpreter_stack() is not None:
            return Transformed.apply(*args)
        return (Direct.apply if torch.is_grad_enabled() else compute)(*args)

    op.register_vmap(lambda *args: _one_by_one(op, *args))
    return call


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def define(
    name: str,
    tensors: str,
    options: str,
    floats: int,
    compute: Callable[..., tuple[Tensor, Tensor]],
    fake: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., None],
) -> Callable[..., tuple[Tensor, ...]]:
    """Define an operator of attention with gradients; return the function that calls it.

    Parameters
    ----------
    name : str
        Its name in ``torch.ops.clattn``.
    tensors, options : str
        What its schema takes: tensors first.
    floats : int
        How many of the tensors, the first ones, have gradients.
    compute, fake : callable
        Compute output and log-sum-exp, or allocate them alone, from tensors and options.
    backward : callable
        Write gradients. Its arguments are the tensors to write to, one for each that has a gradient
        or None, the gradients of the results, the results, then tensors and options.
    """
    count = tensors.count("Tensor")

    def allocate_gradients(*given: Any) -> tuple[Tensor, ...]:
        """Lay out gradients as what they belong to; empty ones where none is needed."""
        _, _, output, _, needs, *args = given
        return tuple(
            torch.empty_like(operand) if needed else output.new_empty(0)
            for operand, needed in zip(args[:floats], needs, strict=True)
        )

    def compute_gradients(
        grad_output: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        lse: Tensor,
        needs: list[bool],
        *args: Any,
    ) -> tuple[Tensor, ...]:
        found = allocate_gradients(grad_output, grad_lse, output, lse, needs, *args)
        backward(
            tuple(one if needed else None for one, needed in zip(found, needs, strict=True)),
            grad_output.detach(),
            None if grad_lse is None else grad_lse.detach(),
            output.detach(),
            lse.detach(),
            *args,
        )
        return found

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward pass reads: no scores."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.options = inputs[count:]

    def differentiate(
        ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *operands, output, lse = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:floats])
        if grad_output is None:  # a loss of the log-sum-exp alone
            grad_output = torch.zeros((), dtype=output.dtype).expand(output.shape)
        batched = [g is not None and is_legacy_batchedtensor(g) for g in (grad_output, grad_lse)]
        # With is_grads_batched of torch.autograd.grad torch calls the operator for each gradient.
        call = backward_op if any(batched) else call_backward
        found = call(grad_output, grad_lse, output, lse, needs, *operands, *ctx.options)
        given = [one if needed else None for one, needed in zip(found, needs, strict=True)]
        return (*given, *[None] * (count - floats + len(ctx.options)))

    op = torch.library.custom_op(
        f"clattn::{name}",
        compute,
        mutates_args=(),
        schema=f"({tensors}, {options}) -> (Tensor, Tensor)",
    )
    op.register_fake(fake)
    op.register_autograd(differentiate, setup_context=keep)
    backward_op = torch.library.custom_op(
        f"clattn::{name}_backward",
        compute_gradients,
        mutates_args=(),
        schema="(Tensor grad_output, Tensor? grad_lse, Tensor output, Tensor lse, bool[] needs, "
        f"{tensors}, {options}) -> ({', '.join(['Tensor'] * floats)})",
    )
    backward_op.register_fake(allocate_gradients)
    backward_op.register_autograd(_refuse)
    call_backward = _callable(backward_op, compute_gradients, _keep_nothing, _refuse)
    return _callable(op, compute, keep, differentiate)


_call = define(
    "attention",
    _TENSORS,
    OPTIONS,
    len(gradients.AttentionGradients._fields),
    _attention,
    _fake_attention,
    _backward,
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    options: Options,
    *,
    sinks: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, with gradients where torch records them."""
    seed = draw_seed() if options.dropout_p > 0 else None
    output, lse = _call(query, key, value, attn_mask, sinks, offsets, seed, *options)
    return output, lse
