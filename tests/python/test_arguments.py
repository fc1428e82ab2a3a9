# SPDX-License-Identifier: MIT
"""Integers, device indices and dtypes that callers hand over: one rule for each, in every function.

What is taken, and what is refused in words that name the argument.
"""

import dis

import clattn
import numpy as np
import pytest
from clattn import _core
from clattn._arguments.dtypes import float_dtype
from clattn._arguments.integers import integers, one_or_several, size
from clattn._arguments.operands import Operands
from clattn.flex.attention import attend_with_mods
from support.processes import index_of

LONG = 10**5000  # Python refuses to print it
TAKEN = {
    "a list": [2, 3], "a tuple": (2, 3), "a range": range(2, 4),
    "bytes that change": bytearray([2, 3]),
    "NumPy's numbers": [np.uint8(2), np.array(3)], "an array": np.array([2, 3], np.uint16),
    "objects": np.array([2, 3], object), "a view": np.array([2, 0, 3])[::2],
    "a buffer": memoryview(np.array([2, 3], np.int8)),
}  # fmt: skip
REFUSED = {
    "bools": ([True, False], TypeError, "n must be integers, got [True, False]"),
    "an array of bools": (np.array([True, False]), TypeError, "n must be integers, got bool"),
    "a bool among ints": ([1, np.True_], TypeError, "n must be integers, got [1, "),
    "floats": ([1.0, 2.0], TypeError, "n must be integers, got [1.0, 2.0]"),
    "text": ("12", TypeError, "n must be a sequence of integers, got str"),
    "an int": (3, TypeError, "n must be a sequence of integers, got int"),
    "a list of lists": ([[1], [2]], ValueError, "n has shape (2, 1); expected one dimension"),
    "a list of arrays": ([np.ones(2, int)], ValueError, "n has shape (1, 2); expected"),
    "a matrix": (np.ones((2, 1), int), ValueError, "n has shape (2, 1); expected one dimension"),
    "a buffer of rows": (memoryview(np.ones((2, 1), int)), ValueError, "n has shape (2, 1)"),
    "ragged lists": ([1, [2, 3]], TypeError, "n must be integers, got [1, [2, 3]]"),
    "65 bits": ([2**64], ValueError, f"n is [{2**64}]; expected numbers of 63 bits"),
    "unsigned, 64 bits": (np.array([2**63], np.uint64), ValueError, "expected numbers of 63 bits"),
    "too long to print": ([LONG], ValueError, "n is a number too long to print; expected numbers"),
    "more than memory holds": (range(2**62), ValueError, f"n has {2**62} numbers; expected"),
    "repeated for ever": (np.broadcast_to(np.int64(1), 2**40), ValueError, "expected at most"),
}  # fmt: skip


@pytest.mark.parametrize("numbers", TAKEN.values(), ids=TAKEN)
def test_integers(numbers):
    for read in (integers, one_or_several):
        found = read(numbers, "n")
        assert found.dtype == np.int64 and found.tolist() == [2, 3]


