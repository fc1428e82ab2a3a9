# SPDX-License-Identifier: MIT
"""attention_decode_mma, a group of query heads as a tile of matrix units, forced on every device:
on CPUs its matrix units are emulated.

Each dtype, pair of head sizes, type of mask and softcap is a program, which takes PoCL many seconds
to build, so most tests share one: float16, head size 64; rows, lengths and the lse are data. A tile
has 16 rows, four warps take 16 keys each in turn, and a part of the keys has 256 of them at least.
"""

import itertools

import clattn
import numpy as np
import pytest
from decode_cases import bits, masked, spoil
from helpers import BANDS, assert_close, check, draw, index_of, run_python, sdpa
from reference import bfloat16, float16, tolerance
from reference_onnx import check as check_onnx
from test_attention_decode import far_rows
from test_attention_layouts import (
    columns_first,
    negative_everywhere,
    negative_rows,
    sliced,
    transposed,
)
from test_attention_mma import builds_quickly  # noqa: F401
from test_directml import compare as compare_directml
from test_directml import run as run_directml

NAN, INF = np.nan, np.inf
LOWEST = np.finfo(np.float16).min


@pytest.fixture(autouse=True)
def decode_mma(monkeypatch):
    """attention_decode_mma, and no other kernel in its place."""
    monkeypatch.setenv("CLATTN_KERNEL", "decode-mma")


def group(heads, L, S, E=64, Ev=None, dtype=float16, lead=(1,)):
    """Query, key and value of query heads that share one key head."""
    shapes = ((*lead, heads, L, E), (*lead, 1, S, E), (*lead, 1, S, Ev or E))
    return tuple(draw(shape, dtype, n) for n, shape in enumerate(shapes))


def run(*arrays, device, **options):
    return check(*arrays, device=device, enable_gqa=True, **options)


SHORT, SPLIT = (5, 2, 77), (4, 2, 3000)
both_lengths = pytest.mark.parametrize("shape", [SHORT, SPLIT], ids=["short", "split"])
kinds = pytest.mark.parametrize("kind", ["bool", "float"])


# --- rows and keys --------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1), (3, 5), (8, 1), (8, 2), (17, 1), (11, 3)], ids=str)
def test_rows(device, heads):
    """Of a tile and of several, the last one filled up; of one head and of many."""
    for S in (1, 15, 16, 17, 64, 65, 130):
        q, k, v = group(*heads, S + 1)
        k[..., S, :] = v[..., S, :] = NAN
        run(q, k[..., :S, :], v[..., :S, :], device=device)
    run(*group(*heads, 70), device=device, is_causal="lower_right")


