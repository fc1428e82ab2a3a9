"""Who computes a call of torch's attention, and why torch does."""

from __future__ import annotations

import sys
from collections import Counter
from operator import length_hint
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from clattn import _core
from clattn._parts.checks import shape_of_call
from clattn._parts.torch_operator import device_number, device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clattn._core import Device

__all__ = [
    "DENSE",
    "FLOATS",
    "GRADIENTS",
    "KEYS",
    "OURS",
    "PACKED",
    "PLAIN",
    "RECORDING",
    "REFUSED",
    "TENSORS",
    "UNPADDED",
    "count",
    "counts",
    "find_reason",
    "is_refused",
    "is_strange",
    "needs_gradients",
]

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = (float, int, np.floating, np.integer)
_FAST_SIZE = 256  # the head sizes of clattn's fast backward pass, at most

# Who computes a call, and why torch does: the names of `clattn.torch.call_counts`.
OURS = "clattn"
# Calls of Hugging Face's models that clattn computes in another way than by numbers alone.
PACKED = "clattn: packed sequences, by a ragged call"
UNPADDED = "clattn: padded sequences, by a ragged call"
KEYS = "clattn: padded sequences, by a mask of keys"
DENSE = "clattn: a mask of rows and keys"
RECORDING = "torch: it records or transforms the call"
TENSORS = "torch: tensors of other kinds, devices or dtypes"
GRADIENTS = "torch: gradients are needed that clattn does not compute fast"
REFUSED = "torch: clattn refuses the arguments"

# Each call advances an iterator, whose position is the count. next() needs no lock: no other thread
# and no signal handler can interrupt it.
_counts = {
    who: iter(range(sys.maxsize))
    for who in (OURS, PACKED, UNPADDED, KEYS, DENSE, RECORDING, TENSORS, GRADIENTS, REFUSED)
}


def count(who: str) -> None:
    """Count a call."""
    next(_counts[who])


def counts() -> Counter[str]:
    """Return how many calls have been counted."""
    made = {who: sys.maxsize - length_hint(numbers) for who, numbers in _counts.items()}
    return Counter({who: count for who, count in made.items() if count})


def _is_watched() -> bool:
    """Whether torch records or transforms what it is called with, beyond gradients."""
    return not torch.compiler.is_compiling() and (
        peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def find_reason(
    given: Sequence[torch.Tensor],
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    device: Device | None,
) -> str | None:
    """Find out why a call is torch's, whether or not the core takes it. None: nothing says so."""
    if not isinstance(dropout_p, _NUMBERS):
        return REFUSED  # an array, whose comparison is no bool
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        return REFUSED  # the core has words for is_causal that torch refuses
    if not (scale is None or isinstance(scale, _NUMBERS)):
        return REFUSED
    if _is_watched():
        return RECORDING
    for tensor in given:
        # The result would be made on the tensor's device, to be thrown away.
        if type(tensor) not in PLAIN or not tensor.is_cpu:
            return TENSORS
    if not needs_gradients(given):
        return None
    if any([is_strange(tensor) for tensor in given]) or given[0].dtype not in FLOATS:
        return TENSORS
    return None if _differentiates_fast(given, device) else GRADIENTS


def needs_gradients(given: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _has_fast_kernels(number: int) -> bool:
    """Whether the operators' device of this number has fast kernels for gradients."""
    device = device_of(number) or _core.find_device(None)
    return device.type == "cpu" and device.float_width > 1


def _differentiates_fast(given: Sequence[torch.Tensor], device: Device | None) -> bool:
    """Whether clattn's backward pass is one of its fast kernels."""
    wide = any([given[n].dim() > 0 and given[n].shape[-1] > _FAST_SIZE for n in (0, 2)])
    return not wide and _has_fast_kernels(device_number(device))


def is_strange(tensor: torch.Tensor) -> bool:
    """Whether it is the tensor itself that the core refuses, whatever the others are."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    return not torch.compiler.is_compiling() and tensor.is_neg()  # which operators resolve


def is_refused(
    given: list[torch.Tensor],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether the core refuses the arguments, on any device."""
    try:
        shape_of_call(
            _core.scaled_dot_product_attention,
            *[tensor.detach() for tensor in given],
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    except (TypeError, ValueError):
        return True
    return False
