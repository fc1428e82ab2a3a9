# SPDX-License-Identifier: MIT
"""Gradients of rings, which the processes of tests/python/test_mpi.py compare with the oracle."""

import itertools

import clattn
import clattn.mpi
import numpy as np
from references.attention import compute_dtype, eps, float64, largest, wide_type
from references.gradients import NAMES, backward_in, judged, of_heads, summed
from support.checks import assert_close
from support.data import draw, qkv
from support.gradients import grads
from support.mpi_cases import BACKWARD, COMM, drawn, messages_of, places

LARGE_LSE = 32  # of clattn.mpi.backward: sums of rows with a larger one are computed anew


def merging_of(right, lse, query, key, value, *, grad_lse, enable_gqa=False, **_):
    """How far a ring may be from one call, beside the arithmetic of both.

    A row's weights in a block are multiplied by a share. It errs by as much as three logarithms do:
    of the block, of the ring, and the one that the block's pass gets, each rounded once. A share,
    its products with the gradients of output and log-sum-exp, and their product with the output are
    rounded. Then the sums of two blocks for each rank are added up, rounded each time. All are
    relative to the sum of the magnitudes of what is added.
    """
    compute = compute_dtype(query.dtype)
    logarithms = 3 * min(max(1, largest(lse)), LARGE_LSE) / 2
    rounds = (logarithms + 4 + 2 * COMM.size) * eps(compute)
    steps = right.steps
    q, k, v, grad, weights = (
        np.where(np.isfinite(a), np.abs(a), 0).astype(float64)
        for a in (steps.query, steps.key, steps.value, right.grad, right.weights)
    )
    scale = abs(float(steps.scale))
    product = grad @ np.swapaxes(v, -1, -2)
    delta = (weights * product).sum(-1) + np.abs(grad_lse)
    at_scores = weights * (product + delta[..., None])
    return [
        rounds * magnitude
        for magnitude in (
            summed(scale * (at_scores @ k), query.shape),
            of_heads(scale * (np.swapaxes(at_scores, -1, -2) @ q), key, enable_gqa),
            of_heads(np.swapaxes(weights, -1, -2) @ grad, value, enable_gqa),
        )
    ]


def answers(given, grad_output, query, key, value, output, lse, **options):
    """The right gradients, and how far those of a ring may be from each."""
    if given["spoil"]:  # the oracle has no rule for NaN that is excluded
        output, lse = clattn.scaled_dot_product_attention(
            query, key, value, return_lse=True, is_causal=options["is_causal"]
        )
        right = clattn.scaled_dot_product_attention_backward(
            grad_output, query, key, value, output, lse, **options
        )
        return zip(right[:3], [1e-5] * 3, strict=True)
    wide = wide_type(query)
    exact = backward_in(wide, grad_output, query, key, value, **options)
    right, allowed = judged(grad_output, query, key, value, output, **options)
    merging = merging_of(exact, lse, query, key, value, **options)
    return zip(
        right[:3], (a.each + b for a, b in zip(allowed[:3], merging, strict=True)), strict=True
    )


def check_gradients(given, layout):
    """Compare the gradients of all ranks with those of the whole sequence."""
    query, key, value, options = drawn(given)
    kind = given.get("kind", np.array)
    rows, keys = places(given, layout, query, key)
    grad_output = draw((*query.shape[:-1], value.shape[-1]), query.dtype, 7)
    grad_lse = draw(query.shape[:-1], compute_dtype(query.dtype), 8)
    parts = [kind(query[..., rows, :]), kind(key[..., keys, :]), kind(value[..., keys, :])]
    own = kind(grad_output[..., rows, :])
    with messages_of(given):
        output, lse = clattn.mpi.ring_attention(*parts, layout=layout, return_lse=True, **options)
        with np.errstate(all="raise"):  # no number warns
            got = clattn.mpi.ring_attention_backward(
                own, *parts, output, lse, grad_lse=kind(grad_lse[..., rows]), layout=layout,
                **options,
            )  # fmt: skip
    assert got.attn_mask is got.sinks is None
    output = np.array(clattn.mpi.join(output, COMM, layout))
    lse = np.array(clattn.mpi.join(lse, COMM, layout, -1))
    right = answers(
        given, grad_output, query, key, value, output, lse, grad_lse=grad_lse, **options
    )
    wholes = [np.array(clattn.mpi.join(gradient, COMM, layout)) for gradient in got[:3]]
    expected = clattn.Tensor if kind is clattn.tensor else np.ndarray
    for name, part, gradient, whole, (answer, allowed) in zip(
        NAMES[:3], parts, got[:3], wholes, right, strict=True
    ):
        assert type(gradient) is expected, f"a {type(gradient).__name__}"
        assert gradient.shape == part.shape and gradient.dtype == part.dtype.newbyteorder("=")
        assert_close(whole, answer, allowed, f"gradient of {name}")
        there = rows if name == "query" else keys
        np.testing.assert_array_equal(np.array(gradient), whole[..., there, :])


