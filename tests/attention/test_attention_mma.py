# SPDX-License-Identifier: MIT
"""attention_mma, the kernel of matrix units, forced on every device: on CPUs it is emulated.

Each head size (of 64 to 256), dtype and set of options is a program, which takes
PoCL many seconds to build, so most tests share one: float16, head size 64, with the lse. `check`
asks for the lse once for the same reason. A group has 64 rows, and 128 where there are two of them
for each unit of the device; a block has 64 keys of head size 64, and 16 of 256.
"""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.attention import attention, bfloat16, eps, float16
from references.onnx import check as check_onnx
from support.directml_calls import compare as compare_directml
from support.directml_calls import run as run_directml
from support.helpers import BANDS, check, draw, index_of, qkv, run_python, sdpa

LOWEST = np.finfo(np.float16).min


@pytest.fixture(autouse=True)
def mma(monkeypatch):
    monkeypatch.setenv("CLATTN_KERNEL", "mma")


@pytest.fixture
def builds_quickly(device):
    if device.platform == "Portable Computing Language":
        pytest.skip("PoCL takes 10 s to build a program; other devices run this test")


def run(*arrays, device, **options):
    """The check of everything, with the lse or without it, but not both."""
    return check(*arrays, device=device, **{"return_lse": True} | options)


def halves(*shape, **options):
    return qkv(*shape, dtype=float16, **options)


def fill(array, seed=0):
    """`array`, of any strides, with normal numbers in its elements."""
    array[...] = draw(array.shape, array.dtype, seed)
    return array


# --- shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("L", [1, 15, 16, 17, 63, 64])
def test_lengths(device, L):
    """One tile of rows, whole and not; blocks of keys in each of the three stages."""
    for S in (1, 15, 16, 17, 63, 64, 65, 128, 200, 257):
        q, k, v = halves((1, 1), L, S + 1, 64)
        k[..., S, :] = v[..., S, :] = np.nan  # beyond the last key
        run(q, k[..., :S, :], v[..., :S, :], device=device)


@pytest.mark.parametrize("L", [65, 128, 129, 300])
def test_lengths_of_two_tiles_of_rows(device, L):
    """With eight heads a warp has 32 rows."""
    for S in (1, 64, 130, 200):
        run(*halves((2, 4), L, S, 64), device=device)
    run(*halves((2, 4), L, 150, 64), device=device, is_causal="lower_right")


def test_many_rows_of_one_head(device):
    run(*halves((1, 1), 200, 70, 64), device=device)


