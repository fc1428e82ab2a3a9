# SPDX-License-Identifier: MIT
"""Keys and values in bytes, with scales, against float64 attention on the numbers that they are."""

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import attention, float16, float32, tolerance
from support.checks import assert_close
from support.data import draw
from support.ragged import check_results, in_pages, packed
from support.variants import force, takes_cpu_kernels

NAN = np.nan
CODES = {
    "int8": np.dtype(np.int8),
    "e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}

pytestmark = pytest.mark.usefixtures("kernel")


def forced(word):
    return pytest.param(word, marks=pytest.mark.by_turns, id=word)


@pytest.fixture(params=[pytest.param("", id="fastest"), forced("reference"), forced("tiled"),
                        forced("rows")])  # fmt: skip
def kernel(request):
    """The kernel that is forced; "rows" is the one for many rows."""
    device = request.getfixturevalue("device")
    rows = "cpu" if takes_cpu_kernels(device) else "tiled"
    word = rows if request.param == "rows" else request.param
    force(request.getfixturevalue("monkeypatch"), word)


fastest = pytest.mark.parametrize("kernel", [pytest.param("", id="fastest")], indirect=True)


def codes(shape, dtype, seed):
    """Every byte but those of NaN and infinity, at random."""
    found = (
        np.random.default_rng([seed, *shape]).integers(0, 256, shape).astype(np.uint8).view(dtype)
    )
    if dtype == np.int8:
        return np.maximum(found, -127)
    return np.where(np.isfinite(found.astype(float32)), found, dtype.type(1)).astype(dtype)


def coded(rows, keys, code, scales, dtype=float32, **sizes):
    """A packed problem in bytes, the same one in float32, and the scales of keys and values."""
    given = packed(rows, keys, dtype=dtype, behind=0, **sizes)
    bits = given._replace(
        key=codes(given.key.shape, code, 1), value=codes(given.value.shape, code, 2)
    )
    Hk = given.key.shape[1]
    shape = {"one": (), "of heads": (Hk,), "of keys": given.key.shape[:2]}[scales]
    largest = float(np.abs(bits.key.astype(float32)).max())
    factors = [(np.abs(draw(shape, float32, n)) + 0.5) / largest for n in (7, 8)]
    spread = [f[:, :, None] if f.ndim == 2 else f[..., :, None] if f.ndim else f for f in factors]
    wide = given._replace(
        key=bits.key.astype(float32) * spread[0], value=bits.value.astype(float32) * spread[1]
    )
    return bits, wide, [np.asarray(f, float32) for f in factors]


def call(bits, scales, device, page_size=None, page_layout="HND", **options):
    options |= {"enable_gqa": True, "return_lse": True, "device": device}
    if page_size is None:
        return clattn.varlen_attn(*bits, key_scale=scales[0], value_scale=scales[1], **options)
    more = scales if scales[0].ndim == 2 else ()
    key, value, *paged, table = in_pages(bits, page_size, page_layout, more=more)
    key_scale, value_scale = paged or scales
    return clattn.varlen_attn(
        bits.query, key, value, bits.cu_seq_q, block_table=table,
        seqused_k=np.diff(bits.cu_seq_k), page_layout=page_layout, key_scale=key_scale,
        value_scale=value_scale, **options,
    )  # fmt: skip


LENGTHS = [1, 40, 0, 3, 1], [300, 60, 5, 0, 17]


@pytest.mark.parametrize("scales", ["one", "of heads", "of keys"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "pages", [{}, {"page_size": 16}, {"page_size": 5, "page_layout": "NHD"}], ids=str
)
def test_bytes_are_their_numbers(device, code, scales, pages):
    bits, wide, factors = coded(*LENGTHS, CODES[code], scales)
    output, lse = call(bits, factors, device, **pages, is_causal="lower_right")
    check_results(wide, output, lse, False, is_causal="lower_right")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("E", [1, 31, 33, 80])
@fastest
def test_head_sizes(device, code, E):
    bits, wide, factors = coded(*LENGTHS, CODES[code], "of keys", E=E, Ev=max(E - 1, 1))
    output, lse = call(bits, factors, device, page_size=16)
    check_results(wide, output, lse, False)


@pytest.mark.parametrize("code", CODES)
@fastest
def test_half_queries(device, code):
    """Numbers of float32 keep their digits beside queries of float16."""
    bits, wide, factors = coded(*LENGTHS, CODES[code], "of keys", dtype=float16, E=32)
    output, lse = call(bits, factors, device, page_size=16)
    assert output.dtype == float16
    for b in range(len(bits.cu_seq_q) - 1):
        query, key, value = wide.of(b)
        rows = slice(*bits.cu_seq_q[b : b + 2])
        right, right_lse = attention(query, key, value, enable_gqa=True)
        allowed, allowed_lse = tolerance(query, key, value, enable_gqa=True)
        assert_close(output[rows].swapaxes(0, 1), right, allowed)
        assert_close(lse[:, rows], right_lse, allowed_lse)


@fastest
def test_every_float8_is_its_number(device):
    """Subnormal ones, the largest, NaN and infinity: one key with one value each."""
    for code in (CODES["e4m3fn"], CODES["e5m2"]):
        values = np.arange(256, dtype=np.uint8).view(code).reshape(-1, 1, 1)
        zeros = np.zeros((256, 1, 1), code)
        offsets = np.arange(257)
        got = clattn.varlen_attn(
            np.zeros((256, 1, 1), float32), zeros, values, offsets, offsets, device=device
        )
        np.testing.assert_array_equal(got, values.astype(float32))


@fastest
def test_scales_multiply_floats_too(device):
    given = packed(*LENGTHS, behind=0)
    factors = [np.abs(draw(given.key.shape[:2], float32, n)) + 0.1 for n in (3, 4)]
    output, lse = call(given, factors, device, page_size=4)
    wide = given._replace(
        key=given.key * factors[0][..., None], value=given.value * factors[1][..., None]
    )
    check_results(wide, output, lse, False)


@fastest
def test_an_attended_nan_of_a_scale_stays_visible(device):
    """And a NaN of a key that no row sees does not matter."""
    bits, _, factors = coded([2], [4], CODES["int8"], "of keys", Hq=1, Hk=1)
    factors[0][3], factors[1][3] = NAN, NAN
    output, lse = call(bits, factors, device, is_causal="lower_right")
    assert np.isfinite(output[0]).all() and np.isfinite(lse[0, 0])
    assert np.isnan(output[1]).all() and np.isnan(lse[0, 1])


@fastest
def test_keys_are_not_values(device):
    """E = Ev and v = -k, under scales that differ."""
    bits, wide, factors = coded([3], [9], CODES["int8"], "of keys")
    bits = bits._replace(value=-bits.key)
    wide = wide._replace(value=bits.value.astype(float32) * factors[1][..., None])
    check_results(wide, *call(bits, factors, device, page_size=2), False)


@fastest
def test_what_is_refused(device):
    bits = coded([3], [9], CODES["int8"], "of keys")[0]
    arrays = dict(zip(bits._fields, bits, strict=True))

    def refused(kind, text, **changed):
        with pytest.raises(kind, match=text):
            clattn.varlen_attn(**arrays | changed, enable_gqa=True, device=device)

    refused(TypeError, "key has dtype int8; expected key_scale")
    refused(TypeError, "value has dtype int8; expected value_scale", key_scale=1.0)
    refused(TypeError, "key_scale has dtype float64; expected float32",
            key_scale=np.ones(2), value_scale=1.0)  # fmt: skip
    refused(ValueError, r"key_scale has shape \(3,\); expected \(\), \(2,\) or \(9, 2\)",
            key_scale=np.ones(3, float32), value_scale=1.0)  # fmt: skip
    refused(TypeError, "expected both to have one dtype",
            value=bits.value.astype(float32), key_scale=1.0, value_scale=1.0)  # fmt: skip
    refused(TypeError, "expected both to have one dtype",
            value=codes(bits.value.shape, CODES["e5m2"], 1), key_scale=1.0)  # fmt: skip
