# SPDX-License-Identifier: MIT
"""Random cases against the reference, and laws that hold between two calls.

Head sizes and kinds of mask come from a short list: each combination is a program to build.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references.attention import bfloat16, float32, tolerance
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.random_calls import BOUNDS, bounded, examples, relay, shrink
from support.sizes import SMALL, WIDE
from support.variants import force

pytestmark = pytest.mark.tensors


LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 65, 77, 96, 97, 113, 193])


@st.composite
def problems(draw_from):
    """(arrays, options) of a call that is right."""
    dtype = draw_from(st.sampled_from([float32, float32, bfloat16]))
    seed = draw_from(st.integers(0, 1000))
    L, S = draw_from(LENGTHS), draw_from(LENGTHS)
    batch = tuple(draw_from(st.lists(st.integers(1, 3), max_size=2)))
    heads, group = draw_from(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4)]))
    options = {"enable_gqa": group > 1 or draw_from(st.booleans())}
    kind = draw_from(st.sampled_from(["none", "bool", "float"]))
    width = draw_from(st.sampled_from([SMALL, WIDE])) if kind == "none" else SMALL
    q = draw((*batch, heads * group, L, width), dtype, seed)
    lead = shrink(draw_from, batch)
    k = draw((*lead, heads, S, width), dtype, seed + 1)
    v = draw((*shrink(draw_from, batch), heads, S, width), dtype, seed + 2)
    if kind != "none":
        mask = draw(shrink(draw_from, (*batch, heads * group, L, S)) or (1,), seed=seed + 3)
        mask = mask > -0.5 if kind == "bool" else np.where(mask > 1, -np.inf, mask)
        options["attn_mask"] = relay(draw_from, mask)
    options["is_causal"] = draw_from(st.sampled_from([False, True, "lower_right"]))
    if draw_from(st.booleans()):
        options["window"] = (draw_from(BOUNDS), draw_from(BOUNDS))
    if draw_from(st.booleans()):
        options["scale"] = draw_from(st.floats(-1, 1, width=32))
    return tuple(relay(draw_from, a) for a in (q, k, v)), options


@bounded
@given(problem=problems())
def test_random_problems(device, problem):
    arrays, options = problem
    check_attention(*arrays, device=device, **options)


@bounded
@given(problem=problems())
def test_random_problems_of_the_reference_kernel(device, problem):
    arrays, options = problem
    with pytest.MonkeyPatch.context() as patch:
        force(patch, "reference")
        check_attention(*arrays, device=device, **options)


few = examples(15)
seeds = st.integers(0, 1000)


@few
@given(seed=seeds)
def test_the_order_of_keys_does_not_matter(device, seed):
    """Permute keys, values and the mask's columns alike."""
    q, k, v = qkv((1, 2), 17, 77, 8, seed=seed)
    mask = np.where(draw((17, 77), seed=seed + 1) > 1, -np.inf, draw((17, 77), seed=seed + 2))
    mask = mask.astype(np.float32)
    order = np.random.default_rng(seed).permutation(77)
    near, allowed = check_attention(q, k, v, device=device, attn_mask=mask), tolerance(q, k, v)[0]
    moved = sdpa(q, k[..., order, :], v[..., order, :], mask[:, order], device=device)
    assert_close(moved, near, 2 * allowed)


