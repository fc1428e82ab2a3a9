# SPDX-License-Identifier: MIT
"""Wrong arguments of the six diagonal functions: refused, by name, before any OpenCL call.

Each row breaks one rule of the specification or of the documentation. It changes a call that is
right: arguments are replaced, or left out where the value is MISSING. test_diagonal_out.py has
the overlaps of out with the input.
"""

from functools import partial

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.diagonal import assert_same, diagonal, numbers
from support.loops import looped
from support.refusals import (
    NUMBERS,
    check_without_opencl,
    of,
    refuse,
    refuse_without_opencl,
    wrong_arrays,
)

NAN, INF = float("nan"), float("inf")
MISSING = object()
f32, f64 = np.float32, np.float64
BF16 = ml_dtypes.bfloat16
GIVEN = numbers((4, 5), f32)
INPUT, VALUE, OUT, SIZES, DTYPE, BEGIN, END = (
    rf"\b{name}\b"
    for name in ("(input|shape|input_or_shape)", "value", "out", "sizes", "dtype", "begin", "end")
)

CALLS = {  # the right call, and what it gives
    "diagonal_matrix": ({"input_or_shape": GIVEN, "value": 7, "begin": 0, "end": 3}, (7, 0, 3)),
    "eye": ({"n": 4, "m": 5}, (1, 0, 1)),
    "tril": ({"input": GIVEN, "diagonal": 1}, (0, 2, 9)),
    "triu": ({"input": GIVEN, "diagonal": 1}, (0, -9, 1)),
    "directml.diagonal_matrix1": (
        {"input": GIVEN, "value": 7, "diagonal_fill_begin": 0, "diagonal_fill_end": 3}, (7, 0, 3)),
    "directml.diagonal_matrix": ({"input": GIVEN, "value": 7, "offset": 1}, (7, 1, 2)),
}  # fmt: skip


def call(name, changed=None):
    """The right call of that function, with arguments replaced."""
    function = clattn
    for part in name.split("."):
        function = getattr(function, part)
    arguments = CALLS[name][0] | (changed or {})
    return function(**{k: v for k, v in arguments.items() if v is not MISSING})


def frozen(*shape):
    return np.frombuffer(bytes(4 * np.prod(shape)), f32).reshape(shape)


def bad_arrays(argument, pattern, takes=NUMBERS, **more):
    """Rows in which an argument is no array of the dtypes that the function takes."""
    return wrong_arrays(argument, (4, 5), takes, pattern, scalar=f32(3), **more)


BAD_DTYPES = {
    "complex": np.complex128, "object": object, "a class": dict, "long double": np.longdouble,
    "float8": ml_dtypes.float8_e5m2, "int4": ml_dtypes.int4, "uint4": "uint4", "datetime": "M8[s]",
    "text": "U4", "structured": [("x", "f4")], "unknown": "float31", "a number": 7, "a list": [],
    "an array": of(f32, 4, 5),
}  # fmt: skip


def bad_dtypes(changed):
    bad = BAD_DTYPES.items()
    return [(f"dtype is {k}", TypeError, DTYPE, changed | {"dtype": v}) for k, v in bad]


VALUES = [  # of a wrong kind, for every dtype
    (f"value is {k}", TypeError, VALUE, {"value": v})
    for k, v in {
        "missing": MISSING, "None": None, "text": "7", "bytes": b"7", "a list": [7],
        "an array": np.array([7.0]), "a matrix": of(f32, 4, 5), "complex": 7j,
        "a complex scalar": np.complex64(7), "a date": np.datetime64("2020-01-01"),
        "a duration": np.timedelta64(7, "s"), "a NumPy text": np.str_("7"), "a type": float,
    }.items()
]  # fmt: skip
HALF, FAR = 7.5, 10**5000  # more digits than Python prints
INEXACT = {  # dtype -> values that it does not hold
    "u1": (HALF, 256, 300, -1, -1.0, 256.0, np.int8(-1), np.uint16(300), NAN, INF, -INF, FAR, -FAR),
    "i1": (HALF, 128, -129, 128.0, np.uint8(200), -0.5, 1e-300, NAN, f32(7.25), np.float16(0.1)),
    "u2": (65536, -1, 65535.5, np.int16(-7), INF, BF16(0.1)),
    "i2": (32768, -32769, 32768.0, f64(0.1), np.float16(NAN)),
    "u4": (2**32, -1, 2.0**32, f32(2**32), np.int64(-1), 1e300),
    "i4": (2**31, -(2**31) - 1, 2.0**31, f32(2**31), 2**32 + 7, 2**64 + 7, -INF),
    "u8": (2**64, -1, 2.0**64, -1.0, 0.5, 2**64 + 7, FAR, np.int64(-(2**63)), NAN),
    "i8": (2**63, -(2**63) - 1, 2.0**63, f32(2**63), np.uint64(2**63), 2**64 + 7, 1e300, -FAR, INF),
    "?": (2, -1, 0.5, HALF, 256, np.uint8(2), np.int64(-1), NAN, INF, FAR),
}  # fmt: skip


