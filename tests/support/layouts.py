# SPDX-License-Identifier: MIT
"""The same numbers in other layouts of memory: each function takes an array and lays it anew."""

import ctypes
import mmap

import numpy as np


def filled(shape, dtype):
    """An array of what must not be read: NaN, or another number where the dtype has none."""
    return np.full(shape, 85 if dtype.kind in "iub" else np.nan, dtype)


def negative_rows(a):
    return a[..., ::-1, :].copy()[..., ::-1, :]


def negative_everywhere(a):
    flip = (slice(None, None, -1),) * a.ndim
    return a[flip].copy()[flip]


def transposed(a):
    """(B, H, S, E) lying as (B, S, H, E), as projections leave it."""
    return a.swapaxes(-2, -3).copy().swapaxes(-2, -3)


def columns_first(a):
    return a.swapaxes(-1, -2).copy().swapaxes(-1, -2)


def fortran(a):
    return np.asfortranarray(a)


def sliced(a):
    """Every dimension strided: each third entry of a larger array full of NaN."""
    big = filled([3 * n + 2 for n in a.shape], a.dtype)
    view = big[tuple(slice(1, 1 + 3 * n, 3) for n in a.shape)]
    view[...] = a
    return view


def part_of_a_projection(a):
    """One of query, key and value cut out of the last dimension, which is still dense."""
    big = filled((*a.shape[:-1], 3 * a.shape[-1]), a.dtype)
    view = big[..., a.shape[-1] : 2 * a.shape[-1]]
    view[...] = a
    return view


def one_element_in(a):
    """Aligned to its own size, to nothing more."""
    flat = filled(a.size + 2, a.dtype)
    flat[1:-1] = a.ravel()
    return flat[1:-1].reshape(a.shape)


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


LAYOUTS = [negative_rows, negative_everywhere, transposed, columns_first, fortran, sliced,
           part_of_a_projection, one_element_in, read_only]  # fmt: skip


def misaligned(a):
    octets = np.empty(a.nbytes + 2, np.uint8)
    view = octets[1:-1].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def byte_swapped(a):
    return a.astype(a.dtype.newbyteorder())


def record_field(a):
    """A field of packed records: rows 1 + E * itemsize bytes apart, a multiple of nothing."""
    records = np.zeros(a.shape[:-1], [("tag", "u1"), ("row", a.dtype, a.shape[-1:])])
    records["tag"] = 0xA5
    records["row"] = a
    return records["row"]


ODD = [misaligned, byte_swapped, record_field]


def at_the_end_of_memory(a):
    """The bytes behind the last one may not be read."""
    pages = -(-a.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    octets = np.frombuffer(memory, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    behind = ctypes.c_void_p(octets.ctypes.data + pages)
    assert protect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    view = octets[pages - a.nbytes : pages].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def far_rows(a):
    """Rows with other numbers between them."""
    big = np.full((*a.shape[:-1], 3, a.shape[-1]), np.nan, a.dtype)
    big[..., 1, :] = a
    return big[..., 1, :]


def same_columns(a):
    """A column stride of 0: the first column in the place of each."""
    return np.broadcast_to(a[..., :1], a.shape)


def columns_backwards(a):
    return a[..., ::-1]