def gradients(query, key, value, **options):
    """A call whose output, log-sum-exp and their gradients are ones, or those among the options."""
    output = np.ones((*query.shape[:-1], value.shape[-1]), query.dtype)
    lse = np.ones(query.shape[:-1], compute_dtype(query.dtype))
    given = {"grad_output": output, "output": output, "lse": lse} | options
    return clattn.mpi.ring_attention_backward(query=query, key=key, value=value, **given)


def the_same_bits():
    """Of the same call; also where only some gradients are asked for."""
    arrays = qkv(L=9, S=11, dtype=np.float16)
    first = gradients(*arrays)
    asked = ["query", "key", "value"], {"query"}, ("key",), ("value", "key", "key"), []
    for needs, again in [(needs, gradients(*arrays, needs=needs)) for needs in asked]:
        for name in NAMES:
            one = getattr(again, name)
            assert (one is not None) == (name in needs), name
            if one is not None:
                np.testing.assert_array_equal(one, getattr(first, name), err_msg=name)


def one_rank_has_a_gradient_of_lse():
    """The others have zeros."""
    arrays = qkv(L=9, S=11)
    ones = np.ones((2, 3, 9), np.float32)
    here = COMM.rank == COMM.size - 1
    some = gradients(*arrays, grad_lse=ones if here else None)
    zeros = gradients(*arrays, grad_lse=ones if here else 0 * ones)
    for a, b in zip(some[:3], zeros[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def shared_arrays():
    """Gradients are summed over what broadcasts."""
    query, key, value = qkv(L=9, S=11)
    key, query = key[:1], query[:, :1]
    grad_output = grads(query, key, value)
    output, lse = clattn.mpi.ring_attention(query, key, value, return_lse=True)
    got = clattn.mpi.ring_attention_backward(grad_output, query, key, value, output, lse)
    # The ranks hold the same numbers: the joined sequence is that of one rank, many times.
    output, lse = clattn.scaled_dot_product_attention(query, key, value, return_lse=True)
    right = clattn.scaled_dot_product_attention_backward(
        grad_output, query, key, value, output, lse
    )
    for name, a, b in zip(NAMES, got[:3], right[:3], strict=False):
        assert a.shape == b.shape
        assert_close(a, b, 1e-5, f"gradient of {name}")


def equal_scores():
    """Scores of any size: weights add up to 1."""
    found = []
    for dtype, number, sign in (("f4", 1e18, -1), ("f4", 840, -1), ("f4", 1, 1), ("f2", 200, 1)):
        query = np.full((3, 8), number, dtype)
        key, value = np.asarray(sign * query, dtype), np.full((3, 8), COMM.rank, dtype)
        output, lse = clattn.mpi.ring_attention(query, key, value, return_lse=True, scale=0.25)
        got = clattn.mpi.ring_attention_backward(
            np.ones_like(output), query, key, value, output, lse, scale=0.25
        )
        found.append((got, number, {"f4": 1e-5, "f2": 1e-3}[dtype]))
    for got, number, close in found:
        # All rows add the same to a key: its share of 1, times how far its value is from the mean.
        by_key = 0.25 * 8 * (COMM.rank - (COMM.size - 1) / 2) * number
        for gradient, right, most in zip(got, (0, by_key, 1), (number, number, 1), strict=False):
            assert_close(gradient, np.full((3, 8), float(right)), close * most)


def keys_of_no_weight():
    """A row whose scores are -inf for all keys of a rank attends to those of other ranks."""
    found = []
    for kernel, others in itertools.product(("", "reference"), (0, -1e25)):
        query, key, value = qkv((1,), L=4, S=5)
        query[...], key[...] = 1e25, others if COMM.rank else -1e25
        clattn._core.force(kernel, "", "")
        try:
            output, lse = clattn.mpi.ring_attention(query, key, value, return_lse=True)
            got = clattn.mpi.ring_attention_backward(output, query, key, value, output, lse)
        finally:
            clattn._core.force("", "", "")
        found.append((others or COMM.size == 1, output, got))
    for alone, output, got in found:
        for array in (output, *got[:3]):  # without other keys, as in one call
            assert (np.isnan(array) if alone else np.isfinite(array)).all()
        assert alone or got.value.any() == got.key.any() == (COMM.rank > 0)


def rows_without_keys():
    """They add nothing, whatever their gradients hold."""
    options = {"is_causal": "lower_right"}
    query, key, value = qkv(L=1 if COMM.rank else 9, S=1)
    output, lse = clattn.mpi.ring_attention(query, key, value, return_lse=True, **options)
    empty = np.isneginf(lse)
    assert empty.any() == (COMM.rank == 0)
    spoilt = np.where(empty[..., None], np.nan, output).astype(np.float32)
    got = clattn.mpi.ring_attention_backward(
        spoilt, query, key, value, output, lse, grad_lse=np.where(empty, np.nan, lse), **options
    )
    for array in got[:3]:
        assert np.isfinite(array).all()
    assert not got.query[empty].any()


GRADIENT_CHECKS = (
    the_same_bits,
    one_rank_has_a_gradient_of_lse,
    shared_arrays,
    equal_scores,
    keys_of_no_weight,
    rows_without_keys,
)

# name: (rank, what it does differently, the error, what it says)
WRONG_GRADIENTS = {
    "needs": (1, {"needs": ["key"]}, ValueError,
              "ranks disagree on needs: ranks 0, 2: query, key, value; rank 1: key"),
    "a mask": (0, {"needs": ["attn_mask"]}, ValueError,
               "rank 0: needs has 'attn_mask'; expected names of query, key, value"),
    "a name": (2, {"needs": "key"}, TypeError, "rank 2: needs must be a collection of names"),
    "window": (2, {"window": (1, 1)}, ValueError, "rank 2: (1, 1)"),
    "head size": (0, {"Ev": 5}, ValueError, "ranks disagree on shape of value"),
    "a dtype": (1, {"grad_output": np.ones((2, 3, 6, 8))}, TypeError,
                "rank 1: grad_output has dtype float64; expected float32"),
    "an output of other rows": (1, {"output": np.ones((2, 3, 5, 8), np.float32)}, ValueError,
                                "rank 1: output has shape (2, 3, 5, 8); expected (2, 3, 6, 8)"),
    "no lse": (2, {"lse": None}, TypeError, "rank 2: lse must be an array"),
    "a lse of halves": (0, {"lse": np.ones((2, 3, 6), np.float16)}, TypeError,
                        "rank 0: lse has dtype float16; expected float32"),
    "a gradient of lse": (0, {"grad_lse": np.ones((2, 3, 7), np.float32)}, ValueError,
                          "rank 0: grad_lse has shape (2, 3, 7); expected (2, 3, 6)"),
    "memory": (1, {"fails": (2, MemoryError("no room"), BACKWARD)}, MemoryError, "rank 1: no room"),
    "a device": (0, {"fails": (3, clattn.DeviceError("lost"), BACKWARD)}, clattn.DeviceError,
                 "rank 0: lost"),
    "a block's sums": (2, {"fails": (1, KeyError("x"))}, RuntimeError, "rank 2: 'x'"),
}  # fmt: skip
