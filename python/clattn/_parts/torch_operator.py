"""Attention as operators of torch: with gradients, for ``torch.compile`` and ``torch.func``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack

from clattn import attention, gradients

if TYPE_CHECKING:
    from clattn._core import Device

__all__ = ["Options", "attend", "device_number", "device_of", "draw_seed"]

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
            "dropout_p": self.dropout_p,
            "is_causal": {"": False, "upper_left": True}.get(self.causal, self.causal),
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
            "window": (self.left, self.right) if bounded else None,
            "softcap": self.softcap,
            "query_offset": self.position if offsets is None else offsets,
            "seed": None if seed is None else int(seed.item()) & (1 << 64) - 1,
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
_OPTIONS = (
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


_FLOATS = len(gradients.AttentionGradients._fields)
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
    wide = torch.float64 if output.dtype is torch.float64 else torch.float32
    return output, output.new_empty(output.shape[:-1], dtype=wide)


def _backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    needs: list[bool],
    *args: Any,
) -> tuple[Tensor, ...]:
    operands, options = _Operands(*args[:_COUNT]), Options(*args[_COUNT:])
    out = _fake_backward(grad_output, grad_lse, output, lse, needs, *args)
    names = gradients.AttentionGradients._fields
    gradients.scaled_dot_product_attention_backward(
        grad_output.detach(),
        output=output.detach(),
        lse=lse.detach(),
        grad_lse=None if grad_lse is None else grad_lse.detach(),
        needs=[name for name, needed in zip(names, needs, strict=True) if needed],
        out=tuple(one if needed else None for one, needed in zip(out, needs, strict=True)),
        **operands.arrays(),
        **options.keywords(operands.seed, operands.offsets),
    )
    return out


def _fake_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    needs: list[bool],
    *args: Any,
) -> tuple[Tensor, ...]:
    """Allocate gradients, laid out as what they belong to; empty ones where none is needed."""
    return tuple(
        torch.empty_like(operand) if needed else output.new_empty(0)
        for operand, needed in zip(args[:_FLOATS], needs, strict=True)
    )


_attention_op = torch.library.custom_op(
    "clattn::attention",
    _attention,
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
_attention_op.register_fake(_fake_attention)
_backward_op = torch.library.custom_op(
    "clattn::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad_output, Tensor? grad_lse, Tensor output, Tensor lse, bool[] needs, "
    f"{_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_backward_op.register_fake(_fake_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass reads: no scores."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_COUNT], *output)
    ctx.options = inputs[_COUNT:]


def _differentiate(
    ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    *operands, output, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:_FLOATS])
    if grad_output is None:  # a loss of the log-sum-exp alone
        grad_output = torch.zeros((), dtype=output.dtype).expand(output.shape)
    found = _call_backward(grad_output, grad_lse, output, lse, needs, *operands, *ctx.options)
    given = [one if needed else None for one, needed in zip(found, needs, strict=True)]
    return (*given, *[None] * (_COUNT - _FLOATS + len(ctx.options)))


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "clattn's attention has no second derivative: call torch's function where one is needed"
    )


_attention_op.register_autograd(_differentiate, setup_context=_keep)
_backward_op.register_autograd(_refuse)


def _one_by_one(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """Call an operator for each entry of a dimension that vmap goes over."""
    results = [
        op(*(a.select(d, n) if type(d) is int else a for a, d in zip(args, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(list(one)) for one in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _callable(op: Any, compute: Any, keep: Any, differentiate: Any) -> Any:
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


_call = _callable(_attention_op, _attention, _keep, _differentiate)
_call_backward = _callable(_backward_op, _backward, _keep_nothing, _refuse)


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
