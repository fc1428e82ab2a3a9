# SPDX-License-Identifier: MIT
"""Comparisons of results with the references."""

import functools
import gc
import sys

import clattn
import numpy as np
from references.attention import Allowed, compute_dtype, judged, rms, widened
from support.data import sdpa
from support.forced import FORCED, weights_are_rounded


def native(array):
    """The same values, contiguous, aligned, in the machine's byte order; None stays None."""
    if array is None:
        return None
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def expected(query, key, value, options):
    """Options of the reference: those of the call, less the ones that only say where it goes."""
    known = {k: v for k, v in options.items() if k not in ("out", "return_lse", "seed")}
    for name in ("attn_mask", "sinks"):
        known[name] = native(known.get(name))
    arrays = tuple(native(a) for a in (query, key, value))
    return arrays, known


def assert_close(got, right, allowed, what="result"):
    """NaN where `right` is NaN, the same infinities, everything else within `allowed`.

    `allowed` is a number, one for each number of the result, or an `Allowed`.
    """
    allowed = allowed if isinstance(allowed, Allowed) else Allowed(allowed)
    assert got.shape == right.shape, f"{what}: shape {got.shape}, expected {right.shape}"
    wide = got.astype(right.dtype)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(right), err_msg=f"{what}: NaN")
    infinite = np.isinf(right)
    np.testing.assert_array_equal(wide[infinite], right[infinite], err_msg=f"{what}: inf")
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(right), np.abs(widened(got) - right), 0)
    each = np.broadcast_to(allowed.each, error.shape)
    if not (error <= each).all():
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(error <= each, 0, error / each)
        worst = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), error.shape)
        index = ", ".join(map(str, worst))
        raise AssertionError(
            f"{what}[{index}] is {got[worst]}, expected {right[worst]}: error {error[worst]:.3g}, "
            f"allowed {each[worst]:.3g}; {np.count_nonzero(excess)} of {error.size} numbers are "
            f"too far off{FORCED.kernel}"
        )
    mean = rms(error[np.isfinite(right)])
    assert mean <= allowed.rms, (
        f"{what}: root mean square of the error {mean:.3g}, allowed {allowed.rms:.3g}"
        f"{FORCED.kernel}"
    )


def check_attention(query, key, value, *, device, rounds_weights=None, **options):
    """Call clattn, compare result and lse with the reference, see that inputs are unchanged.

    Without `return_lse` or `out` it calls twice, with and without the lse: kernels may take
    another path. `rounds_weights` says whether the kernel rounds weights to the dtype; None finds
    it out by another call. Returns the result.
    """
    both_ways = "return_lse" not in options and options.get("out") is None
    options.setdefault("return_lse", True)
    arrays, known = expected(query, key, value, options)
    others = options.get("attn_mask"), options.get("sinks")
    inputs = [a for a in (query, key, value, *others) if a is not None]
    before = [a.tobytes() for a in inputs]

    answer = sdpa(query, key, value, device=device, **options)

    if options.get("out") is None:
        assert before == [a.tobytes() for a in inputs], "an input was modified"
    result, *others = answer if isinstance(answer, tuple) else (answer,)
    if rounds_weights is None:
        again = functools.partial(sdpa, query, key, value, device=device, **options | {"out": None})
        rounds_weights = weights_are_rounded(result, again)
    right = judged(*arrays, rounds_weights=rounds_weights, **known)
    if known.get("return_weights"):
        weights = others.pop()
        assert weights.dtype == query.dtype.newbyteorder("=")
        assert_close(weights, right.weights, right.allowed_weights, "weights")
    assert type(result) is np.ndarray
    assert result.dtype == query.dtype.newbyteorder("=")
    assert_close(result, right.result, right.allowed)
    empty = np.isneginf(right.lse)
    assert not result[empty].any(), "rows without a key have to be zero"
    for lse in others:
        assert lse.dtype == compute_dtype(arrays[0].dtype)
        assert_close(lse, right.lse, right.allowed_lse, "lse")
    if both_ways:
        fewer = options | {"return_lse": False, "return_weights": False}
        alone = sdpa(query, key, value, device=device, **fewer)
        assert_close(alone, right.result, right.allowed, "result without lse")
    return result


def check_band(source, value, begin, end, *, device, **options):
    """Call diagonal_matrix on an array or a shape, compare with NumPy bit by bit."""
    if isinstance(source, np.ndarray):
        right = native(source).copy()
    else:
        right = np.zeros(source, options.get("dtype", np.float32))
    rows, columns = right.shape[-2:]
    filling = np.empty((), right.dtype)
    filling[...] = value
    if rows * columns < 1 << 20:
        t = np.arange(columns) - np.arange(rows)[:, None]
        filled = (begin <= t) & (t < end) if begin <= end else (t < end) | (t >= begin)
        np.copyto(right, filling, where=filled)
    else:  # numbers for each element would take longer than the call
        for row in range(rows):
            first, last = (min(max(0, bound + row), columns) for bound in (begin, end))
            inside = (slice(first, last),) if begin <= end else (slice(last), slice(first, None))
            for piece in inside:
                right[..., row, piece] = filling
    got = clattn.diagonal_matrix(source, value, begin, end, device=device, **options)
    assert got.dtype == right.dtype
    assert got.shape == right.shape
    same = native(got).view("u1") == right.view("u1") if got.size else np.array(True)
    assert same.all(), f"{got.shape} [{begin}, {end}): first at {np.argwhere(~same)[0]}"
    return got


def assert_references_return(calls, things):
    """Each of `things` has as many references after twenty rounds of `calls` as before."""

    def counted():
        gc.collect()
        return np.array([sys.getrefcount(thing) for thing in things])

    calls()
    for _ in range(3):  # caches of other libraries may give some back meanwhile, but not each time
        before = counted()
        for _ in range(20):
            calls()
        changed = counted() - before
        if np.abs(changed).max() < 5:
            return
    raise AssertionError(changed)
