# SPDX-License-Identifier: MIT
"""clattn.openvino: wrong arguments are refused by name, before any OpenCL call.

Each row breaks one rule. It replaces arguments of a call that is right.
"""

import clattn
import ml_dtypes
import numpy as np
import pytest
import references.openvino as oracle
from support.checks import assert_close
from support.data import draw
from support.refusals import (
    FLOATS,
    cases,
    check_without_opencl,
    of,
    refuse,
    refuse_without_opencl,
    wrong,
    wrong_arrays,
    wrong_shapes,
)

pytestmark = pytest.mark.usefixtures("reference_kernel")

NAN, INF = float("nan"), float("inf")
f16, f32, f64 = np.float16, np.float32, np.float64
BF16 = ml_dtypes.bfloat16
Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)


def arrays():
    """A correct call: batches (2, 4), 5 queries, 7 keys, head sizes 8 and 6."""
    return {"query": draw(Q), "key": draw(K), "value": draw(V)}


def batches(query, key, value, **others):
    """The correct call with other batch dimensions."""
    tensors = {"query": of(f32, *query, 5, 8), "key": of(f32, *key, 7, 8)}
    return tensors | {"value": of(f32, *value, 7, 6)} | others


def mask(array):
    return {"attention_mask": array}


EITHER = (TypeError, ValueError)  # where the contract does not say which
TENSORS = r"query|key|value"

ROWS = [  # (what is wrong, exception, pattern in the message, changed arguments)
    *wrong_arrays("query", Q, FLOATS, none=None),
    ("query has rank 0", ValueError, "query", {"query": of(f32)}),
    *wrong_shapes("query", f32, (8,), (5, 8)),
    *wrong_arrays("key", K, ["float32"], none=None),
    *wrong_shapes("key", f32, (8,), (7, 8), (2, 4, 7, 9), (2, 4, 7, 4), (2, 4, 7, 1)),
    *wrong_arrays("value", V, ["float32"], none=None),
    ("value has rank 0", ValueError, "value", {"value": of(f32)}),
    *wrong_shapes("value", f32, (7, 6), (2, 4, 8, 6), (2, 4, 1, 6), (2, 4, 14, 6), (2, 4, 0, 6)),
    ("batches of 2 and 3", ValueError, TENSORS, batches((2,), (3,), (3,))),
    ("batches of 4 and 6", ValueError, TENSORS, batches((4,), (6,), (6,))),
    ("batches of 4 and 6 and 1", ValueError, TENSORS, batches((4, 1), (6, 1), (1, 12))),
    ("batches of 4, 6 and 8", ValueError, TENSORS, batches((4,), (6,), (8,))),
    ("a batch of 5 in 12", ValueError, TENSORS, batches((12,), (12,), (5,))),
    ("the second batch differs", ValueError, TENSORS, batches((2, 4), (2, 3), (2, 4))),
    ("no batch in one of two", ValueError, TENSORS, batches((2,), (0,), (2,))),
    *wrong_arrays("attention_mask", (5, 7), ["float32", "bool"]),
    ("mask has rank 1", ValueError, "attention_mask", mask(of(f32, 7))),
    ("bool mask has rank 1", ValueError, "attention_mask", mask(of(bool, 7))),
    ("mask has another S", ValueError, "attention_mask", mask(of(f32, 5, 8))),
    ("mask has another L", ValueError, "attention_mask", mask(of(bool, 4, 7))),
    ("mask is transposed", ValueError, "attention_mask", mask(of(f32, 7, 5))),
    ("mask is empty", ValueError, "attention_mask", mask(of(bool, 5, 0))),
    ("mask has another batch", ValueError, "attention_mask", mask(of(f32, 3, 1, 5, 7))),
    ("mask has a second batch of 3", ValueError, "attention_mask", mask(of(bool, 3, 5, 7))),
    ("mask's batch is no divisor", ValueError, "attention_mask",
     batches((6,), (6,), (6,), attention_mask=of(f32, 4, 5, 7))),
    ("mask's L is a divisor", ValueError, "attention_mask",
     {"query": of(f32, 2, 4, 6, 8), "attention_mask": of(f32, 3, 7)}),
    ("mask's S is a divisor", ValueError, "attention_mask",
     {"key": of(f32, 2, 4, 6, 8), "value": of(f32, 2, 4, 6, 6),
      "attention_mask": of(bool, 5, 3)}),
    ("scalar mask is 1", ValueError, "attention_mask", mask(np.ones((), f32))),
    ("NumPy scalar mask is 1", ValueError, "attention_mask", mask(f32(1))),
    ("scalar mask is tiny", ValueError, "attention_mask", mask(np.array(1e-45, f32))),
    ("scalar mask is -inf", ValueError, "attention_mask", mask(f32(-INF))),
    ("scalar mask is NaN", ValueError, "attention_mask", mask(f32(NAN))),
    ("scalar mask is a wider 0", TypeError, "attention_mask", mask(np.zeros((), f64))),
    ("scalar mask is an int 0", TypeError, "attention_mask", mask(np.zeros((), np.int32))),
    ("scalar mask is False", EITHER, "attention_mask", mask(np.zeros((), bool))),
    ("scalar mask is True", EITHER, "attention_mask", mask(np.bool_(True))),
    *wrong("scale", TypeError, "1", [1.0], 1j),
    *wrong_shapes("scale", f32, (2,), (0,), (1, 1)),
    ("scale is of a wider type", TypeError, "scale", {"scale": np.ones((), f64)}),
    ("scale is of a narrower type", TypeError, "scale", {"scale": np.ones(1, f16)}),
    ("scale is an int array", TypeError, "scale", {"scale": np.ones(1, np.int32)}),
    ("scale is a bool array", TypeError, "scale", {"scale": np.ones((), bool)}),
    *wrong("scale", ValueError, NAN, -INF),
    ("scale is NaN in an array", ValueError, "scale", {"scale": np.array(NAN, f32)}),
    ("scale is infinite in an array", ValueError, "scale", {"scale": np.array([INF], f32)}),
    *wrong("causal", TypeError, "lower_right", 0.5, None),
    ("another dtype under causal", TypeError, "key", {"key": of(f16, *K), "causal": True}),
    ("another S under causal", ValueError, "value",
     {"value": of(f32, 2, 4, 8, 6), "causal": True}),
    ("device is a float", TypeError, "device", {"device": 7.5}),
    ("torch's name for the mask", TypeError, "attn_mask", {"attn_mask": None}),
    ("torch's name for causal", TypeError, "is_causal", {"is_causal": True}),
]  # fmt: skip


def assert_it_still_works(device):
    given = arrays()
    got = clattn.openvino.scaled_dot_product_attention(**given, device=device)
    tensors = tuple(given.values())
    assert_close(got, oracle.attention(*tensors), oracle.tolerance(*tensors))


@cases(ROWS)
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(clattn.openvino.scaled_dot_product_attention, row, arrays())
    assert_it_still_works(device)


def test_too_many_or_too_few_arguments(device):
    q, k, v = arrays().values()
    call = clattn.openvino.scaled_dot_product_attention
    with pytest.raises(TypeError, match="value"):
        call(q, k)
    with pytest.raises(TypeError, match="query"):
        call(q, k, v, query=q)
    with pytest.raises(TypeError):
        call(q, k, v, None, None, True)  # causal is keyword-only
    assert_it_still_works(device)


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    call = clattn.openvino.scaled_dot_product_attention
    refuse_without_opencl(
        lambda: call(**arrays()), lambda: [refuse(call, row, arrays()) for row in ROWS]
    )


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("doors.test_openvino_errors", tmp_path)