SIZES = {  # dtype, E, Ev, with the lse
    "1": (float16, 1, 1, True),
    "40, 8": (float16, 40, 8, True),
    "72": (bfloat16, 72, 72, True),
    "80, 64": (float16, 80, 64, True),
    "96": (float16, 96, 96, False),
    "128": (bfloat16, 128, 128, True),
    "192, 128": (bfloat16, 192, 128, False),
    "64, 256": (float16, 64, 256, False),
    "256": (bfloat16, 256, 256, False),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("builds_quickly")
def test_head_sizes(device, size):
    """Each is filled up with zeros to the next that there are programs for."""
    dtype, E, Ev, lse = size
    for L, S in ((5, 9), (50, 100)):
        run(*qkv((1, 1), L, S, E, Ev, dtype), device=device, return_lse=lse)


@pytest.mark.parametrize("dtype", [float16, bfloat16])
@pytest.mark.usefixtures("builds_quickly")
def test_widest_tiles_of_two(device, dtype):
    """Head size 128, and what fills the local memory, queries first."""
    run(*qkv((2, 4), 130, 140, 128, dtype=dtype), device=device, return_lse=False)


# --- which keys a row sees ------------------------------------------------------------


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(device, band):
    """Blocks outside for all rows, boundaries within blocks, rows that see no key at all."""
    for L, S in ((50, 50), (20, 230), (150, 20), (64, 128)):
        run(*halves((1, 1), L, S, 64), device=device, **band)
    run(*halves((2, 4), 150, 170, 64), device=device, **band)


def test_excluded_keys_do_not_matter(device):
    """NaN and infinities of keys that only other rows of the tile see."""
    q, k, v = halves((1, 1), 60, 60, 64)
    k[..., 20, 3], v[..., 30, 5], v[..., 33, 2] = np.nan, np.inf, np.nan
    result = run(q, k, v, device=device, is_causal=True)
    assert np.isfinite(result[..., :20, :]).all()
    assert np.isnan(result[..., 20:, :]).all()


def test_special_values(device):
    q, k, v = halves((1, 1), 20, 70, 64)
    q[..., 3, 1] = np.nan
    v[..., 4, 7], v[..., 5, 8], v[..., 6, 8] = np.inf, np.inf, -np.inf
    run(q, k, v, device=device)


@pytest.mark.usefixtures("builds_quickly")
def test_bool_masks(device):
    q, k, v = halves((1, 2), 40, 100, 64)
    for shape in ((100,), (40, 100), (2, 1, 100), (1, 2, 40, 100)):
        run(q, k, v, device=device, attn_mask=draw(shape) > 0)
    mask = draw((40, 200))[:, ::-2] > 0  # columns apart
    mask[7:12] = False
    k[..., 50, :] = v[..., 60, :] = np.nan
    mask[:, [50, 60]] = False
    result = run(q, k, v, device=device, attn_mask=mask, is_causal="lower_right")
    assert not result[..., 7:12, :].any()


def test_float_masks(device):
    """-inf excludes, the lowest number does not; a row of it is the mean of the values."""
    q, k, v = halves((1, 2), 40, 100, 64)
    mask = draw((40, 100), float16)
    mask[draw((40, 100)) > 1] = -np.inf
    mask[3], mask[5], mask[9, 30:] = LOWEST, -np.inf, LOWEST
    run(q, k, v, device=device, attn_mask=mask)
    run(q, k, v, device=device, attn_mask=draw((2, 1, 100), float16), window=(30, 30))


def test_groups_of_heads(device):
    q, k, v = draw((2, 6, 19, 64), float16), *(draw((2, 2, 90, 64), float16, n) for n in (1, 2))
    run(q, k, v, device=device, enable_gqa=True, is_causal=True)


@pytest.mark.usefixtures("builds_quickly")
def test_counts_of_keys(device):
    """The band follows them; what lies beyond is not read."""
    q, k, v = halves((3, 2), 40, 130, 64)
    counts = np.array([4, 90, 130])
    for n, count in enumerate(counts):
        v[n, :, count:] = np.nan
    for options in ({}, {"is_causal": 1}):
        check_onnx(q, k, v, None, None, None, counts, device=device, **options)


def check_bias_and_filter(B, heads, L, *, device):
    """A bias, and a number that is added where the mask is false."""
    call = {
        "query": draw((B, L, heads * 64), float16),
        "key": draw((B, 90, heads * 64), float16),
        "value": draw((B, 90, heads * 64), float16),
        "relative_position_bias": draw((B, heads, L, 90), float16),
        "mask": (draw((B, heads, L, 90)) > 0).astype(np.int32),
        "mask_type": "boolean",
        "mask_filter_value": -3.0,
        "head_count": heads,
        "scale": 0.1,
    }
    compare_directml(call, run_directml(call, device=device).output)


@pytest.mark.usefixtures("builds_quickly")
def test_bias_and_numbers_for_what_a_mask_leaves_out(device):
    check_bias_and_filter(1, 2, 20, device=device)


def test_no_keys(device):
    run(*halves((1, 2), 5, 0, 64), device=device)


# --- numbers --------------------------------------------------------------------------


def test_bases_rise(device):
    """Scores that grow from key to key, and weights beyond half's range under the first base."""
    q, k, v = halves((1, 1), 40, 200, 64)
    k *= np.linspace(0, 16, 200, dtype=float16)[:, None]
    run(q, k, v, device=device)
    run(q, k[..., ::-1, :].copy(), v, device=device)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-6, 3.0])
def test_scales(device, scale):
    """A negative one turns the order of scores."""
    run(*halves((1, 1), 40, 100, 64), device=device, scale=scale)


@pytest.mark.usefixtures("builds_quickly")
def test_softcap(device):
    """Small scores, where tanh is almost its argument, and large ones, where it is near 1."""
    q, k, v = halves((1, 1), 40, 100, 64)
    for softcap in (0.5, 5.0, 50.0, 2000.0):
        run(q, k, v, device=device, softcap=softcap)
    run(q * q.dtype.type(8), k, v, device=device, softcap=20.0, is_causal=True)


@pytest.mark.usefixtures("builds_quickly")
def test_softcap_and_mask(device):
    q, k, v = halves((1, 1), 40, 100, 64)
    run(q, k, v, device=device, softcap=2.0, attn_mask=draw((40, 100), float16))


