# SPDX-License-Identifier: MIT
"""Wrong arguments: the promised exception, naming the argument, before any OpenCL call.

One row a rule. Every row is one change to a call that is right: keyword arguments to replace.
"""

import clattn
import ml_dtypes
import numpy as np
import pytest
from support.helpers import WHAT_TO_INSTALL, check, draw, no_opencl, run_python

NAN, INF = float("nan"), float("inf")
f32 = np.float32


def arrays():
    """A correct call: 4 heads, 5 queries, 7 keys, head sizes 8 and 6."""
    return {
        "query": draw((2, 4, 5, 8)),
        "key": draw((2, 4, 7, 8)),
        "value": draw((2, 4, 7, 6)),
    }


def of(dtype, *shape):
    return np.zeros(shape, dtype)


def frozen(*shape):
    array = np.zeros(shape, f32)
    array.flags.writeable = False
    return array


Q, K, V, RESULT = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), (2, 4, 5, 6)
BF16 = ml_dtypes.bfloat16
GROUPED = {"enable_gqa": True}

ROWS = [  # (what is wrong, exception, name the message has to contain, changed arguments)
    ("query is None", TypeError, "query", {"query": None}),
    ("query is a list", TypeError, "query", {"query": [[1.0, 2.0]]}),
    ("query is a number", TypeError, "query", {"query": 3.0}),
    ("query is a NumPy scalar", TypeError, "query", {"query": np.float32(3)}),
    ("query is text", TypeError, "query", {"query": "query"}),
    ("query is masked", TypeError, "query", {"query": np.ma.masked_array(of(f32, *Q), mask=True)}),
    ("query is int", TypeError, "query", {"query": of(np.int32, *Q)}),
    ("query is complex", TypeError, "query", {"query": of(np.complex64, *Q)}),
    ("query is bool", TypeError, "query", {"query": of(bool, *Q)}),
    ("query is object", TypeError, "query", {"query": of(object, *Q)}),
    ("query is long double", TypeError, "query", {"query": of(np.longdouble, *Q)}),
    ("query is structured", TypeError, "query", {"query": of([("x", f32)], *Q)}),
    ("query is float8", TypeError, "query", {"query": of(ml_dtypes.float8_e4m3fn, *Q)}),
    ("query is datetime", TypeError, "query", {"query": of("M8[s]", *Q)}),
    ("query is strings", TypeError, "query", {"query": of("U4", *Q)}),
    ("query has rank 0", ValueError, "query", {"query": of(f32)}),
    ("query has rank 1", ValueError, "query", {"query": of(f32, 8)}),
    ("key is a list", TypeError, "key", {"key": [[1.0] * 8]}),
    ("key is int", TypeError, "key", {"key": of(np.int64, *K)}),
    ("key has rank 1", ValueError, "key", {"key": of(f32, 8)}),
    ("key has another dtype", TypeError, "key", {"key": of(np.float16, *K)}),
    ("key is wider", TypeError, "key", {"key": of(np.float64, *K)}),
    ("key has another E", ValueError, "key", {"key": of(f32, 2, 4, 7, 9)}),
    ("key has another batch", ValueError, "key", {"key": of(f32, 3, 4, 7, 8)}),
    ("key has other heads", ValueError, "key", {"key": of(f32, 2, 2, 7, 8)}),
    ("value is None", TypeError, "value", {"value": None}),
    ("value is int", TypeError, "value", {"value": of(np.uint8, *V)}),
    ("value has another dtype", TypeError, "value", {"value": of(BF16, *V)}),
    ("value has rank 0", ValueError, "value", {"value": of(f32)}),
    ("value has another S", ValueError, "value", {"value": of(f32, 2, 4, 8, 6)}),
    ("value has another batch", ValueError, "value", {"value": of(f32, 3, 4, 7, 6)}),
    ("value has other heads", ValueError, "value", {"value": of(f32, 2, 2, 7, 6)}),
    ("heads do not divide", ValueError, "enable_gqa|key",
     GROUPED | {"key": of(f32, 2, 3, 7, 8), "value": of(f32, 2, 3, 7, 6)}),
    ("more key heads than query heads", ValueError, "enable_gqa|key",
     GROUPED | {"key": of(f32, 2, 8, 7, 8), "value": of(f32, 2, 8, 7, 6)}),
    ("key and value heads differ", ValueError, "enable_gqa|value",
     GROUPED | {"key": of(f32, 2, 2, 7, 8)}),
    ("mask is a list", TypeError, "attn_mask", {"attn_mask": [[True] * 7]}),
    ("mask is a bool", TypeError, "attn_mask", {"attn_mask": True}),
    ("mask is int", TypeError, "attn_mask", {"attn_mask": of(np.int64, 5, 7)}),
    ("mask is uint8", TypeError, "attn_mask", {"attn_mask": of(np.uint8, 5, 7)}),
    ("mask is complex", TypeError, "attn_mask", {"attn_mask": of(np.complex128, 5, 7)}),
    ("mask is masked", TypeError, "attn_mask", {"attn_mask": np.ma.masked_array(of(bool, 5, 7))}),
    ("mask has another S", ValueError, "attn_mask", {"attn_mask": of(bool, 5, 8)}),
    ("mask has another L", ValueError, "attn_mask", {"attn_mask": of(f32, 4, 7)}),
    ("mask is transposed", ValueError, "attn_mask", {"attn_mask": of(f32, 7, 5)}),
    ("mask has other heads", ValueError, "attn_mask", {"attn_mask": of(f32, 3, 5, 7)}),
    ("mask has another batch", ValueError, "attn_mask", {"attn_mask": of(f32, 3, 1, 5, 7)}),
    ("mask has more dimensions", ValueError, "attn_mask", {"attn_mask": of(bool, 1, 2, 4, 5, 7)}),
    ("mask is wider than the result", ValueError, "attn_mask",
     {"attn_mask": of(f32, 2, 5, 7), "query": of(f32, 1, 5, 8), "key": of(f32, 1, 7, 8),
      "value": of(f32, 1, 7, 6)}),
    ("mask is empty", ValueError, "attn_mask", {"attn_mask": of(bool, 5, 0)}),
    ("dropout above 1", ValueError, "dropout_p", {"dropout_p": 1.5}),
    ("dropout below 0", ValueError, "dropout_p", {"dropout_p": -0.1}),
    ("dropout is NaN", ValueError, "dropout_p", {"dropout_p": NAN}),
    ("dropout is infinite", ValueError, "dropout_p", {"dropout_p": INF}),
    ("dropout is text", TypeError, "dropout_p", {"dropout_p": "0.5"}),
    ("dropout is None", TypeError, "dropout_p", {"dropout_p": None}),
    ("causal is another word", ValueError, "is_causal", {"is_causal": "upper_left"}),
    ("causal is an empty word", ValueError, "is_causal", {"is_causal": ""}),
    ("causal is in capitals", ValueError, "is_causal", {"is_causal": "LOWER_RIGHT"}),
    ("causal is a float", TypeError, "is_causal", {"is_causal": 3.5}),
    ("causal is None", TypeError, "is_causal", {"is_causal": None}),
    ("causal is a mask", TypeError, "is_causal", {"is_causal": of(bool, 5, 7)}),
    ("scale is text", TypeError, "scale", {"scale": "1"}),
    ("scale is a list", TypeError, "scale", {"scale": [1.0]}),
    ("scale is complex", TypeError, "scale", {"scale": 1j}),
    ("scale is an array", TypeError, "scale", {"scale": of(f32, 2)}),
    ("scale is NaN", ValueError, "scale", {"scale": NAN}),
    ("scale is infinite", ValueError, "scale", {"scale": -INF}),
    ("window is a number", TypeError, "window", {"window": 3}),
    ("window is text", TypeError, "window", {"window": "ab"}),
    ("window has one bound", ValueError, "window", {"window": (1,)}),
    ("window has three bounds", ValueError, "window", {"window": (1, 2, 3)}),
    ("window has none", ValueError, "window", {"window": ()}),
    ("window bound is a float", TypeError, "window", {"window": (1.5, None)}),
    ("window bound is text", TypeError, "window", {"window": (None, "1")}),
    ("window bound is infinite", TypeError, "window", {"window": (INF, 0)}),
    ("left bound is negative", ValueError, "window", {"window": (-1, None)}),
    ("right bound is negative", ValueError, "window", {"window": (None, -1)}),
    ("bound is hugely negative", ValueError, "window", {"window": (0, -(2**63))}),
    ("softcap is negative", ValueError, "softcap", {"softcap": -1.0}),
    ("softcap is NaN", ValueError, "softcap", {"softcap": NAN}),
    ("softcap is infinite", ValueError, "softcap", {"softcap": INF}),
    ("softcap is text", TypeError, "softcap", {"softcap": "x"}),
    ("softcap is None", TypeError, "softcap", {"softcap": None}),
    ("seed is a float", TypeError, "seed", {"seed": 1.5}),
    ("seed is text", TypeError, "seed", {"seed": "1"}),
    ("out is a list", TypeError, "out", {"out": []}),
    ("out is True", TypeError, "out", {"out": True}),
    ("out is masked", TypeError, "out", {"out": np.ma.masked_array(of(f32, *RESULT))}),
    ("out is wider", TypeError, "out", {"out": of(np.float64, *RESULT)}),
    ("out is narrower", TypeError, "out", {"out": of(np.float16, *RESULT)}),
    ("out is int", TypeError, "out", {"out": of(np.int32, *RESULT)}),
    ("out is longer", ValueError, "out", {"out": of(f32, 2, 4, 6, 6)}),
    ("out has E for Ev", ValueError, "out", {"out": of(f32, *Q)}),
    ("out is transposed", ValueError, "out", {"out": of(f32, 2, 5, 4, 6)}),
    ("out lacks a dimension", ValueError, "out", {"out": of(f32, 4, 5, 6)}),
    ("out would broadcast", ValueError, "out", {"out": of(f32, 1, *RESULT)}),
    ("out is read-only", ValueError, "out", {"out": frozen(*RESULT)}),
    ("device is a number", TypeError, "device", {"device": 7}),
    ("device is a list", TypeError, "device", {"device": ["cpu"]}),
    ("device is bytes", TypeError, "device", {"device": b"cpu"}),
    ("unknown keyword", TypeError, "attention_mask", {"attention_mask": None}),
    ("seed misspelt", TypeError, "sed", {"sed": 1}),
]  # fmt: skip
UNKNOWN_DEVICES = [
    "no such device", "cpu:99", "gpu:99", "cpu:-1", "cpu:x", "cpu:", "\0", "x" * 5000,
]  # fmt: skip


