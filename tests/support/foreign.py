# SPDX-License-Identifier: MIT
"""Arrays of other libraries, made from NumPy's and turned back, bit by bit.

A `Library` says what its arrays are made of and what a result for one of them is. Those that a
machine lacks are skipped.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from references.diagonal import DTYPES, bfloat16

float64 = np.dtype(np.float64)


def to_torch(array):
    """A tensor of its own memory, with the same strides where torch has such."""
    torch = pytest.importorskip("torch")
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor):
    torch = pytest.importorskip("torch")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def torch_tensor():
    return pytest.importorskip("torch").Tensor


def to_jax(array):
    return pytest.importorskip("jax").numpy.asarray(array)


def jax_array():
    return type(to_jax(np.zeros(1, np.float32)))


class OnlyArray:
    """Nothing but __array__, as NumPy 2 calls it."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        assert dtype is None or dtype == self.array.dtype
        return self.array.copy() if copy else self.array


class OldArray:
    """__array__ as it was before NumPy 2."""

    def __init__(self, array):
        self.array = array

    def __array__(self):
        return self.array


class OnlyDLPack:
    """Nothing but DLPack, in its present form."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        options = {"stream": stream, "dl_device": dl_device, "copy": copy}
        return self.array.__dlpack__(max_version=max_version, **options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """DLPack before version 1: no max_version, and a capsule without a version."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


def to_ctypes(array):
    """An array of arrays of C's numbers, which has the buffer protocol."""
    kind = np.ctypeslib.as_ctypes_type(array.dtype)
    for size in reversed(array.shape):
        kind = kind * size
    return kind.from_buffer_copy(np.ascontiguousarray(array))


def of_numpy(array):
    """A result that is NumPy's."""
    return array


STANDARD = tuple(t for t in DTYPES if t != bfloat16)  # those that NumPy exports


@dataclass(frozen=True)
class Library:
    name: str
    of: Callable
    back: Callable = of_numpy
    kind: Callable = lambda: np.ndarray
    dtypes: tuple = STANDARD

    def __str__(self):
        return self.name

    def check(self, got, right):
        """A result for a query of this library: its kind, its dtype, the bits of `right`."""
        assert type(got) is self.kind(), type(got)
        same(self.back(got), right)


def same(got, right):
    got = np.asarray(got)
    assert got.dtype == right.dtype, f"{got.dtype}, expected {right.dtype}"
    assert got.shape == right.shape, f"{got.shape}, expected {right.shape}"
    assert got.tobytes() == right.tobytes()


TORCH = Library("torch", to_torch, from_torch, torch_tensor, DTYPES)
NARROW = tuple(t for t in DTYPES if t not in (float64, np.dtype("i8"), np.dtype("u8")))
JAX = Library("jax", to_jax, np.asarray, jax_array, NARROW)  # as it is unless it is told otherwise
C_TYPES = tuple(t for t in STANDARD if t != np.dtype(np.float16))
BUFFERS = (Library("memoryview", memoryview), Library("ctypes", to_ctypes, dtypes=C_TYPES))
ARRAYS = (Library("__array__", OnlyArray, dtypes=DTYPES), Library("old __array__", OldArray))
CAPSULES = (Library("__dlpack__", OnlyDLPack), Library("old __dlpack__", OldDLPack))
LIBRARIES = (TORCH, JAX, *BUFFERS, *ARRAYS, *CAPSULES)