def short(value):
    far = type(value) is int and abs(value) == FAR
    return f"{'-' * (value < 0)}10**5000" if far else repr(value)[:20]


def inexact(argument, shapes, kinds):
    """Rows for values that the dtype cannot hold, on inputs of these shapes in turn."""
    return [
        (f"{dtype} cannot hold {short(value)}", ValueError, VALUE,
         {argument: of(dtype, *shapes[n % len(shapes)]), "value": value})
        for dtype in kinds
        for n, value in enumerate(INEXACT[dtype])
    ]  # fmt: skip


def bad_integers(argument, name, missing=True):
    """Rows in which an argument is no whole number."""
    given = {"a float": 1.0, "NaN": NAN, "infinite": -INF, "text": "1", "complex": 1j, "None": None,
             "a list": [1], "an array": np.array([1, 2]), "a NumPy float": f32(1)}  # fmt: skip
    given |= {"missing": MISSING} if missing else {}
    return [(f"{argument} is {k}", TypeError, name, {argument: v}) for k, v in given.items()]


def bad_shapes(argument, name, alone):
    """Rows in which a shape is wrong; `alone` are other arguments of a call without an input."""
    wrong = {"is a float": 4.0, "is text": "45", "has a float": (4, 5.0), "has text": (4, "5"),
             "has None": (4, None), "is nested": ((4, 5), (1, 2)), "has NaN": (NAN, 4)}  # fmt: skip
    out_of_range = {"is empty": (), "has rank 1": (5,), "has a negative row": (-4, 5),
                    "has a negative column": (4, -1), "has a negative batch": (-1, 4, 5),
                    "is all negative": (-4, -5), "is negative and empty": (0, -1),
                    "wraps to 32 bits": (4, -(2**32) + 5)}  # fmt: skip
    both = [(TypeError, *item) for item in wrong.items()]
    both += [(ValueError, *item) for item in out_of_range.items()]
    return [(f"{argument} {k}", error, name, alone | {argument: v}) for error, k, v in both]


SHAPE = {"input_or_shape": (4, 5)}
ALONE = {"input": MISSING, "sizes": (4, 5), "dtype": f32}
DML = [
    *bad_arrays("input", r"\binput\b", NUMBERS.keys() - {"bool", "bfloat16"}),
    ("input has rank 0", ValueError, INPUT, {"input": of(f32)}),
    ("input has rank 1", ValueError, INPUT, {"input": of(f32, 5)}),
    ("input has rank 5", ValueError, INPUT, {"input": of(f32, 1, 1, 1, 4, 5)}),
    ("input is empty, of rank 5", ValueError, INPUT, {"input": of(f32, 0, 1, 1, 4, 5)}),
    ("there is no input, no sizes and no dtype", ValueError, "input|sizes|dtype",
     {"input": MISSING}),
    ("there is no input and no sizes", ValueError, SIZES, {"input": None, "dtype": f32}),
    ("there is no input and no dtype", ValueError, DTYPE, {"input": None, "sizes": (4, 5)}),
    *bad_shapes("sizes", SIZES, ALONE),
    ("sizes are a number", TypeError, SIZES, ALONE | {"sizes": 4}),
    ("sizes have rank 5", ValueError, SIZES, ALONE | {"sizes": (1, 1, 1, 4, 5)}),
    ("sizes differ from the input", ValueError, SIZES, {"sizes": (4, 6)}),
    ("sizes are transposed", ValueError, SIZES, {"sizes": (5, 4)}),
    ("sizes have another rank", ValueError, SIZES, {"sizes": (1, 4, 5)}),
    ("sizes would broadcast", ValueError, SIZES, {"sizes": (2, 4, 5)}),
    ("dtype is bool", TypeError, DTYPE, ALONE | {"dtype": bool, "value": 1}),
    ("dtype is bfloat16", TypeError, DTYPE, ALONE | {"dtype": BF16}),
    *bad_dtypes(ALONE),
    ("dtype is wider than the input", ValueError, DTYPE, {"dtype": f64}),
    ("dtype is another of the same width", ValueError, DTYPE, {"dtype": np.int32}),
    *VALUES,
    *inexact("input", [(4, 5), (1, 4, 5), (0, 5)], [k for k in INEXACT if k != "?"]),
    ("the value does not fit dtype", ValueError, VALUE, ALONE | {"dtype": "u1", "value": 300}),
    ("device is a float", TypeError, "device", {"device": 7.5}),
    ("unknown keyword", TypeError, "shape", {"shape": (4, 5)}),
    ("out is not there", TypeError, "out", {"out": of(f32, 4, 5)}),
]  # fmt: skip


