# SPDX-License-Identifier: MIT
"""Keys and values in bytes, with scales, against float64 attention on the numbers that they are."""

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import attention, float16, float32, tolerance
from support.checks import assert_close
from support.coded import CODES, call, check_codes, coded, codes
from support.data import draw
from support.ragged import check_results, packed
from support.variants import force, takes_cpu_kernels

NAN = np.nan

pytestmark = pytest.mark.usefixtures("kernel")


def forced(word):
    return pytest.param(word, marks=pytest.mark.by_turns, id=word)


@pytest.fixture(params=[pytest.param("", id="fastest"), forced("reference"), forced("tiled"),
                        forced("decode_gpu"), forced("rows")])  # fmt: skip
def kernel(request):
    """The kernel that is forced; "rows" is the one for many rows."""
    device = request.getfixturevalue("device")
    rows = "cpu" if takes_cpu_kernels(device) else "tiled"
    word = rows if request.param == "rows" else request.param
    force(request.getfixturevalue("monkeypatch"), word)


few_rows = pytest.mark.parametrize("kernel", [pytest.param("", id="fastest"),
                                              forced("decode_gpu")], indirect=True)  # fmt: skip
fastest = pytest.mark.parametrize("kernel", [pytest.param("", id="fastest")], indirect=True)


LENGTHS = [1, 40, 0, 3, 1], [300, 60, 5, 0, 17]


@pytest.mark.parametrize("scales", ["one", "of heads", "of keys"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "pages", [{}, {"page_size": 16}, {"page_size": 5, "page_layout": "NHD"}], ids=str
)
def test_bytes_are_their_numbers(device, code, scales, pages):
    given = coded(*LENGTHS, CODES[code], scales)
    check_codes(given, device, **pages, is_causal="lower_right")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("E", [1, 31, 33, 80])
@few_rows
def test_head_sizes(device, code, E):
    given = coded(*LENGTHS, CODES[code], "of keys", E=E, Ev=max(E - 1, 1))
    check_codes(given, device, page_size=16)


@pytest.mark.parametrize("code", CODES)
@few_rows
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


@few_rows
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


@few_rows
def test_scales_multiply_floats_too(device):
    given = packed(*LENGTHS, behind=0)
    factors = [np.abs(draw(given.key.shape[:2], float32, n)) + 0.1 for n in (3, 4)]
    output, lse = call(given, factors, device, page_size=4)
    wide = given._replace(
        key=given.key * factors[0][..., None], value=given.value * factors[1][..., None]
    )
    check_results(wide, output, lse, False)


@few_rows
def test_an_attended_nan_of_a_scale_stays_visible(device):
    """And a NaN of a key that no row sees does not matter."""
    bits, _, factors = coded([2], [4], CODES["int8"], "of keys", Hq=1, Hk=1)
    factors[0][3], factors[1][3] = NAN, NAN
    output, lse = call(bits, factors, device, is_causal="lower_right")
    assert np.isfinite(output[0]).all() and np.isfinite(lse[0, 0])
    assert np.isnan(output[1]).all() and np.isnan(lse[0, 1])


@few_rows
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
    for dtype in ("uint8", ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        name = np.dtype(dtype).name
        refused(TypeError, f"key has dtype {name}; expected query's dtype, int8, float8_e4m3fn or",
                key=bits.key.astype(dtype), value=bits.value.astype(dtype))  # fmt: skip
    refused(TypeError, "value has dtype int8; expected value_scale", key_scale=1.0)
    refused(TypeError, "key_scale has dtype float64; expected float32",
            key_scale=np.ones(2), value_scale=1.0)  # fmt: skip
    refused(ValueError, r"key_scale has shape \(3,\); expected \(\), \(2,\) or \(9, 2\)",
            key_scale=np.ones(3, float32), value_scale=1.0)  # fmt: skip
    refused(TypeError, "expected both to have one dtype",
            value=bits.value.astype(float32), key_scale=1.0, value_scale=1.0)  # fmt: skip
    refused(TypeError, "expected both to have one dtype",
            value=codes(bits.value.shape, CODES["e5m2"], 1), key_scale=1.0)  # fmt: skip
