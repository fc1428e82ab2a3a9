# SPDX-License-Identifier: MIT
"""clattn.onnx.attention: wrong arguments are refused, by name, before any OpenCL call.

Each row breaks one rule of the specification or of the documentation. It replaces keyword
arguments of a call that is right.
"""

import clattn
import ml_dtypes
import numpy as np
import pytest
from support.data import draw
from support.onnx_calls import check_onnx
from support.refusals import (
    FLOATS,
    NUMBERS,
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
BF16 = ml_dtypes.bfloat16
HEADS = r"\b(Q|K|q_num_heads|kv_num_heads)\b"
Q, K, V = r"\bQ\b", r"\bK\b", r"\bV\b"


def arrays():
    """A correct call: B = 2, 4 heads on 2, L = 5, S = 7, E = 8, Ev = 6."""
    return {"Q": draw((2, 4, 5, 8)), "K": draw((2, 2, 7, 8)), "V": draw((2, 2, 7, 6))}


def lengths(*numbers):
    return {"nonpad_kv_seqlen": np.array(numbers, np.int64)}


def mask(*shape, dtype=f32):
    return {"attn_mask": of(dtype, *shape)}


PAST = {"past_key": of(f32, 2, 2, 3, 8), "past_value": of(f32, 2, 2, 3, 6)}
FLAT = {"Q": of(f32, 2, 5, 32), "K": of(f32, 2, 7, 16), "V": of(f32, 2, 7, 12)}
FLAT |= {"q_num_heads": 4, "kv_num_heads": 2}
FIRST = {"pre_errata": True, "opset": 24}

ARRAYS = [
    *wrong_arrays("Q", (2, 4, 5, 8), FLOATS, Q, none=None),
    *wrong_shapes("Q", f32, (), (5, 8), (1, 2, 4, 5, 8)),
    ("all have rank 2", ValueError, Q,
     {"Q": of(f32, 5, 8), "K": of(f32, 7, 8), "V": of(f32, 7, 6)}),
    ("Q alone is 3-D", ValueError, r"\b[QKV]\b", {"Q": of(f32, 2, 5, 32), "q_num_heads": 4,
                                                "kv_num_heads": 2}),
    *wrong_arrays("K", (2, 2, 7, 8), ["float32"], K, none=None),
    ("K is 3-D", ValueError, r"\b[QKV]\b", {"K": of(f32, 2, 7, 16)}),
    ("K has another batch", ValueError, K, {"K": of(f32, 3, 2, 7, 8)}),
    ("a batch of 1 is not broadcast", ValueError, K,
     {"K": of(f32, 1, 2, 7, 8), "V": of(f32, 1, 2, 7, 6)}),
    ("Q has a batch of 1", ValueError, r"\b[QK]\b", {"Q": of(f32, 1, 4, 5, 8)}),
    ("K has another E", ValueError, K, {"K": of(f32, 2, 2, 7, 9)}),
    ("heads do not divide", ValueError, HEADS,
     {"K": of(f32, 2, 3, 7, 8), "V": of(f32, 2, 3, 7, 6)}),
    ("more key heads than query heads", ValueError, HEADS,
     {"K": of(f32, 2, 8, 7, 8), "V": of(f32, 2, 8, 7, 6)}),
    ("no key heads", ValueError, HEADS, {"K": of(f32, 2, 0, 7, 8), "V": of(f32, 2, 0, 7, 6)}),
    *wrong_arrays("V", (2, 2, 7, 6), FLOATS, V, none=None),
    ("V is 3-D", ValueError, r"\b[QKV]\b", {"V": of(f32, 2, 7, 12)}),
    *wrong_shapes("V", f32, (2, 2, 8, 6), (3, 2, 7, 6), (1, 2, 7, 6), (2, 4, 7, 6), (2, 1, 7, 6)),
]  # fmt: skip
THREE = [
    ("3-D without counts", ValueError, "num_heads", FLAT | {"q_num_heads": None,
                                                           "kv_num_heads": None}),
    ("3-D without q_num_heads", ValueError, "q_num_heads", FLAT | {"q_num_heads": None}),
    ("3-D without kv_num_heads", ValueError, "kv_num_heads", FLAT | {"kv_num_heads": None}),
    ("no query heads", ValueError, "q_num_heads", FLAT | {"q_num_heads": 0}),
    ("fewer than no heads", ValueError, "q_num_heads", FLAT | {"q_num_heads": -4}),
    ("no kv heads", ValueError, "kv_num_heads", FLAT | {"kv_num_heads": 0}),
    ("fewer than no kv heads", ValueError, "kv_num_heads", FLAT | {"kv_num_heads": -2}),
    ("Q does not divide by its heads", ValueError, "q_num_heads|Q", FLAT | {"q_num_heads": 3}),
    ("K does not divide by its heads", ValueError, "kv_num_heads|K",
     FLAT | {"K": of(f32, 2, 7, 17)}),
    ("V does not divide by its heads", ValueError, "kv_num_heads|V",
     FLAT | {"V": of(f32, 2, 7, 13)}),
    ("3-D heads do not divide", ValueError, HEADS,
     FLAT | {"Q": of(f32, 2, 5, 24), "q_num_heads": 3}),
    ("3-D with another E", ValueError, HEADS, FLAT | {"q_num_heads": 2}),
    ("3-D with another batch", ValueError, K, FLAT | {"K": of(f32, 3, 7, 16)}),
    ("3-D with another S", ValueError, V, FLAT | {"V": of(f32, 2, 8, 12)}),
    ("3-D past", ValueError, "past_key",
     FLAT | {"past_key": of(f32, 2, 3, 16), "past_value": of(f32, 2, 3, 12)}),
    ("4-D with another q_num_heads", ValueError, "q_num_heads", {"q_num_heads": 2}),
    ("4-D with another kv_num_heads", ValueError, "kv_num_heads", {"kv_num_heads": 4}),
    ("4-D with one count wrong", ValueError, "kv_num_heads",
     {"q_num_heads": 4, "kv_num_heads": 1}),
    ("q_num_heads is huge", ValueError, "q_num_heads", FLAT | {"q_num_heads": 2**62}),
    ("kv_num_heads is beyond 64 bits", ValueError, "kv_num_heads", FLAT | {"kv_num_heads": 10**30}),
    ("q_num_heads is a float", TypeError, "q_num_heads", FLAT | {"q_num_heads": 4.0}),
    ("q_num_heads is text", TypeError, "q_num_heads", FLAT | {"q_num_heads": "4"}),
    ("kv_num_heads is a list", TypeError, "kv_num_heads", FLAT | {"kv_num_heads": [2]}),
]  # fmt: skip
MASKS = [
    *wrong_arrays("attn_mask", (5, 7), NUMBERS, true=True),
    *wrong_shapes("attn_mask", f32, (4, 7), (0, 7), (7, 5), (2, 5, 7), (3, 1, 5, 7), (5, 8)),
    *wrong_shapes("attn_mask", bool, (3, 5, 7), (1, 2, 4, 5, 7), (8,)),
    ("mask is longer than T, with a past", ValueError, "attn_mask", PAST | mask(5, 11)),
    ("mask is short in opset 23", ValueError, "attn_mask", mask(5, 4) | {"opset": 23}),
    ("mask is empty in opset 23", ValueError, "attn_mask", mask(5, 0) | {"opset": 23}),
    ("mask covers no past in opset 23", ValueError, "attn_mask",
     PAST | mask(5, 7, dtype=bool) | {"opset": 23}),
    ("mask is short in 23 as first published", ValueError, "attn_mask",
     mask(5, 6) | {"opset": 23, "pre_errata": True}),
]  # fmt: skip
PASTS = [
    ("past_key alone", ValueError, "past_value|past_key", {"past_key": PAST["past_key"]}),
    ("past_value alone", ValueError, "past_value|past_key", {"past_value": PAST["past_value"]}),
    *wrong_arrays("past_key", (2, 2, 3, 8), ["float32"], None, PAST),
    *wrong_arrays("past_value", (2, 2, 3, 6), ["float32"], None, PAST),
    ("past_key has V's type", TypeError, "past_key",
     PAST | {"V": of(BF16, 2, 2, 7, 6), "past_value": of(BF16, 2, 2, 3, 6),
             "past_key": of(BF16, 2, 2, 3, 8)}),
    ("past_value has Q's type, not V's", TypeError, "past_value",
     PAST | {"V": of(np.float16, 2, 2, 7, 6)}),
    ("past_key is 3-D", ValueError, "past_key", PAST | {"past_key": of(f32, 2, 3, 16)}),
    ("past_key has another batch", ValueError, "past_key",
     PAST | {"past_key": of(f32, 1, 2, 3, 8)}),
    ("past_key has the query's heads", ValueError, "past_key",
     PAST | {"past_key": of(f32, 2, 4, 3, 8)}),
    ("past_key has another E", ValueError, "past_key", PAST | {"past_key": of(f32, 2, 2, 3, 6)}),
    ("past_value has another batch", ValueError, "past_value",
     PAST | {"past_value": of(f32, 3, 2, 3, 6)}),
    ("past_value has other heads", ValueError, "past_value",
     PAST | {"past_value": of(f32, 2, 1, 3, 6)}),
    ("past_value has E for Ev", ValueError, "past_value",
     PAST | {"past_value": of(f32, 2, 2, 3, 8)}),
    ("past_value has another P", ValueError, "past_value|past_key",
     PAST | {"past_value": of(f32, 2, 2, 4, 6)}),
]  # fmt: skip
NONPADS = [
    *wrong_arrays("nonpad_kv_seqlen", (2,), ["int64"]),
    ("one length for all", ValueError, "nonpad_kv_seqlen", lengths(7)),
    ("a length too many", ValueError, "nonpad_kv_seqlen", lengths(7, 4, 1)),
    ("lengths in rows", ValueError, "nonpad_kv_seqlen",
     {"nonpad_kv_seqlen": of(np.int64, 2, 1)}),
    ("lengths without a dimension", ValueError, "nonpad_kv_seqlen",
     {"nonpad_kv_seqlen": np.array(7)}),
    ("length above S", ValueError, "nonpad_kv_seqlen", lengths(7, 8)),
    ("length below 0", ValueError, "nonpad_kv_seqlen", lengths(-1, 7)),
    ("length of 2**40", ValueError, "nonpad_kv_seqlen", lengths(2**40, 7)),
    ("least length", ValueError, "nonpad_kv_seqlen", lengths(-(2**63), 7)),
    ("lengths with a past", ValueError, "nonpad_kv_seqlen", PAST | lengths(7, 4)),
    ("lengths in opset 23", ValueError, "nonpad_kv_seqlen", lengths(7, 4) | {"opset": 23}),
    ("lengths in 23 as first published", ValueError, "nonpad_kv_seqlen",
     lengths(7, 4) | {"opset": 23, "pre_errata": True}),
    ("mask shorter than the longest length", ValueError, "attn_mask|nonpad_kv_seqlen",
     lengths(4, 6) | mask(5, 5)),
    ("mask of one key", ValueError, "attn_mask|nonpad_kv_seqlen",
     lengths(1, 2) | mask(4, 5, 1, dtype=bool)),
    ("mask of no key", ValueError, "attn_mask|nonpad_kv_seqlen",
     lengths(0, 1) | mask(0, dtype=np.int8) | FIRST),
]  # fmt: skip
ATTRIBUTES = [
    *wrong("is_causal", TypeError, None, "lower_right", 0.5),
    ("causal is an array", TypeError, "is_causal", {"is_causal": of(bool, 5, 7)}),
    ("mode 4", ValueError, "qk_matmul_output_mode", {"qk_matmul_output_mode": 4}),
    ("a mode without return_qk", ValueError, "return_qk", {"qk_matmul_output_mode": 2}),
    ("mode -1", ValueError, "qk_matmul_output_mode",
     {"qk_matmul_output_mode": -1, "return_qk": True}),
    *wrong("qk_matmul_output_mode", TypeError, 1.0, None, "0"),
    *wrong("scale", ValueError, -0.5, NAN, INF, -INF, 10**400),
    *wrong("scale", TypeError, "1", 1j, [1.0]),
    ("scale is an array", TypeError, "scale", {"scale": of(f32, 2)}),
    *wrong("softcap", ValueError, -1.0, NAN, INF),
    *wrong("softcap", TypeError, "x", None),
    *wrong("softmax_precision", ValueError, 0, 7, 17, -1, 32),
    *wrong("softmax_precision", TypeError, 1.0, "float32"),
    ("precision is a dtype", TypeError, "softmax_precision", {"softmax_precision": np.float32}),
    ("left window below -1", ValueError, "left_window_size", {"left_window_size": -2}),
    ("right window below -1", ValueError, "right_window_size", {"right_window_size": -(2**63)}),
    ("left window is a float", TypeError, "left_window_size", {"left_window_size": 1.5}),
    ("right window is text", TypeError, "right_window_size", {"right_window_size": "1"}),
    ("left window is a pair", TypeError, "left_window_size", {"left_window_size": (1, 1)}),
    ("left window in 24", ValueError, "left_window_size", {"left_window_size": 0, "opset": 24}),
    ("right window in 24", ValueError, "right_window_size", {"right_window_size": 3, "opset": 24}),
    ("left window in 23", ValueError, "left_window_size", {"left_window_size": 3, "opset": 23}),
    ("window as first published", ValueError, "right_window_size",
     FIRST | {"right_window_size": 0}),
    *wrong("opset", ValueError, 22, 26, 0, 10**30),
    *wrong("opset", TypeError, 24.0, "24", None),
    ("first published in 25", ValueError, "pre_errata|opset", {"pre_errata": True, "opset": 25}),
    ("25 is the default", ValueError, "pre_errata|opset", {"pre_errata": True}),
    ("mask and causality in 23, first published", ValueError, "is_causal|attn_mask",
     mask(5, 7) | {"is_causal": 1, "pre_errata": True, "opset": 23}),
    *wrong("device", TypeError, 7.5, ["cpu"]),
    ("unknown keyword", TypeError, "attention_mask", {"attention_mask": None}),
    ("is_causal misspelt", TypeError, "is_casual", {"is_casual": 1}),
]  # fmt: skip
ROWS = ARRAYS + THREE + MASKS + PASTS + NONPADS + ATTRIBUTES


@cases(ROWS)
def test_wrong_arguments(device, reference_kernel, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(clattn.onnx.attention, row, arrays())
    check_onnx(*arrays().values(), device=device)


SAID = {
    "Q is int32": "int32", "K is float16": "float16", "attn_mask is complex": "complex64",
    "nonpad_kv_seqlen is int32": "int32", "Q is a list": "list", "K has another E": "9",
    "V of float32 (2, 2, 8, 6)": "8", "attn_mask of float32 (5, 8)": "8",
    "past_value has another P": "4", "length above S": "8", "scale is -0.5": "-0.5", "mode 4": "4",
    "softmax_precision is 7": "7", "left window below -1": "-2", "opset is 22": "22",
}  # fmt: skip


@pytest.mark.parametrize(("row", "given"), SAID.items(), ids=SAID)
def test_messages_say_what_was_given(row, given):
    """The message says more than which argument is wrong."""
    [row] = [r for r in ROWS if r[0] == row]
    assert given in str(refuse(clattn.onnx.attention, row, arrays()))


ALLOWED = {  # beside a row each: the nearest call that is right
    "windows of -1 in 24": {"opset": 24, "left_window_size": -1, "right_window_size": -1},
    "counts that match": {"q_num_heads": 4, "kv_num_heads": 2},
    "a scale of 0": {"scale": 0},
    "numpy's integers": {"opset": np.int64(24), "qk_matmul_output_mode": np.uint8(0)},
    "causal is True": {"is_causal": True},
    "a mask of one column in 23": mask(5, 1) | {"opset": 23},
    "mask and causality in 23, corrected": mask(5, 7) | {"opset": 23, "is_causal": 1},
    "mask and causality in 24, first published": mask(5, 7) | FIRST | {"is_causal": 1},
    "mask as long as the longest length": mask(5, 4) | lengths(4, 0),
    "a past without heads to spare": PAST | mask(5, 10),
    "a precision of bfloat16": {"softmax_precision": 16},
}


@pytest.mark.parametrize("changed", ALLOWED.values(), ids=ALLOWED)
def test_the_nearest_right_call(device, reference_kernel, changed):
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    call = dict.fromkeys(names) | arrays() | changed
    args = [call.pop(name) for name in names]
    check_onnx(*args, device=device, **call)


def test_too_many_or_too_few_arguments(device, reference_kernel):
    q, k, v = arrays().values()
    with pytest.raises(TypeError, match=V):
        clattn.onnx.attention(q, k)
    with pytest.raises(TypeError, match=Q):
        clattn.onnx.attention(q, k, v, Q=q)
    with pytest.raises(TypeError):
        clattn.onnx.attention(q, k, v, None, None, None, None, 0)  # attributes have names only
    check_onnx(q, k, v, device=device)


@pytest.mark.parametrize("name", ["no such device", "cpu:99", "\0", "x" * 5000],
                         ids=["word", "number", "zero", "long"])  # fmt: skip
def test_unknown_devices(name):
    with pytest.raises(ValueError, match="device"):
        clattn.onnx.attention(**arrays(), device=name)


HUGE = 1 << 23
TOO_LARGE = {  # asked for through broadcasts, so the inputs take next to nothing
    "Y": {"Q": (HUGE, HUGE, 1, 1), "K": (HUGE, 1, 1, 1), "V": (HUGE, 1, 1, 1)},
    "qk_matmul_output": {"Q": (1, 1, HUGE, 1), "K": (1, 1, HUGE, 1), "V": (1, 1, HUGE, 1)},
    "present": {"Q": (1, 1, 1, 1), "K": (1, 1, 1, 1), "V": (1, 1, 1, 1),
                "past_key": (1, 1, HUGE * HUGE, 1), "past_value": (1, 1, HUGE * HUGE, 1)},
}  # fmt: skip


@pytest.mark.parametrize("shapes", TOO_LARGE.values(), ids=TOO_LARGE)
def test_results_too_large_for_memory(device, reference_kernel, shapes):
    """256 TiB, beyond any address: MemoryError instead of a long wait; the next call works."""
    call = {name: np.broadcast_to(f32(1), shape) for name, shape in shapes.items()}
    with pytest.raises(MemoryError):
        clattn.onnx.attention(**call, return_qk=True, device=device)
    check_onnx(*arrays().values(), device=device)


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""

    def wrong():
        for row in ROWS:
            refuse(clattn.onnx.attention, row, arrays())
        for changed in ALLOWED.values():
            with pytest.raises(clattn.DeviceError):
                clattn.onnx.attention(**arrays() | changed)

    refuse_without_opencl(lambda: clattn.onnx.attention(**arrays()), wrong)


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("doors.test_onnx_errors", tmp_path)
