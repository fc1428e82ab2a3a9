# SPDX-License-Identifier: MIT
"""Wrong calls: the exception, the argument's name in its message, before any OpenCL call.

A row of a table is (what is wrong, exception, pattern in the message, arguments that change).
"""

import clattn
import ml_dtypes
import numpy as np
import pytest
from support.loops import looped
from support.processes import WHAT_TO_INSTALL, no_opencl, run_python

BFLOAT16 = ml_dtypes.bfloat16

# Kinds of dtypes: an operator takes a few of them.
FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": BFLOAT16}
NUMBERS = FLOATS | {"bool": "?"} | {f"{s}int{n}": f"{s or 'i'}{n // 8}" for s in ("", "u")
                                    for n in (8, 16, 32, 64)}  # fmt: skip
NO_NUMBERS = {
    "complex": "c8", "object": "O", "long double": "g", "float8": ml_dtypes.float8_e4m3fn,
    "int4": ml_dtypes.int4, "datetime": "M8[s]", "timedelta": "m8[s]", "strings": "U4",
    "bytes": "S4", "raw": "V4", "structured": [("x", "f4")],
}  # fmt: skip
NO_ARRAYS = {"a list": [[1.0, 2.0]], "a number": 3.0, "text": "4x5",
              "a type": np.ndarray, "an object": object()}  # fmt: skip


def of(dtype, *shape):
    """Zeros."""
    return np.zeros(shape, dtype)


def wrong_arrays(argument, shape, takes, pattern=None, base=None, /, **more):
    """Rows in which an argument is no array, or an array of a dtype that the call does not take.

    `takes` are the names in NUMBERS of the dtypes that are right, `base` are changes that every row
    makes, `more` are further wrong values.
    """
    given = NO_ARRAYS | {"masked": np.ma.masked_array(of("f4", *shape), mask=True)} | more
    dtypes = {name: dtype for name, dtype in NUMBERS.items() if name not in takes} | NO_NUMBERS
    given |= {name: of(dtype, *shape) for name, dtype in dtypes.items()}
    return [
        (f"{argument} is {name}", TypeError, pattern or argument, (base or {}) | {argument: wrong})
        for name, wrong in given.items()
    ]


# Rows of both caches, of two key heads: how rows are kept.
WRONGLY_KEPT = [
    *[(f"dtype is {dtype!r}", TypeError, "dtype.*int8", {"dtype": dtype})
      for dtype in (np.int32, bool, "int5", 4, None, np.complex64, np.longdouble,
                    ml_dtypes.float8_e4m3b11fnuz, "f4,,")],
    *[(f"{name} is {given!r}", ValueError, name, {"dtype": "float8_e5m2", name: given})
      for name in ("key_scale", "value_scale")
      for given in (0.0, -1.0, float("nan"), float("inf"), [1.0], [1.0, 0.0], np.ones((2, 1)),
                    1e-50)],
    *[(f"{name} is {given!r}", TypeError, name, {"dtype": "float8_e5m2", name: given})
      for name in ("key_scale", "value_scale") for given in ("x", None, [[1], 2])],
    *[(f"key_scale of {dtype}", ValueError, "key_scale", {"dtype": dtype, "key_scale": 2.0})
      for dtype in ("float32", "int8", "int4")],
]  # fmt: skip


def wrong(argument, exception, *values, **base):
    """Rows in which an argument has a value that is refused, beside the changes of `base`."""
    others = "".join(f", {name} {value!r}" for name, value in base.items())
    return [
        (f"{argument} is {value!r:.40}{others}", exception, rf"\b{argument}\b",
         base | {argument: value})
        for value in values
    ]  # fmt: skip


def wrong_shapes(argument, dtype, *shapes):
    """Rows in which an argument has a shape that is refused."""
    return [
        (f"{argument} of {np.dtype(dtype)} {shape}", ValueError, rf"\b{argument}\b",
         {argument: of(dtype, *shape)})
        for shape in shapes
    ]  # fmt: skip


def cases(rows):
    """Run a test for each `row`, all in one. Each of the rows' names has to occur once."""
    names = [row[0] for row in rows]
    assert len(set(names)) == len(names), "rows of one name"
    return looped("row", rows, names)


def refuse(function, row, arguments):
    """The row's call raises exactly its exception; returns it."""
    _, exception, pattern, changed = row
    with pytest.raises(exception, match=pattern) as caught:
        function(**arguments | changed)
    assert caught.type in (exception if isinstance(exception, tuple) else (exception,))
    return caught.value


def refuse_without_opencl(right, wrong):
    """In a process without a driver: `wrong` raises as ever, before and after it `right` does not.

    `right` makes a call that is right, `wrong` all calls that are refused.
    """
    for _ in range(2):
        with pytest.raises(clattn.DeviceError) as caught:
            right()
        wrong()
    print(caught.value)


def check_without_opencl(module, folder):
    """Run a module's refuse_all() in such a process; it says what to install."""
    code = f"import {module} as t; t.refuse_all()"
    said = run_python(code, env=no_opencl(folder)).stdout
    assert any(word in said for word in WHAT_TO_INSTALL), said
