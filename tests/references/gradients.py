# SPDX-License-Identifier: MIT
"""The oracle of the backward pass: gradients of attention in plain NumPy, from the formulas.

With weights P, output O, its gradient G and the log-sum-exp's gradient g, and D the factor by which
dropout keeps each weight (0, or 1 / (1 - p)):

    delta = G . O - g                          of each row
    dV    = (D P)^T G
    dS    = P (D (G V^T) - delta)              of the scores after the soft cap: a float mask's
    dZ    = dS (1 - tanh^2)                    of the scores before it
    dQ    = scale dZ K,  dK = scale dZ^T Q
    dsink = - sum of P_sink delta

`judged` says how far a kernel may be off, as in `references.attention`: by the error of the same
formulas in the kernel's own precision, with the output that the forward pass has stored. Kernels on
matrix units round the factors D P and scale dZ to the half type.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from clattn._commands.rounding import explained, score_gradient_errors
from references.attention import (
    RMS_FACTOR,
    RMS_NUMBERS,
    RMS_ROWS,
    Allowed,
    cast,
    compute_dtype,
    eps,
    float64,
    half_step,
    norms,
    relative_error,
    rms,
    score_bounds,
    smallest_normal,
    steps_in,
    wide_type,
)
from references.dropout import dropped

NAMES = ("query", "key", "value", "attn_mask", "sinks")


class Gradients(NamedTuple):
    """Of each operand; None where there is none, or where it is of bool."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    attn_mask: np.ndarray | None
    sinks: np.ndarray | None


@dataclass(frozen=True)
class Pass:
    """A backward pass in one dtype: gradients, and what they are made of."""

    gradients: Gradients
    weights: np.ndarray  # (..., Hq, L, S)
    kept: np.ndarray  # their factors by dropout
    product: np.ndarray  # kept * (G V^T)
    delta: np.ndarray  # (..., Hq, L, 1)
    factors: tuple  # of the last products: scale dZ and D P
    grad: np.ndarray
    sink: np.ndarray  # the weight of the sink, (..., Hq, L, 1)
    steps: object  # of the forward pass


def summed(gradient, shape):
    """The sum over what was broadcast from `shape`."""
    extra = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(extra)))
    ones = tuple(d for d, n in enumerate(shape) if n == 1 and gradient.shape[d] != 1)
    return gradient.sum(axis=ones, keepdims=True).reshape(shape)


def of_heads(gradient, like, enable_gqa):
    """Of the key heads: the sum over the query heads of a group, and over what was broadcast."""
    if enable_gqa:
        heads = like.shape[-3]
        group = gradient.shape[-3] // max(heads, 1)
        gradient = gradient.reshape(*gradient.shape[:-3], heads, group, *gradient.shape[-2:])
        gradient = gradient.sum(axis=-3)
    return summed(gradient, like.shape)


def of_sinks(terms):
    """The sum of (..., Hq, L, 1) over all but the heads."""
    return np.moveaxis(terms, -3, 0).reshape(terms.shape[-3], -1).sum(axis=-1)


def backward_in(dtype, grad_output, query, key, value, *, grad_lse=None, output=None,
                factors_dtype=None, dropout_p=0.0, seed=0, **options):  # fmt: skip
    """The backward pass in `dtype`. `output` is what the forward pass has stored; None: exact.

    With `factors_dtype` the factors of the last products are rounded to this type.
    """
    steps = steps_in(dtype, query, key, value, **options)
    grad = cast(grad_output, dtype)
    kept = np.ones((), dtype)
    if dropout_p:
        dropping = dropped(steps.weights.shape[:-1], key.shape[-2], dropout_p, seed)
        kept = np.where(dropping, 0, 1 / (1 - dtype.type(dropout_p)) if dropout_p < 1 else 0)
        kept = kept.astype(dtype)
    mean = (kept * steps.weights) @ steps.value
    if output is not None:  # a row without a key gave zeros
        mean = np.where(steps.seen.any(axis=-1, keepdims=True), cast(output, dtype), 0)
    delta = (grad * mean).sum(axis=-1, keepdims=True, dtype=dtype)
    if grad_lse is not None:
        delta = delta - cast(grad_lse, dtype)[..., None]
    product = kept * (grad @ np.swapaxes(steps.value, -1, -2))
    at_scores = steps.weights * (product - delta)
    slope = np.ones((), dtype)
    if softcap := options.get("softcap", 0.0):
        z = steps.query @ np.swapaxes(steps.key, -1, -2) * dtype.type(steps.scale)
        slope = 1 - np.tanh(z / dtype.type(softcap)) ** 2
    at_products, kept_weights = at_scores * slope * dtype.type(steps.scale), kept * steps.weights
    if factors_dtype is not None:
        with np.errstate(over="ignore"):
            at_products = at_products.astype(factors_dtype).astype(dtype)
            kept_weights = kept_weights.astype(factors_dtype).astype(dtype)
    gqa = options.get("enable_gqa", False)
    sink = np.zeros_like(delta)
    if (sinks := options.get("sinks")) is not None:
        with np.errstate(all="ignore"):
            sink = np.exp(cast(sinks, dtype)[:, None] - steps.lse)[..., None]
    mask = options.get("attn_mask")
    gradients = Gradients(
        summed(at_products @ steps.key, query.shape),
        of_heads(np.swapaxes(at_products, -1, -2) @ steps.query, key, gqa),
        of_heads(np.swapaxes(kept_weights, -1, -2) @ grad, value, gqa),
        None if mask is None or mask.dtype == bool else summed(at_scores, mask.shape),
        None if sinks is None else -of_sinks(sink * delta),
    )  # fmt: skip
    factors = at_products, kept_weights
    return Pass(gradients, steps.weights, kept, product, delta, factors, grad, sink, steps)


