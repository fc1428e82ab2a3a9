# SPDX-License-Identifier: MIT
"""Views of clattn.Tensor: indexing, reshape, transpose, iteration, all as NumPy's arrays do them.

Strides, values and what is shared are compared with those of the same steps on an array.
"""

import ctypes

import clattn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from references.diagonal import DTYPES
from support.loops import looped
from support.random_calls import examples
from support.tensors import in_host_memory, same_bits

bounded = examples(150)


def pair(shape, device, dtype="i4"):
    """An array of different numbers, and the Tensor of it."""
    a = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    return a, clattn.tensor(a, device)


def assert_alike(t, a):
    """Type, attributes, strides and values."""
    a = np.asarray(a)
    assert type(t) is clattn.Tensor
    for name in ("shape", "ndim", "size", "dtype", "itemsize", "nbytes"):
        assert getattr(t, name) == getattr(a, name), name
    assert len(t.strides) == a.ndim
    if a.size:  # the stride of a dimension of one says nothing
        steps = zip(t.strides, a.strides, a.shape, strict=True)
        assert all(ours == theirs for ours, theirs, n in steps if n > 1), (t.strides, a.strides)
    same_bits(t, a)


def assert_shared(t, base, expected):
    """Whether the Tensors have memory in common; seen where the host can look at it."""
    if t.size and in_host_memory(t.device):
        assert np.shares_memory(t.numpy(), base.numpy()) == expected


INDICES = (0, -1, 3, np.int64(2), np.uint8(1), slice(None), slice(1, 3), slice(None, None, -1),
           slice(3, 0, -2), slice(-100, 100, 3), slice(2, 2), slice(5, 1), ..., None, (),
           (1, 2), (1, 2, 4), (..., -1), (-1, ...), (0, ..., 0), (..., slice(1, None, 2)),
           (None, 1, None, slice(None), None), (slice(None, None, -1),) * 3, (2, ..., None),
           (1, 2, 4, ...), (1, 2, 4, None), (slice(2**70, None, -(2**80)), slice(-(2**70), 2**70)),
           (slice(np.int8(1), np.int16(3), np.uint32(1)),), (None,) * 61)  # fmt: skip


@looped("index", INDICES, ids=lambda i: repr(i)[:50])
def test_indexing(device, index):
    """Of a contiguous Tensor, and of one that is a view already."""
    a, t = pair((4, 3, 5), device)
    assert_alike(t[index], a[index])
    assert_shared(t[index], t, True)
    a, t = pair((10, 3, 4), device)
    assert_alike(t[::-2].T[index], a[::-2].T[index])
    assert_shared(t[::-2].T[index], t, True)


@looped("dtype", DTYPES, ids=str)
def test_views_of_every_dtype(device, dtype):
    a, t = pair((4, 6), device, dtype)
    assert_alike(t[1:, ::-2], a[1:, ::-2])
    assert_alike(t.T[1:].reshape(-1), a.T[1:].reshape(-1))


BAD_INDICES = {  # with the exception; NumPy takes some of the last ones, and copies
    "past the end": (4, IndexError),
    "before the start": (-5, IndexError),
    "past the end of the last": ((0, 0, 5), IndexError),
    "NumPy's integer": (np.int64(4), IndexError),
    "beyond 64 bits": (2**70, IndexError),
    "beyond 64 bits below": (-(2**70), IndexError),
    "too many": ((0, 0, 0, 0), IndexError),
    "too many slices": ((slice(None),) * 4, IndexError),
    "too many beside an ellipsis": ((0, 0, ..., 0, 0), IndexError),
    "65 dimensions": ((None,) * 62, IndexError),
    "step of zero": (slice(None, None, 0), ValueError),
    "two ellipses": ((..., ...), (IndexError, TypeError)),
    "float": (1.0, TypeError),
    "text": ("0", TypeError),
    "slice of floats": (slice(1.5), TypeError),
    "slice of text": (slice(None, None, "1"), TypeError),
    "list": ([0, 1], TypeError),
    "list in a tuple": ((0, [0, 1]), TypeError),
    "array": (np.array([0, 1]), TypeError),
    "mask": (np.ones((4, 3, 5), bool), TypeError),
    "True": (True, TypeError),
    "False in a tuple": ((0, False), TypeError),
    "NumPy's bool": (np.True_, TypeError),
    "object": (object(), TypeError),
}


@pytest.mark.parametrize(("index", "error"), BAD_INDICES.values(), ids=BAD_INDICES)
def test_wrong_indices(device, index, error):
    a, t = pair((4, 3, 5), device)
    with pytest.raises(error) as caught:
        t[index]
    assert str(caught.value)
    assert_alike(t[-1], a[-1])


def test_elements_cannot_be_assigned_or_deleted(device):
    """Nor is a Tensor an index."""
    a, t = pair((4, 3), device)
    with pytest.raises(TypeError, match="ind"):
        t[clattn.tensor(np.array([0, 1]), device)]
    with pytest.raises(TypeError):
        t[0] = 1
    with pytest.raises(TypeError):
        del t[0]
    same_bits(t, a)


