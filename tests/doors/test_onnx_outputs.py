# SPDX-License-Identifier: MIT
"""clattn.onnx.attention: what comes out beside Y, and the operator as first published.

qk_matmul_output in its four modes, the present keys and values, and `pre_errata=True`, all
against the oracle in references/onnx.py. The fourth output runs with the reference kernel mostly:
each combination of mode and option is a program to build.
"""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16, eps, float16, float32, float64
from references.onnx import softmax, tolerances
from support.checks import assert_close
from support.data import draw
from support.loops import looped
from support.onnx_calls import HK, HQ, B, E, L, P, S, cache, check_onnx, flat, inputs, mask_of

pytestmark = [pytest.mark.tensors, pytest.mark.usefixtures("reference_kernel")]

LENGTHS = np.array([20, 33])
FLOAT_MASK, BOOL_MASK = mask_of(float32, (L, S)), mask_of(np.dtype(bool), (L, S))
SEEN = BOOL_MASK.copy()
SEEN[::4] = False  # rows that see nothing
WINDOW = {"left_window_size": 9, "right_window_size": 3}
MODES = looped("mode", range(4), ids="mode{}".format)


def qk(*args, mode, **options):
    options |= {"qk_matmul_output_mode": mode, "return_qk": True}
    return check_onnx(*args, **options).qk_matmul_output


CORRECTED = {  # mask, whether there is a past, lengths, options
    "float mask and softcap": (FLOAT_MASK * 3, False, None, {"softcap": 0.7}),
    "causal with a past": (None, True, None, {"is_causal": 1}),
    "causal with lengths and mask": (SEEN, False, LENGTHS, {"is_causal": 1}),
}
FIRST = {
    "float mask and softcap": (FLOAT_MASK * 3, False, None, {"softcap": 0.7}),
    "causal with a past": (None, True, None, {"is_causal": 1}),
    "causal, softcap, bool mask": (SEEN, False, None, {"is_causal": 1, "softcap": 0.7}),
}


def arguments(case):
    mask, with_past, lengths, options = case
    args = [*inputs(), mask, *(cache() if with_past else (None, None)), lengths]
    return args, dict(options)


@MODES
@looped("case", CORRECTED.values(), ids=CORRECTED)
def test_qk_matmul_output(device, case, mode):
    """0 scaled, never capped; 1 capped; 2 capped and masked; 3 the weights."""
    args, options = arguments(case)
    got = qk(*args, device=device, mode=mode, **options)
    assert got.shape == (B, HQ, L, S + (P if case[1] else 0))
    if mode < 2:
        assert np.isfinite(got).all(), "masks come later"
    if mode == 3 and case[0] is SEEN:
        assert not got[:, :, ::4].any()


@MODES
@looped("case", FIRST.values(), ids=FIRST)
def test_qk_matmul_output_as_first_published(device, case, mode):
    """0 scaled; 1 masked; 2 capped after that, so that -inf is -softcap; 3 the weights."""
    args, options = arguments(case)
    got = qk(*args, device=device, mode=mode, opset=24, pre_errata=True, **options)
    if mode == 2 and options.get("softcap"):
        assert np.isfinite(got).all() and got.min() == -np.float32(0.7)


@looped("mode", [2, 3])
def test_qk_matmul_output_under_a_window(device, mode):
    """With a past and a mask that is short; modes 0 and 1 know no windows."""
    args = (*inputs(), FLOAT_MASK, *cache())
    got = qk(*args, device=device, mode=mode, **WINDOW)
    excluded = 0 if mode == 3 else -np.inf
    assert (got[..., 0, P + 4 :] == excluded).all() and (got[..., 10, :P] == excluded).all()


@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize("dtype", [float16, bfloat16, float64], ids=str)
def test_qk_matmul_output_has_the_type_of_the_query(device, dtype, mode):
    """Rounded to T1 at the end, weights included; V may be of another type."""
    args = inputs(dtype=dtype, v_dtype=float32, Ev=5)
    assert qk(*args, BOOL_MASK, device=device, mode=mode).dtype == dtype


def test_scores_beyond_float16_are_infinite_there(device):
    """The output is rounded to T1; the softmax before it knows them."""
    Q, K, V = inputs(dtype=float16)
    Q, K = np.abs(Q) * 100, np.abs(K) * 100
    K[:, :, ::2] = -K[:, :, ::2]
    got = qk(Q, K, V, device=device, mode=0, scale=4.0)
    assert np.isposinf(got).any() and np.isneginf(got).any() and np.isfinite(got).any()


