# SPDX-License-Identifier: MIT
"""What every variant of attention has to do: a table of variants, and a test for each behaviour.

The table is in support/variants.py. Each variant is forced, so that no call falls back to another
one; the reference kernel is a row of the table, too. A test runs on the shapes of the variant: in
one of them all keys are one block or split, in another they are several. Most tests share a head
size and a few counts of rows, because each combination is a program to build; lengths, strides and
batches are data and cost nothing. So in kernels for CPUs one test has all shapes or bands.

Numbers by design, which show what random ones hide, are in test_kernel_designed.py.
What only one variant does is in a file of its own: test_cpu.py, test_decode.py, test_mma.py,
test_tiled.py and test_bfloat16_pairs.py. Options that only other doors have are in
test_kernel_doors.py.
"""

import itertools
import re

import clattn
import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.attention import attention, float16, float32, float64, tolerance
from support.checks import assert_close
from support.data import draw
from support.layouts import (
    columns_first,
    far_rows,
    negative_everywhere,
    negative_rows,
    one_element_in,
    sliced,
)
from support.masks import INF, NAN, masked, pieces, seen_in_band, spoil
from support.variants import REFERENCE, VARIANTS, each, force, with_kernels, with_tensors_too

pytestmark = pytest.mark.full(contract=True)

both_shapes = each(lambda v: v.shapes, "shape", data=True)
# Where each shape has programs of its own, those of masks run with both, those of softcaps and of
# bands with masks with the last one.
shapes_with_options = each(lambda v: list(v.shapes)[v.shapes_are_programs :], "shape", data=True)
both_shapes_and_tensors = each(lambda v: v.shapes, "shape", tensors=True, data=True)
kinds = pytest.mark.parametrize("kind", ["bool", "float"])


# ---- sizes ----


@each(lambda v: v.rows, "heads", data=True)
def test_rows_and_keys(device, variant, heads):
    """Tiles of rows and blocks of keys, whole and not. Nothing behind the last key is read."""
    for S in variant.keys:
        q, k, v = variant.arrays((1, *heads, S + 1))
        k[..., S, :] = v[..., S, :] = NAN
        variant.check(q, k[..., :S, :], v[..., :S, :], device=device)


@each(lambda v: v.head_sizes, "size", data=True)
def test_head_sizes(device, variant, size):
    """Vectors and columns that are filled up, or that share columns with the one before."""
    E, Ev, dtype, L = size
    if dtype == float64 and not device.float64:
        return
    for S in variant.head_size_keys:
        q, k, v = variant.arrays((1, 1, 1, L, S), dtype, E, Ev)
        right = variant.check(q, k, v, device=device)
        again = variant.call(q, far_rows(k), far_rows(v), device=device)[0]
        if variant.redo_shows:  # as where NaN is read
            assert again.tobytes() == right.tobytes()


@each(lambda v: v.dtypes, "dtype", tensors=True)
def test_dtypes(device, variant, dtype):
    for B, Hq, Hk, L, S in variant.shapes.values():
        for keys in (S, 2 * S):  # as many bytes as with float32
            arrays = variant.arrays((B, Hq, Hk, L, keys), dtype)
            variant.check(*arrays, device=device, is_causal="lower_right")


