"""The right gradients of a row of training in float64, and the allowed error of each number."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from clattn._commands.bench.exact import score_rows
from clattn._commands.bench.rows import Array, Problem
from clattn._commands.rounding import (
    epsilon,
    explained,
    half_step,
    score_gradient_errors,
    smallest_normal,
)

SAMPLE = 2  # key heads that are compared, in every entry of the batch
SAMPLE_LARGE = 1  # of rows for GPUs, whose problems are large
# Kernels take a smaller weight for 0: 2^-100, of a base that may lie 8 above the highest score.
LEAST_WEIGHT = 2.0**-88

Gradients = tuple[Array, ...]  # of query, key, value and, in a row with ALiBi, the slopes


@dataclass(frozen=True)
class ExactGradients:
    """Gradients of some key heads, and of the query heads that share them, in a wider type."""

    heads: tuple[NDArray[np.intp], ...]  # by gradient: their places among all heads
    right: Gradients  # (B, heads, L or S, E); of slopes (heads,)
    each: Gradients  # the largest error of each number that rounding explains

    @property
    def allowed(self) -> float:
        """The largest error that rounding explains anywhere."""
        return max(float(each.max()) for each in self.each)

    def error(self, result: Gradients) -> float:
        """Return the largest error of whole gradients in these heads; infinity for NaN."""
        return max(float(error.max()) for error in self._errors(result))

    def is_right(self, result: Gradients, factor: float = 1) -> bool:
        """Return whether rounding explains each number's error, or a multiple of it does."""
        errors = zip(self._errors(result), self.each, strict=True)
        return all(bool((error <= factor * each).all()) for error, each in errors)

    def _errors(self, result: Gradients) -> list[Array]:
        errors = []
        for gradient, heads, right in zip(result, self.heads, self.right, strict=True):
            mine = gradient[heads] if right.ndim == 1 else gradient[:, heads]
            with np.errstate(invalid="ignore"):
                difference = np.abs(mine.astype(right.dtype) - right)
            errors.append(np.nan_to_num(difference, nan=np.inf))
        return errors


def exact_gradients(problem: Problem) -> ExactGradients:
    """Compute gradients of the first and the last key head; of a large problem of the last one.

    What the same formulas in float32 lose says what rounding explains. On matrix units kernels also
    round weights, and gradients of scores, to half types.
    """
    B, Hq, Hk, L, S, E = problem.row.shape
    dtype, group = problem.query.dtype, Hq // Hk
    sample = SAMPLE_LARGE if problem.row.on_device else SAMPLE
    heads = np.unique(np.linspace(Hk - 1, 0, sample).astype(np.intp))
    of_queries = (heads[:, None] * group + np.arange(group)).ravel()
    of_keys = (B, len(heads), S, E)
    shapes = [(B, len(of_queries), L, E), of_keys, of_keys, (B, len(of_queries))]
    if problem.row.bias_by_slope(np.arange(1)) is None:
        del shapes[3]
    right, plain, squares, rounded = ([np.empty(shape) for shape in shapes] for _ in range(4))
    for b, n in np.ndindex(B, len(heads)):
        exact = _backward(problem, b, int(heads[n]), np.float64)
        near = _backward(problem, b, int(heads[n]), np.float32)
        found = (exact.gradients, near.gradients, *_squares_of_units(exact, dtype))
        for arrays, of_head in zip((right, plain, squares, rounded), found, strict=True):
            for k, (array, gradient) in enumerate(zip(arrays, of_head, strict=True)):
                array[b, n if k in (1, 2) else slice(n * group, (n + 1) * group)] = gradient
    if len(shapes) == 4:  # the entries of the batch share the slopes
        for arrays in (right, plain, squares, rounded):
            arrays[3] = arrays[3].sum(axis=0)
    tiny = smallest_normal(np.float32)
    each = []
    for r, p, square, more in zip(right, plain, squares, rounded, strict=True):
        rounding = half_step(r, dtype if r.ndim > 1 else np.float32)
        each.append(rounding + explained(r, p, np.sqrt(square) + tiny))
        if dtype.itemsize == 2:
            each[-1] += epsilon(dtype) / 2 * np.sqrt(more)
    places = (of_queries, heads, heads, of_queries)[: len(shapes)]
    return ExactGradients(places, tuple(right), tuple(each))


