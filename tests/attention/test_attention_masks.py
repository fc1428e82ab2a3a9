# SPDX-License-Identifier: MIT
"""Which keys a row sees: masks, causality, windows, and all of them together.

What each variant does with the keys that it is told is in test_kernel_contract.py; here are the
arguments, and numbers whose place is in a mask.
"""

import ml_dtypes
import numpy as np
import pytest
from references.attention import (
    attended,
    attention,
    bfloat16,
    eps,
    float16,
    float32,
    float64,
    tolerance,
)
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.loops import looped, looped_dtypes

pytestmark = pytest.mark.tensors

LEAD, L, S = (2, 3), 17, 33
LENGTHS = [(33, 33), (17, 113), (113, 17), (1, 33), (33, 1)]
CAUSAL = [True, "lower_right"]


def bool_mask(shape, seed=9):
    return draw(shape, seed=seed) > 0


def float_mask(shape, dtype=np.float32, seed=9):
    """Numbers, with -inf in a quarter of the places."""
    mask = draw(shape, dtype, seed)
    mask[draw(shape, seed=seed + 1) > 0.7] = -np.inf
    return mask


def lowest(dtype):
    """The type's most negative finite number."""
    return float(ml_dtypes.finfo(dtype).min)


def test_a_mask_with_2d_and_6d_arrays(device):
    check_attention(*qkv((), L, S), device=device, attn_mask=bool_mask((L, S)))
    check_attention(*qkv((2, 1, 3, 2), 5, 7), device=device, attn_mask=float_mask((3, 1, 5, 7)))
    check_attention(
        *qkv((2, 1, 3, 2), 5, 7), device=device, attn_mask=bool_mask((2, 1, 3, 1, 1, 7))
    )


def test_any_nonzero_byte_of_a_bool_is_true(device, kernel):
    """Views of other bytes as bool: 2 and 255 attend, as they do in NumPy."""
    octets = np.array([0, 1, 2, 255, 0, 128, 64], np.uint8)
    q, k, v = qkv(LEAD, 5, 7)
    got = sdpa(q, k, v, octets.view(bool), device=device)
    np.testing.assert_array_equal(got, sdpa(q, k, v, octets != 0, device=device))
    check_attention(q, k, v, device=device, attn_mask=octets != 0)


@looped_dtypes("dtypes", [(float32, float32), (float64, float64), (bfloat16, bfloat16),
                   (float16, float32), (float32, bfloat16), (float32, float64)])  # fmt: skip
def test_a_row_of_finfo_min_is_the_mean(device, kernel, dtypes):
    """finfo.min is not -inf: it absorbs every score, so all weights are equal.

    Beside an ordinary number it counts for nothing. (A log2 e folded into it would overflow.)
    """
    dtype, mask_dtype = dtypes
    low = lowest(mask_dtype)
    q, k, v = qkv(LEAD, L, S, dtype=dtype)
    mask = np.zeros((L, S), mask_dtype)
    mask[3], mask[5, 10:], mask[7, :-1] = low, low, low
    mask[9], mask[9, 5:20] = -np.inf, low
    result = check_attention(q, k, v, device=device, attn_mask=mask)
    right = v.astype(np.float64).mean(axis=-2)
    assert np.abs(result[..., 3, :].astype(np.float64) - right).max() < 2 * eps(dtype)


def test_finfo_min_of_float16_is_an_ordinary_number(device, kernel):
    """-65504 is far inside float32, in which sums run: the row's own scores still decide."""
    mask = np.full((L, S), np.finfo(np.float16).min, np.float16)
    q, k, v = qkv(LEAD, L, S)
    result = sdpa(q, k, v, mask, device=device)
    right, _ = attention(q, k, v)
    assert np.abs(result - right).max() < 65504 * np.finfo(np.float32).eps * np.abs(v).max()


@looped("value", [1e30, -1e30, 1e4])
def test_large_finite_masks(device, kernel, value):
    """A large bias decides, without overflow; one that all keys share changes nothing."""
    q, k, v = qkv(LEAD, L, S)
    mask = np.zeros((L, S), np.float32)
    mask[:, 5] = value
    check_attention(q, k, v, device=device, attn_mask=mask)


def test_causal_flags(device):
    """numpy's bool too; both alignments agree where L equals S."""
    q, k, v = qkv((1, 2), 17, 17)
    right = sdpa(q, k, v, device=device, is_causal=True)
    for flag in (np.True_, "lower_right"):
        np.testing.assert_array_equal(sdpa(q, k, v, device=device, is_causal=flag), right)
    check_attention(q, k, v, device=device, is_causal=np.False_)


WINDOWS = [None, (0, 0), (3, 0), (0, 3), (5, 7), (None, 2), (2, None), (None, None), (200, 200),
           (40, 0)]  # fmt: skip


