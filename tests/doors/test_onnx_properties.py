# SPDX-License-Identifier: MIT
"""clattn.onnx.attention: keys that must not matter, special numbers, random calls, laws."""

import clattn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references.attention import bfloat16, compute_dtype, eps, float16, float32, float64
from references.onnx import attention, tolerances
from support.checks import assert_close
from support.data import draw
from support.loops import looped, looped_dtypes
from support.onnx_calls import HK, HQ, B, E, cache, check_onnx, flat, inputs, mask_of
from support.random_calls import bounded, examples, relay, shrink
from support.variants import force

pytestmark = pytest.mark.tensors

L, S, P = 17, 33, 13
LENGTHS = np.array([20, 29])
SEEN = mask_of(np.dtype(bool), (L, S + P), seed=3)
MINUS = np.where(SEEN, 0, -np.inf).astype(np.float32)
WINDOW = {"left_window_size": 4, "right_window_size": 2}
EXCLUSIONS = {  # what excludes keys: a mask, whether there is a past, lengths, options
    "bool mask": (SEEN[:, P:], False, None, {}),
    "bool mask over a past": (SEEN, True, None, {}),
    "bool mask of keys": (SEEN[3], True, None, {}),
    "minus infinity": (MINUS[:, P:], False, None, {}),
    "minus infinity in half": (MINUS[:, P:].astype(np.float16), False, None, {}),
    "short bool mask": (SEEN[:, :16], False, None, {}),
    "short float mask": (MINUS[:1, :20], True, None, {}),
    "short integers": (np.zeros((L, 16), np.int8), False, None, {}),
    "causal": (None, False, None, {"is_causal": 1}),
    "causal with a past": (None, True, None, {"is_causal": 1}),
    "window with a past": (None, True, None, WINDOW),
    "window": (None, False, None, WINDOW),
    "lengths": (None, False, LENGTHS, {}),
    "lengths and causal": (None, False, LENGTHS, {"is_causal": 1}),
    "lengths and window": (None, False, LENGTHS, WINDOW),
    "everything": (SEEN[:, P:], False, LENGTHS, WINDOW | {"is_causal": 1, "softcap": 2.0}),
    "first published": (SEEN[:, P:], False, LENGTHS,
                        {"is_causal": 1, "opset": 24, "pre_errata": True}),
}  # fmt: skip
IN_THE_CHOSEN_KERNEL = ("bool mask", "minus infinity", "causal", "window with a past", "lengths")


def problem(mask, with_past, lengths, dtype=float32):
    """Arguments of a call."""
    past = cache(P, dtype=dtype) if with_past else (None, None)
    return [*inputs(L, S, dtype=dtype), mask, *past, lengths]


def poisoned(args, unseen, garbage):
    """The same call with `garbage` in the keys and values that (B, Hk, T) `unseen` names."""
    Q, K, V, mask, pk, pv, lengths = args
    past = 0 if pk is None else pk.shape[2]
    new = [np.where(unseen[..., past:, None], a.dtype.type(garbage), a) for a in (K, V)]
    old = [None, None]
    if past:
        old = [np.where(unseen[..., :past, None], a.dtype.type(garbage), a) for a in (pk, pv)]
    return [Q, *new, mask, *old, lengths]


