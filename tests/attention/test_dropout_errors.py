# SPDX-License-Identifier: MIT
"""dropout_p and seed of scaled_dot_product_attention: what is refused, before any OpenCL call.

One row a rule. Every row is one change to a call that is right: keyword arguments to replace.
"""

import clattn
import numpy as np
import pytest
import references.dropout as oracle
from support.helpers import WHAT_TO_INSTALL, assert_close, no_opencl, qkv, run_python

pytestmark = pytest.mark.usefixtures("reference_kernel")

NAN, INF = float("nan"), float("inf")
P, SEED = 0.3, 11


def arrays():
    return dict(zip(("query", "key", "value"), qkv((2, 4), 5, 7, 8), strict=True))


def probability(p):
    return {"dropout_p": p}


def seed(number, p=P):
    return {"dropout_p": p, "seed": number}


ROWS = [  # (what is wrong, exception, name the message has to contain, changed arguments)
    ("p is above 1", ValueError, "dropout_p", probability(1.5)),
    ("p is just above 1", ValueError, "dropout_p", probability(float(np.nextafter(1, 2)))),
    ("p is 2", ValueError, "dropout_p", probability(2)),
    ("p is below 0", ValueError, "dropout_p", probability(-0.1)),
    ("p is just below 0", ValueError, "dropout_p", probability(-5e-324)),
    ("p is -1", ValueError, "dropout_p", probability(-1)),
    ("p is NaN", ValueError, "dropout_p", probability(NAN)),
    ("p is a NaN of NumPy's", ValueError, "dropout_p", probability(np.float32(NAN))),
    ("p is infinite", ValueError, "dropout_p", probability(INF)),
    ("p is minus infinite", ValueError, "dropout_p", probability(-INF)),
    ("p is a huge integer", ValueError, "dropout_p", probability(10**400)),
    ("p is text", TypeError, "dropout_p", probability("0.5")),
    ("p is bytes", TypeError, "dropout_p", probability(b"0.5")),
    ("p is None", TypeError, "dropout_p", probability(None)),
    ("p is complex", TypeError, "dropout_p", probability(0.5 + 0j)),
    ("p is a list", TypeError, "dropout_p", probability([0.5])),
    ("p is an array", TypeError, "dropout_p", probability(np.full(2, 0.5))),
    ("seed is -1", ValueError, "seed", seed(-1)),
    ("seed is far below 0", ValueError, "seed", seed(-(2**64))),
    ("seed is 2**64", ValueError, "seed", seed(2**64)),
    ("seed is far above", ValueError, "seed", seed(10**400)),
    ("seed is a negative NumPy integer", ValueError, "seed", seed(np.int64(-1))),
    ("seed is a float", TypeError, "seed", seed(1.0)),
    ("seed is a NumPy float", TypeError, "seed", seed(np.float64(1))),
    ("seed is text", TypeError, "seed", seed("1")),
    ("seed is bytes", TypeError, "seed", seed(b"1")),
    ("seed is complex", TypeError, "seed", seed(1j)),
    ("seed is a list", TypeError, "seed", seed([1])),
    ("seed is an array", TypeError, "seed", seed(np.array([1, 2]))),
    ("seed is -1, nothing dropped", ValueError, "seed", seed(-1, 0.0)),
    ("seed is 2**64, nothing dropped", ValueError, "seed", seed(2**64, 0.0)),
    ("seed is a float, everything dropped", TypeError, "seed", seed(1.5, 1.0)),
    ("seed is 2**64, everything dropped", ValueError, "seed", seed(2**64, 1.0)),
    ("both are wrong", ValueError, "dropout_p|seed", seed(-1, 2.0)),
    ("values are too few", ValueError, "value",
     probability(P) | {"value": np.zeros((2, 4, 6, 8), np.float32)}),
    ("everything dropped of a wrong mask", ValueError, "attn_mask",
     probability(1.0) | {"attn_mask": np.zeros((4, 7), bool)}),
    ("everything dropped into a wrong out", ValueError, "out",
     probability(1.0) | {"out": np.zeros((2, 4, 5, 7), np.float32)}),
    ("everything dropped into another type", TypeError, "out",
     probability(1.0) | {"out": np.zeros((2, 4, 5, 8), np.float64)}),
]  # fmt: skip


def refuse(row):
    """The row's call raises exactly its exception, with the name in the message."""
    _, exception, name, changed = row
    with pytest.raises(exception, match=name) as caught:
        clattn.scaled_dot_product_attention(**arrays() | changed)
    assert caught.type is exception


def assert_it_still_works(device):
    given = arrays()
    options = {"dropout_p": P, "seed": SEED}
    got = clattn.scaled_dot_product_attention(**given, **options, device=device)
    right, allowed = oracle.attention(**given, **options), oracle.tolerance(**given, **options)
    assert_close(got, right, allowed)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(row)
    assert_it_still_works(device)


def test_out_is_untouched_after_an_error(device):
    out = np.full((2, 4, 5, 8), 7.5, np.float32)
    for changed in (probability(1.5), seed(-1), seed(2**64, 1.0)):
        with pytest.raises(ValueError, match=r"dropout_p|seed"):
            clattn.scaled_dot_product_attention(**arrays() | changed, out=out, device=device)
    assert (out == 7.5).all()


def refuse_all_without_opencl():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    right = arrays() | {"dropout_p": P, "seed": SEED}
    with pytest.raises(clattn.DeviceError) as caught:
        clattn.scaled_dot_product_attention(**right)
    for row in ROWS:
        refuse(row)
    with pytest.raises(clattn.DeviceError):
        clattn.scaled_dot_product_attention(**right)
    print(caught.value)


def test_arguments_are_checked_before_opencl(tmp_path):
    """Without a driver wrong calls raise as ever, a right one DeviceError with what to install."""
    code = "import attention.test_dropout_errors as t; t.refuse_all_without_opencl()"
    said = run_python(code, env=no_opencl(tmp_path)).stdout
    assert any(word in said for word in WHAT_TO_INSTALL), said