def int32(argument):
    return [
        *bad_integers(argument, argument),
        *(
            (f"{argument} is {short(k)}", ValueError, argument, {argument: k})
            for k in (2**31, -(2**31) - 1, 2**32, -(2**32), 2**63, 2**64, -(10**30), FAR)
        ),
    ]


def outs():
    given = {
        TypeError: {
            "a list": [], "True": True, "masked": np.ma.ones((4, 5), f32), "wider": of(f64, 4, 5),
            "object": of(object, 4, 5), "narrower": of(np.float16, 4, 5), "int": of(np.int32, 4, 5),
        },
        ValueError: {
            "longer": of(f32, 5, 5), "wider than long": of(f32, 4, 6), "transposed": of(f32, 5, 4),
            "flat": of(f32, 20), "a batch": of(f32, 1, 4, 5), "empty": of(f32, 0, 5),
            "read-only": frozen(4, 5), "a broadcast": np.broadcast_to(f32(1), (4, 5)),
        },
    }  # fmt: skip
    both, same = of(f32, 4, 5), frozen(4, 5)
    return [
        *((f"out is {k}", e, OUT, {"out": v}) for e, d in given.items() for k, v in d.items()),
        ("in place and read-only", ValueError, OUT, {"input_or_shape": same, "out": same}),
        ("out is too short for the shape", ValueError, OUT, SHAPE | {"out": of(f32, 4, 4)}),
        ("out overlaps", ValueError, OUT, {"input_or_shape": both, "out": both[::-1]}),
        ("out is not of dtype", TypeError, OUT, SHAPE | {"dtype": f64, "out": of(f32, 4, 5)}),
    ]