@MODES
@looped("rank", [3, 4])
def test_qk_matmul_output_has_four_dimensions(device, rank, mode):
    """For three-dimensional inputs too; query heads have rows of their own."""
    args, options = flat(inputs()) if rank == 3 else (inputs(), {})
    assert qk(*args, device=device, mode=mode, **options).shape == (B, HQ, L, S)


@MODES
def test_qk_matmul_output_of_every_length(device, mode):
    """Lengths that fill tiles and that do not; no keys and no rows."""
    for rows, keys in ((1, 200), (40, 13), (33, 1), (17, 0), (0, 17), (16, 16)):
        got = qk(*inputs(rows, keys), device=device, mode=mode)
        assert got.shape == (B, HQ, rows, keys)


def test_scores_of_keys_beyond_the_length_are_there(device):
    """Modes 0 and 1 know no masks: whole blocks that Y does not need hold scores nevertheless."""
    lengths = np.array([3, 0])
    for mode in (0, 1):
        args = (*inputs(17, 200), np.arange(200) < 20, None, None, lengths)
        assert qk(*args, device=device, mode=mode, is_causal=1).all()


def test_without_return_qk_there_is_none(device, kernel):
    """Plain and causal."""
    for options in ({}, {"is_causal": 1}):
        assert check_onnx(*inputs(), device=device, **options).qk_matmul_output is None
    check_onnx(*inputs(), qk_matmul_output_mode=3, return_qk=True, device=device)


@looped("place", ["K", "V"])
def test_excluded_keys_do_not_matter_to_modes_2_and_3(device, place):
    """Excluded keys are -inf in mode 2 and 0 in mode 3, even if their score is NaN."""
    Q, K, V = inputs()
    seen = np.arange(S) % 5 != 2
    (K if place == "K" else V)[:, :, ~seen] = np.nan
    for mask in (seen, np.where(seen, 0, -np.inf).astype(np.float32)):
        masked = qk(Q, K, V, mask, device=device, mode=2)
        assert np.isneginf(masked[..., ~seen]).all() and np.isfinite(masked[..., seen]).all()
        weights = qk(Q, K, V, mask, device=device, mode=3)
        assert not weights[..., ~seen].any() and weights[..., seen].all()


def test_weights_add_up_to_1_or_0(device):
    """The weights of mode 3 add up to 1, or to 0 in rows that see no key."""
    got = qk(*inputs(), SEEN, device=device, mode=3)
    sums = got.astype(np.float64).sum(axis=-1)
    assert np.abs(sums[:, :, SEEN.any(axis=1)] - 1).max() < S * eps(float32)
    assert not sums[:, :, ~SEEN.any(axis=1)].any()


@pytest.mark.parametrize("types", [(float32, 11), (float16, 11), (bfloat16, 1), (float64, 1)],
                         ids=str)  # fmt: skip
def test_softmax_precision_of_mode_3(device, types):
    """Rounded to T1 whatever the precision of the softmax."""
    dtype, precision = types
    args = (*inputs(dtype=dtype, v_dtype=float32), BOOL_MASK)
    assert qk(*args, device=device, mode=3, softmax_precision=precision).dtype == dtype


def test_a_float64_softmax_of_float32(device):
    """softmax_precision 11: with scores that are exact, weights are right to the last bit.

    The query is zero and the mask holds eighths, so the scores are known without an error. What a
    float64 softmax makes of them has one rounding, to float32: half a unit of each weight.
    """
    Q, K, V = inputs(17, 200)
    mask = (np.rint(8 * 3 * draw((17, 200))) / 8).astype(np.float32)
    got = qk(0 * Q, K, V, mask, device=device, mode=3, softmax_precision=11)
    right = softmax(mask.astype(np.longdouble), np.ones(mask.shape, bool))
    half_unit = np.spacing(right.astype(np.float32)).astype(np.float64) / 2
    assert (np.abs(got.astype(np.longdouble) - right) <= half_unit * (1 + 1e-6)).all()


def test_the_answer_is_a_named_tuple(device):
    """Y, present_key, present_value, qk_matmul_output, in ONNX's order."""
    got = check_onnx(*inputs(), None, *cache(), device=device, return_qk=True)
    assert isinstance(got, tuple) and type(got).__name__ == "AttentionOutput"
    assert got._fields == ("Y", "present_key", "present_value", "qk_matmul_output")
    Y, present_key, present_value, scores = got
    assert Y is got.Y and present_key is got.present_key and scores is got.qk_matmul_output
    assert present_value is got.present_value
    assert check_onnx(*inputs(), device=device)[1:] == (None, None, None)


