"""Forward and backward pass, for ``bench --rows train``: beside torch's autograd."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import clattn
from clattn import Device
from clattn._commands.bench.exact_gradients import Gradients
from clattn._commands.bench.flex import FLEX_TRAIN_ROW, FlexRow, TorchFlex, make_alibi
from clattn._commands.bench.peers import Call, repeated
from clattn._commands.bench.rows import SDPA_TRAIN_ROWS, Problem
from clattn._commands.bench.torch_peers import Torch

TRAIN_ROWS = (*SDPA_TRAIN_ROWS, FLEX_TRAIN_ROW)


def train_calls(problem: Problem, device: Device) -> tuple[Call, dict[str, Call]]:
    """Return clattn's call of both passes, as a user writes it, and of the backward pass alone."""
    row = problem.row
    options: dict[str, Any] = {"enable_gqa": row.is_grouped, "device": device}
    attend: Callable[..., Any] = clattn.scaled_dot_product_attention
    backward: Callable[..., Any] = clattn.scaled_dot_product_attention_backward
    captured: dict[str, Any] = {}
    if isinstance(row, FlexRow):
        slopes = clattn.tensor(row.slopes, device)
        attend, backward = clattn.flex_attention, clattn.flex_attention_backward
        options["score_mod"], captured["captured"] = make_alibi(slopes), (slopes,)
    else:
        options |= {"attn_mask": problem.mask, "is_causal": row.is_causal and not row.is_padded}
    attend = functools.partial(attend, return_lse=True, **options)
    backward = functools.partial(backward, **captured, **options)
    arrays, grad = (problem.query, problem.key, problem.value), problem.grad_output

    def run() -> Any:
        return backward(grad, *arrays, *attend(*arrays))

    @functools.cache  # and so memory is measured without it
    def forward() -> Any:
        return attend(*arrays)

    def run_backward() -> Any:
        return backward(grad, *arrays, *forward())

    def result() -> Gradients:
        gradients = run()
        found = [gradients.query, gradients.key, gradients.value]
        if isinstance(row, FlexRow):
            found += gradients.captured
        return tuple(map(np.asarray, found))

    return Call(run, result), {"backward": Call(run_backward, result)}


def backward_call(problem: Problem, device: Device) -> Call:
    """Return clattn's backward pass alone, on arrays of the device."""
    row = problem.row
    given = (problem.query, problem.key, problem.value, problem.grad_output)
    query, key, value, grad = (clattn.tensor(np.ascontiguousarray(a), device) for a in given)
    options: dict[str, Any] = {
        "is_causal": row.is_causal,
        "enable_gqa": row.is_grouped,
        "device": device,
    }
    forward = clattn.scaled_dot_product_attention(query, key, value, return_lse=True, **options)
    run = functools.partial(
        clattn.scaled_dot_product_attention_backward, grad, query, key, value, *forward, **options
    )

    def run_some(count: int) -> None:
        for _ in range(count):
            run()
        clattn.synchronize(device)

    def result() -> Gradients:
        gradients = run()
        return tuple(map(np.asarray, (gradients.query, gradients.key, gradients.value)))

    return repeated(run_some, result)


class TorchTraining(Torch):
    """torch's attention and its autograd, on leaf tensors."""

    name = "torch"
    trains = True

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self._stack = stack

    def prepare(self, problem: Problem) -> Call:
        """Return the call of both passes; gradients are None before it."""
        row = problem.row
        arrays = (problem.query, problem.key, problem.value)
        leaves = [self._tensor(a).requires_grad_() for a in arrays]
        grad = self._tensor(problem.grad_output)
        attend: Callable[[], Any]
        if isinstance(row, FlexRow):
            slopes = self._tensor(row.slopes).requires_grad_()
            compiled = _TrainedFlex(self._stack).compile()
            attend = functools.partial(compiled, *leaves, score_mod=make_alibi(slopes))
            leaves.append(slopes)
        else:
            attend = self._attention(leaves, problem)

        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            attend().backward(grad)

        def result() -> Gradients:
            run()
            return tuple(self._array(leaf.grad, problem.query.dtype) for leaf in leaves)

        return Call(run, result)


class _TrainedFlex(TorchFlex):
    """torch's FlexAttention, with gradients."""

    trains = True
