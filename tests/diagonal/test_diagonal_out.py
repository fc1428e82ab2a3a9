# SPDX-License-Identifier: MIT
"""diagonal_matrix(out=...): written and returned, whatever its strides; in place; overlaps.

`check_diagonal` sees that nothing around out is touched. Out may be the input itself (the same
memory and strides); any other memory that both have is refused. Out's dtype, shape and flags: see
test_diagonal_errors.py.
"""

import clattn
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.diagonal import (
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    LAYOUTS,
    ODD,
    WIDTHS,
    bfloat16,
    numbers,
)
from support.diagonal_calls import check_diagonal
from support.layouts import one_element_in
from support.loops import looped

pytestmark = pytest.mark.tensors

dtypes = looped("dtype", DTYPES)
widths = looped("dtype", WIDTHS)
layouts = looped("layout", LAYOUTS, ids=lambda f: f.__name__)
FEW = ((0, 1), (-2, 2), (INT32_MIN, 1), (0, INT32_MAX), (INT32_MIN, INT32_MAX), (3, -2), (2, 2))
SHAPE = (2, 3, 17, 21)


@layouts
@dtypes
def test_out(device, layout, dtype):
    """The result is written into `out`, from an input and from a shape."""
    a = numbers(SHAPE, dtype)
    for begin, end in FEW:
        out = layout(numbers(SHAPE, dtype, 5))
        check_diagonal(a, 1, begin, end, device=device, out=out)
        check_diagonal(SHAPE, 1, begin, end, device=device, dtype=dtype, out=out)


@layouts
@widths
def test_both_strided(device, layout, dtype):
    """Input and out have different strides."""
    for other in LAYOUTS:
        out = other(np.zeros(SHAPE, dtype))
        check_diagonal(layout(numbers(SHAPE, dtype)), 1, 3, -2, device=device, out=out)


@layouts
@dtypes
def test_in_place(device, layout, dtype):
    for begin, end in FEW:
        a = layout(numbers(SHAPE, dtype))
        check_diagonal(a, 1, begin, end, device=device, out=a)
        check_diagonal(
            a, 0, end, begin, device=device, out=a[...]
        )  # another object, the same memory


@widths
def test_in_place_through_other_objects(device, dtype):
    """Arrays of the same elements are in place; the stride of a dimension of size 1 is ignored."""
    a = numbers((1, 5, 1, 9), dtype)
    step = a.itemsize
    again = as_strided(a, a.shape, (-(2**40), 9 * step, 12345 * step, step))
    for out in (np.frombuffer(memoryview(a), dtype).reshape(a.shape), again, a.T.T):
        check_diagonal(a, 3, 0, 2, device=device, out=out)
        check_diagonal(out, 4, 1, 5, device=device, out=a)
    one = numbers((1, 1), dtype)
    check_diagonal(one, 3, 0, 1, device=device, out=one[::-1, ::-1])
    check_diagonal(one, 4, 0, 1, device=device, out=one.T)
    for empty in (a[:, :0], a[..., :0]):
        check_diagonal(empty, 3, 0, 1, device=device, out=empty)
        check_diagonal(empty, 3, 0, 1, device=device, out=empty[:, ::-1])


