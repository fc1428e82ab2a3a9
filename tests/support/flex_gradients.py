# SPDX-License-Identifier: MIT
"""Backward passes of flex_attention, and their comparison with the oracle."""

import numpy as np
from clattn import flex_attention_backward
from references.attention import compute_dtype
from references.flex_gradients import flex_gradients, forward
from support.checks import assert_close
from support.data import draw


def backward(arrays, grad_output, *, device, **options):
    """Gradients, for the output of NumPy: no program of the forward pass is built."""
    known = {name: option for name, option in options.items()
             if name not in ("needs", "captured", "grad_lse", "block_mask")}  # fmt: skip
    score_mod = known.pop("score_mod", None)
    if "block_mask" in options:
        known["mask_mod"] = options["block_mask"].mask_mod
    steps = forward(*arrays, mod_of=score_mod and (lambda: score_mod), **known)
    dtype = arrays[0].dtype
    output, lse = steps.output.astype(dtype), steps.lse.astype(compute_dtype(dtype))
    return output, flex_attention_backward(
        grad_output, *arrays, output, lse, device=device, **options
    )


def check_gradients(arrays, mod_of=None, captured=(), *, device, block_mask=None, **options):
    """Compare all gradients with the oracle's, for random gradients of output and lse."""
    lead = np.broadcast_shapes(*[a.shape[:-3] for a in arrays])
    heads = max(a.shape[-3] for a in arrays)
    grad_output = draw((*lead, heads, arrays[0].shape[-2], arrays[2].shape[-1]),
                       arrays[0].dtype, seed=9)  # fmt: skip
    grad_lse = draw(grad_output.shape[:-1], compute_dtype(arrays[0].dtype), seed=10)
    known = options | {"grad_lse": grad_lse}
    if block_mask is not None:
        options["block_mask"] = block_mask
        known["mask_mod"] = block_mask.mask_mod
    needs = ("query", "key", "value", *["sinks"] * ("sinks" in options))
    output, got = backward(
        arrays, grad_output, score_mod=mod_of and mod_of(*captured), captured=captured, needs=needs,
        grad_lse=grad_lse, device=device, **options)  # fmt: skip
    right = flex_gradients(grad_output, *arrays, output, mod_of=mod_of, captured=captured, **known)
    for name in ("query", "key", "value"):
        assert_gradient(getattr(got, name), getattr(right, name), name)
    for n, (one, wanted, array) in enumerate(
        zip(got.captured, right.captured, captured, strict=True)
    ):
        assert one.dtype == array.dtype
        assert_gradient(one, wanted, f"captured[{n}]")
    if "sinks" in options:
        assert_gradient(got.sinks, right.sinks, "sinks")
    else:
        assert got.sinks is None
    return got


def assert_gradient(got, right, name):
    assert type(got) is np.ndarray and got.flags.c_contiguous
    assert_close(got, *right, f"gradient of {name}")
