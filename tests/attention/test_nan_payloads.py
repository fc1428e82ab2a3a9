# SPDX-License-Identifier: MIT
"""A NaN that a row attends to stays visible, whatever its bits are and however little it weighs.

Every kernel is forced in turn, where the device runs it. A NaN whose payload is full is the number
above which rounding to a half type, by an addition to its bits, begins again at 0.
"""

import numpy as np
import pytest
from references.attention import bfloat16, float16, float32
from support.checks import check_attention
from support.data import qkv
from support.loops import looped
from support.sizes import WIDE
from support.variants import WITH_ARRAYS, row_id, with_kernels

pytestmark = [
    pytest.mark.full,
    pytest.mark.options,
    # NumPy's, of a signalling NaN that the oracle widens.
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),
]

every_kernel = pytest.mark.parametrize("variant", WITH_ARRAYS, ids=row_id, indirect=True)
PAYLOADS = {
    float16: [0x7FFF, 0xFFFF, 0x7C01, 0xFC01],
    bfloat16: [0x7FFF, 0xFFFF, 0x7F81, 0xFF81],
    float32: [0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0x7F800001, 0xFF800001, 0x7FC00000],
}
L, S = 8, 40  # few rows, as the kernels for few rows take them


def arrays():
    return qkv((1, 2), L, S, WIDE, dtype=bfloat16)


def bits_of(dtype, bits):
    """The number that has these bits."""
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]


def with_payloads(mask):
    """One NaN in each row but the first, at the end of a pair of keys or at its beginning."""
    payloads = PAYLOADS[mask.dtype]
    for row in range(1, L):
        mask[row, 5 * row - 3] = bits_of(mask.dtype, payloads[row % len(payloads)])
    return mask


def check_mask(device, dtype):
    mask = with_payloads(np.zeros((L, S), dtype))
    result = check_attention(*arrays(), device=device, attn_mask=mask, return_lse=True)
    assert np.isfinite(result[..., 0, :].astype(float32)).all()


@every_kernel
def test_payloads_in_a_mask(device, variant):
    check_mask(device, float32)


@with_kernels("pairs")
def test_payloads_in_a_mask_of_halves(device, variant):
    """Of the kernel that rounds weights by an addition to their bits."""
    check_mask(device, float16)


@looped("place", ["query", "key", "value"])
@every_kernel
def test_payloads_in_an_array(device, variant, place):
    given = dict(zip(("query", "key", "value"), arrays(), strict=True))
    for bits in PAYLOADS[bfloat16]:
        given[place][0, 0, 6, 3] = bits_of(bfloat16, bits)
        mask = np.zeros((L, S), np.float32)
        check_attention(*given.values(), device=device, attn_mask=mask, return_lse=True)


@looped("place", ["key", "value"])
@every_kernel
def test_payloads_of_keys_that_are_excluded(device, variant, place):
    """They do not matter."""
    query, key, value = arrays()
    mask = np.zeros((L, S), np.float32)
    excluded = np.arange(3, S, 7)
    mask[:, excluded] = -np.inf
    right = check_attention(query, key, value, device=device, attn_mask=mask, return_lse=True)
    array = key if place == "key" else value
    payloads = [*PAYLOADS[bfloat16], 0x7F80, 0xFF80]  # infinities too
    for n, at in enumerate(excluded):
        array[..., at, :] = bits_of(bfloat16, payloads[n % len(payloads)])
    with np.errstate(invalid="ignore"):  # of the oracle, which widens signalling NaNs
        check_attention(query, key, value, device=device, attn_mask=mask, return_lse=True)
    assert np.isfinite(right.astype(float32)).all()


@looped("low", [-1e4, -1e30, np.finfo(np.float32).min], ids=str)
@every_kernel
def test_a_value_whose_weight_is_zero(device, variant, low):
    """A row attends to the key: the weight is one that has become too small, not one of no key."""
    query, key, value = arrays()
    value[..., 21, 3] = np.nan
    mask = np.zeros((L, S), np.float32)
    mask[:, 21] = low
    result = check_attention(query, key, value, device=device, attn_mask=mask, return_lse=True)
    assert np.isnan(result[..., 3].astype(float32)).all()
    mask[0, 21] = -np.inf
    result = check_attention(query, key, value, device=device, attn_mask=mask, return_lse=True)
    assert np.isfinite(result[..., 0, :].astype(float32)).all()


@looped("number", [np.nan, np.inf, -np.inf, 1e38], ids=str)
@with_kernels("cpu", "pairs")
def test_a_value_in_a_block_whose_weights_are_all_zero(device, variant, number):
    """A kernel may leave out the product with such a block, unless a value is not finite."""
    query, key, value = qkv((1, 2), 40, 600, WIDE, dtype=bfloat16)
    mask = np.zeros((40, 600), np.float32)
    mask[:, 200:] = np.finfo(np.float32).min
    for at in (399, 500):
        value[..., at, 3] = number
        result = check_attention(query, key, value, device=device, attn_mask=mask, return_lse=True)
        finite = np.isfinite(result.astype(float32))
        assert finite[..., :3].all() and finite[..., 4:].all()
        assert (finite[..., 3] == np.isfinite(number)).all()


@every_kernel
def test_rows_whose_scores_are_all_low(device, variant):
    """They are no empty rows; a row without a key is one, whatever the other rows attend to."""
    query, key, value = arrays()
    mask = np.full((L, S), np.finfo(np.float32).min)
    mask[1] = -np.inf
    mask[2, ::2] = -np.inf
    value[..., 7, 5] = np.nan
    result = check_attention(query, key, value, device=device, attn_mask=mask, return_lse=True)
    assert not result[..., 1, :].any()
