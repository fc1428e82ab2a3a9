# SPDX-License-Identifier: MIT
"""Wrong arguments: the promised exception, naming the argument, before any OpenCL call."""

import clattn
import ml_dtypes
import numpy as np
import pytest
from support.checks import check_attention
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

NAN, INF = float("nan"), float("inf")
f32 = np.float32


def arrays():
    """A correct call: 4 heads, 5 queries, 7 keys, head sizes 8 and 6."""
    return {"query": draw((2, 4, 5, 8)), "key": draw((2, 4, 7, 8)), "value": draw((2, 4, 7, 6))}


def frozen(*shape):
    array = of(f32, *shape)
    array.flags.writeable = False
    return array


Q, K, V, RESULT = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), (2, 4, 5, 6)
BF16 = ml_dtypes.bfloat16
GROUPED = {"enable_gqa": True}

ROWS = [  # (what is wrong, exception, name the message has to contain, changed arguments)
    *wrong_arrays("query", Q, FLOATS, none=None, scalar=f32(3)),
    *wrong_shapes("query", f32, (), (8,)),
    *wrong_arrays("key", K, ["float32"], none=None),
    *wrong_shapes("key", f32, (8,)),
    *wrong_shapes("key", f32, (2, 4, 7, 9), (3, 4, 7, 8), (2, 2, 7, 8)),
    *wrong_arrays("value", V, ["float32"], none=None),
    *wrong_shapes("value", f32, ()),
    *wrong_shapes("value", f32, (2, 4, 8, 6), (3, 4, 7, 6), (2, 2, 7, 6)),
    ("heads do not divide", ValueError, "enable_gqa|key",
     GROUPED | {"key": of(f32, 2, 3, 7, 8), "value": of(f32, 2, 3, 7, 6)}),
    ("more key heads than query heads", ValueError, "enable_gqa|key",
     GROUPED | {"key": of(f32, 2, 8, 7, 8), "value": of(f32, 2, 8, 7, 6)}),
    ("key and value heads differ", ValueError, "enable_gqa|value",
     GROUPED | {"key": of(f32, 2, 2, 7, 8)}),
    *wrong_arrays("attn_mask", (5, 7), [*FLOATS, "bool"], true=True),
    *wrong_shapes("attn_mask", bool, (5, 8), (1, 2, 4, 5, 7), (5, 0)),
    *wrong_shapes("attn_mask", f32, (4, 7), (7, 5), (3, 5, 7), (3, 1, 5, 7)),
    ("mask is wider than the result", ValueError, "attn_mask",
     {"attn_mask": of(f32, 2, 5, 7), "query": of(f32, 1, 5, 8), "key": of(f32, 1, 7, 8),
      "value": of(f32, 1, 7, 6)}),
    *wrong("is_causal", ValueError, "upper_left", "", "LOWER_RIGHT"),
    *wrong("is_causal", TypeError, 3.5, None),
    ("causal is a mask", TypeError, "is_causal", {"is_causal": of(bool, 5, 7)}),
    *wrong("scale", TypeError, "1", [1.0], 1j, np.complex64(1 + 2j), np.timedelta64(1)),
    ("scale is an array", TypeError, "scale", {"scale": of(f32, 2)}),
    *wrong("scale", ValueError, NAN, -INF),
    *wrong("window", TypeError, 3, "ab"),
    *wrong("window", ValueError, (1,), (1, 2, 3), ()),
    *wrong("window", TypeError, (1.5, None), (None, "1"), (INF, 0), (True, 1), (1, np.True_)),
    *wrong("window", ValueError, (-1, None), (None, -1), (0, -(2**63))),
    ("window is too long to print", ValueError, "window", {"window": (-(10**5000), 0)}),
    *wrong("softcap", ValueError, -1.0, NAN, INF),
    *wrong("softcap", TypeError, "x", None, np.complex64(1)),
    *wrong("seed", TypeError, 1.5, "1", True, np.True_),
    ("seed is too long to print", ValueError, "seed", {"seed": 10**5000}),
    *wrong("dropout_p", TypeError, True, np.complex128(0.5j)),
    *wrong("out", TypeError, [], True),
    ("out is masked", TypeError, "out", {"out": np.ma.masked_array(of(f32, *RESULT))}),
    ("out is wider", TypeError, "out", {"out": of(np.float64, *RESULT)}),
    ("out is narrower", TypeError, "out", {"out": of(np.float16, *RESULT)}),
    ("out is int", TypeError, "out", {"out": of(np.int32, *RESULT)}),
    *wrong_shapes("out", f32, (2, 4, 6, 6), (*Q,), (2, 5, 4, 6), (4, 5, 6), (1, *RESULT)),
    ("out is read-only", ValueError, "out", {"out": frozen(*RESULT)}),
    *wrong_arrays("sinks", (4,), FLOATS, scalar=1),
    *wrong_shapes("sinks", f32, (), (3,), (5,), (1,), (4, 2), (2, 4), (1, 3, 1, 1), (0,)),
    ("sinks of key heads", ValueError, "sinks",
     GROUPED | {"key": of(f32, 2, 2, 7, 8), "value": of(f32, 2, 2, 7, 6), "sinks": of(f32, 2)}),
    *wrong("query_offset", TypeError, True, False, None, 1.0, "1", [True, False], [1.0, 2.0],
           np.bool(True), np.array([True, False]), np.array([1.0, 2.0]), {}),
    *wrong("query_offset", ValueError, [1], [1, 2, 3], [], np.array([[1, 2]]), [2**63, 0]),
    ("offsets of a query with three dimensions", ValueError, "query_offset.*int",
     {"query": of(f32, 4, 5, 8), "query_offset": [0, 0, 0, 0]}),
    *wrong("return_weights", TypeError, 1, None, "x"),
    *wrong("device", TypeError, 7.5, ["cpu"], b"cpu"),
    ("unknown keyword", TypeError, "attention_mask", {"attention_mask": None}),
    ("seed misspelt", TypeError, "sed", {"sed": 1}),
]  # fmt: skip
UNKNOWN_DEVICES = ["no device", "cpu:99", "gpu:99", "cpu:-1", "cpu:x", "cpu:", "\0", "x" * 5000]