@each(lambda v: v.groups, "heads", tensors=True, data=True)
def test_groups_of_heads(device, variant, heads):
    """Query heads with the same keys, by enable_gqa and by broadcasting: the same bits."""
    hq, hk = heads
    for L, S in ((1, 129), (2, 17), (3, 1001)):
        q, k, v = variant.arrays((2, hq, hk, L, S))
        apart = q.reshape(2, hk, hq // hk, *q.shape[-2:])
        for options in ({}, {"is_causal": "lower_right"}):
            grouped = variant.check(q, k, v, device=device, **options)
            spread = variant.check(
                apart, k[:, :, None], v[:, :, None], device=device, enable_gqa=False, **options
            )
            np.testing.assert_array_equal(spread.reshape(grouped.shape), grouped)


LEADS = [((), (), ()), ((5,), (), ()), ((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)),
         ((2, 1, 2), (3, 1), (1, 2)), ((2, 3), (1, 3), (2, 3)), ((2, 3), (2, 3), (1, 3)),
         ((1, 1), (2, 3), (2, 3)), ((9, 13), (9, 13), (9, 13))]  # fmt: skip


@with_tensors_too
def test_leading_dimensions(device, variant):
    """None, many, and keys that are the same along some of them."""
    for q, k, v in LEADS:
        shapes = (*q, 2, variant.E), (*k, 50, variant.E), (*v, 50, variant.E)
        arrays = (draw(shape, variant.dtype, n) for n, shape in enumerate(shapes))
        variant.check(*arrays, device=device, enable_gqa=False)


@with_tensors_too
def test_no_keys_and_no_rows(device, variant):
    _, Hq, Hk, L, S = next(iter(variant.shapes.values()))
    out = np.full((2, Hq, L, variant.E), 7.5, variant.dtype)
    variant.check(*variant.arrays((2, Hq, Hk, L, 0)), device=device, out=out)
    assert not out.astype(float32).any()
    for B, rows in ((2, 0), (0, L)):
        arrays = variant.arrays((B, Hq, Hk, rows, S))
        assert variant.check(*arrays, device=device).size == 0


# ---- scores ----


@both_shapes
def test_scale(device, variant, shape):
    """A negative one turns the order of scores."""
    arrays = variant.arrays(shape)
    for scale in (0.0, -0.7, 1e-30, -1e-42, 3.0):
        variant.check(*arrays, device=device, scale=scale)
        variant.check(*arrays, device=device, scale=scale, window=(60, 0), is_causal="lower_right")


@pytest.mark.options
@shapes_with_options
def test_softcap(device, variant, shape):
    """Small scores, where tanh is almost its argument, and large ones, where it is near 1."""
    for softcap, scale in itertools.product((1e-30, 0.5, 5.0, 50.0, 3e38), (None, 2.0)):
        variant.check(*variant.arrays(shape), device=device, softcap=softcap, scale=scale)


@pytest.mark.options
@shapes_with_options
def test_softcap_and_mask(device, variant, shape):
    L, S = variant.shapes[shape][-2:]
    mask = variant.mask(draw((L, S)) > -1, "float")
    variant.check(*variant.arrays(shape), device=device, softcap=2.0, attn_mask=mask)


@both_shapes
def test_keys_of_very_different_weight(device, variant, shape):
    """Sums are scaled anew with every block or never; light keys have the largest values."""
    q, k, v = variant.arrays(shape)
    S = k.shape[-2]
    base = np.float32(2 if variant.dtype.itemsize == 2 else 10)
    q[:] = 1
    rising = [np.arange(S) * 9 // S, np.arange(S) // 16 % 64 / 4, np.linspace(-1, 1, S)]
    for step in (*rising, *(weight[::-1] for weight in rising)):
        k[:] = step.astype(variant.dtype)[:, None]
        weighted = v.astype(float32) * base ** (8 - step[:, None])
        for scale in (0.001, 0.01, 0.3, 2.0):
            variant.check(q, k, weighted.astype(variant.dtype), device=device, scale=scale)


# ---- bands ----


@each(lambda v: v.bands, "band", data=True)
def test_bands(device, variant, band):
    """Blocks outside for all rows, rows that see no key; keys that nobody sees may be anything."""
    causal = [False, "lower_right"] if "is_causal" not in band else [band["is_causal"]]
    for (B, Hq, Hk, L, S), is_causal in itertools.product(variant.shapes.values(), causal):
        options = band | {"is_causal": is_causal}
        for rows, keys in ((L, S), (8, L), (8, 130), (40, 39)):
            arrays = variant.arrays((B, Hq, Hk, rows, keys))
            seen = seen_in_band(rows, keys, **options)
            variant.check(*spoil(arrays, seen), device=device, **options)


@pytest.mark.options
@shapes_with_options
def test_bands_with_masks(device, variant, shape):
    L, S = variant.shapes[shape][-2:]
    for kind in ("bool", "float"):
        seen = draw((L, S)) > 0
        seen[L // 3 : 2 * L // 3 + 1, S // 4 : 3 * S // 4] = False  # blocks of some rows
        mask = variant.mask(seen, kind)
        for options in ({"is_causal": "lower_right"}, {"window": (S // 2, 0)},
                        {"is_causal": "lower_right", "window": (30, 2)}):  # fmt: skip
            variant.check(*variant.arrays(shape), device=device, attn_mask=mask, **options)


# ---- masks ----


@pytest.mark.options
@kinds
@both_shapes_and_tensors
def test_every_broadcast_shape(device, variant, shape, kind):
    """Per batch, head, row and key, or the same for all of them."""
    B, Hq, _, L, S = variant.shapes[shape]
    arrays = variant.arrays(shape)
    for flags in itertools.product((0, 1), repeat=4):
        full = tuple(n if f else 1 for n, f in zip((B, Hq, L, S), flags, strict=True))
        mask = variant.mask(draw(full, seed=1) > -0.3, kind)
        variant.check(*arrays, device=device, attn_mask=mask)
    variant.check(*arrays, device=device, attn_mask=variant.mask(draw((S,)) > 0, kind))
    q, k, v = arrays
    mask = variant.mask(draw((Hq, L, S)) > 0, kind)
    variant.check(q, k[:, :1], v[:, :1], device=device, attn_mask=mask)


@pytest.mark.options
@each(lambda v: v.mask_dtypes, "dtypes", tensors=True, data=True)
def test_float_masks_of_any_type(device, variant, dtypes):
    dtype, mask_dtype = dtypes
    if dtype == float64 and not device.float64:
        return
    for shape in variant.shapes:
        q, k, v = variant.arrays(shape, dtype)
        mask = masked(draw((q.shape[-2], k.shape[-2])) > -0.5, "float", dtype=mask_dtype)
        variant.check(q, k, v, device=device, attn_mask=mask)


@pytest.mark.options
@kinds
@both_shapes_and_tensors
def test_layouts_of_masks(device, variant, shape, kind):
    _, Hq, _, L, S = variant.shapes[shape]
    wide = variant.mask(draw((Hq, L, 2 * S)) > 0, kind)
    mask = wide[..., :S]
    layouts = (negative_rows, negative_everywhere, columns_first, sliced)
    others = [layout(mask) for layout in layouts]
    for other in (*others, wide[..., ::2], wide[..., S - 1 :: -1]):
        variant.check(*variant.arrays(shape), device=device, attn_mask=other)


@pytest.mark.options
@each(lambda v: pieces(64), "name", data=True)
def test_keys_that_a_mask_excludes(device, variant, name):
    """Whole blocks and splits: for all rows, and for one beside rows that see all or nothing."""
    for shape, kind in itertools.product(variant.shapes, ("bool", "float")):
        q, k, v = variant.arrays(shape)
        L, S = q.shape[-2], k.shape[-2]
        seen = np.zeros((1, S), bool)
        for piece in pieces(S)[name]:
            seen[:, piece] = True
        rows = np.repeat(seen, L, axis=0)
        rows[0], rows[2:3] = True, False
        mask = variant.mask(seen, kind)
        excluded = variant.check(*spoil((q, k, v), seen), device=device, attn_mask=mask)
        if variant.redo_shows:  # no row is computed again
            clean = variant.call(q, k, v, device=device, attn_mask=mask)[0]
            np.testing.assert_array_equal(excluded, clean)
        result = variant.check(q, k, v, device=device, attn_mask=variant.mask(rows, kind))
        assert not result[..., 2:3, :].astype(float32).any()


@pytest.mark.options
@both_shapes_and_tensors
def test_rows_without_a_key(device, variant, shape):
    """Zeros and an lse of -inf, over what lay there, whatever the query holds."""
    q, k, v = variant.arrays(shape)
    L, S = q.shape[-2], k.shape[-2]
    q[..., 1, :], k[..., 5, :] = NAN, INF
    out = np.full(q.shape, 7.5, variant.dtype)
    seen = draw((L, S)) > 0
    seen[1], seen[:, 5] = False, False
    for mask in (seen, np.where(seen, 0, -INF).astype(variant.mask_dtype), np.zeros(S, bool)):
        result = variant.check(q, k, v, device=device, attn_mask=mask, out=out)
        assert not result[..., 1, :].astype(float32).any()
        variant.check(q, k, v, device=device, attn_mask=mask)


@pytest.mark.options
@both_shapes
def test_rows_whose_scores_are_all_minus_infinity(device, variant, shape):
    """They are no numbers, where rows that attend to no key are zeros, and others as ever."""
    q, k, v = variant.arrays(shape)
    L, S = q.shape[-2], k.shape[-2]
    first = S // 3
    q[..., 7] = 1
    k[..., :first, 7] = -INF
    seen = draw((L, S)) > -1
    seen[:, :2], seen[:, -1] = True, True
    seen[0, first:] = seen[1] = False
    others = seen.copy()
    others[0] = False
    for kind in ("bool", "float"):
        right = variant.check(q, k, v, device=device, attn_mask=variant.mask(others, kind))
        assert np.isfinite(right.astype(float32)).all()
        mask = variant.mask(seen, kind)
        result = variant.call(q, k, v, device=device, attn_mask=mask)[0]
        assert np.isnan(result[..., 0, :].astype(float32)).all()
        np.testing.assert_array_equal(result[..., 1:, :], right[..., 1:, :])


@pytest.mark.options
@both_shapes
def test_the_lowest_number_is_not_minus_infinity(device, variant, shape):
    """A row of it is the mean of its values; beside an ordinary number it counts for nothing."""
    L, S = variant.shapes[shape][-2:]
    dtypes = [(variant.dtype, variant.mask_dtype)]
    dtypes += [(float64, float64)] * (float64 in variant.dtypes)
    for dtype, mask_dtype in dtypes:
        arrays = variant.arrays(shape, dtype)
        for lowest_of, start in itertools.product({dtype, mask_dtype}, (0, S // 3)):
            for stop in (S // 2, S - 1, S):
                mask = np.zeros((L, S), mask_dtype)
                mask[1:3] = -INF
                mask[:2, start:stop] = float(ml_dtypes.finfo(lowest_of).min)
                variant.check(*arrays, device=device, attn_mask=mask)


# ---- numbers ----


def rows_but_the_second(result):
    return np.delete(result.astype(float32), 1, axis=-2)


@pytest.mark.options
@both_shapes
def test_numbers_of_keys_that_some_rows_see(device, variant, shape):
    """They show in rows that see them and in no other, though rows share every load."""
    L, S = variant.shapes[shape][-2:]
    for which, at, bad in itertools.product((1, 2), (0, S // 2, S - 1), (NAN, INF, -INF)):
        arrays = variant.arrays(shape)
        arrays[which][0, 0, at, 3] = bad
        seen = draw((L, S)) > -1
        seen[:, at] = np.arange(L) == 1
        result = variant.check(*arrays, device=device, attn_mask=seen)
        assert np.isfinite(rows_but_the_second(result)).all()
        if which == 2:
            assert not np.isfinite(result[0, 0, 1, 3].astype(float32))
        variant.check(*arrays, device=device)


@both_shapes
def test_numbers_behind_what_a_row_may_see(device, variant, shape):
    """The last keys of a causal problem, which lie in the same vector or block."""
    for which in (1, 2):
        arrays = variant.arrays(shape)
        S, L = arrays[1].shape[-2], arrays[0].shape[-2]
        arrays[which][..., S - L + 1 :, :] = NAN
        result = variant.check(*arrays, device=device, is_causal="lower_right")
        result = result.astype(float32)
        assert np.isfinite(result[..., 0, :]).all() and np.isnan(result[..., 1:, :]).all()


@pytest.mark.options
@both_shapes
def test_numbers_in_queries_and_masks_stay_in_their_rows(device, variant, shape):
    q, k, v = variant.arrays(shape)
    L, S = q.shape[-2], k.shape[-2]
    q[0, 0, 1, variant.E - 1] = NAN
    result = variant.check(q, k, v, device=device).astype(float32)
    assert np.isnan(result[0, 0, 1]).all() and np.isnan(result).sum() == variant.E
    for added, at in itertools.product((INF, NAN), (0, S // 2, S - 1)):
        mask = np.zeros((L, S), variant.mask_dtype)
        mask[1, at] = added
        result = variant.check(*variant.arrays(shape), device=device, attn_mask=mask)
        assert np.isnan(result[..., 1, :].astype(float32)).all()
        assert np.isfinite(rows_but_the_second(result)).all()


def by_reference(variant, *arrays, device, **options):
    with pytest.MonkeyPatch.context() as patch:
        force(patch, "reference")
        return variant.call(*arrays, device=device, **options)


@both_shapes
def test_scores_of_minus_infinity(device, variant, shape):
    """They weigh nothing beside others. Where all are -inf the row is no number."""
    q, k, v = variant.arrays(shape)
    S = k.shape[-2]
    q = np.abs(q) + q.dtype.type(1)
    for keys in (slice(1), slice(S // 3), slice(S - 1), slice(S - 1, S), slice(S // 4, S)):
        spoilt = k.copy()
        spoilt[..., keys, 7] = -INF
        result = variant.check(q, spoilt, v, device=device)
        assert np.isfinite(result.astype(float32)).all()
    k[..., 7] = -INF
    result, lse = variant.call(q, k, v, device=device)
    right, right_lse = by_reference(variant, q, k, v, device=device)
    assert np.isnan(result.astype(float32)).all() and np.isnan(right.astype(float32)).all()
    np.testing.assert_array_equal(lse, right_lse)


@pytest.mark.options
@each(lambda v: v.shapes if v.dtype == float32 and v != REFERENCE else (), "shape", data=True)
def test_sums_that_overflow(device, variant, shape):
    """Values near the largest number, products beyond it: as the reference kernel has it.

    A sum that overflows there may come out right where the base is above the highest score.
    """
    q, k, v = variant.arrays(shape)
    S = k.shape[-2]
    high = np.float32(3e38)
    one_weighs = np.where(np.arange(S) == S - 2, 0, -200).astype(float32)
    two_weigh = np.where(np.arange(S) // 2 == S // 4, 0, -200).astype(float32)
    cases = [
        ((q, k, np.full_like(v, high)), {"attn_mask": one_weighs}),
        ((q, k, np.full_like(v, high)), {"attn_mask": two_weigh}),
        ((q * 0, k, np.full_like(v, -high)), {}),
        ((np.full_like(q, 1e20), np.full_like(k, 1e20), v), {"scale": 1.0}),
        ((np.full_like(q, 1e20), np.full_like(k, -1e20), v), {"scale": 1.0}),
        ((np.full_like(q, 1e18), np.full_like(k, 1e18), v), {"scale": 1.0}),
        ((np.full_like(q, 1e20), np.full_like(k, 1e20), v), {"softcap": 5.0}),
    ]
    for arrays, options in cases:
        wanted = by_reference(variant, *arrays, device=device, **options)
        exact = attention(*arrays, enable_gqa=q.ndim > 2, **options)
        found = variant.call(*arrays, device=device, **options)
        for got, right, true in zip(found, wanted, exact, strict=True):
            right = np.where(np.isfinite(got) & ~np.isfinite(right), true, right)
            near = np.where(np.isfinite(right), np.abs(right), 0).max() * 1e-5
            assert_close(got.astype(float64), right.astype(float64), near)


@each(lambda v: v.shapes if v.dtype == float32 else (), "shape", data=True)
def test_a_large_value_with_a_late_high_score(device, variant, shape):
    """Weights above 1 on the way must not make a sum overflow that ends within range."""
    keys = variant.shapes[shape][-1]
    for at in (0, 40, keys - 1):
        for S in (at + 1, max(keys, at + 1)):
            k, v = np.zeros((2, 1, S, variant.E), float32)
            k[:, at], v[:, at] = 2.7, 1e38
            variant.check(np.ones((1, 1, variant.E), float32), k, v, device=device, scale=1.0)


@each(lambda v: v.shapes if v.dtype == float16 else (), "shape", data=True)
def test_equal_and_large_values(device, variant, shape):
    """Weights are divided by the sum of rounded ones. Results reach the end of half's range."""
    q, k, v = variant.arrays(shape)
    variant.check(q, k, np.sign(v) * v.dtype.type(65504), device=device)
    v[...] = v[..., :1, :]
    result = variant.check(q, k, v, device=device)
    right = np.repeat(v[..., :1, :], q.shape[1] // v.shape[1], axis=1)
    np.testing.assert_array_equal(result, np.broadcast_to(right, result.shape))


@pytest.mark.options
@each(lambda v: v.shapes if v != REFERENCE else (), "shape", data=True)
def test_beside_the_reference_kernel(device, variant, shape):
    """Another way to the same numbers, and the same bits when it is gone again."""
    q, k, v = variant.arrays(shape)
    mask = variant.mask(draw((q.shape[-2], k.shape[-2])) > 0, "float")
    for options in ({}, {"attn_mask": mask}, {"window": (20, 0), "is_causal": "lower_right"}):
        right, right_lse = by_reference(variant, q, k, v, device=device, **options)
        got, lse = variant.call(q, k, v, device=device, **options)
        rounds = variant.rounds_weights(q.dtype)
        allowed, allowed_lse = tolerance(q, k, v, enable_gqa=True, rounds_weights=rounds, **options)
        assert_close(got, right.astype(float64), 2 * allowed)
        assert_close(lse, right_lse.astype(float64), 2 * allowed_lse, "lse")


@pytest.mark.options
@both_shapes
def test_base_and_sum(device, variant, shape):
    """The log-sum-exp as two numbers, which tells what one number of its size cannot."""
    q, k, v = variant.arrays(shape)
    mask = np.zeros((q.shape[-2], k.shape[-2]), variant.mask_dtype)
    mask[0], mask[1] = -INF, np.finfo(mask.dtype).min
    for options in ({"attn_mask": mask}, {"is_causal": True}):
        right, lse = variant.call(q, k, v, device=device, **options)
        split = {"return_lse": clattn._core.base_and_sum} | options
        result, (base, total) = variant.call(q, k, v, device=device, **split)
        np.testing.assert_array_equal(result, right)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(base + np.log(total), lse, rtol=2e-6, atol=2e-6)
    q[...] = 0
    _, (base, total) = variant.call(
        q, k, v, device=device, attn_mask=mask, return_lse=clattn._core.base_and_sum
    )
    empty = np.isneginf(base[..., 0]) & (total[..., 0] == 0)
    assert empty.all()
    assert (base[..., 1] == mask[1, 0].astype(base.dtype)).all()
    np.testing.assert_allclose(total[..., 1], k.shape[-2], rtol=1e-6)


@both_shapes
def test_the_same_call_gives_the_same_bits(device, variant, shape):
    """Work-groups that run side by side share nothing."""
    arrays = variant.arrays(shape)
    first = [a.tobytes() for a in variant.call(*arrays, device=device)]
    for _ in range(20):
        assert [a.tobytes() for a in variant.call(*arrays, device=device)] == first


# ---- where the numbers lie ----


@each(lambda v: v.key_layouts, "layout", tensors=True, data=True)
def test_layouts_of_keys_and_values(device, variant, layout):
    for shape in variant.shapes:
        q, k, v = variant.arrays(shape)
        for arrays in ((layout(k), v), (k, layout(v)), (layout(k), layout(v))):
            variant.check(q, *arrays, device=device)


ANY = [negative_rows, negative_everywhere, columns_first, sliced, far_rows, np.asfortranarray]


@each(lambda v: ANY, "layout", tensors=True, data=True)
def test_layouts_of_queries_and_results(device, variant, layout):
    """Nothing between the elements of a result is written."""
    for shape in variant.shapes:
        q, k, v = variant.arrays(shape)
        out = layout(np.full(q.shape, -1, variant.dtype))
        owner = out
        while owner.base is not None:
            owner = owner.base
        guards = np.isnan(owner.astype(float32)).sum()
        assert variant.check(layout(q), k, v, device=device, out=out) is out
        assert np.isnan(owner.astype(float32)).sum() == guards, "written outside of out"


@with_tensors_too
def test_keys_that_are_all_the_same(device, variant):
    """Row strides of 0, alone and together."""
    for shape in variant.shapes:
        q, k, v = variant.arrays(shape)
        one_key = np.broadcast_to(k[..., :1, :], k.shape)
        one_value = np.broadcast_to(v[..., :1, :], v.shape)
        for arrays in ((one_key, v), (k, one_value), (one_key, one_value)):
            variant.check(q, *arrays, device=device)


@each(lambda v: (1, 3, 16) if one_element_in in v.key_layouts else (8, 16), "step", tensors=True,
      data=True)  # fmt: skip
def test_rows_that_overlap(device, variant, step):
    """A window that slides along: each key is the one before, moved by a few elements."""
    flat = draw((700,), variant.dtype)
    item = variant.dtype.itemsize
    k = as_strided(flat, (1, 40, variant.E), (0, step * item, item))
    q = draw((1, 2, variant.E), variant.dtype)
    variant.check(q, k, k[:, ::-1], device=device)


@with_tensors_too
def test_one_packed_array(device, variant):
    """Heads beside each other, and one result that lies in the same way."""
    for B, _, Hk, L, S in variant.shapes.values():
        packed = draw((B, max(L, S), 3, Hk, variant.E), variant.dtype)
        q, k, v = packed.transpose(2, 0, 3, 1, 4)
        out = np.empty((B, L, Hk, variant.E), variant.dtype).transpose(0, 2, 1, 3)
        variant.check(q[..., :L, :], k[..., :S, :], v[..., :S, :], device=device, out=out)


@both_shapes_and_tensors
def test_out_may_be_an_input(device, variant, shape):
    """The result is as if the inputs had been read first."""
    B, _, Hk, L, S = variant.shapes[shape]
    shape = (B, Hk, Hk, min(L, S), S)
    right = variant.call(*variant.arrays(shape), device=device)[0].astype(float64)
    allowed, _ = tolerance(*variant.arrays(shape), enable_gqa=True)
    for n in range(3):
        arrays = variant.arrays(shape)
        out = arrays[n][..., : shape[-2], :]
        assert variant.call(*arrays, device=device, out=out)[0] is out
        assert_close(out, right, 2 * allowed)


# ---- what a variant does not take ----


def refused(v):
    """Calls that the variant refuses, by the reason."""
    shape = (1, 2, 2, 3, 50)
    yield from ((f"{E}, {Ev}", v.arrays(shape, E=E, Ev=Ev)) for E, Ev in v.refused_sizes)
    yield from ((dtype, v.arrays(shape, dtype)) for dtype in v.refused_dtypes)
    for layout, which in itertools.product(v.refused_layouts, (1, 2)):
        arrays = list(v.arrays(shape))
        arrays[which] = layout(arrays[which])
        yield f"{('key', 'value')[which - 1]} {layout.__name__}", arrays


def refusal(variant, arrays, device):
    try:
        variant.call(*arrays, device=device)
    except ValueError as error:
        return str(error)
    return "no error"


@with_kernels(*(variant.kernel for variant in VARIANTS))
def test_arrays_that_it_refuses(device, variant):
    """A ValueError that names the variable, its word and what the kernel takes.

    Without it the call works; here the reference kernel says so.
    """
    message = rf'CLATTN_KERNEL is "{variant.kernel}".*{variant.takes}'
    for reason, arrays in refused(variant):
        assert re.search(message, refusal(variant, arrays, device)), reason
        result, _ = by_reference(variant, *arrays, device=device)
        assert np.isfinite(result.astype(float32)).all()
