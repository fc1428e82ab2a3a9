# SPDX-License-Identifier: MIT
"""Backward passes: calls of them, and their comparison with the oracle."""

import functools

import clattn
import numpy as np
import pytest
from references.gradients import NAMES, judged
from support.checks import assert_close, native
from support.data import draw, sdpa
from support.forced import FORCED, factors_are_rounded

# Kernels, as parameters of a fixture. Those that are slow on CPUs run on one of them.
FASTEST = pytest.param("", id="fastest")
REFERENCE = pytest.param("reference", marks=pytest.mark.by_turns, id="reference")
TILED = pytest.param("tiled", marks=pytest.mark.by_turns, id="tiled")
MMA = pytest.param("mma", marks=pytest.mark.full(slowest=True), id="mma")


def forward(query, key, value, *, device, **options):
    """Output and log-sum-exp. attention_mma takes no dropout, but the gradients' kernel does."""
    words = FORCED.words
    unforced = "dropout_p" in options and words[0].startswith("mma")
    if unforced:
        FORCED.words = "", words[1]
    try:
        return sdpa(query, key, value, device=device, return_lse=True, **options)
    finally:
        if unforced:
            FORCED.words = words


def backward(grad_output, query, key, value, *, device, needs=None, **options):
    """Forward, then backward: the gradients and the forward pass's output."""
    grad_lse = options.pop("grad_lse", None)
    output, lse = forward(query, key, value, device=device, **options)
    mask = options.pop("attn_mask", None)
    if needs is None:
        needs = ["query", "key", "value"]
        needs += ["attn_mask"] if mask is not None and mask.dtype != bool else []
        needs += ["sinks"] if options.get("sinks") is not None else []
    gradients = clattn.scaled_dot_product_attention_backward(
        grad_output, query, key, value, output, lse, mask, grad_lse=grad_lse, needs=needs,
        device=device, **options,
    )  # fmt: skip
    return gradients, output


def check_backward(grad_output, query, key, value, *, device, **options):
    """Compare each gradient with the oracle; return them."""
    arrays = [
        a for a in (grad_output, query, key, value, options.get("attn_mask")) if a is not None
    ]
    before = [a.tobytes() for a in arrays]
    got, output = backward(grad_output, query, key, value, device=device, **options)
    assert before == [a.tobytes() for a in arrays], "an input was modified"
    known = {k: native(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    clean = [native(a) for a in (grad_output, query, key, value)]
    again = functools.partial(backward, *clean, device=device, **known)
    rounds = factors_are_rounded(device, native(query).dtype, again)
    right, allowed = judged(*clean, output, rounds_factors=rounds, **known)
    given = {"query": query, "key": key, "value": value} | options
    for name, gradient, exact, most in zip(NAMES, got, right, allowed, strict=True):
        if exact is None:
            assert gradient is None
            continue
        assert gradient.dtype == given[name].dtype
        assert gradient.flags.c_contiguous
        assert_close(gradient, exact, most, f"gradient of {name}")
    return got


def grads(query, key, value, seed=7):
    """A gradient of the output."""
    lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return draw((*lead, query.shape[-2], value.shape[-1]), query.dtype, seed)