@few
@given(seed=seeds, split=st.integers(1, 76))
def test_two_halves_merge_by_their_lse(device, seed, split):
    """The result over all keys is the mean of two partial results, weighted by exp(lse)."""
    q, k, v = qkv((1, 2), 17, 77, 8, seed=seed)
    whole, lse = sdpa(q, k, v, device=device, return_lse=True)
    parts = [
        sdpa(q, k[..., part, :], v[..., part, :], device=device, return_lse=True)
        for part in (slice(None, split), slice(split, None))
    ]
    weights = [np.exp(part_lse - lse)[..., None] for _, part_lse in parts]
    merged = sum(weight * part for weight, (part, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(sum(weights), 1, rtol=0, atol=4e-6)
    np.testing.assert_allclose(merged, whole, rtol=0, atol=1e-5)


@few
@given(seed=seeds, shift=st.integers(-64, 64))
def test_a_bias_that_all_keys_share_changes_the_lse_alone(device, seed, shift):
    q, k, v = qkv((1, 2), 17, 33, 8, seed=seed)
    bias = np.full((17, 33), shift, np.float32)
    near, lse = sdpa(q, k, v, device=device, return_lse=True)
    moved, moved_lse = sdpa(q, k, v, bias, device=device, return_lse=True)
    np.testing.assert_allclose(moved, near, rtol=0, atol=1e-4)  # scores of 64 have eps 8e-6
    np.testing.assert_allclose(moved_lse - shift, lse, rtol=0, atol=1e-4)


@few
@given(seed=seeds, factor=st.sampled_from([2.0, -0.5, 0.25]))
def test_the_result_is_linear_in_the_values(device, seed, factor):
    """Bit for bit where the factor is a power of two."""
    q, k, v = qkv((1, 2), 17, 33, 8, seed=seed)
    near = sdpa(q, k, v, device=device, is_causal=True)
    scaled = sdpa(q, k, v * np.float32(factor), device=device, is_causal=True)
    np.testing.assert_array_equal(scaled, near * np.float32(factor))


@few
@given(seed=seeds, causal=st.sampled_from([False, True, "lower_right"]), left=BOUNDS, right=BOUNDS)
def test_a_band_is_a_mask(device, seed, causal, left, right):
    """Causality and windows say what a bool mask, or one of 0 and -inf, says too."""
    q, k, v = qkv((1, 2), 33, 65, 8, seed=seed)
    p = np.arange(33)[:, None] + (32 if causal == "lower_right" else 0)
    j = np.arange(65)[None, :]
    seen = (j >= p - (left if left is not None else 99)) & (
        j <= p + (right if right is not None else 99)
    )
    if causal:
        seen &= j <= p
    band = check_attention(q, k, v, device=device, is_causal=causal, window=(left, right))
    allowed, _ = tolerance(q, k, v, is_causal=causal, window=(left, right))
    bias = np.where(seen, 0, -np.inf).astype(np.float32)
    for mask in (seen, bias):
        assert_close(sdpa(q, k, v, mask, device=device), band, 2 * allowed)


@few
@given(seed=seeds, extra=st.integers(1, 130))
def test_excluded_keys_may_as_well_not_be_there(device, seed, extra):
    """Append keys full of NaN that a mask excludes."""
    q, k, v = qkv((1, 2), 17, 33, 8, seed=seed)
    garbage = np.full((1, 2, extra, 8), np.nan, np.float32)
    longer = [np.concatenate([a, garbage], axis=-2) for a in (k, v)]
    near = check_attention(q, k, v, device=device)
    same = sdpa(q, *longer, np.arange(33 + extra) < 33, device=device)
    np.testing.assert_allclose(same, near, rtol=0, atol=1e-6)


@few
@given(seed=seeds, batch=st.integers(0, 2), head=st.integers(0, 3))
def test_batches_and_heads_are_independent(device, seed, batch, head):
    q, k, v = qkv((3, 4), 17, 33, 8, seed=seed)
    whole = sdpa(q, k, v, device=device, is_causal=True)
    alone = sdpa(q[batch, head], k[batch, head], v[batch, head], device=device, is_causal=True)
    np.testing.assert_allclose(whole[batch, head], alone, rtol=0, atol=1e-6)


@few
@given(seed=seeds, first=st.integers(0, 96), count=st.integers(1, 97))
def test_rows_are_independent(device, seed, first, count):
    """A slice of the queries gives that slice of the result, causal ones by a window mask."""
    q, k, v = qkv((1, 2), 97, 33, 8, seed=seed)
    rows = slice(first, first + count)
    whole = sdpa(q, k, v, device=device)
    np.testing.assert_allclose(
        sdpa(q[..., rows, :], k, v, device=device), whole[..., rows, :], rtol=0, atol=1e-6
    )


@few
@given(seed=seeds)
def test_the_result_is_within_the_values(device, seed):
    """A weighted mean lies between the smallest and the largest, to rounding; constants stay."""
    q, k, v = qkv((1, 2), 17, 97, 8, seed=seed)
    result = sdpa(q, k, v, device=device, is_causal=True, scale=1.5)
    slack = 1e-6
    assert (result <= v.max(axis=-2, keepdims=True) + slack).all()
    assert (result >= v.min(axis=-2, keepdims=True) - slack).all()
    ones = sdpa(q, k, np.ones_like(v), device=device, is_causal=True, scale=1.5)
    np.testing.assert_allclose(ones, 1, rtol=0, atol=slack)