TRIANGLE = [
    *bad_arrays("input", INPUT, none=None, missing=MISSING, shape=(4, 5)),
    ("input has rank 0", ValueError, INPUT, {"input": of(f32)}),
    ("input has rank 1", ValueError, INPUT, {"input": of(f32, 5)}),
    *bad_integers("diagonal", "diagonal", missing=False),
    ("unknown keyword", TypeError, "k", {"k": 1}),
]
ROWS = {  # function -> rows of (what is wrong, exception, what the message has, changed arguments)
    "diagonal_matrix": [
        *bad_arrays("input_or_shape", INPUT, none=None, missing=MISSING, whole=5),
        ("input has rank 0", ValueError, INPUT, {"input_or_shape": of(f32)}),
        ("input has rank 1", ValueError, INPUT, {"input_or_shape": of(f32, 5)}),
        ("an array is no shape", ValueError, INPUT, {"input_or_shape": np.array([4, 5])}),
        *bad_shapes("input_or_shape", INPUT, {}),
        *bad_dtypes(SHAPE),
        ("dtype is not the input's", ValueError, DTYPE, {"dtype": f64}),
        ("dtype is another of the same width", ValueError, DTYPE, {"dtype": np.uint32}),
        *VALUES,
        *inexact("input_or_shape", [(4, 5), (1, 1, 2, 4, 5), (0, 5)], INEXACT),
        ("nothing is filled, with 7.5", ValueError, VALUE,
         SHAPE | {"dtype": "i4", "value": HALF, "begin": 3}),
        *bad_integers("begin", BEGIN),
        *bad_integers("end", END),
        *outs(),
        ("device is a float", TypeError, "device", {"device": 7.5}),
        ("device is a list", TypeError, "device", {"device": ["cpu"]}),
        ("unknown keyword", TypeError, "offset", {"offset": 1}),
    ],
    "eye": [
        *bad_integers("n", r"\bn\b"),
        *(row for row in bad_integers("m", r"\bm\b", missing=False) if row[3]["m"] is not None),
        ("n is a shape", TypeError, r"\bn\b", {"n": (4, 5)}),
        ("n is negative", ValueError, r"\bn\b", {"n": -1}),
        ("n is very negative", ValueError, r"\bn\b", {"n": -(2**64) + 4}),
        ("m is negative", ValueError, r"\bm\b", {"m": -5}),
        ("m is negative, n is 0", ValueError, r"\bm\b", {"n": 0, "m": -1}),
        *bad_dtypes({}),
        ("device is a float", TypeError, "device", {"device": 7.5}),
        ("unknown keyword", TypeError, "k", {"k": 1}),
    ],
    "tril": TRIANGLE,
    "triu": TRIANGLE,
    "directml.diagonal_matrix1": [*DML, *int32("diagonal_fill_begin"),
                                  *int32("diagonal_fill_end")],
    "directml.diagonal_matrix": [*DML, *int32("offset")],
}  # fmt: skip
ALL = [(name, row) for name, rows in ROWS.items() for row in rows]


def refuse_row(name, row):
    return str(refuse(lambda **changed: call(name, changed), row, {}))


def check_right_call(name):
    value, begin, end = CALLS[name][1]
    source = (4, 5) if name == "eye" else GIVEN
    assert_same(call(name), diagonal(source, value, begin, end))


@looped("case", ALL, [f"{name}, {row[0]}" for name, row in ALL])
def test_wrong_arguments(device, case):
    """The exception of the row; afterwards the correct call works."""
    name, row = case
    with clattn.use_device(device):
        refuse_row(name, row)
        check_right_call(name)


SAID = {  # function -> row -> what of the call the message repeats
    "diagonal_matrix": {
        "input_or_shape is complex": "complex64",
        "input_or_shape is float8": "float8_e4m3fn",
        "input_or_shape has a negative column": "-1",
        "dtype is complex": "complex128",
        "dtype is not the input's": "float64",
        "value is text": "str",
        "u1 cannot hold 300": "300",
        "u1 cannot hold 7.5": "7.5",
        "u2 cannot hold 65536": "uint16",
        "i8 cannot hold 9223372036854775808": "9223372036854775808",
        "begin is a float": "float",
        "end is text": "str",
        "out is wider": "float64",
        "out is a list": "list",
    },
    "eye": {"n is negative": "-1", "m is a float": "float", "dtype is complex": "complex128"},
    "tril": {"input is a list": "list", "input is complex": "complex64"},
    "triu": {"diagonal is text": "str", "input is shape": "tuple"},
    "directml.diagonal_matrix1": {
        "input is bool": "bool",
        "dtype is bfloat16": "bfloat16",
        "sizes differ from the input": "6",
        "dtype is wider than the input": "float64",
        "diagonal_fill_end is 2147483648": "2147483648",
    },
    "directml.diagonal_matrix": {"offset is -2147483649": "-2147483649", "value is text": "str"},
}


@pytest.mark.parametrize("name", SAID)
def test_messages_say_what_was_given(name):
    """The message says more than which argument is wrong."""
    rows = {row[0]: row for row in ROWS[name]}
    for what, given in SAID[name].items():
        message = refuse_row(name, rows[what])
        assert given in message, f"{what}: {message}"


@pytest.mark.parametrize("name", ["no such device", "cpu:99", "cpu:-1", "\0", "x" * 5000],
                         ids=lambda n: repr(n[:20]))  # fmt: skip
