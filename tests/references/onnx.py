# SPDX-License-Identifier: MIT
"""The oracle: ONNX Attention, opsets 23 to 25, in plain NumPy, written from its specification.

`attention` takes the arguments of clattn.onnx.attention and computes in a wider type than a kernel
does: in float64, or for float64 in NumPy's long double. `plain` computes the same in the precision
that kernels use. `tolerances` says how far Y and qk_matmul_output may be off. The oracle refuses
nothing: see test_onnx_errors.py for that. support/onnx_calls.py calls clattn and compares.
"""

from typing import NamedTuple

import numpy as np
from clattn._commands.rounding import explained, half_step
from references.attention import (
    Allowed,
    bases,
    bounds,
    cast,
    compute_dtype,
    eps,
    float64,
    in_halves,
    lost_in_sums,
    relative_error,
    score_bounds,
    weighted_sum,
    wide_type,
)

FLOAT64_SOFTMAX = 11  # ONNX's number for the type, as softmax_precision takes it


class Answer(NamedTuple):
    """As clattn's AttentionOutput, with nothing left out."""

    Y: np.ndarray
    present_key: np.ndarray
    present_value: np.ndarray
    qk_matmul_output: np.ndarray


def split_heads(array, heads):
    """(B, L, heads * n) to (B, heads, L, n)."""
    batch, length, hidden = array.shape
    return array.reshape(batch, length, heads, hidden // heads).swapaxes(1, 2)


def joined_heads(array):
    """(B, heads, L, n) to (B, L, heads * n)."""
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, length, heads * width)


def padded(mask, keys, opset):
    """From 24 on a last dimension below T, 1 included, is filled up with -inf (False)."""
    missing = keys - mask.shape[-1]
    if opset == 23 or missing <= 0:
        return mask
    if mask.dtype.kind in "iu":  # integers have no -inf
        mask = mask.astype(np.longdouble)
    fill = np.full((*mask.shape[:-1], missing), mask.dtype != bool and -np.inf, mask.dtype)
    return np.concatenate((mask, fill), axis=-1)


def converted(mask, dtype):
    """Any number as `dtype`. Finite numbers stay finite (float64's finfo.min too)."""
    if mask.dtype.kind in "iu" or mask.dtype == np.longdouble:
        return mask.astype(dtype)
    return cast(mask, dtype)


def softcapped(scores, softcap):
    if not softcap:
        return scores
    cap = scores.dtype.type(softcap)
    return cap * np.tanh(scores / cap)


def seen_by_position(length, keys, past, nonpad, is_causal, left, right, pre_errata):
    """Causality, windows and lengths, no masks: bool, broadcasts to (B, 1, L, T)."""
    if pre_errata:
        offset = 0
    elif nonpad is not None:
        offset = (nonpad - length).reshape(-1, 1, 1, 1)
    else:
        offset = past
    p = np.arange(length).reshape(1, 1, length, 1) + offset
    j = np.arange(keys).reshape(1, 1, 1, keys)
    seen = np.ones((1, 1, length, keys), bool)
    if is_causal:
        seen = seen & (j <= p)
    if left != -1:
        seen = seen & (p - j <= left)
    if right != -1:
        seen = seen & (j - p <= right)
    if nonpad is not None:
        seen = seen & (j < nonpad.reshape(-1, 1, 1, 1))
    return seen


class Stages(NamedTuple):
    """What is computed on the way."""

    Y: np.ndarray
    present_key: np.ndarray
    present_value: np.ndarray
    stages: list  # scores scaled, and after mask and softcap, in the order of the opset; weights
    by_heads: np.ndarray  # Y in four dimensions
    seen: np.ndarray
    query: np.ndarray
    key: np.ndarray  # a head for each of the query's
    value: np.ndarray
    scale: np.ndarray
    bias: np.ndarray


def stages_in(dtype, Q, K, V, attn_mask=None, past_key=None, past_value=None,
              nonpad_kv_seqlen=None, *, is_causal=0, kv_num_heads=None, q_num_heads=None,
              scale=None, softcap=0.0, softmax_precision=None, left_window_size=-1,
              right_window_size=-1, opset=25, pre_errata=False,
              weights_dtype=None, base=0):  # fmt: skip
    """Y, the present keys and values, and qk_matmul_output by its mode."""
    three = Q.ndim == 3
    if three:
        Q = split_heads(Q, q_num_heads)
        K, V = split_heads(K, kv_num_heads), split_heads(V, kv_num_heads)
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        K, V = np.concatenate((past_key, K), axis=2), np.concatenate((past_value, V), axis=2)
    batch, heads, length, width = Q.shape
    keys = K.shape[2]
    group = heads // K.shape[1]
    q, k, v = (cast(a, dtype) for a in (Q, np.repeat(K, group, 1), np.repeat(V, group, 1)))
    if scale is None:
        scale = 1 / np.sqrt(np.longdouble(max(width, 1)))

    seen = seen_by_position(length, keys, past, nonpad_kv_seqlen, is_causal, left_window_size,
                            right_window_size, pre_errata)  # fmt: skip
    bias = dtype.type(0)
    if attn_mask is not None:
        attn_mask = padded(attn_mask, keys, opset)
        seen = seen & (attn_mask if attn_mask.dtype == bool else attn_mask != -np.inf)
        if attn_mask.dtype != bool:
            bias = converted(attn_mask, dtype)
    seen = np.broadcast_to(seen, (batch, heads, length, keys))

    with np.errstate(all="ignore"):
        scaled = np.matmul(q, np.swapaxes(k, -1, -2)) * dtype.type(scale)
        if pre_errata:
            masked = np.where(seen, scaled + bias, -np.inf).astype(dtype)
            capped = softcapped(masked, softcap)
            stages = [scaled, masked, capped]
            if softcap:  # -inf has become -softcap: every key keeps some weight
                seen = np.ones_like(seen)
        else:
            capped = softcapped(scaled, softcap)
            masked = np.where(seen, capped + bias, -np.inf).astype(dtype)
            stages = [scaled, capped, masked]
        precision = float64 if softmax_precision == FLOAT64_SOFTMAX else dtype
        weights = softmax(stages[-1].astype(np.promote_types(dtype, precision)), seen)
        used = weights.astype(dtype)
        if weights_dtype is not None:
            used = in_halves(used, weights_dtype, base)
            used = used / np.where(used.any(axis=-1, keepdims=True), used.sum(-1, keepdims=True), 1)
        Y = weighted_sum(used, v, seen)
    stages.append(weights)
    return Stages(joined_heads(Y) if three else Y, K, V, stages, Y, seen, q, k, v, scale, bias)