def ids(rows):
    return [row[0] for row in rows]


def refuse(row):
    """The row's call raises its exception, with the name in the message."""
    _, exception, name, changed = row
    arguments = arrays() | changed
    with pytest.raises(exception, match=name) as caught:
        clattn.scaled_dot_product_attention(**arguments)
    assert type(caught.value) is exception
    return caught.value


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(row)
    check(*arrays().values(), device=device)


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ("query is int", "int32"),
        ("key has another dtype", "float16"),
        ("mask is int", "int64"),
        ("out is wider", "float64"),
        ("query is a list", "list"),
        ("scale is text", "str"),
        ("dropout above 1", "1.5"),
        ("causal is another word", "upper_left"),
        ("softcap is negative", "-1"),
        ("left bound is negative", "-1"),
        ("key has another E", "9"),
        ("value has another S", "8"),
        ("out is longer", "6"),
        ("mask has another S", "8"),
    ],
)
def test_messages_say_what_was_given(row, given):
    """And not only which argument is wrong."""
    assert given in str(refuse(next(r for r in ROWS if r[0] == row)))


@pytest.mark.parametrize("name", UNKNOWN_DEVICES, ids=lambda n: repr(n[:20]))
def test_unknown_devices(device, name):
    with pytest.raises(ValueError, match="device"):
        clattn.scaled_dot_product_attention(**arrays(), device=name)
    check(*arrays().values(), device=device)