@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (24, 3)], ids=str)
def test_groups(device, heads):
    """By enable_gqa and by broadcasting, with batches."""
    hq, hk = heads
    for S in (40, 3001):
        q = draw((2, hq, 1, 64), float16)
        k, v = (draw((2, hk, S, 64), float16, n) for n in (1, 2))
        grouped = run(q, k, v, device=device)
        apart = q.reshape(2, hk, hq // hk, 1, 64)
        spread = check(apart, k[:, :, None], v[:, :, None], device=device)
        np.testing.assert_array_equal(spread.reshape(grouped.shape), grouped)


SIZES = {  # E, Ev, dtype: columns of keys and values without work
    "8": (8, 8, bfloat16),
    "80, 40": (80, 40, float16),
    "128": (128, 128, bfloat16),
    "192, 128": (192, 128, float16),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("builds_quickly")
def test_head_sizes(device, size):
    """What lies behind a row is not read: it would have rows computed again, to other bits."""
    E, Ev, dtype = size
    for heads, L, S in ((3, 1, 9), (8, 2, 100), (2, 1, 2500)):
        q, k, v = group(heads, L, S, E, Ev, dtype)
        right = run(q, k, v, device=device)
        again = run(q, far_rows(k), far_rows(v), device=device)
        assert again.tobytes() == right.tobytes()


def test_bfloat16(device):
    for shape in (SHORT, SPLIT):
        run(*group(*shape, dtype=bfloat16), device=device, is_causal="lower_right")


def test_leading_dimensions(device):
    """None, many, and keys that are the same along some of them."""
    for q, k in [((), ()), ((2, 1, 3, 2), (2, 1, 3, 2)), ((2, 3), (1, 1)), ((1, 1), (2, 3))]:
        arrays = draw((*q, 2, 64), float16), *(draw((*k, 50, 64), float16, n) for n in (1, 2))
        check(*arrays, device=device)


def test_no_keys(device):
    assert not run(*group(4, 2, 0), device=device).any()


# --- parts of the keys ----------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
def test_parts(device, batches):
    """Many and few, and their rests; some have no key that a row sees."""
    for S in (511, 512, 1023, 4097):
        arrays = group(4, 2, S, lead=(batches,))
        for options in ({}, {"is_causal": "lower_right"}, {"window": (S - 100, 10)}):
            run(*arrays, device=device, **options)


def test_parts_of_the_same_call_have_the_same_bits(device):
    first, first_lse = sdpa(*group(*SPLIT), device=device, enable_gqa=True, return_lse=True)
    for _ in range(5):
        again, lse = sdpa(*group(*SPLIT), device=device, enable_gqa=True, return_lse=True)
        assert again.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_parts_and_warps_of_very_different_weight(device, order):
    """The heaviest last, first; those that weigh nothing have values that matter if misjudged."""
    q, k, v = group(4, 2, 4097)
    q[:] = 1
    # steps of whole parts and of single chunks, which go to other warps
    for step in (np.arange(4097) // 256, np.arange(4097) // 16 % 64 / 4):
        k[:] = step.astype(float16)[::order, None]
        weighted = v * 2.0 ** (8 - step[::order, None])
        for scale in (0.001, 0.01, 0.3):
            run(q, k, weighted.astype(float16), device=device, scale=scale)


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


PIECES = {  # which of 2500 keys are seen
    "the first": [slice(0, 1)],
    "the last": [slice(2499, 2500)],
    "a piece": [slice(1100, 1150)],
    "both ends": [slice(0, 3), slice(2490, 2500)],
    "every 16th": [slice(15, 2500, 16)],
    "none": [],
}


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
    call = {
        "query": draw((2, 2, 256), float16),
        "key": draw((2, 90, 256), float16),
        "value": draw((2, 90, 256), float16),
        "relative_position_bias": draw((2, 4, 2, 90), float16),
        "mask": (draw((2, 4, 2, 90)) > 0).astype(np.int32),
        "mask_type": "boolean",
        "mask_filter_value": -3.0,
        "head_count": 4,
        "scale": 0.1,
    }
    compare_directml(call, run_directml(call, device=device).output)


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


# --- where the numbers lie ------------------------------------------------------------


@pytest.mark.parametrize("which", ["key", "value", "both"])
def test_layouts_of_keys_and_values(device, which):
    """Rows of which each starts at 16 bytes."""
    for layout, shape in itertools.product((negative_rows, transposed, far_rows), (SHORT, SPLIT)):
        q, k, v = group(*shape)
        k = k if which == "value" else layout(k)
        run(q, k, v if which == "key" else layout(v), device=device)


@pytest.mark.parametrize("layout", [negative_everywhere, columns_first, sliced])
def test_layouts_of_queries_and_results(device, layout):
    for shape in (SHORT, SPLIT):
        q, k, v = group(*shape)
        out = layout(np.full(q.shape, -1, float16))
        assert run(layout(q), k, v, device=device, out=out) is out


def test_keys_that_are_all_the_same(device):
    q, k, v = group(*SPLIT)
    one_key = np.broadcast_to(k[..., :1, :], k.shape)
    one_value = np.broadcast_to(v[..., :1, :], v.shape)
    for arrays in ((one_key, v), (k, one_value), (one_key, one_value)):
        run(q, *arrays, device=device)


def test_where_memory_is_copied(device):
    """Inputs that overlap share a copy, where keys and values, aligned in the host's memory, no
    longer are: rows are computed again, by other arithmetic.
    """
    run_python(
        """
        import sys
        import clattn, numpy as np
        from helpers import check, draw
        device = clattn.devices()[int(sys.argv[1])]
        assert device.memory_mode == "copy"
        for S in (77, 2500):
            packed = draw((S, 136 + 72), np.dtype(np.float16))
            assert packed.ctypes.data % 16 == 0
            arrays = packed[:2, 1:65], packed[:, 72:136], packed[:, 144:]
            again = check(*arrays, device=device)
            assert (again != check(*(a.copy() for a in arrays), device=device)).any()
        """,
        index_of(device),
        env={"CLATTN_MEMORY": "copy"},
    )


# --- which kernel runs ----------------------------------------------------------------


def test_the_kernel_for_the_device(device, monkeypatch):
    """Where matrix units are emulated, others are used."""
    arrays = draw((1, 8, 1, 64), float16), *(draw((1, 8, 900, 64), float16, n) for n in (1, 2))
    forced, decode = (bits(device, arrays, monkeypatch, n) for n in ("decode-mma", "decode"))
    chosen = bits(device, arrays, monkeypatch, None)
    assert (chosen == decode) or device.type != "cpu"
    assert forced != decode


REFUSED = {
    "float32": [a.astype(np.float32) for a in group(*SHORT)],
    "E above 192": group(*SHORT, 200, 64),
    "Ev above 128": group(*SHORT, 64, 136),
    "rows of 14 bytes": group(*SHORT, 64, 7),
    "keys elsewhere": [
        n if a else sliced(n) for a, n in zip((1, 0, 1), group(*SHORT), strict=True)
    ],
}


@pytest.mark.parametrize("arrays", REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_when_forced(device, monkeypatch, arrays):
    """A ValueError that names the variable, what it says and what the kernel takes."""
    wanted = r'CLATTN_KERNEL is "decode-mma".*one half type, head sizes of 1 to 192'
    with pytest.raises(ValueError, match=wanted):
        sdpa(*arrays, device=device, enable_gqa=True)
    with pytest.raises(ValueError, match="no past keys, input bias, dropout"):
        sdpa(*group(*SHORT), device=device, enable_gqa=True, dropout_p=0.5)
    monkeypatch.delenv("CLATTN_KERNEL")
    assert np.isfinite(clattn.scaled_dot_product_attention(
        *arrays, device=device, enable_gqa=True)).all()  # fmt: skip
