# SPDX-License-Identifier: MIT
"""dropout_p and seed of scaled_dot_product_attention: what is refused, before any OpenCL call.

Each row replaces arguments of a call that is right.
"""

import clattn
import numpy as np
import pytest
import references.dropout as oracle
from support.checks import assert_close
from support.data import qkv
from support.refusals import (
    cases,
    check_without_opencl,
    of,
    refuse,
    refuse_without_opencl,
    wrong,
)

pytestmark = pytest.mark.usefixtures("reference_kernel")

NAN, INF = float("nan"), float("inf")
P, SEED = 0.3, 11


def arrays():
    return dict(zip(("query", "key", "value"), qkv((2, 4), 5, 7, 8), strict=True))


ROWS = [
    *wrong("dropout_p", ValueError, 1.5, float(np.nextafter(1, 2)), 2, -0.1, -5e-324, -1, NAN,
           np.float32(NAN), INF, -INF, 10**400),
    *wrong("dropout_p", TypeError, "0.5", b"0.5", None, 0.5 + 0j, [0.5], np.full(2, 0.5)),
    *wrong("seed", ValueError, -1, -(2**64), 2**64, 10**400, np.int64(-1), dropout_p=P),
    *wrong("seed", TypeError, 1.0, np.float64(1), "1", b"1", 1j, [1], np.array([1, 2]),
           dropout_p=P),
    *wrong("seed", ValueError, -1, 2**64, dropout_p=0.0),
    *wrong("seed", TypeError, 1.5, dropout_p=1.0),
    *wrong("seed", ValueError, 2**64, dropout_p=1.0),
    ("both are wrong", ValueError, "dropout_p|seed", {"dropout_p": 2.0, "seed": -1}),
    ("values are too few", ValueError, "value",
     {"dropout_p": P, "value": of("f4", 2, 4, 6, 8)}),
    ("everything dropped of a wrong mask", ValueError, "attn_mask",
     {"dropout_p": 1.0, "attn_mask": of(bool, 4, 7)}),
    ("everything dropped into a wrong out", ValueError, "out",
     {"dropout_p": 1.0, "out": of("f4", 2, 4, 5, 7)}),
    ("everything dropped into another type", TypeError, "out",
     {"dropout_p": 1.0, "out": of("f8", 2, 4, 5, 8)}),
]  # fmt: skip


def assert_it_still_works(device):
    given = arrays()
    options = {"dropout_p": P, "seed": SEED}
    got = clattn.scaled_dot_product_attention(**given, **options, device=device)
    right, allowed = oracle.attention(**given, **options), oracle.tolerance(**given, **options)
    assert_close(got, right, allowed)


@cases(ROWS)
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(clattn.scaled_dot_product_attention, row, arrays())
    assert_it_still_works(device)


def test_out_is_untouched_after_an_error(device):
    out = np.full((2, 4, 5, 8), 7.5, np.float32)
    for changed in ({"dropout_p": 1.5}, {"dropout_p": P, "seed": -1}):
        with pytest.raises(ValueError, match=r"dropout_p|seed"):
            clattn.scaled_dot_product_attention(**arrays() | changed, out=out, device=device)
    assert (out == 7.5).all()


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    call, right = clattn.scaled_dot_product_attention, arrays()
    refuse_without_opencl(
        lambda: call(**right, dropout_p=P, seed=SEED),
        lambda: [refuse(call, row, right) for row in ROWS],
    )


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("attention.test_dropout_errors", tmp_path)