@pytest.mark.parametrize(("numbers", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_are_no_integers(numbers, error, words):
    with pytest.raises(error) as caught:
        integers(numbers, "n")
    assert words in str(caught.value)


def test_one_or_several():
    for one in (3, np.uint8(3), np.array(3)):
        found = one_or_several(one, "n")
        assert type(found) is int and found == 3
    for wrong in (True, np.True_, np.float64(3), 3.0, None, np.array(3.0)):
        with pytest.raises(TypeError, match="n must be an int or a sequence of integers, got "):
            one_or_several(wrong, "n")


def test_arrays_of_other_libraries():
    torch = pytest.importorskip("torch")
    assert integers(torch.tensor([2, 3]), "n").tolist() == [2, 3]
    assert one_or_several(torch.tensor(3), "n") == 3
    with pytest.raises(TypeError, match="n must be an int or a sequence"):
        one_or_several(torch.tensor(True), "n")
    with pytest.raises(ValueError, match=r"n \(Tensor\) cannot be read: .*requires? grad"):
        integers(torch.ones(2, requires_grad=True), "n")


def test_sizes():
    assert size(np.int8(3), "n", 3) == 3 and size(2**63 - 1, "n", 0) == 2**63 - 1
    for wrong, words in ((2, "n is 2; expected 3 or more"), (2**63, f"n is {2**63}; expected"),
                         (-LONG, "n is a number too long to print; expected")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            size(wrong, "n", 3)
    for wrong in (True, np.True_, 3.0, "3", None, [3]):
        with pytest.raises(TypeError, match="n must be an integer, got"):
            size(wrong, "n", 0)


def attend(**options):
    q = np.ones((1, 1, 2, 4), np.float32)
    return clattn.scaled_dot_product_attention(q, q, q, **options)


CALLS = {
    "window": lambda n, cache: attend(window=(n, 0)),
    "seed": lambda n, cache: attend(seed=n),
    "dropout_p": lambda n, cache: attend(dropout_p=n),
    "query_offset": lambda n, cache: attend(query_offset=[n]),
    "device": lambda n, cache: attend(device=n),
    "batch": lambda n, cache: clattn.KVCache(n, 1, 1, 1),
    "n": lambda n, cache: cache.truncate(n),
    "indices": lambda n, cache: cache.reorder([n]),
    "head_sizes": lambda n, cache: clattn.warm_up(head_sizes=[n]),
    "diagonal_fill_begin": lambda n, cache: clattn.directml.diagonal_matrix1(
        sizes=(2, 2), dtype="f4", value=0, diagonal_fill_begin=n, diagonal_fill_end=0),
    "softmax_precision": lambda n, cache: clattn.onnx.attention(
        *[np.ones((1, 1, 1, 1), np.float32)] * 3, softmax_precision=n),
    "stream": lambda n, cache: cache.key.__dlpack__(stream=n),
    "dtype": lambda n, cache: clattn.eye(2, dtype=n),
}  # fmt: skip


@pytest.mark.parametrize("argument", CALLS)
def test_every_message_names_its_argument(device, argument):
    """Numbers that Python does not print, and bools, which are no integers."""
    cache = clattn.KVCache(1, 1, 1, 1, device=device)
    for number in (-LONG, LONG):
        if argument != "window" or number < 0:  # any larger bound is none
            with pytest.raises(
                (ValueError, TypeError, BufferError), match=rf"\b({argument})\b.* too long to print"
            ):
                CALLS[argument](number, cache)
    if argument not in ("dtype", "stream", "dropout_p"):
        with pytest.raises(TypeError, match=rf"\b{argument}\b"):
            CALLS[argument](True, cache)


def test_an_attribute_of_onnx_that_is_a_flag():
    """ONNX has no bools among attributes: is_causal is 0 or 1."""
    q = np.random.default_rng(0).standard_normal((1, 1, 4, 4)).astype(np.float32)
    right = clattn.onnx.attention(q, q, q, is_causal=1).Y
    for flag in (True, np.True_, np.int8(1)):
        np.testing.assert_array_equal(clattn.onnx.attention(q, q, q, is_causal=flag).Y, right)


def test_an_index_of_any_kind_names_a_device(device):
    number = index_of(device)
    for index in (number, np.int64(number), np.uint8(number), np.array(number)):
        with clattn.use_device(index) as found:
            assert found == device
    for wrong in (True, np.float64(number), np.array([number, number]), np.array(1.5)):
        for call in (clattn.use_device, lambda device: attend(device=device)):
            with pytest.raises(TypeError, match="device must be a "):
                call(wrong)


@pytest.mark.parametrize("dtype", [None, "f4,,", "i4", bool, "nonsense", 3], ids=repr)
def test_float_dtypes(device, dtype):
    """None is no dtype: to NumPy it is float64."""
    for call in (float_dtype, lambda dtype: clattn.KVCache(1, 1, 1, 1, dtype=dtype, device=device),
                 lambda dtype: clattn.warm_up([dtype])):  # fmt: skip
        with pytest.raises(TypeError, match="dtype"):
            call(dtype)


def test_sizes_beyond_64_bits_are_named(device):
    """Of empty arrays, too, whose bytes NumPy counts without the 0."""
    for call, words in (
        (lambda: clattn.eye(0, 2**62, device=device), rf"shape \(0, {2**62}\)"),
        (
            lambda: clattn.diagonal_matrix((0, 2**62, 2**62), 1, 0, 1),
            rf"shape \(0, {2**62}, {2**62}\)",
        ),
        (
            lambda: clattn.KVCache(2**62, 2**62, 0, 8, device=device),
            rf"Tensor of shape \({2**62}, ",
        ),
    ):
        with pytest.raises(MemoryError, match=words):
            call()


q = np.ones((1, 1, 2, 4), np.float32)


class Name(str):
    """A name that Python does not keep as one of its own."""


NAMED = {
    "in any order": ((q, q), {"softcap": 5.0, "is_causal": True, "value": q}),
    "by position": ((q, q, q, None, 0.0, True), {"softcap": 5.0}),
    "strings of another kind": (
        (q, q, q),
        {Name("softcap"): 5.0, "".join(["is_", "causal"]): True},
    ),
}
MISNAMED = {
    "unknown": ((q, q, q), {"sink": None}, "argument 'sink' is not known"),
    "given twice": ((q, q, q), {"key": q}, "argument 'key' is given twice"),
    "given twice, behind others": ((q, q, q, None), {"scale": 1.0, "attn_mask": None}, "twice"),
    "missing": ((q,), {"value": q}, "argument 'key' is missing"),
    "nothing": ((), {}, "argument 'query' is missing"),
    "too many by position": ((q, q, q, *[None] * 6), {}, "at most 8 arguments without a name"),
    "one that means a missing one inside": ((q, q, ...), {}, "value must be an array"),
}


def test_arguments_of_the_core_by_name(first_device):
    right = clattn.scaled_dot_product_attention(q, q, q, is_causal=True, softcap=5.0)
    for case, (arguments, options) in NAMED.items():
        result = _core.scaled_dot_product_attention(*arguments, **options)
        np.testing.assert_array_equal(result, right, case)


@pytest.mark.parametrize(("arguments", "options", "words"), MISNAMED.values(), ids=MISNAMED)
def test_wrong_names_of_arguments_of_the_core(arguments, options, words):
    with pytest.raises(TypeError, match=words):
        _core.scaled_dot_product_attention(*arguments, **options)


def test_operands_that_are_handed_on_alike():
    mask, sinks = np.arange(6).reshape(2, 3), np.arange(4)
    operands = Operands(np.ones((4, 2, 5)), np.ones((1, 3, 5)), np.ones((1, 3, 6)), mask, sinks)
    part = operands.cut("S", slice(1, 3)).cut("L", slice(1)).given()
    assert [a.shape for a in part.values()] == [(4, 1, 5), (1, 2, 5), (1, 2, 6), (1, 2), (4,)]
    np.testing.assert_array_equal(part["attn_mask"], [[1, 2]])
    assert part["sinks"] is sinks
    less = Operands(operands.query, None, operands.value)
    assert list(less.given()) == ["query", "key", "value"]
    assert less.map(np.negative, "query").query.sum() == -40


@pytest.mark.parametrize(
    "function",
    [
        clattn.scaled_dot_product_attention,
        clattn.KVCache.attend,
        clattn.onnx.attention,
        clattn.openvino.scaled_dot_product_attention,
        clattn.directml.multihead_attention,
        clattn.diagonal_matrix,
        attend_with_mods,
    ],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_calls_of_the_core_make_no_dict(function):
    """CPython makes one of many names (csrc/python/arguments.h): a small call takes 0.6 us more."""
    names = {instruction.opname for instruction in dis.get_instructions(function)}
    assert not names & {"BUILD_MAP", "BUILD_CONST_KEY_MAP", "MAP_ADD", "DICT_MERGE"}