@pytest.mark.full
@pytest.mark.parametrize("v_dtype", DTYPES, ids=lambda d: f"V-{d}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: f"QK-{d}")
def test_present_is_past_and_new_bit_for_bit(device, dtype, v_dtype):
    """NaNs with their payloads, minus zeros, infinities and subnormals of every type."""
    args = [*inputs(dtype=dtype, v_dtype=v_dtype), None, *cache(dtype=dtype, v_dtype=v_dtype)]
    rng = np.random.default_rng(0)
    for n in (1, 2, 4, 5):
        args[n] = np.frombuffer(rng.bytes(args[n].nbytes), args[n].dtype).reshape(args[n].shape)
    got = clattn.onnx.attention(*args, device=device)
    for present, past, new in ((got[1], args[4], args[1]), (got[2], args[5], args[2])):
        assert present.dtype == past.dtype
        assert present.tobytes() == np.concatenate((past, new), axis=2).tobytes()


def test_present_is_new_and_the_callers_own(device):
    """The caller may write to the results: they never share memory with an input."""
    for past, new in ((0, S), (P, 0), (P, S)):
        args = [*inputs(S=new), None, *cache(past)]
        before = [a.tobytes() for a in args if a is not None]
        got = clattn.onnx.attention(*args, device=device)
        for present in got[:3]:
            assert not any(np.shares_memory(present, a) for a in args if a is not None)
            present[...] = 7
        assert before == [a.tobytes() for a in args if a is not None]


def test_first_published_masks_then_caps(device):
    """A bias beyond the cap is cut, and a masked key keeps a weight of exp(-softcap)."""
    common = {"device": device, "softcap": 0.7, "opset": 24, "pre_errata": True}
    check_onnx(*inputs(), FLOAT_MASK * 3, **common)
    check_onnx(
        *inputs(), BOOL_MASK[:, :20], **common
    )  # padded with -inf, which becomes -0.7 as well
    check_onnx(*inputs(), None, **common, is_causal=1)
    got = check_onnx(*inputs(), np.zeros(S, bool), **common)  # every key alike
    mean = inputs()[2].mean(axis=2, dtype=np.float64)[:, :, None]
    allowed = tolerances(*inputs(), np.zeros(S, bool), softcap=0.7, opset=24, pre_errata=True).Y
    assert_close(got.Y[:, ::2], np.broadcast_to(mean, (B, HK, L, E)), allowed.each[:, ::2])


def test_first_published_caps_what_lengths_mask(device):
    """The padding mask that nonpad_kv_seqlen stands for is a mask too, so it is added, then capped.

    The text says no more than that it can be derived; onnx 1.19.1's implementation does this.
    """
    common = {"device": device, "opset": 24, "pre_errata": True}
    check_onnx(*inputs(), None, None, None, LENGTHS, **common, softcap=0.7)
    check_onnx(*inputs(), None, None, None, LENGTHS, **common)


@looped("opset", [23, 24])
def test_first_published_causality_starts_at_the_top_left(device, kernel, opset):
    """With a past of any length the first query sees only the first key of the past."""
    common = {"device": device, "is_causal": 1, "opset": opset, "pre_errata": True}
    args = (*inputs(), None, *cache())
    got = check_onnx(*args, **common)
    first = args[5][:, :, 0]
    np.testing.assert_array_equal(got.Y[:, ::2, 0], first)
    check_onnx(*inputs(40, 13), **common)
    if opset == 24:
        check_onnx(*inputs(), None, None, None, np.array([7, 0]), **common)


def test_first_published_composes_mask_and_causality_in_24(device):
    common = {"device": device, "is_causal": 1, "opset": 24, "pre_errata": True}
    got = check_onnx(*inputs(), SEEN, **common)
    assert not got.Y[:, :, ::4].any()  # without a softcap such rows are zero here too
    check_onnx(*inputs(), FLOAT_MASK, *cache(), **common)


def test_first_published_is_the_corrected_one_where_they_do_not_differ(device):
    """The two differ only for a softcap with a mask and for causality with an offset."""
    for args, options in (
        ((*inputs(), FLOAT_MASK), {}),
        (inputs(), {"softcap": 0.7}),
        (inputs(), {"is_causal": 1}),
        ((*inputs(), BOOL_MASK, *cache()), {}),
    ):
        for opset in (23, 24):
            if opset == 23 and len(args) > 4:
                continue  # the mask is shorter than T
            both = [
                clattn.onnx.attention(*args, **options, opset=opset, pre_errata=old, device=device)
                for old in (False, True)
            ]
            allowed = 2 * tolerances(*args, **options, opset=opset).Y.each
            assert_close(both[0].Y, both[1].Y, allowed)