def test_unknown_devices(device, name):
    for function in ("diagonal_matrix", "eye", "directml.diagonal_matrix1"):
        with pytest.raises(ValueError, match="device"):
            call(function, {"device": name})
    assert_same(call("eye", {"device": device}), np.eye(4, 5, dtype=f32))


def test_too_many_or_too_few_arguments(device):
    """dtype, out and device are keywords, and all of DirectML's but the input."""
    a = GIVEN
    for wrong, match in (
        (lambda: clattn.diagonal_matrix(), "input"),
        (lambda: clattn.diagonal_matrix(a, 7, 0), "end"),
        (lambda: clattn.diagonal_matrix(a, 7, 0, 3, f32), None),
        (lambda: clattn.diagonal_matrix(a, 7, 0, 3, value=7), "value"),
        (lambda: clattn.eye(), "n"),
        (lambda: clattn.eye(4, 5, f32), None),
        (lambda: clattn.tril(), "input"),
        (lambda: clattn.triu(a, 0, None), None),
        (lambda: clattn.directml.diagonal_matrix1(a, (4, 5)), None),
        (lambda: clattn.directml.diagonal_matrix(a, 7, 0), None),
        (lambda: clattn.directml.diagonal_matrix(a, offset=0), "value"),
    ):
        with pytest.raises(TypeError, match=match):
            wrong()
    with clattn.use_device(device):
        for name in CALLS:
            check_right_call(name)


def test_results_too_large_for_memory(device):
    """Half a petabyte and more: MemoryError. What 64 bits cannot count may be a ValueError too."""
    wide = np.broadcast_to(f32(1), (2**24, 2**24))
    with clattn.use_device(device):
        for name, changed in (
            ("diagonal_matrix", {"input_or_shape": (2**24, 2**24)}),
            ("diagonal_matrix", {"input_or_shape": wide}),
            ("eye", {"n": 2**24, "m": None}),
            ("tril", {"input": wide}),
            ("directml.diagonal_matrix1", {"input": wide}),
            ("directml.diagonal_matrix", {"input": None, "sizes": wide.shape, "dtype": f64}),
        ):
            with pytest.raises(MemoryError):
                call(name, changed)
        for name, changed in (
            ("diagonal_matrix", {"input_or_shape": (2**32, 2**32)}),
            ("diagonal_matrix", {"input_or_shape": (2**31, 2**33, 5)}),
            ("diagonal_matrix", {"input_or_shape": (2**70, 5)}),
            ("diagonal_matrix", {"input_or_shape": (1,) * 99 + (4, 5)}),
            ("eye", {"n": 2**62}),
            ("eye", {"n": 2**64 + 4}),
            ("eye", {"n": FAR, "m": 0}),
            ("directml.diagonal_matrix", {"input": None, "sizes": (2**64 + 4, 5), "dtype": f32}),
        ):
            with pytest.raises((MemoryError, ValueError)):
                call(name, changed)
        for name in CALLS:
            check_right_call(name)


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    refuse_without_opencl(partial(call, "eye"), lambda: [refuse_row(*row) for row in ALL])
    for name in CALLS:
        refuse_without_opencl(partial(call, name), lambda: None)


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("diagonal.test_diagonal_errors", tmp_path)


WITH_OUT = (
    (clattn.tril, "input"),
    (clattn.triu, "input"),
    (lambda a, out: clattn.diagonal_matrix(a, 2, 0, 1, out=out), "input_or_shape"),
)


class Mute(np.ndarray):
    """Answers NumPy's functions, numpy.may_share_memory among them, with nonsense."""

    def __array_function__(self, func, types, args, kwargs):
        return "no answer"


def test_subclasses_do_not_say_what_overlaps(device):
    a = numbers((6, 6), np.float32)
    before = a.copy()
    flipped = a[::-1]
    with clattn.use_device(device):
        for input, out in ((a, flipped.view(Mute)), (a.view(Mute), flipped), (a, a.T)):
            for call, name in WITH_OUT:
                with pytest.raises(ValueError, match=f"out shares memory with {name};"):
                    call(input, out=out)
        np.testing.assert_array_equal(a, before)
        np.testing.assert_array_equal(clattn.tril(a.view(Mute), out=a), np.tril(before))
