# SPDX-License-Identifier: MIT
"""What the variants for few rows do besides the kernel contract: splits of the keys, their merge.

Keys are split where there are fewer work-items or work-groups than the device wants, and where
each split has enough keys: 256 KiB of them in attention_decode_cpu, 256 keys in the others. So the
shape "split" of each variant, of one head and 2500 keys, is split on every device.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references.attention import bfloat16, float16, float64, tolerance
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.designed import check_keys
from support.launches import chosen
from support.layouts import far_rows
from support.loops import looped
from support.processes import index_of, run_python
from support.random_calls import bounded
from support.sizes import WIDE
from support.variants import decode_for, each, forced, takes_cpu_kernels, with_kernels

# ---- heads that lie side by side ----

# Keys and values take more than 16 MiB, or more than 8 MiB in calls in which cores take turns.
BESIDE = {  # B, Hq, Hk, L, S, options
    "a row of each head": (1, 6, 6, 1, 4600, {}),
    "a tile of each head": (1, 12, 6, 2, 4600, {"is_causal": "lower_right"}),
    "half of the heads for each of two cores": (1, 24, 8, 1, 1700, {}),
    "several tiles, which two heads have": (2, 18, 6, 5, 2300, {"window": (2000, 0)}),
    "cores take turns": (1, 13, 13, 1, 1100, {}),
    "cores take turns at heads of batches": (3, 5, 5, 2, 1000, {}),
}


@pytest.mark.by_turns
@pytest.mark.parametrize(("B", "Hq", "Hk", "L", "S", "options"), BESIDE.values(), ids=BESIDE)
def test_heads_side_by_side(device, B, Hq, Hk, L, S, options):
    """A work-item, or several cores, read heads of a cache (B, S, H, E) in the order of memory."""
    query = draw((B, Hq, L, 80))
    key, value = (draw((B, S, Hk, 80), seed=n).swapaxes(1, 2) for n in (1, 2))
    mask = draw((B, Hq, 1, S), seed=3) > -1
    key[:, :, 7], value[:, :, 7] = np.nan, np.inf
    mask[..., 7] = mask[0, 1] = False
    check_attention(query, key, value, attn_mask=mask, enable_gqa=True, device=device, **options)


# ---- splits of the keys ----

SPLITS = {  # leading dimensions, L, S, E, Ev
    "two, small": ((1, 1), 1, 129, 512, 512),
    "the last key of a split": ((1, 1), 1, 191, 512, 512),
    "many": ((1, 1), 1, 4097, 64, 64),
    "rests": ((1, 1), 3, 3001, 33, 80),
    "two heads": ((1, 2), 1, 2500, 64, 64),
    "two batches": ((2, 1), 2, 1023, 64, 64),
    "several groups of rows": ((1, 1), 40, 1025, 64, 64),
    "no dimension in front": ((), 8, 1024, 64, 64),
}


@looped("shape", SPLITS.values(), ids=SPLITS)
@with_kernels("decode_cpu", tensors=True)
def test_sizes_of_splits(device, variant, shape):
    arrays = qkv(*shape)
    for options in ({}, {"is_causal": "lower_right"}):
        check_attention(*arrays, device=device, **options)


@pytest.mark.full
@pytest.mark.parametrize("B", [1, 3])
@with_kernels("decode_gpu", "decode_mma")
def test_splits(device, variant, B):
    """Sixteen, eight and two of them on two compute units, and their rests."""
    _, Hq, Hk, L, _ = variant.shapes["split"]
    for S in (511, 512, 1023, 4097):
        check_keys(variant, (B, B * Hq, B * Hk), L, S, device=device)
        arrays = variant.arrays((B, B * Hq, B * Hk, L, S))
        for options in ({}, {"is_causal": "lower_right"}, {"window": (S - 100, 10)}):
            variant.check(*arrays, device=device, **options)


@pytest.mark.by_turns
@pytest.mark.parametrize("dtype", [float64, float16, bfloat16], ids=str)
@with_kernels("decode_cpu")
def test_splits_in_every_dtype(device, variant, dtype):
    for heads, L, S in (((1, 1, 1), 1, 5000), ((2, 1, 1), 2, 1023), ((1, 2, 1), 3, 3001)):
        check_keys(variant, heads, L, S, device=device, dtype=dtype)
    check_attention(*qkv((1, 1), 1, 5000, 64, dtype=dtype), device=device)
    if dtype == float16:
        q, k, v = qkv((1, 1), 4, 5001, 33, 48, dtype=float16)
        check_attention(q, far_rows(k), v, device=device)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"window": (900, 10)}, {"is_causal": "lower_right"}],
                         ids=str)  # fmt: skip
@each({"decode_cpu": [1, 4], "decode_gpu": [1]}, "group")
def test_splits_do_not_show(device, variant, group, options):
    """The same result as without splits, to the rounding of both.

    There are no splits where many batches have the same queries and keys.
    """
    q, k, v = variant.arrays((1, 2 * group, 2, 2, 2049))
    allowed, allowed_lse = tolerance(q, k, v, enable_gqa=True, **options)
    result, lse = variant.call(q, k, v, device=device, **options)
    many = [np.repeat(a, 8 * device.compute_units, axis=0) for a in (q, k, v)]
    whole, whole_lse = variant.call(*many, device=device, **options)
    for n in range(len(whole)):
        assert_close(result[0], whole[n], 2 * allowed[0])
        assert_close(lse[0], whole_lse[n], 2 * allowed_lse[0], "lse")


@with_kernels("decode_cpu")
def test_threads(device, variant):
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


# ---- laws that hold between two calls ----

few = settings(
    bounded,
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 77, 128, 200, 511, 1025, 2049])
SEEDS = st.integers(0, 1000)
ROWS = st.sampled_from([3, 5, 6])
with_decode_cpu = with_kernels("decode_cpu", tensors=True)


@with_decode_cpu
@few
@given(seed=SEEDS, rows=ROWS, keys=LENGTHS)
def test_the_order_of_keys_does_not_matter(device, variant, seed, rows, keys):
    q, k, v = qkv((1, 1), rows, keys, 64, seed=seed)
    mask = np.where(draw((rows, keys), seed=seed) > 1, -np.inf, draw((rows, keys), seed=seed + 1))
    mask = mask.astype(np.float32)
    near = check_attention(q, k, v, device=device, attn_mask=mask)
    order = np.random.default_rng(seed).permutation(keys)
    moved = sdpa(q, k[..., order, :], v[..., order, :], mask[:, order], device=device)
    assert_close(moved, near, 2 * tolerance(q, k, v, attn_mask=mask)[0])


@with_decode_cpu
@few
@given(seed=SEEDS, rows=ROWS, keys=LENGTHS, extra=st.sampled_from([1, 16, 130, 3000]))
def test_excluded_keys_may_as_well_not_be_there(device, variant, seed, rows, keys, extra):
    """They are full of NaN, before or behind those that count, and may make splits of the keys."""
    q, k, v = qkv((1, 1), rows, keys, 64, seed=seed)
    near, lse = sdpa(q, k, v, device=device, return_lse=True)
    allowed, allowed_lse = tolerance(q, k, v)
    garbage = np.full((1, 1, extra, 64), np.nan, np.float32)
    for lengths, seen in (((garbage, None), slice(extra, None)), ((None, garbage), slice(keys))):
        longer = [np.concatenate([a if p is None else p for p in lengths], -2) for a in (k, v)]
        mask = np.zeros(extra + keys, bool)
        mask[seen] = True
        same, same_lse = sdpa(q, *longer, mask, device=device, return_lse=True)
        assert_close(same, near, 2 * allowed)
        assert_close(same_lse, lse, 2 * allowed_lse, "lse")


@with_decode_cpu
@few
@given(seed=SEEDS, rows=ROWS, keys=LENGTHS)
def test_every_row_and_head_is_on_its_own(device, variant, seed, rows, keys):
    q, k, v = qkv((2, 3), rows, keys, 64, seed=seed)
    whole = sdpa(q, k, v, device=device)
    allowed, _ = tolerance(q, k, v)
    b, h, i = seed % 2, seed % 3, seed % rows
    alone = sdpa(q[b, h, i : i + 1], k[b, h], v[b, h], device=device)
    assert_close(alone, whole[b, h, i : i + 1], 2 * allowed[b, h, i : i + 1])


@with_decode_cpu
@few
@given(seed=SEEDS, keys=LENGTHS, factor=st.sampled_from([2.0, -0.5, 0.25]))
def test_the_result_is_linear_in_the_values(device, variant, seed, keys, factor):
    """Bit for bit where the factor is a power of two."""
    q, k, v = qkv((1, 2), 3, keys, 64, seed=seed)
    near = sdpa(q, k, v, device=device)
    scaled = sdpa(q, k, v * np.float32(factor), device=device)
    np.testing.assert_array_equal(scaled, near * np.float32(factor))


@with_decode_cpu
@few
@given(seed=SEEDS, keys=LENGTHS, group=st.sampled_from([1, 3, 8]), data=st.data())
def test_two_halves_merge_by_their_lse(device, variant, seed, keys, group, data):
    """As the kernel merges its splits."""
    q, k, v = draw((group, 1, 64), seed=seed), draw((1, keys + 1, 64)), draw((1, keys + 1, 64))
    at = data.draw(st.integers(1, keys))
    whole, lse = sdpa(q, k, v, device=device, return_lse=True)
    halves = [sdpa(q, k[:, half], v[:, half], device=device, return_lse=True)
              for half in (slice(at), slice(at, None))]  # fmt: skip
    weights = [np.exp(half_lse.astype(float64) - lse)[..., None] for _, half_lse in halves]
    merged = sum(w * half for w, (half, _) in zip(weights, halves, strict=True))
    allowed, allowed_lse = tolerance(q, k, v)
    assert (np.abs(sum(weights)[..., 0] - 1) <= 2 * allowed_lse).all()
    assert_close(whole, merged, 3 * allowed + 2 * allowed_lse[..., None] * np.abs(v).max())


# ---- where memory is copied ----

COPIED = """
import sys
import clattn, numpy as np
from support.forced import FORCED
from support.checks import check_attention
from support.data import draw, qkv
from support.onnx_calls import check_onnx
from support.onnx_calls import cache, inputs
device = clattn.devices()[int(sys.argv[1])]
assert device.memory_mode == "copy"
"""


@pytest.mark.full
@each({"decode_cpu": [(64, 3000)], "decode_gpu": [(32, 2500)]}, "sizes")
def test_splits_where_memory_is_copied(device, variant, sizes):
    """Two kernels run, one after the other: neither takes back what the other has written.

    Inputs that overlap share a copy, which may start where keys and values, aligned in the host's
    memory, no longer are.
    """
    run_python(
        COPIED
        + """