@cases(ROWS)
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(clattn.scaled_dot_product_attention, row, arrays())
    check_attention(*arrays().values(), device=device)


SAID = {
    "query is int32": "int32", "key is float16": "float16", "attn_mask is int64": "int64",
    "out is wider": "float64", "query is a list": "list", "scale is '1'": "str",
    "is_causal is 'upper_left'": "upper_left", "softcap is -1.0": "-1",
    "window is (-1, None)": "-1", "key of float32 (2, 4, 7, 9)": "9",
    "value of float32 (2, 4, 8, 6)": "8", "out of float32 (2, 4, 6, 6)": "6",
    "attn_mask of bool (5, 8)": "8", "sinks of float32 (3,)": r"(4,)",
    "query_offset is [1, 2, 3]": "(3,)", "query_offset is True": "bool",
}  # fmt: skip


@pytest.mark.parametrize(("row", "given"), SAID.items(), ids=SAID)
def test_messages_say_what_was_given(row, given):
    """And not only which argument is wrong."""
    row = next(r for r in ROWS if r[0] == row)
    assert given in str(refuse(clattn.scaled_dot_product_attention, row, arrays()))


@pytest.mark.parametrize("name", UNKNOWN_DEVICES, ids=lambda n: repr(n[:20]))
def test_unknown_devices(device, name):
    with pytest.raises(ValueError, match="device"):
        clattn.scaled_dot_product_attention(**arrays(), device=name)
    check_attention(*arrays().values(), device=device)


def test_too_many_or_too_few_arguments(device):
    q, k, v = arrays().values()
    call = clattn.scaled_dot_product_attention
    with pytest.raises(TypeError, match="value"):
        call(q, k)
    with pytest.raises(TypeError, match="query"):
        call(q, k, v, query=q)
    with pytest.raises(TypeError):
        call(q, k, v, None, 0.0, False, None, False, (1, 1))  # window is keyword-only
    check_attention(q, k, v, device=device)


def test_out_is_untouched_after_an_error(device):
    out = np.full(RESULT, 7.5, f32)
    with pytest.raises(ValueError, match="scale"):
        clattn.scaled_dot_product_attention(**arrays(), out=out, scale=NAN)
    assert (out == 7.5).all()
    check_attention(*arrays().values(), device=device, out=out)


def test_a_result_too_large_for_memory(device):
    """Half a petabyte, asked for through broadcasts: MemoryError, and the next call works."""
    q, k, v = (np.broadcast_to(f32(1), (1 << 20, 1 << 20, 1, 128)) for _ in range(3))
    with pytest.raises(MemoryError):
        clattn.scaled_dot_product_attention(q, k, v, device=device)
    check_attention(*arrays().values(), device=device)


def test_a_result_whose_size_overflows_64_bits(device):
    """Each input is possible in itself; the broadcast result is not."""
    q = np.broadcast_to(f32(1), (1 << 24, 1, 1, 1 << 20, 1))
    k = np.broadcast_to(f32(1), (1 << 24, 1, 3, 1))
    with pytest.raises((MemoryError, ValueError)):
        clattn.scaled_dot_product_attention(q, k, k, device=device)
    check_attention(*arrays().values(), device=device)


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    call, right = clattn.scaled_dot_product_attention, arrays()
    refuse_without_opencl(lambda: call(**right), lambda: [refuse(call, row, right) for row in ROWS])


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("attention.test_attention_errors", tmp_path)
