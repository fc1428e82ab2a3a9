# SPDX-License-Identifier: MIT
"""attention_decode_gpu: which keys a row sees, and numbers that are none or too large.

Shapes are those of test_attention_decode_gpu.py.
"""

import itertools

import numpy as np
import pytest
from references.onnx import check as check_onnx
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
from support.onnx_calls import inputs, mask_of
from test_attention_decode_gpu import SHORT, SPLIT, E, decode_gpu  # noqa: F401

both_lengths = pytest.mark.parametrize("shape", [SHORT, SPLIT], ids=["short", "split"])
kinds = pytest.mark.parametrize("kind", ["bool", "float"])


@kinds
@both_lengths
def test_every_broadcast_shape(device, shape, kind):
    """Per batch, head, row and key, or the same for all of them; in groups of heads too."""
    lead, L, S, _ = shape
    q, k, v = qkv(*shape)
    for flags in ((0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 1, 1, 1)):
        full = tuple(n if f else 1 for n, f in zip((*lead, L, S), flags, strict=True))
        check(q, k, v, device=device, attn_mask=masked(draw(full, seed=1) > -0.3, kind))
    mask = masked(draw((2, 1, S)) > 0, kind)
    check(draw((2, 1, E)), k[0, :1], v[0, :1], device=device, enable_gqa=True, attn_mask=mask)


@both_lengths
def test_layouts_of_masks(device, shape):
    lead, L, S, _ = shape
    seen = draw((lead[1], L, 2 * S)) > 0
    for mask in (seen[..., ::2], seen[..., S - 1 :: -1], seen[:, ::-1, :S]):
        for kind in ("bool", "float"):
            check(*qkv(*shape), device=device, attn_mask=masked(mask, kind))


