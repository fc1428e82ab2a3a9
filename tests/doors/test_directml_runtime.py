# SPDX-License-Identifier: MIT
"""clattn.directml beside ONNX Runtime's com.microsoft MultiHeadAttention, where it is installed.

That operator is DirectML's own, less, on the CPU, the stacked tensors (the runtime is given their
parts) and a past with Ev != E. Both have to be within the tolerance of the oracle, which is so
checked by an independent witness.
"""

import functools

import clattn
import numpy as np
import pytest
import references.directml as oracle
from references.directml import make
from support.data import draw
from support.onnx_model import run_model

pytestmark = pytest.mark.usefixtures("reference_kernel")
LENGTH, PACKED = "key_sequence_length", "key_query_sequence_length_start_end"


def int32(*numbers):
    return np.array(numbers, np.int32)


def flags(shape):
    return (draw(shape, seed=9) > 0).astype(np.int32)


PAST = {"P": 3, "bias": True}
ADDED = draw((2, 2, 5, 7), seed=7)
CASES = {
    "plain": make(),
    "one of everything": make(B=1, L=1, S=1, H=1),
    "tiles and rests": make(L=33, S=200),
    "another Ev": make(Ev=5),
    "another Ev, bias": make(Ev=5, bias=True),
    "bias": make(bias=True),
    "relative position bias": make(relative_position_bias=ADDED),
    "one for all batches": make(relative_position_bias=ADDED[:1]),
    "one for all heads": make(relative_position_bias=ADDED[:, :1]),
    "past": make(P=3),
    "empty past": make(P=0),
    "past and bias": make(**PAST),
    "no scale": make(scale=1.0),
    "negative scale": make(scale=-0.7),
    "stacked query, key and value": make("stacked_query_key_value", bias=True),
    "stacked key and value": make("stacked_key_value", bias=True),
    "stacked query and key": make("stacked_query_key", bias=True, Ev=5),
    "stacked, past": make("stacked_key_value", **PAST),
    "boolean of keys": make(mask=flags((2, 7)), mask_type="boolean"),
    "boolean of rows": make(mask=flags((2, 5, 7)), mask_type="boolean"),
    "boolean, past": make(**PAST, mask=flags((2, 10)), mask_type="boolean"),
    "boolean of rows, past": make(**PAST, mask=flags((2, 5, 10)), mask_type="boolean"),
    "boolean and relative position bias": make(
        mask=flags((2, 7)), mask_type="boolean", relative_position_bias=ADDED),
    "lengths": make(mask=int32(3, 7), mask_type=LENGTH),
    "lengths, past": make(**PAST, mask=int32(3, 9), mask_type=LENGTH),
    "packed lengths": make(mask=int32(4, 7, 0, 5, 10, 0, 7, 14), mask_type=PACKED),
    "padded throughout": make(mask=int32(0, 3), mask_type=LENGTH),
    "padded throughout by flags": make(mask=flags((2, 7)) * 0, mask_type="boolean"),
    "small filter": make(mask=int32(3, 0), mask_type=LENGTH, mask_filter_value=-1.5),
    "positive filter": make(mask=int32(3, 5), mask_type=LENGTH, mask_filter_value=2.5),
    "large filter": make(mask=flags((2, 7)), mask_type="boolean", mask_filter_value=-1e30),
}  # fmt: skip

INPUTS = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key",
          "past_value")  # fmt: skip


def joined(array):
    """(B, H, N, X) -> (B, N, H·X)."""
    parts = array.swapaxes(1, 2)
    return np.ascontiguousarray(parts).reshape(*parts.shape[:2], -1)


def runtime(call):
    """Output of the operator, and present key and value if there is a past."""
    given = dict.fromkeys(INPUTS)
    given |= dict(zip(INPUTS, (joined(a) for a in oracle.sources(call)), strict=False))
    given |= {name: call[name] for name in ("bias", "past_key", "past_value") if name in call}
    given |= {"key_padding_mask": call.get("mask"),
              "attention_bias": call.get("relative_position_bias")}  # fmt: skip
    outputs = ["output", "present_key", "present_value"][: 3 if "past_key" in call else 1]
    return run_model("MultiHeadAttention", given, outputs, domain="com.microsoft",
                     num_heads=call["head_count"], scale=float(call["scale"]),
                     mask_filter_value=float(call.get("mask_filter_value", -10000.0)))  # fmt: skip


@functools.cache
def answer_of_the_runtime(name):
    """The runtime computes each case once, not once for every device."""
    return runtime(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_agrees(device, name):
    call = CASES[name]
    theirs, *their_present = answer_of_the_runtime(name)
    right, allowed = oracle.attention(call), oracle.tolerance(call)
    assert (np.abs(theirs - right) <= allowed).all(), "the runtime's output"
    ours = clattn.directml.multihead_attention(**call, return_present=True, device=device)
    assert ours.output.shape == theirs.shape and ours.output.dtype == theirs.dtype
    assert (np.abs(ours.output - right) <= allowed).all()
    assert (np.abs(ours.output.astype(np.float64) - theirs) <= 2 * allowed).all()
    for mine, yours in zip(ours[1:], their_present, strict=False):
        np.testing.assert_array_equal(mine, yours)
