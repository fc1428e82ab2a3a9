# SPDX-License-Identifier: MIT
"""attention_decode_mma: which keys a row sees, scores and numbers that are none or too large.

Shapes are those of test_attention_decode_mma.py.
"""

import itertools

import numpy as np
import pytest
from references.attention import float16, tolerance
from references.onnx import check as check_onnx
from support.decode_cases import INF, NAN, PIECES, masked, spoil
from support.helpers import BANDS, assert_close, draw, sdpa
from test_attention_decode_mma import SHORT, SPLIT, decode_mma, group, run  # noqa: F401
from test_attention_mma import builds_quickly, check_bias_and_filter  # noqa: F401

LOWEST = np.finfo(np.float16).min

both_lengths = pytest.mark.parametrize("shape", [SHORT, SPLIT], ids=["short", "split"])
kinds = pytest.mark.parametrize("kind", ["bool", "float"])


# --- which keys a row sees ------------------------------------------------------------


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(device, band):
    """What only rows of another tile, or none, see may be anything."""
    for heads, L, S in ((4, 2, 50), (3, 7, 130), (2, 2, 2500)):
        q, k, v = group(heads, L, S)
        p = np.arange(L)[:, None]
        if band.get("is_causal") == "lower_right":
            p = p + S - L
        t = np.arange(S) - p
        left, right = (
            S + L if bound is None else bound for bound in band.get("window", (None,) * 2)
        )
        seen = (t >= -left) & (t <= right) & ((t <= 0) | ("is_causal" not in band))
        run(*spoil((q, k, v), seen), device=device, **band)


@kinds
@both_lengths
def test_every_broadcast_shape(device, builds_quickly, shape, kind):  # noqa: F811
    """Per head, row and key, or the same for all of them."""
    heads, L, S = shape
    for flags in ((0, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 1)):
        full = tuple(n if f else 1 for n, f in zip((heads, L, S), flags, strict=True))
        mask = masked(draw(full, seed=1) > -0.3, kind)
        run(*group(*shape), device=device, attn_mask=mask)
    wide = draw((L, 2 * S)) > 0
    for mask in (wide[..., ::2], wide[..., S - 1 :: -1]):
        run(*group(*shape), device=device, attn_mask=masked(mask, kind), is_causal="lower_right")


@kinds
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_chunks_and_parts_that_are_excluded(device, pieces, kind):
    """For all rows, or for one beside a row that sees everything."""
    q, k, v = group(4, 2, 2500)
    seen = np.zeros((1, 2500), bool)
    for piece in pieces:
        seen[:, piece] = True
    run(*spoil((q, k, v), seen), device=device, attn_mask=masked(seen, kind))
    mask = masked(np.concatenate([seen | True, seen]), kind)
    run(q, k, v, device=device, attn_mask=mask)


def test_values_of_excluded_keys_are_not_computed_again(device):
    """A NaN that no row sees costs nothing: the row stays as it is beside ordinary numbers."""
    q, k, v = group(4, 2, 2500)
    seen = draw((1, 2500)) > 0
    clean = run(q, k, v, device=device, attn_mask=seen)
    np.testing.assert_array_equal(
        run(*spoil((q, k, v), seen), device=device, attn_mask=seen), clean
    )


def test_lengths(device):
    """Keys at and behind a length do not matter, whatever they hold."""
    q = draw((5, 4, 2, 64), float16)
    k, v = (draw((5, 2, 300, 64), float16, n) for n in (1, 2))
    counts = np.array([0, 1, 16, 250, 300])
    for n, count in enumerate(counts):
        k[n, :, count:], v[n, :, count:] = NAN, INF
    for is_causal in (0, 1):
        check_onnx(q, k, v, None, None, None, counts, device=device, is_causal=is_causal)


@pytest.mark.usefixtures("builds_quickly")
def test_bias_and_numbers_for_what_a_mask_leaves_out(device):
    check_bias_and_filter(2, 4, 2, device=device)


# --- numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-6, 3.0])
@both_lengths
def test_scales(device, shape, scale):
    """A negative one turns the order of scores."""
    run(*group(*shape), device=device, scale=scale)
    run(*group(*shape), device=device, scale=scale, window=(60, 0), is_causal="lower_right")


@pytest.mark.usefixtures("builds_quickly")
def test_softcap(device):
    q, k, v = group(*SPLIT)
    for softcap in (0.5, 20.0):
        run(q, k, v, device=device, softcap=softcap, scale=0.5)
    run(q, k, v, device=device, softcap=2.0, attn_mask=draw((2, 3000), float16))