def attention_in(dtype, *args, qk_matmul_output_mode=0, **options):
    """The answer computed in `dtype`; the present keys and values are copies, in their types."""
    return chosen(stages_in(dtype, *args, **options), qk_matmul_output_mode)


def chosen(computed, mode):
    return Answer(*computed[:3], computed.stages[mode])


def softmax(scores, seen):
    """Zero where a row does not look, and so everywhere in a row that sees nothing."""
    empty = ~seen.any(axis=-1, keepdims=True)
    peak = np.where(empty, 0, scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = np.where(seen, np.exp(scores - peak), 0)
    return weights / np.where(empty, 1, weights.sum(axis=-1, keepdims=True))


def right_stages(Q, *args, qk_matmul_output_mode=0, **options):
    """Wider than any kernel's arithmetic, whatever the mode is."""
    return stages_in(wide_type(Q), Q, *args, **options)


def attention(*args, qk_matmul_output_mode=0, **options):
    """The right answer."""
    return chosen(right_stages(*args, **options), qk_matmul_output_mode)


def plain(Q, K, V, *args, compute=None, **options):
    """The naive computation in the kernels' own precision, rounded to Q's type."""
    near = attention_in(compute or compute_dtype(Q.dtype), Q, K, V, *args, **options)
    Y, qk = rounded(near.Y, Q.dtype), rounded(near.qk_matmul_output, Q.dtype)
    return near._replace(Y=Y, qk_matmul_output=qk)


def rounded(array, dtype):
    """To the type that is stored, in which a score may be infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def overflowed(array, dtype):
    """`array`, with infinities where `dtype` has them."""
    stored = rounded(array, dtype)
    return np.where(np.isinf(stored), stored, array).astype(array.dtype)


class Tolerances(NamedTuple):
    """How far Y, and each entry of qk_matmul_output, may be off."""

    Y: Allowed
    qk: np.ndarray


def tolerances(Q, K, V, *args, compute=None, stages=None, rounds_weights=False, **options):
    """As references/attention.py has them; `stages` is what `right_stages` gives.

    Modes 0 to 2 of qk_matmul_output are sums of products, scaled, capped and shifted: one unit is
    that of a score, and 2 eps of the entry. Mode 3 has the errors of weights.
    """
    compute, dtype = compute or compute_dtype(Q.dtype), Q.dtype
    mode = options.get("qk_matmul_output_mode", 0)
    given = {name: option for name, option in options.items() if name != "qk_matmul_output_mode"}
    right = stages or right_stages(Q, K, V, *args, **given)
    near = stages_in(compute, Q, K, V, *args, **given)
    halves = [
        stages_in(compute, Q, K, V, *args, weights_dtype=dtype, base=base, **given).by_heads
        for base in bases(near.by_heads)
        if rounds_weights
    ]
    *scores, weights = right.stages
    weights = weights.astype(float64)
    masked = scores[1 if options.get("pre_errata") else 2]
    most = score_bounds(right.query, right.key, right.scale, right.seen)
    softcap = options.get("softcap", 0.0)
    with np.errstate(all="ignore"):
        lost = lost_in_sums(compute, masked - right.bias, masked) if np.any(right.bias) else None
        relative = relative_error(compute, most, softcap=softcap, lost=lost, weights=weights)
        allowed = bounds(right.by_heads, near.by_heads, weights, right.value, relative, dtype,
                         rounded=halves)  # fmt: skip
        if right.Y.ndim == 3:
            allowed = Allowed(joined_heads(allowed.each), allowed.rms)

        right_qk = overflowed(right.stages[mode], dtype)
        near_qk = near.stages[mode].astype(compute)
        unit = relative_error(compute, most) + 2 * eps(compute) * np.abs(right_qk).astype(float64)
        if mode == 3:
            unit = 2 * relative * weights + np.finfo(np.float32).tiny
        qk = half_step(right_qk, dtype) + explained(right_qk, near_qk, unit)
    return Tolerances(allowed, qk)


def tensor_scatter(past_cache, update, write_indices=None, axis=-2, mode="linear"):
    """TensorScatter-24, row by row."""
    present = past_cache.copy()
    rows, positions = np.moveaxis(update, axis, 1), np.moveaxis(present, axis, 1)
    for b in range(len(present)):
        for row in range(rows.shape[1]):
            position = (0 if write_indices is None else int(write_indices[b])) + row
            if mode == "circular":
                position %= positions.shape[1]
            positions[b, position] = rows[b, row]
    return present