@looped("length", [0, 1, 3])
def test_items_by_the_sequence_protocol(device, length):
    """C code's way: CPython adds the length to a negative index before the type sees it."""
    item = ctypes.pythonapi.PySequence_GetItem
    item.argtypes, item.restype = [ctypes.py_object, ctypes.c_ssize_t], ctypes.py_object
    a, t = pair((length, 2), device)
    for index in range(-3 * length - 2, length + 2):
        if -length <= index < length:
            assert_alike(item(t, index), a[index])
        else:
            with pytest.raises(IndexError, match=f"^index {index} is out of bounds"):
                item(t, index)
    with pytest.raises(TypeError, match="no length"):
        item(clattn.tensor(np.float32(1)[...], device), -1)


def test_indexing_without_dimensions(device):
    a, t = pair((), device)
    for index in ((), ..., None, (None, ...)):
        assert_alike(t[index], a[index])
    for index in (0, slice(None), (..., 0)):
        with pytest.raises(IndexError):
            t[index]


def test_indexing_what_is_empty(device):
    a, t = pair((3, 0, 2**40), device)
    for index in (0, slice(None, None, -1), (..., -1), (slice(1), slice(5), slice(2**39, None))):
        assert_alike(t[index], a[index])
    with pytest.raises(IndexError):
        t[0, 0]


def test_length_and_iteration(device):
    """A Tensor without dimensions has neither."""
    a, t = pair((4, 3), device)
    assert len(t) == 4
    rows = list(t)
    assert len(rows) == 4
    for row, right in zip(rows, a, strict=True):
        assert_alike(row, right)
        assert_shared(row, t, True)
    first, *_, last = t.T
    assert_alike(first, a[:, 0])
    assert_alike(last, a[:, -1])
    assert len(t[:0]) == 0 and list(t[:0]) == []
    for ask in (len, iter, list):
        with pytest.raises(TypeError, match="dimension"):
            ask(t[0, 0])


TRANSPOSED = ((), (None,), ((2, 0, 1),), (2, 0, 1), ([1, 2, 0],), (-1, -3, -2), (0, 1, 2),
              ((0, -1, 1),), (np.int64(1), np.int8(0), 2))  # fmt: skip


@looped("axes", TRANSPOSED, ids=repr)
def test_transpose(device, axes):
    a, t = pair((4, 3, 5), device)
    assert_alike(t.transpose(*axes), a.transpose(*axes))
    assert_shared(t.transpose(*axes), t, True)
    assert_alike(t[::2, None, ..., 0].transpose(2, 0, 1), a[::2, None, ..., 0].transpose(2, 0, 1))


def test_all_axes_reversed(device):
    for shape in ((), (3,), (2, 3), (2, 3, 4, 5), (0, 3)):
        a, t = pair(shape, device)
        assert_alike(t.T, a.T)
        assert_alike(t.T.T, a)
        assert_alike(t.transpose(), a.T)


WRONG_AXES = [(0, 1), (0, 1, 2, 0), (0, 1, 1), (0, 1, -2), (0, 1, 3), (-4, 0, 1), ((),)]
NO_AXES = [("a", 0, 1), (1.0, 0, 2), ((0, 1), 2), (None, 0, 1)]


@looped("axes", WRONG_AXES + NO_AXES, ids=repr)
def test_wrong_axes(device, axes):
    _, t = pair((4, 3, 5), device)
    error = ValueError if axes in WRONG_AXES else (TypeError, ValueError)
    with pytest.raises(error, match=r"ax|integer"):
        t.transpose(*axes)


RESHAPED = ((60,), (-1,), (4, 15), (12, 5), (2, 2, 3, 5), (5, -1), (-1, 3, 4), (60, 1), (1,) * 3 +
            (-1,), ((3, 20),), ((-1,),), ((4, -1, 1),), (np.int64(6), np.uint8(10)))  # fmt: skip
BASES = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.T,
    "rows left out": lambda a: a[:, ::2],
    "columns left out": lambda a: a[..., ::3],
    "backwards": lambda a: a[::-1, ::-1, ::-1],
    "last axes swapped": lambda a: a.transpose(0, 2, 1),
    "one row": lambda a: a[1:2],
    "added axes": lambda a: a[:, None, ::2, :, None],
    "one dimension": lambda a: a[1, :, 1],
    "none": lambda a: a[1, 1, 1, ...],
    "empty": lambda a: a[:, 3:],
}


