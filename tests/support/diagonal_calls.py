# SPDX-License-Identifier: MIT
"""Calls of clattn.diagonal_matrix, compared with the oracle bit by bit."""

import clattn
import numpy as np
from references.diagonal import assert_same, band, diagonal
from support.checks import native


def owner_of(array):
    """The array that owns the memory of a view, one by as_strided included."""
    owner = array
    while (array := getattr(array, "base", None)) is not None:
        if isinstance(array, np.ndarray):
            owner = array
    return owner


def check_diagonal(source, value, begin, end, *, device, dtype=None, out=None):
    """clattn.diagonal_matrix against the oracle; a new result, unless `out` is given.

    `dtype` is passed where a shape is given. The input is unchanged (unless out is the input), and
    so is all memory around out.
    """
    right = diagonal(source, value, begin, end, dtype)
    options = {} if isinstance(source, np.ndarray) or dtype is None else {"dtype": dtype}
    before = source.tobytes() if isinstance(source, np.ndarray) else None
    if out is not None:
        options["out"] = out
        around, old = owner_of(out).tobytes(), out.copy()

    got = clattn.diagonal_matrix(source, value, begin, end, device=device, **options)

    what = f"{source if before is None else source.shape} {value!r} [{begin}, {end})"
    result = got if got.dtype.isnative else native(got)  # as out may be
    if value != value:  # any NaN will do, but for those that are copied
        result = native(got)
        filled = band(right.shape, begin, end)
        assert np.isnan(result[..., filled]).all(), what
        result[..., filled] = right[..., filled]
    assert_same(result, right, what)
    if out is not None:
        assert got is out
        out[...] = old
        assert owner_of(out).tobytes() == around, "written outside of out"
        out[...] = right
        return got
    assert type(got) is np.ndarray and got.dtype.isnative and got.flags.writeable
    if before is not None:
        assert source.tobytes() == before, "the input was modified"
        assert not np.may_share_memory(got, source), "the result is not new"
    return got