class _Pass(NamedTuple):
    """The backward pass of one key head, and of the G query heads that share it."""

    gradients: Gradients  # (G, L, E), (S, E), (S, E); of slopes (G,)
    arrays: tuple[Array, Array, Array, Array]  # query, key, value, gradient of the output
    weights: Array  # (G, L, S)
    product: Array  # of the output's gradient and value, (G, L, S)
    delta: Array  # (G, L, 1)
    sizes: Array  # of scores, as far as they are weighed, (G, L, 1)
    by_slope: Array | None  # (L, S)


def _backward(problem: Problem, batch: int, head: int, dtype: DTypeLike) -> _Pass:
    """Compute in `dtype`, from the definition; in float32 with the output as it is stored."""
    _, Hq, Hk, L, _, E = problem.row.shape
    dtype, rows, group = np.dtype(dtype), np.arange(L), Hq // Hk
    heads = slice(head * group, (head + 1) * group)
    query, grad = (a[batch, heads].astype(dtype) for a in (problem.query, problem.grad_output))
    key, value = (a[batch, head].astype(dtype) for a in (problem.key, problem.value))
    scores, largest = score_rows(problem, rows, batch, slice(head, head + 1), dtype)
    scores = scores[0]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output = weights @ value
    if dtype == np.float32:
        output = output.astype(problem.query.dtype).astype(dtype)
    delta = (grad * output).sum(axis=-1, keepdims=True)
    product = grad @ value.T
    by_scores = weights * (product - delta)
    by_products = by_scores / np.sqrt(dtype.type(E))
    by_slope = problem.row.bias_by_slope(rows)
    gradients: Gradients = (
        by_products @ key,
        (by_products.swapaxes(-1, -2) @ query).sum(axis=0),
        (weights.swapaxes(-1, -2) @ grad).sum(axis=0),
    )
    if by_slope is not None:
        gradients += (by_scores.reshape(group, -1) @ by_slope.astype(dtype).ravel(),)
    weighed = np.square(np.where(np.isneginf(scores), 0, scores)) * weights
    sizes = largest + np.sqrt(weighed.sum(axis=-1, keepdims=True))
    arrays = (query, key, value, grad)
    return _Pass(gradients, arrays, weights, product, delta, sizes, by_slope)


def _squares_of_units(exact: _Pass, dtype: np.dtype[Any]) -> tuple[Gradients, Gradients]:
    """Return the squares of how far one rounding of each kind moves each gradient.

    Those of weights and of gradients of scores that are rounded, divided by the rounding, follow.
    """
    query, key, value, grad = exact.arrays
    weights, unit = exact.weights, epsilon(np.float32)
    relative = unit * (1 + exact.sizes / 2)
    lost = np.minimum(weights, LEAST_WEIGHT)
    norms = (np.linalg.norm(a, axis=-1, keepdims=True) for a in (grad, value))
    each, row = score_gradient_errors(
        weights, exact.product, exact.delta, relative=relative,
        norms=(next(norms), next(norms).T),
        mean=(weights @ np.abs(value)).max(axis=-1, keepdims=True),
        epsilon=unit, stored=max(unit, epsilon(dtype)),
    )  # fmt: skip

    each += lost * np.abs(exact.product - exact.delta)

    def squares(each: Array, row: Array | float, weights_off: Array) -> Gradients:
        of_pairs = np.square(each)
        moved = of_pairs + np.square(row * weights)  # delta moves all keys of a row
        scale = 1 / query.shape[-1]  # the square of that of the scores
        found = [
            scale * (of_pairs @ np.square(key) + np.square(row * (weights @ key))),
            scale * (moved.swapaxes(-1, -2) @ np.square(query)).sum(axis=0),
            (np.square(weights_off).swapaxes(-1, -2) @ np.square(grad)).sum(axis=0),
        ]
        if exact.by_slope is not None:
            in_rows = np.square(row * (weights * exact.by_slope).sum(axis=-1, keepdims=True))
            found.append(
                (of_pairs * np.square(exact.by_slope)).sum((-2, -1)) + in_rows.sum((-2, -1))
            )
        return tuple(found)

    by_scores = weights * (exact.product - exact.delta)
    return squares(each, row, relative * weights + lost), squares(by_scores, 0.0, weights)