@looped("base", BASES.values(), ids=BASES)
def test_reshape(device, base):
    """A view exactly where NumPy's is one, with NumPy's strides; else new memory."""
    a, t = pair((4, 6, 10), device)
    a, t, whole, whole_t = base(a), base(t), a, t
    shapes = [(a.size,), (1, a.size, 1), a.shape, a.shape[::-1], (*a.shape[:-2], -1)]
    shapes += [(2, a.size // 2), (-1, 4), (a.size // 6, 3, 2), (a.size // 12, -1, 6), (5, -1)]
    for shape in shapes:
        try:
            right = a.reshape(shape)
        except ValueError:
            with pytest.raises(ValueError, match="shape"):
                t.reshape(shape)
            continue
        got = t.reshape(shape)
        assert_alike(got, right)
        assert_shared(got, whole_t, np.shares_memory(right, whole))


@looped("shape", RESHAPED, ids=repr)
def test_ways_to_say_a_shape(device, shape):
    a, t = pair((4, 3, 5), device)
    assert_alike(t.reshape(*shape), a.reshape(*shape))


def test_a_shape_without_dimensions(device):
    for shape in ((1,), (), (1, 1)):
        a, t = pair(shape, device)
        assert_alike(t.reshape(()), a.reshape(()))
        assert_alike(t.reshape(1, 1, 1), a.reshape(1, 1, 1))
        assert_alike(t.reshape(-1), a.reshape(-1))


WRONG_SHAPES = ((59,), (4, 3, 6), (7, -1), (-1, -1), (0, -1), (0,), (-2, 30), (-60,), (61, 0),
                (2**62, 60), (2**33, 2**31, 60), (2**70, 1), (), (2**64 + 60,),
                (1,) * 64 + (60,))  # fmt: skip


@looped("shape", WRONG_SHAPES, ids=lambda s: repr(s)[:40])
def test_wrong_shapes(device, shape):
    """Products that overflow to the right size are among them."""
    a, t = pair((4, 3, 5), device)
    with pytest.raises((ValueError, OverflowError)) as caught:
        t.reshape(shape)
    assert type(caught.value) is ValueError, caught.value
    same_bits(t, a)


def test_shapes_whose_products_overflow(device):
    """To four elements, or to none."""
    _, t = pair((4,), device, "i1")
    for shape in ((2**33, 2**33), (2**62 + 1, 4), (2**32, 2**32, 4)):
        with pytest.raises(ValueError, match="shape"):
            t.reshape(shape)
    with pytest.raises(ValueError, match="shape"):
        t.reshape(2**32, 2**32)
    a, t = pair((0,), device)
    assert_alike(t.reshape(0, 2**40), a.reshape(0, 2**40))
    with pytest.raises(ValueError, match="shape"):
        t.reshape(2**40, -1, 0)


@looped("shape", [("60",), (60.0,), ((4, 3.0, 5),), (None,), ((4, 15), 1)],
                         ids=repr)  # fmt: skip
def test_shapes_of_a_wrong_type(device, shape):
    _, t = pair((4, 3, 5), device)
    with pytest.raises(TypeError):
        t.reshape(*shape)


def test_a_view_keeps_the_memory(device):
    a, t = pair((40, 30), device)
    part = t.T[3:, ::-2]
    del t
    others = [pair((40, 30), device, "i4")[1] for _ in range(3)]
    same_bits(part, a.T[3:, ::-2])
    assert others[0].shape == (40, 30)


def test_views_see_what_is_written(device):
    """Through another view, by an operator; what reshape had to copy stays as it was."""
    a, t = pair((6, 8), device, "f4")
    row, column, copied = t[2], t[:, 3], t.T.reshape(-1)
    clattn.diagonal_matrix(t, -1, 0, 100, out=t)
    right = np.where(np.arange(8) >= np.arange(6)[:, None], np.float32(-1), a)
    same_bits(t, right)
    same_bits(row, right[2])
    same_bits(column, right[:, 3])
    same_bits(copied, a.T.reshape(-1))


@st.composite
def steps(draw, max_steps=4):
    """A shape, then steps of views: (name of the method, arguments)."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5))
    a, chain = np.empty(shape, np.int8), []
    for _ in range(draw(st.integers(1, max_steps))):
        kind = draw(st.sampled_from(["index", "transpose", "reshape"]))
        if kind == "index":
            index = draw(hnp.basic_indices(a.shape, allow_newaxis=True, max_dims=8))
            chain.append(("__getitem__", (index,)))
        elif kind == "transpose":
            chain.append(("transpose", tuple(draw(st.permutations(range(a.ndim))))))
        else:
            sides = draw(st.permutations([*a.shape, 1]))
            cut = draw(st.integers(0, len(sides)))
            merged = [*sides[:cut], int(np.prod(sides[cut:], dtype=int))]
            if a.size and draw(st.booleans()):
                merged[draw(st.integers(0, len(merged) - 1))] = -1
            chain.append(("reshape", (tuple(merged),)))
        name, arguments = chain[-1]
        a = np.asarray(getattr(a, name)(*arguments))
    return shape, chain


@bounded
@given(case=steps())
def test_chains_of_views(device, case):
    """Any steps give what the same steps on an array give, strides and sharing included."""
    shape, chain = case
    a, t = pair(shape, device, "i2")
    whole, whole_t = a, t
    for name, arguments in chain:
        a, t = np.asarray(getattr(a, name)(*arguments)), getattr(t, name)(*arguments)
        assert_alike(t, a)
    if np.shares_memory(a, whole):
        assert_shared(t, whole_t, True)