def test_rows_without_a_key(device):
    """Zeros and an lse of -inf, over what lay there, whatever the query holds."""
    for heads, L, S in (SHORT, SPLIT):
        q, k, v = group(heads, L, S)
        q[..., 1, :], k[..., 5, :] = NAN, INF
        seen = draw((L, S)) > 0
        seen[1], seen[:, 5] = False, False
        out = np.full(q.shape, 7.5, float16)
        assert not run(q, k, v, device=device, attn_mask=seen, out=out)[..., 1, :].any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_numbers_of_keys_that_some_rows_see(device, bad):
    """They show in rows that see them, in no other of the tile."""
    for (heads, L, S), at in itertools.product((SHORT, SPLIT), (0, 40, -1)):
        for place in (1, 2):
            arrays = group(heads, L, S)
            arrays[place][0, 0, at, 3] = bad
            seen = draw((L, S)) > -1
            seen[:, at] = [False, True]
            result = run(*arrays, device=device, attn_mask=seen)
            assert np.isfinite(result[..., 0, :]).all()
            if place == 2:
                assert not np.isfinite(result[..., 1, 3]).any()


def test_numbers_in_queries_and_masks_stay_in_their_rows(device):
    for heads, L, S in (SHORT, SPLIT):
        q, k, v = group(heads, L, S)
        mask = np.zeros((heads, L, S), np.float32)
        q[0, 1, 1, 63] = mask[2, 0, S - 1] = NAN
        mask[3, 1, 0] = INF
        result = run(q, k, v, device=device, attn_mask=mask)
        bad = np.isnan(result).all(axis=-1)
        assert np.argwhere(bad).tolist() == [[0, 1, 1], [0, 2, 0], [0, 3, 1]]
        assert np.isnan(result).sum() == 3 * 64


@kinds
def test_the_lowest_number_is_not_minus_infinity(device, kind):
    """A row of it is the mean of its values, beside an ordinary number it counts for nothing."""
    low = LOWEST if kind == "bool" else np.finfo(np.float32).min
    for heads, L, S in (SHORT, SPLIT):
        for start, stop in ((0, S), (S // 3, S), (0, S // 2)):
            mask = np.zeros((2, S), np.float32)
            mask[0, start:stop], mask[1] = low, -INF
            mask[1, start:stop] = low
            run(*group(heads, L, S), device=device, attn_mask=mask)


def test_scores_of_minus_infinity(device):
    """They weigh nothing beside others."""
    q, k, v = group(*SPLIT)
    q = np.abs(q) + 1
    for keys in (slice(1), slice(700), slice(0, 2999)):
        spoilt = k.copy()
        spoilt[..., keys, 7] = -INF
        assert np.isfinite(run(q, spoilt, v, device=device)).all()


def test_equal_values_come_back(device):
    """The sum that weights are divided by is that of the rounded ones. They are 1, of the first
    key, and of the last, which the same warp has, some number below 2^8.
    """
    q, k, v = group(8, 2, 65)
    q[...] = np.linspace(4, 5.5, 16).reshape(8, 2, 1)
    k[...], k[..., 0, :], k[..., 64, :] = -1, 0, 0.125
    v[...] = (2 - np.arange(64) / 512)[None]
    result = sdpa(q, k, v, device=device, enable_gqa=True)
    np.testing.assert_array_equal(result, np.broadcast_to(v[..., :1, :], result.shape))


def test_warps_without_keys(device):
    """What one warp finds in 16 keys, four find in as many each: rounded weights' results, not
    those of a row that is computed again.
    """
    q, k, v = group(4, 4, 16)
    one = sdpa(q, k, v, device=device, enable_gqa=True)
    tile = (1, 1, 4, 1)
    four = sdpa(q, np.tile(k, tile), np.tile(v, tile), device=device, enable_gqa=True)
    assert (one != four).mean() < 0.01


def test_large_values(device):
    """Results at the end of half's range."""
    q, k, v = group(*SHORT)
    v[...] = np.sign(v) * v.dtype.type(65504)
    run(q, k, v, device=device)


def test_beside_the_reference_kernel(device, monkeypatch):
    """Another way to the same numbers."""
    q, k, v = group(*SPLIT)
    for options in ({}, {"window": (1400, 0), "is_causal": "lower_right"}):
        options |= {"enable_gqa": True}
        got, lse = sdpa(q, k, v, device=device, return_lse=True, **options)
        with monkeypatch.context() as patch:
            patch.setenv("CLATTN_KERNEL", "reference")
            right, right_lse = sdpa(q, k, v, device=device, return_lse=True, **options)
        allowed, allowed_lse = tolerance(q, k, v, **options)
        assert_close(got, right, 2 * allowed)
        assert_close(lse, right_lse, 2 * allowed_lse, "lse")
