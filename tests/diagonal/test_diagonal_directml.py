# SPDX-License-Identifier: MIT
"""clattn.directml.diagonal_matrix1 and diagonal_matrix: the page's examples, ranks, dtypes, bounds.

The values are those of the torch-like function, see test_diagonal.py; wrong calls are in
test_diagonal_errors.py.
"""

import itertools

import clattn
import numpy as np
import pytest
from references.diagonal import ELEVEN, INT32_MAX, INT32_MIN, assert_same, brute, diagonal, numbers
from support.loops import looped

pytestmark = pytest.mark.tensors

dtypes = looped("dtype", ELEVEN)
ENDS = (INT32_MIN, INT32_MIN + 1, -4, -3, -1, 0, 1, 3, 5, 6, INT32_MAX - 1, INT32_MAX)
GIVEN = np.array([[4, 7, 3, 7, 9], [1, 2, 8, 6, 9], [9, 4, 1, 8, 7], [4, 3, 4, 2, 4]], np.float32)
EXAMPLES = {  # input, value, begin, end, the matrix as the page has it
    # The page prints ones here, for a Value of 7: a slip, says our specification.
    "one diagonal": (None, 7, 0, 1, [[7, 0, 0, 0, 0], [0, 7, 0, 0, 0], [0, 0, 7, 0, 0],
                                     [0, 0, 0, 7, 0]]),
    "three diagonals": (None, 7, 0, 3, [[7, 7, 7, 0, 0], [0, 7, 7, 7, 0], [0, 0, 7, 7, 7],
                                        [0, 0, 0, 7, 7]]),
    "strict upper triangle": (GIVEN, 0, INT32_MIN, 1, [[0, 7, 3, 7, 9], [0, 0, 8, 6, 9],
                                                       [0, 0, 0, 8, 7], [0, 0, 0, 0, 4]]),
    "only the diagonal": (GIVEN, 0, 1, 0, [[4, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 1, 0, 0],
                                           [0, 0, 0, 2, 0]]),
}  # fmt: skip


def matrix1(source, value, begin, end, *, device, dtype=None):
    """diagonal_matrix1 on an input, or on a tuple of sizes."""
    bounds = {"diagonal_fill_begin": begin, "diagonal_fill_end": end}
    if isinstance(source, np.ndarray):
        return clattn.directml.diagonal_matrix1(source, value=value, device=device, **bounds)
    return clattn.directml.diagonal_matrix1(
        sizes=source, dtype=dtype, value=value, device=device, **bounds
    )


def check1(source, value, begin, end, *, device, dtype=None):
    before = source.tobytes() if isinstance(source, np.ndarray) else None
    got = matrix1(source, value, begin, end, device=device, dtype=dtype)
    assert_same(got, diagonal(source, value, begin, end, dtype), f"{value} [{begin}, {end})")
    if before is not None:
        assert source.tobytes() == before, "the input was modified"
        assert not np.may_share_memory(got, source)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_oracle_with_the_pages_examples(example):
    source, value, begin, end, rows = example
    source = (4, 5) if source is None else source
    assert_same(brute(source, value, begin, end), np.array(rows, np.float32))


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_pages_examples(device, example):
    source, value, begin, end, rows = example
    right = np.array(rows, np.float32)
    for dtype in ELEVEN:
        given = (4, 5) if source is None else source.astype(dtype)
        got = matrix1(given, value, begin, end, device=device, dtype=dtype)
        assert_same(got, right.astype(dtype))


@dtypes
def test_bounds(device, dtype):
    """All pairs of bounds, also those whose sum or difference overflows 32 bits."""
    a = numbers((4, 6), dtype)
    for begin, end in itertools.product(ENDS, repeat=2):
        check1(a, 7, begin, end, device=device)
        check1((4, 6), 7, begin, end, device=device, dtype=dtype)


@dtypes
def test_offsets(device, dtype):
    """The band [offset, offset + 1), INT32_MAX + 1 included."""
    call = clattn.directml.diagonal_matrix
    a = numbers((2, 4, 6), dtype)
    for offset in (*range(-6, 9), *ENDS):
        got = call(a, value=7, offset=offset, device=device)
        assert_same(got, diagonal(a, 7, offset, offset + 1), f"offset {offset}")
        got = call(sizes=(4, 6), dtype=dtype, value=7, offset=offset, device=device)
        assert_same(got, diagonal((4, 6), 7, offset, offset + 1, dtype), f"offset {offset}")
        if offset < INT32_MAX:
            assert_same(matrix1((4, 6), 7, offset, offset + 1, device=device, dtype=dtype), got)


def test_sizes_and_dtype_beside_an_input(device):
    """Both may repeat what the input says, in any spelling."""
    a = numbers((3, 4, 5), np.int16)
    right = diagonal(a, 7, 0, 1)
    sizes = [None, (3, 4, 5), [3, 4, 5], (np.int64(3), 4, np.uint8(5))]
    for size, dtype in itertools.product(sizes, [None, np.int16, "int16", np.dtype("i2")]):
        same = {"sizes": size, "dtype": dtype, "value": 7, "device": device}
        got = clattn.directml.diagonal_matrix(a, offset=0, **same)
        assert_same(got, right)
        got = clattn.directml.diagonal_matrix1(
            input=a, diagonal_fill_begin=0, diagonal_fill_end=1, **same
        )
        assert_same(got, right)


def test_sizes_and_dtype_in_any_spelling(device):
    for sizes in ((2, 3), [2, 3], (np.int32(2), np.uint64(3))):
        for dtype in (np.uint16, "uint16", np.dtype("u2")):
            got = clattn.directml.diagonal_matrix(
                None, sizes=sizes, dtype=dtype, value=65535, offset=np.int8(1), device=device
            )
            assert_same(got, diagonal((2, 3), 65535, 1, 2, np.uint16))


@pytest.mark.parametrize("value", [7.0, np.float64(7), np.int8(7), np.uint64(7), np.float16(7)],
                         ids=lambda v: type(v).__name__)  # fmt: skip
def test_values(device, value):
    """Integer dtypes take exact numbers of any type; float dtypes round."""
    for dtype in ELEVEN:
        check1((4, 5), value, 0, 2, device=device, dtype=dtype)
        check1(numbers((4, 5), dtype), value, 0, 2, device=device)
    for dtype in ELEVEN[:3]:
        for rough in (0.1, 1e5, -1e40, 2**24 + 1, -0.0, float("inf"), -float("inf")):
            check1((4, 5), rough, 0, 2, device=device, dtype=dtype)
        got = matrix1((4, 5), float("nan"), 0, 2, device=device, dtype=dtype)
        assert np.isnan(got).tolist() == (diagonal((4, 5), 1, 0, 2, dtype) == 1).tolist()


def test_the_default_device(device):
    a = numbers((4, 5), np.float32)
    with clattn.use_device(device):
        assert_same(clattn.directml.diagonal_matrix(a, value=7, offset=1), diagonal(a, 7, 1, 2))
        got = clattn.directml.diagonal_matrix1(
            a, value=7, diagonal_fill_begin=1, diagonal_fill_end=-1
        )
        assert_same(got, diagonal(a, 7, 1, -1))