def units_of(right, relative, dtype, stored, options, shapes):
    """How far one rounding of each kind moves each gradient, to first order.

    `stored` is the dtype of the output that delta is made of.
    """
    steps, weights = right.steps, right.weights.astype(float64)
    compute = compute_dtype(dtype)
    width = norms(right.grad)[..., None]
    values = np.where(np.isfinite(steps.value), np.abs(steps.value), 0)
    off, row = score_gradient_errors(
        weights, right.product, right.delta, relative=relative,
        norms=(width, right.kept * norms(steps.value)[..., None, :]),
        mean=((right.kept * weights) @ values).max(axis=-1, keepdims=True, initial=0),
        epsilon=eps(compute), stored=eps(compute) if np.dtype(stored) == compute else eps(stored),
    )  # fmt: skip
    scale = abs(float(steps.scale))
    squares = off**2 + (row * weights) ** 2
    gqa = options.get("enable_gqa", False)
    query, key = (a.astype(float64) for a in (steps.query, steps.key))
    value = (relative * right.kept * weights) ** 2
    mask = shapes.get("attn_mask")
    units = Gradients(
        summed(scale**2 * (off**2 @ key**2 + (row * np.abs(weights @ key)) ** 2),
               shapes["query"].shape),
        of_heads(scale**2 * (np.swapaxes(squares, -1, -2) @ query**2), shapes["key"], gqa),
        of_heads(np.swapaxes(value, -1, -2) @ right.grad.astype(float64) ** 2,
                 shapes["value"], gqa),
        None if right.gradients.attn_mask is None else summed(squares, mask.shape),
        None if right.gradients.sinks is None else
        of_sinks((right.sink * (relative * np.abs(right.delta) + row)) ** 2),
    )  # fmt: skip
    return [None if u is None else np.sqrt(np.nan_to_num(u.astype(float64), nan=np.inf))
            for u in units]  # fmt: skip


def rounding_units(right, dtype, options, shapes):
    """How far rounding the factors to a half type moves each gradient, to first order.

    A light factor loses half the smallest number of the type.
    """
    gqa = options.get("enable_gqa", False)
    least = smallest_normal(dtype) * eps(dtype)
    products, weights = (np.maximum(eps(dtype) * np.abs(f), least) ** 2 for f in right.factors)
    query, key = (np.nan_to_num(a.astype(float64)) for a in (right.steps.query, right.steps.key))
    grad = np.nan_to_num(right.grad.astype(float64))
    squares = (
        summed(products @ key**2, shapes["query"].shape),
        of_heads(np.swapaxes(products, -1, -2) @ query**2, shapes["key"], gqa),
        of_heads(np.swapaxes(weights, -1, -2) @ grad**2, shapes["value"], gqa),
    )
    return [np.sqrt(s.astype(float64)) / 2 for s in squares]


class Judged(NamedTuple):
    """The right gradients, and how far a kernel may be from each."""

    right: Gradients
    allowed: list


def judged(grad_output, query, key, value, output, *, of_call=True, rounds_factors=False,
           **options):  # fmt: skip
    """The right gradients and what rounding explains, as `references.attention.judged`.

    `of_call`: the forward pass of these arguments gave `output`. Else it is any array, and what is
    right is made of it. With `rounds_factors` the kernel rounds the factors of the last products to
    the query's dtype.
    """
    dtype, compute = query.dtype, compute_dtype(query.dtype)
    with np.errstate(all="ignore"):
        right = backward_in(wide_type(query), grad_output, query, key, value,
                            output=None if of_call else output, **options)  # fmt: skip
        near = backward_in(compute, grad_output, query, key, value, output=output, **options)
        steps = right.steps
        most = score_bounds(steps.query, steps.key, steps.scale, steps.seen)
        relative = relative_error(compute, most, softcap=options.get("softcap", 0.0))
        arrays = {"query": query, "key": key, "value": value} | options
        units = units_of(right, relative, dtype, output.dtype, options, arrays)
        rounded, by_rounding = near, None
        if rounds_factors:
            rounded = backward_in(compute, grad_output, query, key, value, output=output,
                                  factors_dtype=dtype, **options)  # fmt: skip
            units_of_factors = rounding_units(right, dtype, options, arrays)
            by_rounding = dict(zip(NAMES[:3], units_of_factors, strict=True))
        allowed = []
        for name, exact, plain, other, unit in zip(
            NAMES, right.gradients, near.gradients, rounded.gradients, units, strict=True
        ):
            if exact is None:
                allowed.append(None)
                continue
            own = dtype if name in NAMES[:3] else options[name].dtype
            unit = unit + smallest_normal(compute)
            arithmetic = explained(exact, plain, unit)
            each = half_step(exact, own) + arithmetic
            enough = exact.size >= RMS_NUMBERS
            if by_rounding is not None and name in by_rounding:
                each = each + explained(plain, other, by_rounding[name] + smallest_normal(compute))
                enough = enough and np.prod(exact.shape[:-1]) >= RMS_ROWS
            if np.dtype(own).itemsize > 2 or not enough:
                allowed.append(Allowed(each))
            else:
                error = other.astype(own).astype(float64) - exact
                allowed.append(Allowed(each, RMS_FACTOR * rms(error) + rms(arithmetic)))
    return Judged(right.gradients, allowed)