def test_too_many_or_too_few_arguments(device):
    q, k, v = arrays().values()
    call = clattn.scaled_dot_product_attention
    with pytest.raises(TypeError, match="value"):
        call(q, k)
    with pytest.raises(TypeError, match="query"):
        call(q, k, v, query=q)
    with pytest.raises(TypeError):
        call(q, k, v, None, 0.0, False, None, False, (1, 1))  # window is keyword-only
    check(q, k, v, device=device)


def test_out_is_untouched_after_an_error(device):
    out = np.full(RESULT, 7.5, f32)
    with pytest.raises(ValueError, match="scale"):
        clattn.scaled_dot_product_attention(**arrays(), out=out, scale=NAN)
    assert (out == 7.5).all()
    check(*arrays().values(), device=device, out=out)


def test_a_result_too_large_for_memory(device):
    """Half a petabyte, asked for through broadcasts: MemoryError, and the next call works."""
    q, k, v = (np.broadcast_to(f32(1), (1 << 20, 1 << 20, 1, 128)) for _ in range(3))
    with pytest.raises(MemoryError):
        clattn.scaled_dot_product_attention(q, k, v, device=device)
    check(*arrays().values(), device=device)


def test_a_result_whose_size_overflows_64_bits(device):
    """Each input is possible in itself; the broadcast result is not."""
    q = np.broadcast_to(f32(1), (1 << 24, 1, 1, 1 << 20, 1))
    k = np.broadcast_to(f32(1), (1 << 24, 1, 3, 1))
    with pytest.raises((MemoryError, ValueError)):
        clattn.scaled_dot_product_attention(q, k, k, device=device)
    check(*arrays().values(), device=device)


def refuse_all_without_opencl():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    with pytest.raises(clattn.DeviceError) as caught:
        clattn.scaled_dot_product_attention(**arrays())
    for row in ROWS:
        refuse(row)
    with pytest.raises(clattn.DeviceError):
        clattn.scaled_dot_product_attention(**arrays())
    print(caught.value)


def test_arguments_are_checked_before_opencl(tmp_path):
    """Without a driver wrong calls raise as ever, a right one DeviceError with what to install."""
    code = "import attention.test_attention_errors as t; t.refuse_all_without_opencl()"
    said = run_python(code, env=no_opencl(tmp_path)).stdout
    assert any(word in said for word in WHAT_TO_INSTALL), said