def unseen_by(row, args, options):
    """The keys (B, Hk, T) whose weights in that row are 0 for all heads of a group."""
    weights = attention(*args, **options, qk_matmul_output_mode=3).qk_matmul_output[:, :, row]
    return (weights.reshape(B, HK, HQ // HK, -1) == 0).all(axis=2)


def check_poison(device, case, garbage, dtype=float32):
    """The values of keys that row 9 does not see leave row 9 unchanged.

    The rows that see one show it: those are compared with values alone poisoned, since garbage in
    a key may make a score that is no number where the order of sums decides.
    """
    mask, with_past, lengths, options = case
    args = problem(mask, with_past, lengths, dtype)
    right, allowed = attention(*args, **options), tolerances(*args, **options)
    unseen = unseen_by(9, args, options)
    assert unseen.any(), "nothing is excluded"
    bad = poisoned(args, unseen, garbage)
    got = clattn.onnx.attention(*bad, **options, device=device)
    assert_close(got.Y[:, :, 9], right.Y[:, :, 9], allowed.Y.each[:, :, 9])
    if not np.isfinite(garbage):
        bad[1], bad[4] = args[1], args[4]
        check_onnx(*bad, **options, device=device)


@looped("garbage", [np.nan, np.inf, 3e38], ids=str)
@looped("name", EXCLUSIONS)
def test_an_excluded_key_does_not_matter(device, reference_kernel, name, garbage):
    check_poison(device, EXCLUSIONS[name], garbage)


@looped("garbage", [np.nan, -np.inf], ids=str)
@looped("name", IN_THE_CHOSEN_KERNEL)
def test_nor_in_the_kernel_that_clattn_chooses(device, name, garbage):
    check_poison(device, EXCLUSIONS[name], garbage)


@looped_dtypes("dtype", [float16, bfloat16, float64])
def test_nor_in_any_other_type(device, reference_kernel, dtype):
    check_poison(device, EXCLUSIONS["lengths"], np.nan, dtype)


def test_the_rest_of_a_cache_may_be_anything(device, kernel):
    """An external cache holds NaN everywhere beyond its length."""
    Q, K, V = inputs(5, 40)
    lengths = np.array([7, 33])
    beyond = np.broadcast_to(np.arange(40) >= lengths[:, None, None], (B, HK, 40))
    args = [Q, K, V, None, None, None, lengths]
    got = clattn.onnx.attention(*poisoned(args, beyond, np.nan), is_causal=1, device=device)
    right, allowed = attention(*args, is_causal=1), tolerances(*args, is_causal=1)
    assert_close(got.Y, right.Y, allowed.Y)


def test_rows_without_a_key_are_zero(device, kernel):
    """Such rows are zero even if their query is NaN and the values of excluded keys infinite."""
    Q, K, V = inputs()
    Q[0, 0, 3] = np.nan
    V[:, :, 5] = np.inf
    seen = np.arange(S) != 5
    mask = np.broadcast_to(seen, (L, S)).copy()
    mask[::3] = False
    for masked in (mask, np.where(mask, 0, -np.inf).astype(np.float32)):
        got = check_onnx(Q, K, V, masked, device=device)
        assert not got.Y[:, :, ::3].any() and np.isfinite(got.Y).all()


def test_nan_stays_where_it_is_attended(device, kernel):
    """A NaN in a query in its row; in a key or a value in every row that sees it."""
    for name, place in (("Q", (0, 1, 5, 3)), ("K", (0, 0, 9, 2)), ("V", (1, 1, 9, 2))):
        arrays = dict(zip("QKV", inputs(), strict=True))
        arrays[name][place] = np.nan
        got = check_onnx(*arrays.values(), device=device, is_causal=1).Y
        expected = {"Q": E, "K": 2 * (L - 9) * E, "V": 2 * (L - 9)}[name]
        assert np.isnan(got).sum() == expected


def test_nan_in_a_mask_stays_unless_its_key_is_excluded(device, reference_kernel):
    mask = draw((L, L))
    mask[np.triu_indices(L, 1)] = np.nan
    assert np.isfinite(check_onnx(*inputs(L, L), mask, device=device, is_causal=1).Y).all()
    mask[5, 3] = np.nan
    got = check_onnx(*inputs(L, L), mask, device=device, is_causal=1).Y
    assert np.isnan(got[:, :, 5]).all() and np.isnan(got).sum() == B * HQ * E


def problems(kinds):
    """(arguments, options) of a call that is right.

    A kind is (type of mask, causal, window, whether there may be lengths): a program to build.
    """

    @st.composite
    def make(draw_from):
        kind, is_causal, window, may_end = draw_from(st.sampled_from(kinds))
        batch, hk = draw_from(st.integers(1, 3)), draw_from(st.integers(1, 3))
        heads = (hk * draw_from(st.integers(1, 3)), hk)
        lengths = st.sampled_from([0, 1, 2, 7, 15, 16, 17, 31, 33, 64, 97])
        rows, keys = draw_from(lengths), draw_from(lengths)
        seed = draw_from(st.integers(0, 1000))
        arrays = list(inputs(rows, keys, heads, B=batch, seed=seed))
        held = draw_from(st.sampled_from(["nothing", "past", "lengths"][: 2 + may_end]))
        past = draw_from(lengths) if held == "past" else 0
        opset = 25 if window else draw_from(st.integers(24, 25))
        options = {"is_causal": is_causal, "opset": opset}
        if window:
            for side in ("left_window_size", "right_window_size"):
                options[side] = draw_from(st.integers(-1, 40))
        nonpad, mask, shortest = None, None, 0
        if held == "lengths":
            nonpad = np.array([draw_from(st.integers(0, keys)) for _ in range(batch)])
            shortest = nonpad.max()
        if kind:
            full = (batch, heads[0], rows, draw_from(st.integers(shortest, keys + past)))
            lead = shrink(draw_from, full)[:-1] if full[-1] else ()
            mask = relay(draw_from, mask_of(np.dtype(kind), (*lead, full[-1]), seed))
        rest = [mask, *(cache(past, hk, B=batch) if held == "past" else (None, None)), nonpad]
        if draw_from(st.booleans()):
            arrays, counts = flat(arrays, heads)
            options |= counts
        rest[1:3] = (None if a is None else relay(draw_from, a) for a in rest[1:3])
        return [*(relay(draw_from, a) for a in arrays), *rest], options

    return make()


CHEAP = [(None, 0, False, True), (None, 1, False, True), (bool, 0, False, False),
         ("f4", 0, False, False), (None, 0, True, False)]  # fmt: skip
TOGETHER = [*CHEAP, (bool, 1, False, True), ("f4", 1, True, True)]


@bounded
@given(call=problems(CHEAP))
def test_random_calls(device, call):
    args, options = call
    check_onnx(*args, device=device, **options)


@bounded
@given(call=problems(TOGETHER))
def test_random_calls_of_the_reference_kernel(device, call):
    args, options = call
    with pytest.MonkeyPatch.context() as patch:
        force(patch, "reference")
        check_onnx(*args, device=device, **options)


few = examples(15)


@few
@given(seed=st.integers(0, 1000), split=st.integers(0, 40))
def test_a_past_is_keys_that_came_before(device, seed, split):
    """Keys split into past and new keys give the same answer as all keys at once."""
    Q, K, V = inputs(7, 40, seed=seed)
    parts = (Q, K[:, :, split:], V[:, :, split:], None, K[:, :, :split], V[:, :, :split])
    got = clattn.onnx.attention(*parts, device=device)
    np.testing.assert_array_equal(got.present_key, K)
    np.testing.assert_array_equal(got.present_value, V)
    whole = clattn.onnx.attention(Q, K, V, device=device).Y
    assert_close(got.Y, whole, 2 * tolerances(Q, K, V).Y.each)


@few
@given(seed=st.integers(0, 1000), past=st.integers(0, 33))
def test_a_cache_inside_is_a_cache_outside(device, seed, past):
    """Causal queries behind `past` keys: offset P, and n - L with a full cache, are the same."""
    Q, K, V = inputs(40 - past, 40, seed=seed)
    parts = (Q, K[:, :, past:], V[:, :, past:], None, K[:, :, :past], V[:, :, :past])
    inside = clattn.onnx.attention(*parts, is_causal=1, device=device).Y
    args = (Q, K, V, None, None, None, np.full(B, 40))
    outside = clattn.onnx.attention(*args, is_causal=1, device=device).Y
    assert_close(inside, outside, 2 * tolerances(*args, is_causal=1).Y.each)


@looped_dtypes("dtype", [float32, float16, float64])
def test_a_row_of_finfo_min_is_the_mean(device, reference_kernel, dtype):
    """finfo.min is not -inf: it absorbs every score of its row, so all weights are equal."""
    lowest = np.finfo(compute_dtype(dtype)).min
    mask = np.zeros((L, S), compute_dtype(dtype))
    mask[3], mask[5, 10:], mask[7, :-1] = lowest, lowest, lowest
    got = check_onnx(*inputs(dtype=dtype, heads=(2, 2)), mask, device=device)
    mean = inputs(dtype=dtype, heads=(2, 2))[2].astype(np.float64).mean(axis=2)
    assert np.abs(got.Y[:, :, 3].astype(np.float64) - mean).max() < 2 * eps(dtype)