E, P = int(sys.argv[2]), int(sys.argv[3])
options = {"B": 1, "E": E, "Ev": E}
args = *inputs(1, 1, (1, 1), **options), None, *cache(P, 1, **options)
check_onnx(*args, device=device)
check_onnx(*args, device=device, left_window_size=2000)
out = np.full((1, 1, 2, 2 * E + 2), 7, np.float32)
check_attention(*qkv((1, 1), 2, 2500, E), device=device, out=out[..., 1:-1:2])
assert (out[..., ::2] == 7).all()
for S in (77, 2500):
    packed = draw((S, 3 * E + 4))
    assert packed.ctypes.data % 16 == 0
    arrays = packed[:2, 1 : E + 1], packed[:, E + 4 : 2 * E + 4], packed[:, 2 * E + 4 :]
    check_attention(*arrays, device=device)
""",
        index_of(device),
        *sizes,
        env={"CLATTN_MEMORY": "copy"} | forced(variant.kernel),
    )


@with_kernels("decode_mma")
def test_keys_that_a_copy_moves(device, variant):
    """Keys and values are not aligned in the copy: the variant refuses them, another takes them."""
    run_python(
        COPIED
        + """
for S in (77, 2500):
    FORCED.words = ("decode_mma", "")
    packed = draw((S, 136 + 72), np.dtype(np.float16))
    assert packed.ctypes.data % 16 == 0
    arrays = packed[:2, 1:65], packed[:, 72:136], packed[:, 144:]
    check_attention(*(a.copy() for a in arrays), device=device)
    try:
        check_attention(*arrays, device=device)
    except ValueError as error:
        assert "whole aligned 16 bytes" in str(error), error
    else:
        sys.exit("no error")
    FORCED.words = ("", "")
    check_attention(*arrays, device=device)
""",
        index_of(device),
        env={"CLATTN_MEMORY": "copy"},
    )


# ---- which kernel runs ----


@looped("L", [1, 2, 8])
def test_few_rows_take_the_kernel_of_the_device(device, L):
    assert chosen(None, sdpa, *qkv((2, 4), L, 1000, WIDE), device=device) == decode_for(device)


def test_more_rows_do_not(device):
    if not takes_cpu_kernels(device):
        pytest.skip("attention_decode_cpu is for CPUs")
    assert chosen(None, sdpa, *qkv((2, 4), 9, 1000, WIDE), device=device) == "cpu"


def test_emulated_matrix_units_are_not_chosen(device):
    if not takes_cpu_kernels(device):
        pytest.skip("the device may have matrix units")
    arrays = draw((1, 8, 1, 64), float16), *(draw((1, 8, 900, 64), float16, n) for n in (1, 2))
    assert chosen(None, sdpa, *arrays, device=device) == decode_for(device)
    assert chosen("decode_mma", sdpa, *arrays, device=device) == "decode_mma"
