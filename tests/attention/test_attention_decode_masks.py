# SPDX-License-Identifier: MIT
"""attention_decode_cpu: which keys a row sees, and numbers that are none or too large.

With 64 columns in float32 a part holds at least 512 keys: SPLIT is a shape of one head whose keys
are split, SHORT one whose keys are not.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from references.attention import bfloat16, float16, float32, float64
from support.decode_cases import (
    INF,
    NAN,
    PIECES,
    check_beside_the_reference_kernel,
    check_scores_of_minus_infinity,
    check_sums_that_overflow,
    masked,
    spoil,
)
from support.helpers import check, draw, qkv
from support.layouts import columns_first, negative_everywhere, negative_rows, sliced

pytestmark = [pytest.mark.usefixtures("decode"), pytest.mark.tensors]

SHORT, SPLIT = ((2, 4), 3, 77, 64), ((1, 1), 3, 2500, 64)
both_lengths = pytest.mark.parametrize("shape", [SHORT, SPLIT], ids=["short", "split"])
kinds = pytest.mark.parametrize("kind", ["bool", "float"])


@kinds
@both_lengths
def test_every_broadcast_shape(device, shape, kind):
    """Per batch, head, row and key, or the same for all of them; in groups of heads too."""
    lead, L, S, _ = shape
    q, k, v = qkv(*shape)
    for flags in itertools.product((0, 1), repeat=4):
        full = tuple(n if f else 1 for n, f in zip((*lead, L, S), flags, strict=True))
        check(q, k, v, device=device, attn_mask=masked(draw(full, seed=1) > -0.3, kind))
    mask = masked(draw((lead[1], L, S)) > 0, kind)
    check(q, k[:, :1], v[:, :1], device=device, enable_gqa=True, attn_mask=mask)


@pytest.mark.parametrize("dtypes", [(float16, float16), (bfloat16, float32), (float64, float64),
                                    (float32, float64)],
                         ids=lambda d: f"{d[0]}-mask-{d[1]}")  # fmt: skip
def test_float_masks_of_any_type(device, dtypes):
    dtype, mask_dtype = dtypes
    shapes = ((2, 2), 3, 77, 64), ((1, 1), 3, 5000, 64)
    for lead, L, S, E in shapes if dtype == float32 else shapes[:1]:
        mask = masked(draw((L, S)) > -0.5, "float").astype(mask_dtype)
        check(*qkv(lead, L, S, E, dtype=dtype), device=device, attn_mask=mask)


@kinds
@pytest.mark.parametrize("layout", [negative_rows, negative_everywhere, columns_first, sliced,
                                    lambda a: a[..., ::2]],
                         ids=["rows", "both", "columns first", "all", "every other"])  # fmt: skip
@both_lengths
def test_layouts_of_masks(device, shape, layout, kind):
    lead, L, S, _ = shape
    seen = draw((lead[1], L, 2 * S)) > 0
    if layout in (negative_rows, negative_everywhere, columns_first, sliced):
        seen = seen[..., :S]
    if kind == "bool" and layout is sliced:
        mask = sliced(seen.view(np.uint8), 1).view(bool)
    else:
        mask = layout(masked(seen, kind))
    check(*qkv(*shape), device=device, attn_mask=mask)


@kinds
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_whole_blocks_and_parts_that_are_excluded(device, pieces, kind):
    """For all rows, or one row each way beside rows that see everything and nothing."""
    q, k, v = qkv(*SPLIT)
    seen = np.zeros((1, 2500), bool)
    for piece in pieces:
        seen[:, piece] = True
    check(*spoil((q, k, v), seen), device=device, attn_mask=masked(seen, kind))
    rows = np.concatenate([seen, np.ones_like(seen), np.zeros_like(seen)])
    result = check(q, k, v, device=device, attn_mask=masked(rows, kind))
    assert not result[..., 2, :].any()


@pytest.mark.parametrize("dtype", [float32, float64], ids=str)
def test_the_lowest_number_is_not_minus_infinity(device, dtype):
    """A row of it is the mean of its values, beside an ordinary number it counts for nothing."""
    low = float(ml_dtypes.finfo(dtype).min)
    for lead, _, S, E in (SHORT, SPLIT):
        q, k, v = qkv(lead, 3, S, E, dtype=dtype)
        for start, stop in ((0, S), (S // 3, S), (0, S // 2), (S // 2, S - 1)):
            mask = np.zeros((3, S), dtype)
            mask[0, start:stop], mask[1], mask[2] = low, -INF, -INF
            mask[1, start:stop] = low
            check(q, k, v, device=device, attn_mask=mask)
    mask = np.full((3, 2500), low, dtype)
    result = check(*qkv(*SPLIT, dtype=dtype), device=device, attn_mask=mask)
    mean = qkv(*SPLIT, dtype=dtype)[2].mean(axis=-2, keepdims=True)
    np.testing.assert_allclose(result, np.broadcast_to(mean, result.shape), rtol=0, atol=1e-6)


# ---- bands ----


@pytest.mark.parametrize("causal", [True, "lower_right"])
@pytest.mark.parametrize("L", [1, 3, 8, 40])
def test_causal(device, causal, L):
    """More rows than keys, and keys that nobody sees; in groups of heads too."""
    for S in (1, 3, 7, 16, 39, 41, 130):
        arrays = q, k, v = qkv((2, 2), L, S, 64)
        seen = np.tri(L, S, S - L if isinstance(causal, str) else 0, dtype=bool)
        check(*spoil(arrays, seen), device=device, is_causal=causal)
        check(q, k[:, :1], v[:, :1], device=device, is_causal=causal, enable_gqa=True)
    check(*qkv((1, 1), L, 2500, 64), device=device, is_causal=causal)


WINDOWS = [(0, 0), (1, 0), (0, 3), (15, 16), (40, None), (None, 5), (None, 0), (600, 0),
           (1300, 900), (2**40, 2**40)]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(device, window):
    """At the keys' start and end, over blocks and parts; what is outside does not matter."""
    for lead, L, S in (((2, 2), 3, 50), ((1, 1), 8, 130), ((1, 1), 3, 2500), ((1, 1), 40, 2500)):
        arrays = qkv(lead, L, S, 64)
        for causal in (False, True, "lower_right"):
            p = np.arange(L)[:, None] + (S - L if causal == "lower_right" else 0)
            t = np.arange(S) - p
            left, right = (S + L if bound is None else bound for bound in window)
            seen = (t >= -left) & (t <= right) & ((t <= 0) | (causal is False))
            options = {"window": window, "is_causal": causal}
            check(*spoil(arrays, seen), device=device, **options)