@looped("causal", [False, *CAUSAL], ids=["both ways", "top left", "lower right"])
@looped("window", WINDOWS)
def test_bands(device, window, causal):
    """Keys p - left ... p + right, with p shifted where the alignment is lower right."""
    for lengths in LENGTHS:
        check_attention(*qkv((1, 2), *lengths), device=device, window=window, is_causal=causal)


def test_window_bounds_near_the_end_of_64_bits(device):
    """p + right must not wrap around: a huge bound is no bound. Numpy integers are integers."""
    q, k, v = qkv((1, 2), 17, 33)
    right = sdpa(q, k, v, device=device)
    for huge in (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1):
        for causal in (False, "lower_right"):
            options = {"device": device, "window": (huge, huge), "is_causal": causal}
            wanted = right if not causal else sdpa(q, k, v, device=device, is_causal=causal)
            np.testing.assert_array_equal(sdpa(q, k, v, **options), wanted)
    check_attention(q, k, v, device=device, window=(np.int32(3), np.uint8(2)))
    got = sdpa(q, k, v, device=device, window=(2**70, None))  # more than 64 bits hold
    np.testing.assert_array_equal(got, right)


@looped("kind", ["bool", "float"])
@looped("causal", CAUSAL, ids=["top left", "lower right"])
def test_everything_together(device, kernel, kind, causal):
    """Mask, causality, window, softcap, scale and groups compose: a key has to pass them all."""
    q = draw((2, 6, 33, 8))
    k, v = draw((2, 3, 77, 8)), draw((2, 3, 77, 8), seed=1)
    mask = {"bool": bool_mask, "float": float_mask}[kind]((6, 33, 77))
    check_attention(q, k, v, device=device, attn_mask=mask, is_causal=causal, window=(20, 4),
                    softcap=2.0, scale=0.7, enable_gqa=True)  # fmt: skip


EXCLUSIONS = {
    "bool mask": {"attn_mask": bool_mask((33, 77))},
    "bool mask of keys": {"attn_mask": bool_mask((77,))},
    "minus infinity": {"attn_mask": np.where(bool_mask((33, 77)), 0, -np.inf).astype(np.float32)},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window": (4, 6)},
    "window from the lower right": {"window": (4, 6), "is_causal": "lower_right"},
    "mask and causal": {"attn_mask": bool_mask((33, 77)), "is_causal": True},
}


@looped("garbage", [np.nan, np.inf, -np.inf, 3e38], ids=str)
@looped("options", EXCLUSIONS.values(), ids=EXCLUSIONS)
def test_an_excluded_key_does_not_matter(device, kernel, options, garbage):
    """Row by row: what row i does not see may hold anything, and row i comes out the same.

    Every key that row 16 does not see is poisoned, so the rows that see one show it.
    """
    q, k, v = qkv((1, 2), 33, 77)
    seen = np.broadcast_to(attended(33, 77, **options), (33, 77))[16]
    right, allowed = attention(q, k, v, **options)[0], tolerance(q, k, v, **options)[0]
    k[..., ~seen, :] = garbage
    v[..., ~seen, :] = garbage
    got = sdpa(q, k, v, device=device, **options)
    assert_close(got[..., 16, :], right[..., 16, :], allowed[..., 16, :])
    k[..., ~seen, :] = 0  # values alone: the reference knows what every other row shows
    if not np.isfinite(garbage):
        check_attention(q, k, v, device=device, **options)


@looped_dtypes("dtype", [float16, bfloat16, float64])
def test_an_excluded_key_does_not_matter_in_any_dtype(device, kernel, dtype):
    q, k, v = qkv((1, 2), 17, 77, dtype=dtype)
    mask = bool_mask((77,))
    k[..., ~mask, :], v[..., ~mask, :] = np.nan, np.inf
    result = check_attention(q, k, v, device=device, attn_mask=mask)
    assert np.isfinite(result.astype(np.float32)).all()


def test_a_nan_in_a_mask_shows_unless_its_key_is_excluded(device, kernel):
    q, k, v = qkv((1, 2), 17, 17)
    mask = draw((17, 17))
    mask[np.triu_indices(17, 1)] = np.nan
    assert np.isfinite(
        check_attention(q, k, v, device=device, attn_mask=mask, is_causal=True)
    ).all()
    mask[5, 3] = np.nan
    check_attention(q, k, v, device=device, attn_mask=mask, is_causal=True)


def test_a_mask_with_no_keys_or_no_rows(device):
    check_attention(*qkv(LEAD, 5, 0), device=device, attn_mask=np.ones((5, 0), bool))
    check_attention(*qkv(LEAD, 0, 5), device=device, attn_mask=np.ones((0, 5), np.float32))
    check_attention(
        *qkv((0, 3), 5, 7), device=device, attn_mask=np.ones((5, 7), bool), is_causal=True
    )