def test_equal_values_come_back(device):
    """The sum that weights are divided by is that of the rounded ones."""
    q, k, v = halves((1, 1), 40, 100, 64)
    v[...] = v[..., :1, :]
    result = run(q, k, v, device=device)
    np.testing.assert_array_equal(result, np.broadcast_to(v[..., :1, :], result.shape))


def test_large_values(device):
    """Results at the end of half's range."""
    q, k, v = halves((1, 1), 20, 40, 64)
    v[...] = np.sign(v) * v.dtype.type(65504)
    run(q, k, v, device=device)


def test_error_is_that_of_rounded_weights(device):
    """Root mean square: that of plain arithmetic, rounded once, and as much again."""
    q, k, v = halves((1, 1), 64, 257, 64)
    result = sdpa(q, k, v, device=device, return_lse=True)[0].astype("f8")
    right = attention(q, k, v)[0]
    plain = right.astype(float16).astype("f8")
    error, once = (np.sqrt(np.mean((x - right) ** 2)) for x in (result, plain))
    assert error < 2 * once
    assert np.abs(result - right).max() < 2 * eps(float16) * np.abs(v.astype("f8")).max()


# --- layouts --------------------------------------------------------------------------


@pytest.mark.usefixtures("builds_quickly")
def test_layouts(device):
    """Odd places, backwards, columns apart; results too: element by element."""
    q, k, v = halves((1, 2), 18, 70, 64)
    out = np.full((1, 2, 64, 18), np.nan, float16).swapaxes(2, 3)
    wide = draw((1, 2, 70, 200), float16)
    run(q, wide[..., 3:67], wide[..., 81:145], device=device, out=out)
    run(q[..., ::-1, :], k[..., ::-2, ::-1], v[..., ::2, :], device=device)
    run(*(np.asfortranarray(a) for a in (q, k, v)), device=device)


def test_layouts_of_whole_16_bytes(device):
    """Heads beside each other, rows apart, backwards, one row for all."""
    packed = draw((1, 70, 3, 2, 64), float16)
    q, k, v = packed.transpose(2, 0, 3, 1, 4)
    out = np.empty((1, 70, 2, 64), float16).transpose(0, 2, 1, 3)
    run(q, k, v, device=device, out=out)
    q, k, v = halves((1, 2), 18, 70, 64)
    run(q[..., ::-1, :], k[..., ::-2, :], v[..., ::2, :], device=device)
    run(q, np.broadcast_to(k[..., :1, :], k.shape), v, device=device)


@pytest.mark.parametrize("place", range(5))
def test_places_in_memory(device, place):
    """Rows of whole 16 bytes that begin anywhere."""
    arrays = []
    for n, rows in enumerate((18, 70, 70)):
        memory = np.zeros(rows * 64 + 32, float16)
        start = -memory.ctypes.data % 16 // 2
        arrays.append(
            fill(as_strided(memory[start + place :], (1, 1, rows, 64), (0, 0, 128, 2)), n)
        )
    run(*arrays, device=device)


def test_masks_that_begin_anywhere(device, tmp_path):
    """One does not keep keys from being copied by 16 bytes: there is no other program for it."""
    if device.platform == "Portable Computing Language":
        pytest.skip("PoCL keeps its programs itself")
    code = """
    import sys
    from pathlib import Path
    import clattn, numpy as np
    from support.helpers import check, qkv
    q, k, v = qkv((1, 1), 18, 70, 64, dtype=np.float16)
    memory = np.ones(18 * 70 + 32, bool)
    start = -memory.ctypes.data % 16
    for place in 0, 3:
        mask = memory[start + place :][: 18 * 70].reshape(18, 70)
        mask[:, 5] = False
        check(q, k, v, device=clattn.devices()[int(sys.argv[1])], attn_mask=mask, return_lse=True)
    print(len([*Path(sys.argv[2]).rglob("attention_mma-*.bin")]))
    """
    done = run_python(code, index_of(device), tmp_path, env={"XDG_CACHE_HOME": tmp_path})
    assert done.stdout.split() == ["1"], done.stdout


# --- what it does not take ------------------------------------------------------------


def test_what_it_refuses(device):
    for arrays in (qkv((1,), 3, 4, 8), halves((1,), 3, 4, 8, 257), halves((1,), 3, 4, 300, 8)):
        with pytest.raises(ValueError, match='CLATTN_KERNEL is "mma", whose kernel takes query'):
            sdpa(*arrays, device=device)
    with pytest.raises(ValueError, match="no past keys, input bias, dropout"):
        sdpa(*halves((1,), 3, 4, 8), device=device, dropout_p=0.5)