def test_bands_with_masks(device):
    for kind, (lead, L, S, E) in itertools.product(("bool", "float"), (SHORT, SPLIT)):
        mask = masked(draw((L, S)) > 0, kind)
        for options in ({"is_causal": "lower_right"}, {"window": (S // 2, 0)},
                        {"is_causal": "lower_right", "window": (30, 2)}):  # fmt: skip
            check(*qkv(lead, L, S, E), device=device, attn_mask=mask, **options)


# ---- rows without keys, numbers that are none ----


@both_lengths
def test_rows_without_a_key(device, shape):
    """Zeros and an lse of -inf, over what lay there, whatever the query holds."""
    lead, L, S, E = shape
    q, k, v = qkv(*shape)
    q[..., 1, :] = NAN
    k[..., 5, :] = INF
    out = np.full((*lead, L, E), 7.5, np.float32)
    seen = draw((L, S)) > 0
    seen[1], seen[:, 5] = False, False
    for mask in (seen, np.where(seen, 0, -INF).astype(np.float32), np.zeros(S, bool)):
        result = check(q, k, v, device=device, attn_mask=mask, out=out)
        assert not result[..., 1, :].any()
        check(q, k, v, device=device, attn_mask=mask)


def test_no_keys_and_no_rows(device):
    out = np.full((2, 4, 3, 64), 7.5, np.float32)
    check(*qkv((2, 4), 3, 0, 64), device=device, out=out)
    assert not out.any()
    assert check(*qkv((2, 4), 0, 77, 64), device=device).size == 0
    assert check(*qkv((0, 4), 3, 77, 64), device=device).size == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@both_lengths
def test_numbers_of_keys_that_some_rows_see(device, shape, bad):
    """They show in rows that see them, in no other, though these share every load with them."""
    _, L, S, _ = shape
    for place, at in itertools.product(("key", "value"), (0, S // 2, S - 1)):
        arrays = dict(zip(("query", "key", "value"), qkv(*shape), strict=True))
        arrays[place][0, 0, at, 3] = bad
        seen = draw((L, S)) > -1
        seen[:, at] = [False, True, False]
        result = check(*arrays.values(), device=device, attn_mask=seen)
        others = np.isfinite(result[..., (0, 2), :])
        assert others.all()
        if place == "value":
            assert not np.isfinite(result[0, 0, 1, 3])
        check(*arrays.values(), device=device)


@both_lengths
def test_numbers_behind_what_a_row_may_see(device, shape):
    """Causality's later keys, which lie in the same vector of keys."""
    S = shape[2]
    for place in ("key", "value"):
        arrays = dict(zip(("query", "key", "value"), qkv(*shape), strict=True))
        arrays[place][..., S - 2 :, :] = NAN
        result = check(*arrays.values(), device=device, is_causal="lower_right")
        assert np.isfinite(result[..., 0, :]).all() and np.isnan(result[..., 1:, :]).all()


@both_lengths
def test_nan_in_a_query_stays_in_its_row(device, shape):
    q, k, v = qkv(*shape)
    q[0, 0, 1, 63] = NAN
    result = check(q, k, v, device=device)
    assert np.isnan(result[0, 0, 1]).all() and np.isnan(result).sum() == 64


@both_lengths
@pytest.mark.parametrize("added", [INF, NAN], ids=str)
def test_a_mask_that_adds_it(device, shape, added):
    _, L, S, _ = shape
    for at in (0, S // 2, S - 1):
        mask = np.zeros((L, S), np.float32)
        mask[1, at] = added
        result = check(*qkv(*shape), device=device, attn_mask=mask)
        assert np.isnan(result[..., 1, :]).all() and np.isfinite(result[..., (0, 2), :]).all()


@pytest.mark.parametrize("count", [1, 40, 600, 2499, 2500])
@pytest.mark.parametrize("end", ["first", "last"])
def test_scores_that_are_minus_infinity_without_a_mask(device, monkeypatch, count, end):
    keys = slice(count) if end == "first" else slice(2500 - count, None)
    check_scores_of_minus_infinity(monkeypatch, SPLIT, keys, device)


@both_lengths
def test_sums_that_overflow(device, monkeypatch, shape):
    check_sums_that_overflow(monkeypatch, shape, device)


@pytest.mark.parametrize("at", [0, 40, 2499])
def test_a_large_value_with_a_late_high_score(device, at):
    """Weights above 1 on the way must not make a sum overflow that ends within range."""
    for S in (at + 1, 2500):
        k, v = np.zeros((1, S, 64), np.float32), np.zeros((1, S, 64), np.float32)
        k[:, at], v[:, at] = 2.7, 1e38
        check(np.ones((1, 1, 64), np.float32), k, v, device=device, scale=1.0)


@both_lengths
def test_beside_the_reference_kernel(device, monkeypatch, shape):
    check_beside_the_reference_kernel(monkeypatch, shape, device)
