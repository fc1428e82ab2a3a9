# SPDX-License-Identifier: MIT
"""The oracle: scaled_dot_product_attention in plain NumPy, written from its documentation.

`attention` computes one step wider than the kernels do: in float64 for float32 and the half
types, in NumPy's long double for float64. `plain` is the same text in the precision the kernels
use. The error of `plain` against `attention` says what rounding costs, and so what a kernel may
cost: `judged` says how much, for each number and for all together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np
from clattn._commands.rounding import epsilon, explained, half_step, smallest_normal, unit_of

float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
DTYPES = (float32, float64, float16, bfloat16)


def compute_dtype(dtype):
    """The type that sums and softmax run in: float32 at least, float64 for float64."""
    return float64 if np.dtype(dtype) == float64 else float32


eps = epsilon


def positions(length, keys, is_causal, query_offset=0, ndim=2):
    """p of every query row as a column, j of every key as a row (`window`'s and `is_causal`'s).

    Several offsets belong to the first of query's `ndim` dimensions.
    """
    shift = keys - length if isinstance(is_causal, str) else 0
    offset = np.asarray(query_offset)
    if np.abs(offset.astype(float)).max(initial=0) > 2**60:
        offset = offset.astype(object)  # Python's integers do not overflow
    if offset.ndim:
        offset = offset.reshape(-1, *[1] * (ndim - 1))
    return np.arange(length)[:, None] + shift + offset, np.arange(keys)[None, :]


def attended(length, keys, attn_mask=None, is_causal=False, window=None, query_offset=0, ndim=2):
    """Which keys a row sees, by masks alone, never by scores: bool, broadcasts to (..., L, S)."""
    p, j = positions(length, keys, is_causal, query_offset, ndim)
    seen = np.ones((length, keys), bool)
    if is_causal:
        seen = seen & (j <= p).astype(bool)
    left, right = window or (None, None)
    if left is not None:
        seen = seen & (j >= p - left).astype(bool)
    if right is not None:
        seen = seen & (j <= p + right).astype(bool)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == bool
        seen = seen & (attn_mask if is_bool else attn_mask != -np.inf)
    return seen


def cast(array, dtype):
    """To a narrower or wider float; what is finite stays finite (float64's finfo.min as well)."""
    if np.can_cast(array.dtype, dtype):
        return array.astype(dtype)
    limits = np.finfo(dtype)
    with np.errstate(over="ignore"):
        wide = array if array.dtype == float64 else array.astype(np.float32)
        moved = np.clip(wide, limits.min, limits.max).astype(dtype)
    return np.where(np.isinf(wide), wide, moved).astype(dtype)


class Steps(NamedTuple):
    """What attention computes on its way; broadcast over heads where `enable_gqa` asks for it."""

    result: np.ndarray  # (..., Hq, L, Ev)
    lse: np.ndarray  # (..., Hq, L)
    weights: np.ndarray  # (..., Hq, L, S), which add up to 1 with the sink's
    scores: np.ndarray  # -inf where a row does not look
    peak: np.ndarray  # (..., Hq, L, 1)
    seen: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: np.ndarray


def attention_in(dtype, query, key, value, return_weights=False, **options):
    """Result (..., Hq, L, Ev) and log-sum-exp (..., Hq, L), computed and returned in `dtype`.

    With `return_weights` the weights (..., Hq, L, S) follow. With `weights_dtype` the weights are
    rounded to this type before the values are summed.
    """
    steps = steps_in(dtype, query, key, value, **options)
    return steps[: 3 if return_weights else 2]


def steps_in(dtype, query, key, value, attn_mask=None, is_causal=False, scale=None,
             enable_gqa=False, window=None, softcap=0.0, sinks=None, query_offset=0,
             weights_dtype=None, base=0):  # fmt: skip
    """The steps of attention, computed in `dtype`; `weights_dtype` and `base` as `in_halves`."""
    q, k, v = (cast(a, dtype) for a in (query, key, value))
    if enable_gqa:
        group = q.shape[-3] // k.shape[-3]
        k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    length, width, keys = q.shape[-2], q.shape[-1], k.shape[-2]
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if scale is None:
        scale = 1 / np.sqrt(np.longdouble(max(width, 1)))

    with np.errstate(all="ignore"):
        scores = np.matmul(q, np.swapaxes(k, -1, -2)) * dtype.type(scale)
        if softcap:
            scores = dtype.type(softcap) * np.tanh(scores / dtype.type(softcap))
        if attn_mask is not None and attn_mask.dtype != bool:
            scores = scores + cast(attn_mask, dtype)
        seen = attended(length, keys, attn_mask, is_causal, window, query_offset, query.ndim)
        seen = np.broadcast_to(seen, (*lead, length, keys))
        scores = np.where(seen, scores, -np.inf)

        empty = ~seen.any(axis=-1, keepdims=True)
        peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        sink = np.array(-np.inf, dtype)
        if sinks is not None:  # a score of each row, of no key
            sink = cast(sinks, dtype)[:, None, None] if len(lead) else cast(sinks, dtype)
            peak = np.maximum(peak, sink)
        nothing = empty & (sink == -np.inf)
        peak = np.where(nothing, 0, peak)
        weights = np.where(seen, np.exp(scores - peak), 0).astype(dtype)
        total = weights.sum(axis=-1, keepdims=True, dtype=dtype) + np.exp(sink - peak)
        lse = np.where(nothing, -np.inf, peak + np.log(total))[..., 0]
        exact = np.where(seen, weights / np.where(empty, 1, total), 0).astype(dtype)
        if weights_dtype is not None:
            weights = in_halves(weights, weights_dtype, base)
            total = weights.sum(axis=-1, keepdims=True, dtype=dtype) + np.exp(sink - peak)
        result = weighted_sum(weights, v, seen) / np.where(empty, 1, total).astype(dtype)
        result = np.where(empty, 0, result).astype(dtype)
    return Steps(result, lse.astype(dtype), exact, scores, peak, seen, q, k, v, scale)


def in_halves(weights, dtype, base=0):
    """Weights rounded to a half type, each row as a multiple of its own between 1 and 2.

    The base that a kernel subtracts is not the row's highest score, so its weights are any multiple
    of these. `base` says which.
    """
    factor = np.exp2(np.random.default_rng(base).random((*weights.shape[:-1], 1)))
    factor = factor.astype(weights.dtype)
    return (weights * factor).astype(dtype).astype(weights.dtype) / factor


def weighted_sum(weights, value, seen):
    """weights @ value, where an unseen key adds nothing even if its value is NaN or infinite."""
    finite = np.isfinite(value)
    if finite.all():
        return np.matmul(weights, value)
    result = np.matmul(weights, np.where(finite, value, 0))
    spoilt = ~finite.reshape(-1, *value.shape[-2:]).all(axis=(0, 2))
    spoilt &= np.broadcast_to(seen, weights.shape).reshape(-1, len(spoilt)).any(axis=0)
    rest = np.where(finite, 0, value)
    for key in np.flatnonzero(spoilt):
        terms = weights[..., key, None] * rest[..., None, key, :]
        result = result + np.where(seen[..., key, None], terms, 0)
    return result


def attention(query, key, value, **options):
    """The right answer: (result, lse[, weights]), wider than any kernel's arithmetic."""
    wide = np.dtype(np.longdouble) if query.dtype == float64 else float64
    return attention_in(wide, query, key, value, **options)


def plain(query, key, value, **options):
    """The naive computation in the kernels' own precision, rounded to the query's dtype."""
    answer = attention_in(compute_dtype(query.dtype), query, key, value, **options)
    return answer[0].astype(query.dtype), *answer[1:]


def widened(array):
    """As float64, or as the long double that it is."""
    with np.errstate(invalid="ignore"):
        return array.astype(np.result_type(array.dtype, float64), copy=False)


def largest(array):
    """Largest finite magnitude; 0 of nothing."""
    wide = np.abs(widened(array))
    return float(wide.max(initial=0, where=np.isfinite(wide)))


def max_error(got, right):
    """Largest error over the entries that are finite in `right`; inf if one of them is not in got.

    Entries that are not finite have to agree exactly, so they are compared elsewhere.
    """
    finite = np.isfinite(right)
    difference = np.abs(widened(got[finite]) - right[finite])
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


# The root mean square of the error may be so many times that of the plain computation.
RMS_FACTOR = 1.1
# The mean of fewer numbers says little. Rounding the weights of a row moves all its columns, and
# moves rows with equal weights alike. So where weights are rounded, distinct rows are counted. The
# squared error of one row varies by about its own size, so the mean over 256 rows varies by 1 / 16.
# The bound leaves room for three times that, which is 1.1 ** 2 - 1.
RMS_NUMBERS, RMS_ROWS = 500, 256


@dataclass(frozen=True)
class Allowed:
    """The largest errors that rounding explains."""

    each: np.ndarray  # of every number; broadcasts to the result
    rms: float = np.inf  # the root mean square over all of them


def rms(error):
    """The root mean square of the finite numbers; 0 of nothing. Squares of large ones overflow."""
    error = np.abs(error[np.isfinite(error)].astype(float64))
    top = error.max(initial=0.0)
    return float(top * np.sqrt(np.mean(np.square(error / top)))) if top > 0 else 0.0


def norms(array):
    """Return the norm of each row of (..., N, E), in float64, over its finite numbers."""
    wide = np.abs(np.where(np.isfinite(array), array, 0)).astype(float64)
    top = wide.max(axis=-1, initial=np.finfo(float64).tiny)
    return top * np.sqrt(np.square(wide / top[..., None]).sum(axis=-1))


def score_bounds(query, key, scale, seen):
    """How large the scores of a row might be, by the norms of query and key: (..., L, 1)."""
    keys = np.where(seen, norms(key)[..., None, :], 0).max(axis=-1, keepdims=True, initial=0)
    return abs(float(scale)) * norms(query)[..., None] * keys


def relative_error(dtype, most, *, softcap=0.0, lost=None, weights=None):
    """How far one rounding of each kind moves the weights of a row: (..., L, 1), relatively.

    exp, product and sum cost one eps. Where scores might be as large as `most`, whether or not
    their products cancel, a score is off by about half an eps of that, and so is the exp of it,
    relatively; a softcap leaves no score to be off by more than twice itself. `lost` is what single
    scores lose besides, such as in the sum with a mask: it counts by the `weights`.
    """
    with np.errstate(all="ignore"):
        off = eps(dtype) / 2 * most
        off = np.minimum(off, 2 * softcap) + eps(dtype) * softcap if softcap else off
        if lost is not None:
            squares = (weights * np.square(lost)).sum(axis=-1, keepdims=True)
            off = np.hypot(off, np.sqrt(squares.astype(float64)))
        return eps(dtype) + off


def lost_in_sums(dtype, scores, sums):
    """What a score may lose when a number is added: half an eps of the sum, at most all of it.

    `scores` are what the wide sums leave of the scores. So a number that swallows a score in the
    wide type, too, costs nothing.
    """
    with np.errstate(all="ignore"):
        left = np.abs(scores).astype(float64)
        lost = np.minimum(eps(dtype) / 2 * np.abs(sums).astype(float64), left)
    return np.where(np.isfinite(lost), lost, 0)


class Judged(NamedTuple):
    """The right answer, and how far a kernel may be from it."""

    result: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    allowed: Allowed
    allowed_lse: np.ndarray
    allowed_weights: np.ndarray
    relative: np.ndarray  # error of a row's weights


def wide_type(query):
    """The type of the right answer."""
    return np.dtype(np.longdouble) if query.dtype == float64 else float64


def distinct_rows(weights):
    """How many rows have weights of their own, as their squares tell."""
    return np.unique(np.square(weights).sum(axis=-1).astype(np.float32)).size


def bounds(right, near, weights, value, relative, dtype, *, rounded=(), total=1.0):
    """`Allowed` of a result (..., L, Ev), whose rows' weights have a `relative` error.

    `near` is the plain result before it is rounded to `dtype`. Where a kernel rounds the weights to
    `dtype` before it sums values, `rounded` are plain results with these, of several bases; a row's
    weights add up to `total` times the largest.
    """
    weights = weights.astype(float64)
    values = np.abs(np.where(np.isfinite(value), value, 0)).astype(float64)
    finite = np.abs(np.where(np.isfinite(right), right, 0)).astype(float64)
    top = largest(values) or 1.0
    square = np.matmul(weights, np.square(values / top)) * top**2
    square = square * np.maximum(weights.sum(axis=-1, keepdims=True), 1)  # dropout's exceed 1
    unit = unit_of(relative, square, finite)
    unit = unit + value.shape[-2] * smallest_normal(compute_dtype(dtype))
    arithmetic = explained(right, near, unit)
    each = half_step(right, dtype) + arithmetic
    samples, enough = right.size, RMS_NUMBERS
    if len(rounded):
        # Half an eps of each weight, of either sign; at most of weights @ |value|. A light weight
        # loses half the smallest number of the dtype.
        squares = np.square(weights)
        own = np.matmul(squares, np.square(values / top)) * top**2
        own = eps(dtype) / 2 * np.sqrt(own + finite**2 * squares.sum(axis=-1, keepdims=True))
        own = own + smallest_normal(compute_dtype(dtype))
        own = np.max([explained(near, other, own) for other in rounded], axis=0)
        smallest = smallest_normal(dtype) * eps(dtype)
        light = values.sum(axis=-2, keepdims=True) * smallest / 2
        each = each + np.minimum(own, eps(dtype) * np.sqrt(square)) + light / total
        near = rounded[0]
        samples, enough = distinct_rows(weights), RMS_ROWS
    each = np.where(np.isfinite(right), each, np.inf)
    if np.dtype(dtype).itemsize > 2 or right.size < RMS_NUMBERS or samples < enough:
        return Allowed(each)
    with np.errstate(all="ignore"):
        stored = near.astype(dtype).astype(float64)
        return Allowed(each, RMS_FACTOR * rms(stored - right) + rms(arithmetic))


def bases(array):
    """The numbers of the bases with which `in_halves` rounds: several where there are few rows."""
    return range(1 if np.prod(array.shape[:-1]) >= 64 else 4)


def judged(query, key, value, *, rounds_weights=False, return_weights=False, **options):
    """The right answer and how far (result, lse, weights) may be from it.

    With `rounds_weights` the kernel rounds the weights to the query's dtype before it sums values.
    """
    dtype, compute = query.dtype, compute_dtype(query.dtype)
    right = steps_in(wide_type(query), query, key, value, **options)
    near = steps_in(compute, query, key, value, **options)
    rounded = [
        steps_in(compute, query, key, value, weights_dtype=dtype, base=base, **options).result
        for base in bases(near.result)
        if rounds_weights
    ]
    mask = options.get("attn_mask")
    lost = None
    if mask is not None and mask.dtype != bool:
        with np.errstate(all="ignore"):
            left = right.scores - cast(mask, right.scores.dtype)
        lost = lost_in_sums(compute, left, right.scores)
    most = score_bounds(right.query, right.key, right.scale, right.seen)
    relative = relative_error(compute, most, softcap=options.get("softcap", 0.0), lost=lost,
                              weights=right.weights)  # fmt: skip
    with np.errstate(all="ignore"):
        total = np.exp(right.lse[..., None] - right.peak).astype(float64)
        total = np.where(total > 0, total, 1)
        allowed = bounds(right.result, near.result, right.weights, right.value, relative, dtype,
                         rounded=rounded, total=total)  # fmt: skip
        peak = np.abs(right.peak[..., 0])
        unit = relative[..., 0] + 2 * eps(compute) * (peak + np.abs(right.lse)).astype(float64)
        allowed_lse = half_step(right.lse, compute) + explained(right.lse, near.lse, unit)
        allowed_weights = None
        if return_weights:
            unit = 2 * relative * right.weights.astype(float64) + smallest_normal(compute)
            allowed_weights = explained(right.weights, near.weights, unit)
            allowed_weights = half_step(right.weights, dtype) + allowed_weights
    return Judged(*right[:3], allowed, allowed_lse, allowed_weights, relative)


def tolerance(query, key, value, **options):
    """How far each number of (result, lse) may be from `attention`: see `judged`."""
    found = judged(query, key, value, **options)
    return found.allowed.each, found.allowed_lse