@widths
def test_every_width_in_place(device, dtype):
    """Rows lie without padding, so a store beyond the band would hit the next row."""
    for columns in range(1, 71):
        a = one_element_in(numbers((5, columns), dtype))
        check_diagonal(a, 1, -1, columns // 2, device=device, out=a)
        check_diagonal(a, 2, columns // 2, 1, device=device, out=a)
        check_diagonal(a.shape, 3, 0, columns // 3, device=device, dtype=dtype, out=a)


@looped("layout", ODD, ids=lambda f: f.__name__)
@dtypes
def test_odd_out(device, layout, dtype):
    """Misaligned, packed or of the other byte order."""
    if layout is ODD[2] and (dtype == bfloat16 or dtype.itemsize == 1):
        return  # has no other byte order
    out = layout(numbers(SHAPE, dtype))
    for source in (numbers(SHAPE, dtype, 5), out):
        check_diagonal(source, 1, 0, 3, device=device, out=out)


def test_out_in_a_file(device, tmp_path):
    """numpy.memmap is an array like any other: written, returned, in place."""
    a = numbers((33, 65), np.float32)
    a.tofile(tmp_path / "matrix")
    mapped = np.memmap(tmp_path / "matrix", np.float32, "r+", shape=a.shape)
    right = clattn.diagonal_matrix(a, 7, 0, 3, device=device)
    assert clattn.diagonal_matrix(mapped, 7, 0, 3, out=mapped, device=device) is mapped
    mapped.flush()
    assert np.fromfile(tmp_path / "matrix", np.float32).tobytes() == right.tobytes()


@pytest.mark.arrays_only  # no Tensor has such strides
@widths
def test_out_whose_elements_coincide(device, dtype):
    """Such an out is refused, and nothing is written."""
    before = numbers((99,), dtype)
    for strides in ((0, 0), (0, 1), (1, 0), (1, 1), (3, 1), (2, -3)):
        buffer = before.copy()
        steps = tuple(s * buffer.itemsize for s in strides)
        out = as_strided(buffer[40:], (4, 5), steps)
        options = {"dtype": dtype, "out": out, "device": device}
        with pytest.raises(ValueError, match="out has elements that share memory"):
            clattn.diagonal_matrix((4, 5), 7, 0, 1, **options)
        assert buffer.tobytes() == before.tobytes()
    for shape, strides in (((2, 3), (3, 2)), ((3, 2), (-2, 3))):  # rows that interleave are right
        out = as_strided(before.copy()[40:], shape, [s * before.itemsize for s in strides])
        clattn.diagonal_matrix(shape, 7, 0, 1, dtype=dtype, out=out, device=device)
        right = clattn.diagonal_matrix(shape, 7, 0, 1, dtype=dtype, device=device)
        assert out.tobytes() == right.tobytes()


def windows(flat, first, second, shape=(6, 6)):
    """Two matrices out of one buffer: where they start and the strides, all in elements."""
    step = flat.itemsize
    return [
        as_strided(flat[begin:], shape, [s * step for s in strides])
        for begin, *strides in (first, second)
    ]


OVERLAPS = {  # a fresh buffer of 500 elements -> two matrices that have some of it in common
    "one element on": lambda b: windows(b, (0, 6, 1), (1, 6, 1)),
    "one row on": lambda b: windows(b, (0, 6, 1), (6, 6, 1)),
    "one column on": lambda b: windows(b, (0, 20, 1), (1, 20, 1)),
    "one column in common": lambda b: windows(b, (0, 20, 1), (5, 20, 1)),
    "one element in common": lambda b: windows(b, (0, 6, 1), (35, 6, 1)),
    "rows reversed": lambda b: windows(b, (0, 6, 1), (30, -6, 1)),
    "columns reversed": lambda b: windows(b, (0, 6, 1), (5, 6, -1)),
    "all reversed": lambda b: windows(b, (0, 6, 1), (35, -6, -1)),
    "transposed": lambda b: windows(b, (0, 6, 1), (0, 1, 6)),
    "another row stride": lambda b: windows(b, (0, 6, 1), (0, 7, 1)),
    "another column stride": lambda b: windows(b, (0, 20, 1), (0, 20, 2)),
    "twice as far apart": lambda b: windows(b, (0, 6, 1), (0, 12, 2)),
    "three steps on": lambda b: windows(b, (0, 30, 3), (3, 30, 3)),
    "steps of two and three": lambda b: windows(b, (0, 30, 2), (3, 30, 3)),
    "the input is one row of out": lambda b: windows(b, (6, 0, 1), (0, 6, 1)),
    "the input is one element of out": lambda b: windows(b, (35, 0, 0), (0, 6, 1)),
    "one row, reversed": lambda b: windows(b, (0, 6, 1), (5, 6, -1), (1, 6)),
    "one column, on": lambda b: windows(b, (0, 2, 1), (2, 2, 1), (6, 1)),
    "batches reversed": lambda b: (b[:72].reshape(2, 6, 6), b[:72].reshape(2, 6, 6)[::-1]),
    "batches and rows exchanged": lambda b: (b[:108].reshape(3, 6, 6)[:, :3],
                                             b[:108].reshape(3, 6, 6)[:, :3].swapaxes(0, 1)),
    "a batch on": lambda b: (b[:72].reshape(2, 6, 6), b[36:108].reshape(2, 6, 6)),
    "the second batch alone": lambda b: (np.broadcast_to(b[36:72].reshape(6, 6), (2, 6, 6)),
                                         b[:72].reshape(2, 6, 6)),
    "one byte on": lambda b: (b.view("u1")[: 36 * b.itemsize].view(b.dtype).reshape(6, 6),
                              b.view("u1")[1 : 36 * b.itemsize + 1].view(b.dtype).reshape(6, 6)),
}  # fmt: skip


@pytest.mark.arrays_only
@looped("overlap", OVERLAPS.values(), ids=OVERLAPS)
@widths
def test_overlaps_are_refused(device, overlap, dtype):
    """ValueError, whatever the bounds, before anything is written; then the same in place works."""
    buffer = numbers((500,), dtype)
    before = buffer.tobytes()
    first, second = overlap(buffer)
    # One byte on is one element on where an element is a byte: refused all the same.
    assert np.shares_memory(first, second)
    pairs = [(first, second)]
    if 0 not in first.strides:
        pairs.append((second, first))
    for source, out in pairs:
        for begin, end in FEW:
            with pytest.raises(ValueError, match=r"\bout\b") as caught:
                clattn.diagonal_matrix(source, 1, begin, end, out=out, device=device)
            assert type(caught.value) is ValueError
            assert buffer.tobytes() == before
    if overlap is not OVERLAPS["one byte on"]:
        check_diagonal(second, 1, 0, 3, device=device, out=second)


DISJOINT = {
    "one after the other": lambda b: windows(b, (0, 6, 1), (36, 6, 1)),
    "one before the other": lambda b: windows(b, (36, 6, 1), (0, 6, 1)),
    "side by side": lambda b: windows(b, (0, 12, 1), (6, 12, 1)),
    "every other row": lambda b: windows(b, (6, 12, 1), (0, 12, 1)),
    "every other row, backwards": lambda b: windows(b, (0, 12, 1), (66, -12, 1)),
    "every other column": lambda b: windows(b, (0, 12, 2), (1, 12, 2)),
    "every other column, backwards": lambda b: windows(b, (0, 12, 2), (11, 12, -2)),
    "every other batch": lambda b: (b[:144].reshape(4, 6, 6)[::2], b[:144].reshape(4, 6, 6)[1::2]),
}


@looped("disjoint", DISJOINT.values(), ids=DISJOINT)
@widths
def test_neighbours_are_no_overlap(device, disjoint, dtype):
    """Views of one array that have no element in common: each may be read, the other written."""
    source, out = disjoint(numbers((500,), dtype))
    assert not np.shares_memory(source, out)
    before = source.tobytes()
    for begin, end in FEW:
        check_diagonal(source, 1, begin, end, device=device, out=out)
    assert source.tobytes() == before


def test_nothing_is_touched_after_an_error(device):
    """A refused call writes neither out nor the input."""
    a = numbers((4, 5), np.int32)
    before = a.tobytes()
    right = {"value": 7, "begin": 0, "end": 3, "out": a, "device": device}
    for wrong in ({"value": 7.5}, {"begin": 1.0}, {"end": None}, {"dtype": "f4"}, {"device": 7.5}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            clattn.diagonal_matrix(a, **right | wrong)
        assert a.tobytes() == before
    check_diagonal(a, 7, 0, 3, device=device, out=a)
    assert a.tobytes() != before


def test_triangles(device):
    """`out` of tril and triu: another array, the input itself, one of another shape."""
    a = numbers((3, 4, 5), np.float32)
    with clattn.use_device(device):
        for triangle, right in ((clattn.tril, np.tril(a, 1)), (clattn.triu, np.triu(a, 1))):
            for out in (np.empty((3, 4, 5), np.float32), np.empty((5, 4, 3), np.float32).T):
                assert triangle(a, 1, out=out) is out
                np.testing.assert_array_equal(out, right)
            own = a.copy()
            np.testing.assert_array_equal(triangle(own, 1, out=own), right)
            with pytest.raises(ValueError, match="out"):
                triangle(a, out=np.empty((3, 5, 4), np.float32))
