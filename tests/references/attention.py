# SPDX-License-Identifier: MIT
"""The oracle: scaled_dot_product_attention in plain NumPy, written from its documentation.

`attention` computes one step wider than the kernels do: in float64 for float32 and the half
types, in NumPy's long double for float64. `plain` is the same text in the precision the kernels
use. The error of `plain` against `attention` says what rounding costs, and so what a kernel may
cost: see `tolerance`.
"""

import ml_dtypes
import numpy as np

float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
DTYPES = (float32, float64, float16, bfloat16)


def compute_dtype(dtype):
    """The type that sums and softmax run in: float32 at least, float64 for float64."""
    return float64 if np.dtype(dtype) == float64 else float32


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


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


def attention_in(dtype, query, key, value, attn_mask=None, is_causal=False, scale=None,
                 enable_gqa=False, window=None, softcap=0.0, sinks=None, query_offset=0,
                 return_weights=False, weights_dtype=None):  # fmt: skip
    """Result (..., Hq, L, Ev) and log-sum-exp (..., Hq, L), computed and returned in `dtype`.

    With `return_weights` the weights (..., Hq, L, S) follow. With `weights_dtype` the weights are
    rounded to this type before the values are summed.
    """
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
        full = (*lead, length, keys)
        seen = np.broadcast_to(seen, full)
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
        exact = weights / np.where(empty, 1, total).astype(dtype)
        if weights_dtype is not None:
            weights = weights.astype(weights_dtype).astype(dtype)
            total = weights.sum(axis=-1, keepdims=True, dtype=dtype) + np.exp(sink - peak)
        result = weighted_sum(weights, v, seen) / np.where(empty, 1, total).astype(dtype)
        result = np.where(empty, 0, result)
    answer = result.astype(dtype), lse.astype(dtype)
    return (*answer, np.where(seen, exact, 0).astype(dtype)) if return_weights else answer


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


def tolerance(query, key, value, *, rounds_weights=False, right=None, **options):
    """How far (result, lse) may be from `attention`: twice the error of `plain`, plus a floor.

    `right` is what `attention` gives, where the caller has it already.

    On a handful of outputs `plain` can be exact by luck (with one key its error is 0), so there
    is a floor for the roundings that no kernel can avoid. It matters on few outputs only; with
    many, twice the plain error exceeds it:
    - result, a mean of values with weights that add up to 1: half an eps of the stored dtype,
      relative to the largest result (the final rounding), and one eps of the compute type,
      relative to the largest value (exp, sum, division: 2e-7 relative together);
    - lse: 4 eps of the compute type (a chain of products, exp, log and their scales), relative
      to the largest of 1, lse and score.
    A score of magnitude s is off by about s eps / 2, and so is the exp of it, relatively. `plain`
    has that error too, but on few outputs not with the same luck: hence the factor 1 + s / 2.

    With `rounds_weights` the kernel rounds the weights to the query's dtype before it sums values,
    and so does `plain`. The floor of the result counts this rounding like the final one.
    """
    weights_dtype = query.dtype if rounds_weights else None
    options.pop("return_weights", None)
    right, right_lse = right or attention(query, key, value, **options)
    near, near_lse = plain(query, key, value, weights_dtype=weights_dtype, **options)
    compute_eps = eps(compute_dtype(query.dtype))
    score = score_magnitude(query, key, options)
    rounding = largest(right) * eps(query.dtype) / (1 if rounds_weights else 2)
    floor = largest(value) * compute_eps * (1 + score / 2)
    lse_floor = 4 * compute_eps * max(1.0, score, largest(right_lse))
    return (
        max(2 * max_error(near, right), rounding) + floor,
        2 * max_error(near_lse, right_lse) + lse_floor,
    )


def weights_tolerance(query, key, value, **options):
    """How far weights may be: twice the error of `plain`, plus one rounding to query's dtype."""
    options["return_weights"] = True
    right, near = (f(query, key, value, **options)[2] for f in (attention, plain))
    floor = eps(compute_dtype(query.dtype)) * (1 + score_magnitude(query, key, options) / 2)
    return 2 * max_error(near, right) + largest(right) * eps(query.dtype) / 2 + floor


def score_magnitude(query, key, options):
    """The largest score, scaled and softcapped."""
    q, k = (np.where(np.isfinite(a), a, 0) for a in (cast(query, float64), cast(key, float64)))
    if options.get("enable_gqa"):
        k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
    scale = options.get("scale")
    scale = 1 / np.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    score = largest(np.matmul(q, np.swapaxes(k, -1, -2)) * scale)
    return min(score, options.get("softcap") or score)
