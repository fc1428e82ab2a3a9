# SPDX-License-Identifier: MIT
"""attention_decode_cpu, the kernel for few rows and many keys: values, sizes, parts, layouts.

It is forced throughout, so that no call falls back to another kernel. Which keys a row sees and
special numbers are in test_attention_decode_masks.py, the other front doors and the choice of the
kernel in test_attention_decode_doors.py. Most calls share a head size and a few counts of rows:
each combination is a program to build, while lengths are data.

Keys are split into parts where there are fewer work-items than cores want and each part has at
least 256 KiB: with one head, S = 4097 and E = Ev = 64 in float32 are 8 parts at most, S = 129 and
E = Ev = 512 two.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from references.attention import DTYPES, bfloat16, float16, float64, tolerance
from support.helpers import assert_close, check, draw, qkv, sdpa
from support.layouts import (
    columns_first,
    far_rows,
    fortran,
    negative_everywhere,
    negative_rows,
    one_element_in,
    part_of_a_projection,
    read_only,
    sliced,
    transposed,
)

pytestmark = [pytest.mark.usefixtures("decode"), pytest.mark.tensors]


KEYS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000)
HEAD_SIZES = [  # E, Ev, rows
    (16, 16, 1), (17, 31, 1), (31, 17, 4), (128, 96, 4), (257, 16, 3), (16, 257, 1), (512, 512, 1),
]  # fmt: skip


@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=lambda s: f"E{s[0]}-Ev{s[1]}")
def test_head_sizes(device, sizes):
    """A last vector that shares columns with the one before, in keys, in values, in both."""
    E, Ev, rows = sizes
    for S in (1, 16, 31, 129):
        check(*qkv((1, 2), rows, S, E, Ev), device=device)


@pytest.mark.parametrize("rows", [*range(1, 14), 16, 17, 31, 32, 33, 40])
def test_rows(device, rows):
    """Those that share a load, those of a work-item, and the rests of both; above 8 forced."""
    for S in (1, 17, 131):
        check(*qkv((2, 3), rows, S, 64), device=device)


@pytest.mark.parametrize("S", KEYS)
def test_keys(device, S):
    """Vectors and blocks of keys, and their rests; nothing is read behind the last key."""
    for rows in (1, 2, 3, 8):
        q, k, v = qkv((1, 2), rows, S + 1, 64)
        k[..., S, :] = v[..., S, :] = np.nan
        check(q, k[..., :S, :], v[..., :S, :], device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(device, dtype):
    for S in (1, 15, 33, 200):
        check(*qkv((1, 2), 1, S, 64, dtype=dtype), device=device)
        q, k, v = qkv((2, 1), 4, S + 1, 33, 48, dtype=dtype)
        check(
            sliced(q),
            far_rows(k),
            v,
            device=device,
            out=sliced(np.zeros_like(v, shape=(2, 1, 4, 48))),
        )


def test_one_vector_of_float64(device):
    """Eight lanes at most, so head sizes from 8."""
    for S in (1, 7, 9, 100):
        check(*qkv((1, 2), 3, S, 9, 8, dtype=float64), device=device)


HEADS = [(2, 1), (3, 1), (6, 3), (4, 2), (5, 1), (14, 2), (8, 1), (16, 2), (32, 1), (33, 1)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_groups(device, heads):
    """Groups of 1 to 33 heads with the same keys, by enable_gqa and by broadcasting."""
    hq, hk = heads
    for rows, S in ((1, 129), (2, 17), (3, 65)):
        q = draw((2, hq, rows, 64))
        k, v = draw((2, hk, S, 64), seed=1), draw((2, hk, S, 64), seed=2)
        for options in ({}, {"is_causal": "lower_right"}):
            grouped = check(q, k, v, device=device, enable_gqa=True, **options)
            apart = q.reshape(2, hk, hq // hk, rows, 64)
            spread = check(apart, k[:, :, None], v[:, :, None], device=device, **options)
            np.testing.assert_array_equal(spread.reshape(grouped.shape), grouped)


def test_leading_dimensions(device):
    """None, many, and keys that are the same along some of them."""
    leads = [((), (), ()), ((5,), (), ()), ((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)),
             ((2, 1, 2), (3, 1), (1, 2)), ((2, 3), (1, 3), (2, 3)), ((2, 3), (2, 3), (1, 3)),
             ((1, 1), (2, 3), (2, 3)), ((9, 33), (9, 33), (9, 33))]  # fmt: skip
    for q, k, v in leads:
        arrays = draw((*q, 3, 64)), draw((*k, 50, 64), seed=1), draw((*v, 50, 64), seed=2)
        check(*arrays, device=device)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 1e-30, -1e-42, 3.0], ids=str)
def test_scale(device, scale):
    check(*qkv((1, 2), 3, 130, 64), device=device, scale=scale)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e-30, 3e38], ids=str)
def test_softcap(device, softcap):
    for scale in (None, 2.0):
        check(*qkv((1, 2), 3, 130, 64), device=device, softcap=softcap, scale=scale)


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_scores_in_order(device, order):
    """What is summed up is scaled anew with every block, or never after the first."""
    q, k, v = qkv((1, 1), 4, 600, 64)
    q[:] = 1
    k[:] = np.linspace(-1, 1, 600, dtype=np.float32)[::order, None]
    for scale in (0.1, 1.0, 30.0):
        check(q, k, v, device=device, scale=scale)


# ---- parts of the keys ----

PARTS = {  # leading dimensions, L, S, E, Ev
    "two, small": ((1, 1), 1, 129, 512, 512),
    "a part's last key": ((1, 1), 1, 191, 512, 512),
    "many": ((1, 1), 1, 4097, 64, 64),
    "rests": ((1, 1), 3, 3001, 33, 80),
    "two heads": ((1, 2), 1, 2500, 64, 64),
    "two batches": ((2, 1), 2, 1023, 64, 64),
    "several groups of rows": ((1, 1), 40, 1025, 64, 64),
    "no dimension in front": ((), 8, 1024, 64, 64),
}


@pytest.mark.parametrize("shape", PARTS.values(), ids=PARTS)
def test_parts(device, shape):
    arrays = qkv(*shape)
    for options in ({}, {"is_causal": "lower_right"}):
        check(*arrays, device=device, **options)


@pytest.mark.parametrize("dtype", [float64, float16, bfloat16], ids=str)
def test_parts_in_every_dtype(device, dtype):
    check(*qkv((1, 1), 1, 5000, 64, dtype=dtype), device=device)


def test_parts_of_half_types_with_rests(device):
    q, k, v = qkv((1, 1), 4, 5001, 33, 48, dtype=float16)
    check(q, far_rows(k), v, device=device)


def test_parts_with_a_softcap(device):
    check(*qkv((1, 1), 3, 4097, 64), device=device, softcap=2.0)


def unsplit(q, k, v, device, **options):
    """Many copies of the queries of two heads: so many work-items that no keys are split."""
    copies = np.broadcast_to(q, (4 * device.compute_units, *q.shape))
    return sdpa(copies, k, v, device=device, return_lse=True, **options)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("options", [{}, {"window": (900, 10)}, {"is_causal": "lower_right"}],
                         ids=str)  # fmt: skip
def test_parts_do_not_show(device, group, options):
    """The same result as without parts, to the rounding of both."""
    options = options | {"enable_gqa": group > 1}
    q, k, v = draw((2 * group, 3, 64)), draw((2, 2049, 64), seed=1), draw((2, 2049, 64), seed=2)
    result, lse = sdpa(q, k, v, device=device, return_lse=True, **options)
    allowed, allowed_lse = tolerance(q, k, v, **options)
    whole, whole_lse = unsplit(q, k, v, device, **options)
    for n in range(len(whole)):
        assert_close(result, whole[n], 2 * allowed)
        assert_close(lse, whole_lse[n], 2 * allowed_lse, "lse")


def test_parts_of_the_same_call_have_the_same_bits(device):
    q, k, v = qkv((1, 2), 2, 4097, 64)
    first, first_lse = sdpa(q, k, v, device=device, return_lse=True)
    for _ in range(10):
        again, lse = sdpa(q, k, v, device=device, return_lse=True)
        assert again.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_parts_of_very_different_weight(device, order):
    """The heaviest last, first; those that weigh nothing have values that matter if misjudged."""
    q, k, v = qkv((1, 1), 2, 4097, 64)
    q[:] = 1
    steps = np.repeat(np.arange(9, dtype=np.float32), 512)[:4097]
    k[:] = steps[::order, None]
    v *= (10 ** (9 - steps[::order]))[:, None]
    for scale in (1e-3, 0.01, 0.3, 2.0):
        check(q, k, v, device=device, scale=scale)


def test_threads(device):
    """Calls of several threads at once, split and not, do not meet."""
    calls = [(qkv((1, 1), 1, 4097, 64), {}), (qkv((4, 8), 2, 300, 64), {"is_causal": True}),
             (qkv((1, 2), 3, 2500, 64), {"attn_mask": draw((3, 2500)) > 0}),
             (qkv((1, 1), 8, 4097, 64, seed=1), {"window": (3000, 0)})]  # fmt: skip

    def run(call):
        arrays, options = call
        return sdpa(*arrays, device=device, return_lse=True, **options)

    right = [run(call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        for result, wanted in zip(pool.map(run, calls * 20), right * 20, strict=True):
            for got, alone in zip(result, wanted, strict=True):
                assert got.tobytes() == alone.tobytes()


# ---- where the numbers lie ----


ROWS_IN_ONE_PIECE = [negative_rows, transposed, part_of_a_projection, one_element_in, read_only,
                     far_rows]  # fmt: skip
ANY = [*ROWS_IN_ONE_PIECE, negative_everywhere, columns_first, fortran, sliced]


def by_name(function):
    return function.__name__


@pytest.mark.parametrize("layout", ROWS_IN_ONE_PIECE, ids=by_name)
@pytest.mark.parametrize("which", ["key", "value", "both"])
def test_layouts_of_keys_and_values(device, which, layout):
    for lead, S in (((2, 3), 33), ((1, 1), 2500)):
        q, k, v = qkv(lead, 2, S, 64)
        k = k if which == "value" else layout(k)
        check(q, k, v if which == "key" else layout(v), device=device)


@pytest.mark.parametrize("layout", ANY, ids=by_name)
def test_layouts_of_queries_and_results(device, layout):
    for shape in (((2, 3), 6, 33, 64), ((1, 1), 3, 2500, 64)):
        q, k, v = qkv(*shape)
        check(layout(q), k, v, device=device)
        if layout is not read_only:
            out = layout(np.full(q.shape, -1, np.float32))
            owner = out
            while owner.base is not None:
                owner = owner.base
            guards = np.isnan(owner).sum()
            assert check(q, k, v, device=device, out=out, return_lse=False) is out
            assert np.isnan(owner).sum() == guards, "written outside of out"


def test_keys_that_are_all_the_same(device):
    """Row strides of 0, alone and together."""
    for lead, S in (((2, 1), 33), ((1, 1), 2500)):
        q, k, v = qkv(lead, 2, S, 64)
        one_key = np.broadcast_to(k[..., :1, :], k.shape)
        one_value = np.broadcast_to(v[..., :1, :], v.shape)
        check(q, one_key, v, device=device)
        check(q, k, one_value, device=device)
        check(q, one_key, one_value, device=device)


def test_rows_that_overlap(device):
    """A window that slides along: each key is the one before, moved by a few elements."""
    flat = draw((700,))
    for step in (1, 3, 16):
        k = as_strided(flat, (1, 40, 64), (0, 4 * step, 4))
        check(draw((1, 2, 64)), k, k[:, ::-1], device=device)


def test_out_may_be_an_input(device):
    """The result is as if the inputs had been read first; the values as they are with parts."""
    q, k, v = qkv((1, 1), 3, 2500, 64)
    right = sdpa(q, k, v, device=device)
    for n in range(3):
        arrays = [q.copy(), k.copy(), v.copy()]
        out = arrays[n][..., :3, :]
        assert sdpa(*arrays, device=device, out=out) is out
        np.testing.assert_array_equal(out, right)


# ---- laws that hold between two calls ----

few = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 77, 128, 200, 511, 1025, 2049])
SEEDS = st.integers(0, 1000)
ROWS = st.sampled_from([3, 5, 6])


@few
@given(seed=SEEDS, rows=ROWS, keys=LENGTHS)
def test_the_order_of_keys_does_not_matter(device, seed, rows, keys):
    q, k, v = qkv((1, 1), rows, keys, 64, seed=seed)
    mask = np.where(draw((rows, keys), seed=seed) > 1, -np.inf, draw((rows, keys), seed=seed + 1))
    mask = mask.astype(np.float32)
    near = check(q, k, v, device=device, attn_mask=mask)
    order = np.random.default_rng(seed).permutation(keys)
    moved = sdpa(q, k[..., order, :], v[..., order, :], mask[:, order], device=device)
    assert_close(moved, near, 2 * tolerance(q, k, v, attn_mask=mask)[0])


@few
@given(seed=SEEDS, rows=ROWS, keys=LENGTHS, extra=st.sampled_from([1, 16, 130, 3000]))
def test_excluded_keys_may_as_well_not_be_there(device, seed, rows, keys, extra):
    """They are full of NaN, before or behind those that count, and may make parts of the keys."""
    q, k, v = qkv((1, 1), rows, keys, 64, seed=seed)
    near, lse = sdpa(q, k, v, device=device, return_lse=True)
    allowed, allowed_lse = tolerance(q, k, v)
    garbage = np.full((1, 1, extra, 64), np.nan, np.float32)
    for parts, seen in (((garbage, None), slice(extra, None)), ((None, garbage), slice(keys))):
        longer = [np.concatenate([a if p is None else p for p in parts], axis=-2) for a in (k, v)]
        mask = np.zeros(extra + keys, bool)
        mask[seen] = True
        same, same_lse = sdpa(q, *longer, mask, device=device, return_lse=True)
        assert_close(same, near, 2 * allowed)
        assert_close(same_lse, lse, 2 * allowed_lse, "lse")


@few
@given(seed=SEEDS, rows=ROWS, keys=LENGTHS)
def test_every_row_and_head_is_on_its_own(device, seed, rows, keys):
    q, k, v = qkv((2, 3), rows, keys, 64, seed=seed)
    whole = sdpa(q, k, v, device=device)
    allowed, _ = tolerance(q, k, v)
    b, h, i = seed % 2, seed % 3, seed % rows
    alone = sdpa(q[b, h, i : i + 1], k[b, h], v[b, h], device=device)
    assert_close(alone, whole[b, h, i : i + 1], 2 * allowed)


@few
@given(seed=SEEDS, keys=LENGTHS, factor=st.sampled_from([2.0, -0.5, 0.25]))
def test_the_result_is_linear_in_the_values(device, seed, keys, factor):
    """Bit for bit where the factor is a power of two."""
    q, k, v = qkv((1, 2), 3, keys, 64, seed=seed)
    near = sdpa(q, k, v, device=device)
    scaled = sdpa(q, k, v * np.float32(factor), device=device)
    np.testing.assert_array_equal(scaled, near * np.float32(factor))


@few
@given(seed=SEEDS, keys=LENGTHS, group=st.sampled_from([1, 3, 8]), data=st.data())
def test_two_halves_merge_by_their_lse(device, seed, keys, group, data):
    """As the kernel does it with its parts."""
    q, k, v = draw((group, 1, 64), seed=seed), draw((1, keys + 1, 64)), draw((1, keys + 1, 64))
    at = data.draw(st.integers(1, keys))
    whole, lse = sdpa(q, k, v, device=device, return_lse=True)
    halves = [sdpa(q, k[:, part], v[:, part], device=device, return_lse=True)
              for part in (slice(at), slice(at, None))]  # fmt: skip
    weights = [np.exp(half_lse.astype(float64) - lse)[..., None] for _, half_lse in halves]
    merged = sum(w * half for w, (half, _) in zip(weights, halves, strict=True))
    allowed, allowed_lse = tolerance(q, k, v)
    assert np.abs(sum(weights) - 1).max() <= 2 * allowed_lse
    assert_close(whole, merged, 3 * allowed + 2 * allowed_lse * np.abs(v).max())
