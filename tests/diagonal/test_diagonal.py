# SPDX-License-Identifier: MIT
"""diagonal_matrix, eye, tril and triu: every dtype, bound, shape and layout, bit by bit.

The oracle's own tests come first; they need no device.
"""

import itertools

import clattn
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from references.diagonal import (
    DTYPES,
    FLOATS,
    INT32_MAX,
    INT32_MIN,
    LAYOUTS,
    ODD,
    WIDTHS,
    assert_same,
    band,
    bfloat16,
    brute,
    cut,
    diagonal,
    numbers,
    overlapping_rows,
    rounded,
    stored,
)
from support.diagonal_calls import check_diagonal
from support.layouts import one_element_in, read_only, sliced
from support.loops import looped
from support.random_calls import examples

pytestmark = pytest.mark.tensors

dtypes = looped("dtype", DTYPES)
widths = looped("dtype", WIDTHS)  # one dtype of each element width
layouts = looped("layout", LAYOUTS, ids=lambda f: f.__name__)

# Around the corners of a 4 x 6 matrix, and the ends of C's int. All pairs: normal, inverted, empty.
ENDS = (INT32_MIN, INT32_MIN + 1, -5, -4, -3, -1, 0, 1, 2, 5, 6, 7, INT32_MAX - 1, INT32_MAX)
BOUNDS = tuple(itertools.product(ENDS, repeat=2))
BEYOND = (  # what 32 or 64 bits would wrap to something else
    (2**31, 2**31 + 1), (0, 2**31), (0, 2**32), (2**32, 2**32 + 3), (-(2**32), 3 - 2**32),
    (2**32, 3), (-(2**31) - 1, 0), (2**63 - 1, 2**63), (2**63, -(2**63)), (-(2**63), 2**63),
    (-(2**63) - 1, 1), (0, 2**64), (2**64, 2**64 + 3), (2**64, 3), (1 - 2**64, 2), (3, -(2**64)),
    (10**30, 10**30 + 1), (10**30, -(10**30)), (-(10**30), 10**30), (10**400, -(10**400)),
)  # fmt: skip
FEW = ((0, 1), (0, 3), (-2, 2), (INT32_MIN, 1), (0, INT32_MAX), (1, 0), (3, -2), (2, 2))


def test_the_oracle_by_hand():
    """Matrices drawn by hand; then the vectorised form against the loops."""
    rows = [[7, 7, 0, 0], [7, 7, 7, 0], [0, 7, 7, 7]]
    assert brute((3, 4), 7, -1, 2, np.dtype("i4")).tolist() == rows
    others = [[0, 0, 7, 7], [0, 0, 0, 7], [7, 0, 0, 0]]
    assert brute((3, 4), 7, 2, -1, np.dtype("i4")).tolist() == others
    assert not brute((3, 4), 7, 1, 1).any()
    assert brute((3, 4), 7, 900, 800).all()
    for dtype, (begin, end) in itertools.product((DTYPES[2], DTYPES[-1]), BOUNDS + BEYOND):
        for shape in ((4, 6), (2, 5, 1), (1, 3), (0, 3), (2, 0)):
            for source in (numbers(shape, dtype), shape):
                right = brute(source, 1, begin, end, dtype)
                assert_same(diagonal(source, 1, begin, end, dtype), right)