def test_masks_of_other_types(device):
    """Numbers of 16 bits beside float32, and what lies behind a mask's last column."""
    for S in (77, 2500):
        for keys in (1, 17, S // 2, S):
            mask = mask_of(np.dtype(np.int16), (2, keys))
            check_onnx(*inputs(2, S, (1, 1), B=1, E=E, Ev=E), mask, device=device)


@kinds
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_blocks_and_parts_that_are_excluded(device, pieces, kind):
    """For all rows, or for one beside a row that sees everything."""
    q, k, v = qkv(*SPLIT)
    seen = np.zeros((1, 2500), bool)
    for piece in pieces:
        seen[:, piece] = True
    check(*spoil((q, k, v), seen), device=device, attn_mask=masked(seen, kind))
    check(q, k, v, device=device, attn_mask=masked(np.concatenate([seen, ~seen & 1 > 0]), kind))
    check(q, k, v, device=device, attn_mask=masked(np.concatenate([seen | True, seen]), kind))


@both_lengths
def test_the_lowest_number_is_not_minus_infinity(device, shape):
    """A row of it is the mean of its values, beside an ordinary number it counts for nothing."""
    low, S = np.finfo(np.float32).min, shape[2]
    for start, stop in ((0, S), (S // 3, S), (0, S // 2)):
        mask = np.zeros((2, S), np.float32)
        mask[0, start:stop], mask[1] = low, -INF
        mask[1, start:stop] = low
        check(*qkv(*shape), device=device, attn_mask=mask)


# ---- bands ----


@pytest.mark.parametrize("causal", [True, "lower_right"])
@pytest.mark.parametrize("L", [2, 8, 40])
def test_causal(device, causal, L):
    """More rows than keys, and keys that nobody sees."""
    for S in (1, 3, 39, 41, 130, 2500):
        arrays = qkv((1, 1), L, S, E)
        seen = np.tri(L, S, S - L if isinstance(causal, str) else 0, dtype=bool)
        check(*spoil(arrays, seen), device=device, is_causal=causal)


WINDOWS = [(0, 0), (0, 3), (15, 16), (None, 5), (600, 0), (1300, 900), (2**40, 2**40)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(device, window):
    """At the keys' start and end, over blocks and parts; what is outside does not matter."""
    for lead, L, S in (((2, 2), 2, 50), ((1, 1), 8, 130), ((1, 1), 2, 2500)):
        arrays = qkv(lead, L, S, E)
        for causal in (False, "lower_right"):
            p = np.arange(L)[:, None] + (S - L if causal == "lower_right" else 0)
            t = np.arange(S) - p
            left, right = (S + L if bound is None else bound for bound in window)
            seen = (t >= -left) & (t <= right) & ((t <= 0) | (causal is False))
            check(*spoil(arrays, seen), device=device, window=window, is_causal=causal)


def test_bands_with_masks(device):
    for kind, shape in itertools.product(("bool", "float"), (SHORT, SPLIT)):
        _, L, S, _ = shape
        mask = masked(draw((L, S)) > 0, kind)
        for options in ({"is_causal": "lower_right"}, {"window": (S // 2, 0)}):
            check(*qkv(*shape), device=device, attn_mask=mask, **options)


@pytest.mark.parametrize("is_causal", [0, 1])
def test_lengths(device, is_causal):
    """Keys at and behind a length do not matter, whatever they hold; it shifts the band."""
    Q, K, V = inputs(2, 77, (2, 2), B=5, E=E, Ev=E)
    lengths = np.array([0, 1, 16, 50, 77])
    for b, n in enumerate(lengths):
        K[b, :, n:], V[b, :, n:] = NAN, INF
    check_onnx(Q, K, V, None, None, None, lengths, device=device, is_causal=is_causal)
    for length in (0, 1, 700, 2048, 3000):
        Q, K, V = inputs(2, 3000, (1, 1), B=1, E=E, Ev=E)
        K[:, :, length:], V[:, :, length:] = INF, NAN
        arguments = (Q, K, V, None, None, None, np.array([length]))
        check_onnx(*arguments, device=device, is_causal=is_causal)
        check_onnx(*arguments, device=device, is_causal=is_causal, left_window_size=900)


# ---- rows without keys, numbers that are none ----


@both_lengths
def test_rows_without_a_key(device, shape):
    """Zeros and an lse of -inf, over what lay there, whatever the query holds."""
    lead, L, S, _ = shape
    q, k, v = qkv(*shape)
    q[..., 1, :] = NAN
    k[..., 5, :] = INF
    out = np.full((*lead, L, E), 7.5, np.float32)
    seen = draw((L, S)) > 0
    seen[1], seen[:, 5] = False, False
    for mask in (seen, np.where(seen, 0, -INF).astype(np.float32), np.zeros(S, bool)):
        result = check(q, k, v, device=device, attn_mask=mask, out=out)
        assert not result[..., 1, :].any()
    assert not check(*qkv(lead, 2, 0, E), device=device).any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@both_lengths
def test_numbers_of_keys_that_some_rows_see(device, shape, bad):
    """They show in rows that see them, in no other, though these share every load with them."""
    _, L, S, _ = shape
    for place, at in itertools.product(("key", "value"), (0, S // 2, S - 1)):
        arrays = dict(zip(("query", "key", "value"), qkv(*shape), strict=True))
        arrays[place][0, 0, at, 3] = bad
        seen = draw((L, S)) > -1
        seen[:, at] = [False, True]
        result = check(*arrays.values(), device=device, attn_mask=seen)
        assert np.isfinite(result[..., 0, :]).all()
        if place == "value":
            assert not np.isfinite(result[0, 0, 1, 3])
        check(*arrays.values(), device=device)


@both_lengths
def test_numbers_in_queries_and_masks_stay_in_their_rows(device, shape):
    q, k, v = qkv(*shape)
    q[0, 0, 1, E - 1] = NAN
    result = check(q, k, v, device=device)
    assert np.isnan(result[0, 0, 1]).all() and np.isnan(result).sum() == E
    for added, at in itertools.product((INF, NAN), (0, shape[2] - 1)):
        mask = np.zeros((2, shape[2]), np.float32)
        mask[1, at] = added
        result = check(*qkv(*shape), device=device, attn_mask=mask)
        assert np.isnan(result[..., 1, :]).all() and np.isfinite(result[..., 0, :]).all()


@pytest.mark.parametrize("count", [1, 600, 2499, 2500])
def test_scores_that_are_minus_infinity_without_a_mask(device, monkeypatch, count):
    check_scores_of_minus_infinity(monkeypatch, SPLIT, slice(count), device)


@both_lengths
def test_sums_that_overflow(device, monkeypatch, shape):
    check_sums_that_overflow(monkeypatch, shape, device)


@both_lengths
def test_beside_the_reference_kernel(device, monkeypatch, shape):
    check_beside_the_reference_kernel(monkeypatch, shape, device)
