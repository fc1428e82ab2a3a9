# SPDX-License-Identifier: MIT
"""What the check of results sees: NumPy's results with a fault each, and right ones.

No device computes here. A fault that the check of `support/checks.py` takes for rounding could be
in a kernel and no test would tell.
"""

import functools
import re

import numpy as np
import pytest
from references.attention import (
    DTYPES,
    bfloat16,
    compute_dtype,
    float16,
    float32,
    judged,
    steps_in,
)
from support.checks import assert_close
from support.data import qkv

# B and H, L, S, E; options
PROBLEMS = {
    "rows": (((2, 4), 33, 77, 32), {}),
    "few rows": (((2, 2), 2, 2500, 64), {}),
    "causal": (((2, 2), 170, 170, 32), {"is_causal": True}),
}
HALVES = (float16, bfloat16)


def in_dtype(weights, value, dtype):
    """weights @ value, each product added in a dtype."""
    total = np.zeros((*weights.shape[:-1], value.shape[-1]), dtype)
    for key in range(value.shape[-2]):
        product = weights[..., key, None] * value[..., None, key, :]
        total = (total.astype(weights.dtype) + product).astype(dtype)
    return total.astype(weights.dtype)


def cut(array, bits):
    """Without the bits of a fraction behind the first ones."""
    fraction, exponent = np.frexp(array)
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits).astype(array.dtype)


def answer(fault, q, k, v, *, rounds_weights=False, **options):
    """The plain result of a kernel with a fault."""
    dtype, compute = q.dtype, compute_dtype(q.dtype)
    if fault == "the last key is lost":
        options |= {"attn_mask": np.arange(k.shape[-2]) < k.shape[-2] - 1}
    elif fault == "causality is off by one":
        options |= {"query_offset": -1 if options.get("is_causal") else 0, "is_causal": True}
    elif fault == "a head reads another's keys":
        k = np.roll(k, 1, axis=-3)
    elif fault == "the scale is wrong by 1e-3":
        options |= {"scale": 1.001 / np.sqrt(q.shape[-1])}
    given = {"weights_dtype": dtype} if rounds_weights else {}
    steps = steps_in(compute, q, k, v, **options, **given)
    result = steps.result
    weights, value = steps.weights, steps.value
    if fault == "weights are rounded":
        result = steps_in(compute, q, k, v, weights_dtype=dtype, **options).result
    elif fault == "the sum of values is rounded":
        weights = np.exp(steps.scores - steps.peak)
        if rounds_weights:
            weights = weights.astype(dtype).astype(compute)
        result = in_dtype(weights, value, dtype) / weights.sum(axis=-1, keepdims=True)
    elif fault == "scores are rounded":
        scores = steps.scores.astype(dtype).astype(compute)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        if rounds_weights:
            weights = weights.astype(dtype).astype(compute)
        result = weights @ value / weights.sum(axis=-1, keepdims=True)
    elif fault == "exp has 12 bits":
        weights = cut(np.exp(steps.scores - steps.peak), 12)
        result = weights @ value / weights.sum(axis=-1, keepdims=True)
    elif fault == "the result is cut":
        with np.errstate(under="ignore"):
            nearest = result.astype(dtype)
        towards_zero = np.nextafter(nearest, np.zeros_like(nearest))
        is_above = np.abs(nearest.astype(compute)) > np.abs(result)
        return np.where(is_above, towards_zero, nearest)
    return result.astype(dtype)


@functools.cache
def known(problem, dtype, rounds_weights):
    """The arrays of a problem, its options, and what is right and allowed."""
    (lead, L, S, E), options = PROBLEMS[problem]
    arrays = qkv(lead, L, S, E, dtype=dtype)
    return arrays, options, judged(*arrays, rounds_weights=rounds_weights, **options)


ANYWHERE = ("the last key is lost", "causality is off by one", "a head reads another's keys")
IN_HALVES = ("the sum of values is rounded", "scores are rounded")
FAULTS = [
    *((fault, dtype, False) for fault in ANYWHERE for dtype in DTYPES),
    *((fault, dtype, True) for fault in ANYWHERE for dtype in HALVES),
    *((fault, dtype, rounds) for fault in IN_HALVES for dtype in HALVES for rounds in (0, 1)),
    *(("weights are rounded", dtype, False) for dtype in HALVES),
    *(("the result is cut", dtype, False) for dtype in HALVES),
    *(("exp has 12 bits", dtype, False) for dtype in DTYPES),
    *(("the scale is wrong by 1e-3", dtype, False) for dtype in DTYPES),
]  # fmt: skip
# Where weights are rounded, random numbers in a few rows do not show rounded scores. Numbers by
# design do: test_half_types_are_storage_only of test_kernel_designed.py.
BY_DESIGN = ("few rows", "scores are rounded")
CASES = [
    (problem, *case)
    for problem in PROBLEMS
    for case in FAULTS
    if not (case[2] and (problem, case[0]) == BY_DESIGN)
]


def name_of(case):
    problem, fault, dtype, rounds = case
    return f"{problem}-{fault}-{dtype}" + ("-rounds weights" if rounds else "")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_fault_is_seen(case):
    problem, fault, dtype, rounds = case
    arrays, options, right = known(problem, dtype, rounds)
    got = answer(fault, *arrays, rounds_weights=rounds, **options)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(got, right.result, right.allowed)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_right_result_is_right(problem, dtype, rounds):
    """Other bits than those of the plain computation: sums go the other way round.

    Weights are rounded as multiples of the highest one, which the oracle does not.
    """
    if rounds and dtype not in HALVES:
        return
    (q, k, v), options, right = known(problem, dtype, rounds)
    steps = steps_in(compute_dtype(dtype), q[..., ::-1], k[..., ::-1], v, **options)
    weights = np.exp(steps.scores - steps.peak)
    if rounds:
        weights = weights.astype(dtype).astype(weights.dtype)
    sums = weights[..., ::-1].sum(axis=-1, keepdims=True)
    result = weights[..., ::-1] @ steps.value[..., ::-1, :] / sums
    assert_close(result.astype(dtype), right.result, right.allowed)
    assert_close(steps.lse, right.lse, right.allowed_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_log_sum_exp_that_is_off(dtype):
    """By what one key of 2500 adds, or by two roundings to the dtype of a half."""
    (q, k, v), options, right = known("few rows", dtype, False)
    lost = steps_in(compute_dtype(dtype), q, k[..., 1:, :], v[..., 1:, :], **options).lse
    halves = right.lse.astype(float16).astype(compute_dtype(dtype))
    for wrong in (lost, halves):
        with pytest.raises(AssertionError, match="allowed"):
            assert_close(wrong, right.lse, right.allowed_lse)


def test_the_worst_number_is_named():
    _, _, right = known("rows", float32, False)
    got = right.result.astype(float32)
    got[0, 1, 2, 3] += 1e-5
    got[1, 0, 20, 4] = 7
    message = re.escape(f"result[1, 0, 20, 4] is 7.0, expected {right.result[1, 0, 20, 4]}: error ")
    with pytest.raises(AssertionError, match=message + ".*allowed .*2 of 8448 numbers"):
        assert_close(got, right.result, right.allowed)