def test_the_oracle_beside_numpy():
    """`rounded` against NumPy's conversions, `diagonal` against NumPy's triangles."""
    random = np.frombuffer(np.random.default_rng(0).bytes(1600)).tolist()
    powers = [2.0**e for e in (-151, -149, -126, -25, -24, -14, 0, 15, 127)]
    ties = (1, 1.5, 1 + 2**-11, 1 + 3 * 2**-11, 1.5 + 2**-11 + 2**-40, 2 - 2**-12, 2 - 2**-24)
    near = [sign * m * power for power in powers for m in ties for sign in (1, -1)]
    for value in (*random, *near, 0.0, -0.0):
        for dtype in FLOATS[:3] if np.isfinite(value) else ():
            with np.errstate(over="ignore", under="ignore"):
                assert_same(rounded(value, dtype), np.array(value).astype(dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            single = np.array(value).astype(np.float32)
        if np.isfinite(single):
            assert_same(rounded(float(single), bfloat16), single.astype(bfloat16))
    a = numbers((2, 5, 7), np.dtype("i2"))
    for k in range(-7, 9):
        assert_same(diagonal(a, 0, k + 1, INT32_MAX), np.tril(a, k))
        assert_same(diagonal(a, 0, INT32_MIN, k), np.triu(a, k))
        assert_same(diagonal((5, 7), 1, k, k + 1), np.eye(5, 7, k, dtype=np.float32))


@dtypes
def test_bounds(device, dtype):
    """Every pair of bounds, on an input and on zeros."""
    a = numbers((4, 6), dtype)
    for begin, end in BOUNDS + BEYOND:
        check_diagonal(a, 1, begin, end, device=device)
        check_diagonal((4, 6), 1, begin, end, device=device, dtype=dtype)


SHAPES = (
    (1, 1), (1, 7), (7, 1), (3, 40), (40, 3), (17, 17), (33, 65), (1, 300), (300, 1), (2, 5000),
    (5000, 2), (3, 4, 5), (2, 3, 5, 4), (2, 1, 3, 4, 3), (2, 2, 1, 2, 3, 4), (1,) * 30 + (3, 4),
    (2,) + (1,) * 61 + (3, 4), (0, 0), (0, 5), (5, 0), (0, 4, 5), (3, 0, 5), (3, 4, 0),
    (2, 0, 3, 4), (0, 2**40), (0, 2**40, 1), (2**40, 0, 3),
)  # fmt: skip


@looped("shape", SHAPES, ids=lambda s: "x".join(map(str, s[-6:])))
@widths
def test_shapes(device, shape, dtype):
    """One row, one column, empty dimensions anywhere, NumPy's highest rank."""
    for begin, end in FEW:
        check_diagonal(numbers(shape, dtype), 3, begin, end, device=device)
        check_diagonal(shape, 3, begin, end, device=device, dtype=dtype)


@widths
def test_widths(device, dtype):
    """Rows of every length; bands that begin and end inside a vector."""
    for columns in range(1, 71):
        rows = 1 + columns % 5
        a = numbers((2, rows, columns), dtype)
        for begin, end in ((0, 1), (columns // 3, columns // 2), (columns, columns // 2), (2, 1)):
            check_diagonal(a, 9, begin, end, device=device)
            check_diagonal(a.shape, 9, begin, end, device=device, dtype=dtype)


def test_every_run_length(device):
    """The stretches before, in and after the band have every length."""
    a = numbers((1, 67), np.uint8)
    for begin, end in itertools.product(range(0, 69, 2), range(-1, 69, 3)):
        check_diagonal(a, 170, begin, end, device=device)
        check_diagonal((1, 67), 170, begin, end, device=device, dtype=np.uint8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_are_copied_bit_by_bit(device, dtype):
    """NaN with its payload, quiet or signalling, -0.0, infinities, subnormals: all 16-bit ones."""
    bits = np.arange(2**16).astype(f"u{dtype.itemsize}") << (8 * dtype.itemsize - 16)
    a = np.concatenate((bits, bits + 1)).view(dtype).reshape(2, 256, 256)
    with np.errstate(invalid="ignore"):  # ml_dtypes' isnan asks the processor
        assert np.isnan(a).any() and np.isinf(a).any()
    for begin, end in FEW:
        check_diagonal(a, -0.0, begin, end, device=device)


@layouts
@dtypes
def test_input_layouts(device, layout, dtype):
    a = layout(numbers((2, 3, 17, 21), dtype))
    for begin, end in FEW:
        check_diagonal(a, 1, begin, end, device=device)


@looped("layout", ODD, ids=lambda f: f.__name__)
@dtypes
def test_odd_layouts(device, layout, dtype):
    """Misaligned, rows any number of bytes apart, the other byte order (bfloat16 has but one)."""
    if layout is ODD[2] and (dtype == bfloat16 or dtype.itemsize == 1):
        layout = read_only
    a = layout(numbers((3, 17, 21), dtype))
    for begin, end in FEW:
        check_diagonal(a, 1, begin, end, device=device)


@dtypes
def test_zero_strides(device, dtype):
    """Strides of zero in each dimension and in all; rows that overlap."""
    a = numbers((2, 5, 9), dtype)
    pieces = [a[:1], a[:, :1], a[..., :1], a[:1, :1, :1], overlapping_rows(a)]
    for piece, (begin, end) in itertools.product(pieces, FEW):
        shape = (3, 5, 9) if piece.shape[0] == 1 else (2, 5, 9)
        check_diagonal(np.broadcast_to(piece, shape), 1, begin, end, device=device)
    huge = as_strided(a, (2, 5, 9), (0, 0, 2**40 * a.itemsize))[..., :1]
    check_diagonal(huge, 1, 0, 1, device=device)  # a stride that is never used


FINITE = (
    0, 7, -7, True, False, 0.1, -1 / 3, -0.0, 65504, 65519.996, 65520, -1e5, 2.98e-8, 2.99e-8, 6e-8,
    2**11 + 1, 2**24 + 1, -(2**24) - 1, 2**53 + 1, 3.4028235e38, 3.4028236e38, 1e39, 1e-45, 7e-46,
    1e-40, 1e300, 5e-324, 10**30, -(10**39), np.float32(0.1), np.float64(0.1), np.float16(0.1),
    bfloat16.type(0.1), np.uint8(200), np.int64(-(2**62) - 1), np.uint64(2**64 - 1), np.True_,
)  # fmt: skip
TWICE = (1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40, 2**54 + 2**30 + 1, -(2**60) - 2**36 - 1, 10**400)


@looped("value", FINITE + TWICE, ids=lambda v: f"{type(v).__name__} {v!r:.30}")
def test_values_are_rounded(device, value):
    """Values are rounded to nearest, ties to even. TWICE: two roundings would differ from one."""
    for dtype in FLOATS:
        a = numbers((3, 5), dtype)
        check_diagonal(a, value, 0, 2, device=device)
        check_diagonal((3, 5), value, 0, 2, device=device, dtype=dtype)


NAN, INF = float("nan"), float("inf")


@looped("value", [NAN, -NAN, INF, -INF, np.float16(NAN), np.float32(INF)], ids=str)
def test_values_that_are_not_finite(device, value):
    for dtype in FLOATS:
        for begin, end in FEW:
            check_diagonal(numbers((3, 5), dtype), value, begin, end, device=device)
            check_diagonal((3, 5), value, begin, end, device=device, dtype=dtype)


@looped("dtype", DTYPES[4:12], ids=str)
def test_integer_values(device, dtype):
    """Every number that the dtype holds is taken, whatever its own type is."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    values = [low, high, high - 1, dtype.type(low), dtype.type(high), float(low), 7.0, -0.0, True,
              np.True_, np.float16(7), bfloat16.type(7), np.float32(100), np.int8(7), np.uint64(7),
              float(high + 1) / 2]  # fmt: skip
    if low:
        values += [-1, -1.0, np.int64(-1), low + 1]
    if dtype.itemsize < 8:
        values += [float(high), np.float64(high - 1), np.int64(high)]
    for value in values:
        got = check_diagonal((3, 5), value, 0, 2, device=device, dtype=dtype)
        assert int(got[0, 0]) == int(value)
        check_diagonal(numbers((3, 5), dtype), value, 2, 0, device=device)


@looped("value", [True, False, 0, 1, np.True_, np.False_, np.uint8(1)], ids=repr)
def test_bool_values(device, value):
    """The bytes are 0 and 1, see assert_same."""
    for begin, end in FEW:
        check_diagonal(numbers((5, 9), bool), value, begin, end, device=device)
        check_diagonal((5, 9), value, begin, end, device=device, dtype=bool)


def test_dtype_and_shape(device):
    """The default is float32; dtypes and sizes may be given in any spelling."""
    assert clattn.diagonal_matrix((2, 3), 7, 0, 1, device=device).dtype == np.float32
    assert clattn.diagonal_matrix((2, 3), 7, 0, 1, dtype=None, device=device).dtype == np.float32
    for spelling in ("float64", np.float64, np.dtype("f8"), float):
        check_diagonal((2, 3), 7, 0, 1, device=device, dtype=spelling)
    a = numbers((2, 3), np.int16)
    for spelling in (None, "int16", np.int16, np.dtype("i2")):
        got = clattn.diagonal_matrix(a, 7, 0, 1, dtype=spelling, device=device)
        assert_same(got, diagonal(a, 7, 0, 1))
    for shape in ([2, 3], (np.int64(2), np.uint8(3)), [np.int32(2), 3]):
        got = clattn.diagonal_matrix(shape, 7, 0, 1, device=device)
        assert_same(got, diagonal((2, 3), 7, 0, 1))
    got = clattn.diagonal_matrix(
        end=np.uint16(3), begin=np.int8(-1), value=7, input_or_shape=a, dtype=np.int16,
        device=device,
    )  # fmt: skip
    assert_same(got, diagonal(a, 7, -1, 3))
    with clattn.use_device(device):
        assert_same(clattn.diagonal_matrix(a, 7, -1, 3), got)


SIZES = ((0, None), (1, None), (2, None), (17, None), (100, None), (0, 5), (5, 0), (4, 5), (5, 4),
         (1, 70), (70, 1), (257, 300), (1025, 1025))  # fmt: skip


@looped("size", SIZES, ids=str)
def test_eye(device, size):
    """The result is NumPy's, except that the default dtype is float32."""
    assert_same(clattn.eye(*size, device=device), np.eye(*size, dtype=np.float32))
    assert_same(clattn.eye(n=size[0], m=size[1], device=device), np.eye(*size, dtype=np.float32))
    for dtype in DTYPES:
        right = np.eye(*size, dtype=np.uint8).astype(dtype)
        assert_same(clattn.eye(*size, dtype=dtype, device=device), right)
    with clattn.use_device(device):
        assert_same(clattn.eye(*size, dtype="int8"), np.eye(*size, dtype=np.int8))


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (1, 6), (6, 1), (2, 3, 4, 4), (3, 0), (0, 3, 3)],
                         ids=str)  # fmt: skip
@dtypes
def test_tril_and_triu(device, dtype, shape):
    """NumPy's, on every diagonal; beyond the matrix all or nothing; +0 in the rest."""
    a = numbers(shape, dtype)
    before = a.tobytes()
    rows, columns = shape[-2:]
    far = (INT32_MIN, INT32_MAX, -(2**63), 2**63 - 1, 2**32, -(2**64), 10**30)
    with clattn.use_device(device):
        assert_same(clattn.tril(a), diagonal(a, 0, 1, INT32_MAX))
        assert_same(clattn.triu(input=a), diagonal(a, 0, INT32_MIN, 0))
        for k in (*range(-rows - 2, columns + 3), *far):
            near = max(-rows, min(k, columns))  # the same triangles, as NumPy takes it
            lower, upper = clattn.tril(a, diagonal=k), clattn.triu(a, k)
            assert_same(lower, diagonal(a, 0, near + 1, INT32_MAX), f"tril {k}")
            assert_same(upper, diagonal(a, 0, INT32_MIN, near), f"triu {k}")
            kept = ~band(shape, near + 1, INT32_MAX)
            assert_same(lower, np.where(kept, a, np.zeros(1, dtype)), f"tril {k}")
            if dtype != bfloat16:
                assert_same(lower, np.tril(a, near), f"tril {k}")
                assert_same(upper, np.triu(a, near), f"triu {k}")
        for layout in LAYOUTS:
            assert_same(clattn.triu(layout(a), -1), diagonal(a, 0, INT32_MIN, -1))
    assert a.tobytes() == before


def test_results_are_independent(device):
    """Memory that a caller wrote to is zero in a later result; two results share no memory."""
    for shape in ((3, 5), (100, 100), (1000, 1000), (2000, 3000), (10_000, 8, 8)):
        for _ in range(3):
            first, second = (check_diagonal(shape, 7, 0, 1, device=device) for _ in range(2))
            assert not np.may_share_memory(first, second)
            first.fill(np.nan)
            second.fill(np.nan)
    for n in (5, 300, 2000):
        for _ in range(3):
            got = clattn.eye(n, dtype=np.int64, device=device)
            assert_same(got, np.eye(n, dtype=np.int64))
            got.fill(-1)


bounded = examples(120)
ANY_BOUND = st.one_of(
    st.integers(-30, 30), st.integers(-(2**65), 2**65), st.sampled_from(ENDS + BEYOND[5])
)


@st.composite
def problems(pick):
    """(array, begin, end, where the result goes) of a call that is right."""
    dtype = pick(st.sampled_from(DTYPES))
    last = st.integers(0, 40)
    shape = (*pick(st.lists(st.integers(0, 4), max_size=3)), pick(last), pick(last))
    a = numbers(shape, dtype, pick(st.integers(0, 99)))
    a = a.transpose(pick(st.permutations(range(a.ndim))))
    a = pick(st.sampled_from([np.array, sliced, cut, one_element_in]))(a)
    a = a[tuple(slice(None, None, pick(st.sampled_from([1, 1, 2, -1, -2]))) for _ in a.shape)]
    if a.size and pick(st.booleans()):
        axis = pick(st.integers(0, a.ndim - 1))
        a = np.broadcast_to(a.take([0], axis), a.shape)
    return a, pick(ANY_BOUND), pick(ANY_BOUND), pick(st.sampled_from(["new", "out", "in place"]))


@bounded
@given(problem=problems())
@example(problem=(numbers((5, 9), np.uint8), 900, 800, "in place"))
def test_random_problems(device, problem):
    """Any strides and bounds; the result is new, in strided memory, or in place."""
    a, begin, end, where = problem
    out = None
    if where == "out":
        out = sliced(np.zeros(a.shape, a.dtype))
    elif where == "in place" and a.flags.writeable:
        out = a
    check_diagonal(a, 1, begin, end, device=device, out=out)
    check_diagonal(a.shape, 1, begin, end, device=device, dtype=a.dtype, out=out)


@bounded
@given(problem=problems(), other=ANY_BOUND)
def test_laws(device, problem, other):
    """Filling twice changes nothing; a band and its complement together fill everything."""
    a, begin, end, _ = problem
    fill, options = stored(1, a.dtype), {"device": device}
    once = clattn.diagonal_matrix(a, 1, begin, end, **options)
    assert_same(clattn.diagonal_matrix(once, 1, begin, end, **options), once)
    if begin != end:
        both = clattn.diagonal_matrix(once, 1, end, begin, **options)
        assert_same(both, np.full(a.shape, fill, a.dtype))
    if begin < other < end:
        part = clattn.diagonal_matrix(a, 1, begin, other, **options)
        assert_same(clattn.diagonal_matrix(part, 1, other, end, **options), once)
