# SPDX-License-Identifier: MIT
"""The kernels' contract, with numbers by design: their results show what rounding would hide."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.attention import float64
from support.designed import check_keys, check_ones, check_scores
from support.variants import REFERENCE, VARIANTS, each, with_kernels

pytestmark = pytest.mark.full(contract=True)

both_shapes = each(lambda v: v.shapes, "shape", data=True)
each_kernel = with_kernels(*(variant.kernel for variant in (REFERENCE, *VARIANTS)))


@both_shapes
def test_keys_by_their_numbers(device, variant, shape):
    """Each key counts once in each row, in blocks, splits and groups of heads."""
    *heads, L, S = variant.shapes[shape]
    for options in ({}, {"is_causal": "lower_right"}, {"window": (S // 2, 10)}):
        check_keys(variant, heads, L, S, device=device, **options)


@each_kernel
def test_half_types_are_storage_only(device, variant):
    """Scores, weights' sums and sums of values have the bits of float32 at least."""
    for dtype in {variant.dtype, *variant.dtypes} - {float64}:
        check_ones(variant, device=device, dtype=dtype)
        for shape in variant.shapes:
            check_scores(variant, shape, device=device, dtype=dtype)


def far_heads(array):
    """Same values; heads are 2**30 elements apart, of which a few pages are touched."""
    far, item = 1 << 30, array.dtype.itemsize
    buffer = np.empty(far * (array.shape[1] - 1) + array[0, 0].size, array.dtype)
    strides = (0, far * item, *array.strides[2:])
    view = as_strided(buffer, array.shape, strides)
    view[...] = array
    return view


@each_kernel
def test_heads_that_are_far_apart(device, variant):
    """Offsets beyond 32 bits, of inputs and results."""
    *_, L, S = next(iter(variant.shapes.values()))
    q, k, v = variant.arrays((1, 3, 3, L, S))
    variant.check(q, far_heads(k), far_heads(v), device=device)
    variant.check(far_heads(q), k, v, device=device, out=far_heads(np.zeros_like(q)))
