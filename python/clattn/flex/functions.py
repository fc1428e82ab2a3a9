"""Functions that NumPy, SciPy and torch have, made of a few operations each.

Each is as accurate as its operations are: none takes the difference of two numbers that may be
nearly equal.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from clattn.flex import operations as ops
from clattn.flex.graph import Graph, Node
from clattn.flex.kinds import BOOL, INT, REAL
from clattn.flex.smaller_tables import SmallerTable
from clattn.flex.tables import elements

__all__ = [
    "dot",
    "elu",
    "embedding",
    "fmod",
    "gelu",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "leaky_relu",
    "log_sigmoid",
    "nan_to_num",
    "reciprocal",
    "relu",
    "round_",
    "sigmoid",
    "silu",
    "softplus",
]

# The most numbers that isin compares with.
_MOST_COMPARED = 64

_erfc = ops.real_function("erfc")
_exp = ops.real_function("exp")
_expm1 = ops.real_function("expm1")
_log1p = ops.real_function("log1p")
_rint = ops.rounding("rint")


# ---- rounding ----


def round_(graph: Graph, x: Any, decimals: int = 0) -> Node:
    """Return the nearest integer, of two the even one, in the type of `x`."""
    if decimals != 0:
        raise graph.refuse(f"decimals is {decimals!r}; expected 0")
    return _rint(graph, x)


def fmod(graph: Graph, x: Any, y: Any) -> Node:
    """Return the rest of a division that rounds towards 0: it has the sign of `x`."""
    a, b = graph.operands(x, y, INT)
    if a.type == REAL:
        return ops.call_two(graph, "fmod", a, b)
    rest = ops.remainder(graph, a, b)
    wrong = ops.less(graph, ops.bitwise_xor(graph, a, b), 0)  # the signs differ
    wrong = ops.bitwise_and(graph, wrong, ops.not_equal(graph, rest, 0))
    return ops.where(graph, wrong, ops.subtract(graph, rest, b), rest)


def reciprocal(graph: Graph, x: Any) -> Node:
    """`1 / x`, which is real."""
    return ops.divide(graph, 1, x)


# ---- what is no finite number ----


def isnan(graph: Graph, x: Any) -> Node:
    """Return whether `x` is NaN."""
    a = graph.operand(x)
    return ops.not_equal(graph, a, a) if a.type == REAL else graph.cast(False, BOOL)


def isinf(graph: Graph, x: Any) -> Node:
    """Return whether `x` is infinite."""
    a = graph.operand(x)
    if a.type != REAL:
        return graph.cast(False, BOOL)
    return ops.equal(graph, ops.absolute(graph, a), math.inf)


def isfinite(graph: Graph, x: Any) -> Node:
    """Return whether `x` is neither NaN nor infinite."""
    a = graph.operand(x)
    if a.type != REAL:
        return graph.cast(True, BOOL)
    return ops.less(graph, ops.absolute(graph, a), math.inf)


def nan_to_num(
    graph: Graph, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Node:
    """Put numbers in the place of NaN and of infinities; by default 0 and the largest floats."""
    a = graph.operand(x)
    if a.type != REAL:
        return a
    most = sys.float_info.max  # in float32 its largest number
    high = ops.where(graph, ops.equal(graph, a, math.inf), most if posinf is None else posinf, a)
    low = -most if neginf is None else neginf
    both = ops.where(graph, ops.equal(graph, a, -math.inf), low, high)
    return ops.where(graph, isnan(graph, a), nan, both)


def isin(
    graph: Graph, x: Any, values: Any, assume_unique: bool = False, invert: bool = False
) -> Node:
    """Return whether `x` equals one of a few numbers."""
    numbers = [values] if type(values) is Node else elements(values)
    if numbers is None:
        raise graph.refuse("isin of a symbol in what is no array; expected an array or a list")
    if len(numbers) > _MOST_COMPARED:
        raise graph.refuse(
            f"isin compares with {len(numbers)} numbers; at most {_MOST_COMPARED}: make an array "
            "of bools and write clattn.lookup(array, index)"
        )
    found = graph.cast(False, BOOL)
    for n, number in enumerate(numbers):
        equal = ops.equal(graph, x, number)
        found = equal if n == 0 else ops.bitwise_or(graph, found, equal)
    return ops.invert(graph, found) if invert else found


# ---- tables ----


def embedding(
    graph: Graph, x: Any, weight: Any, padding_idx: Any = None, *, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Node | SmallerTable:  # fmt: skip
    """`weight[x]`, a table of a dimension less. All options but max_norm are for training."""
    if max_norm is not None:
        raise graph.refuse(f"max_norm is {max_norm!r}; expected None")
    return graph.lookup(weight, x)


def dot(graph: Graph, x: Any, y: Any) -> Node:
    """Return the sum of the products of two rows of tables, one operation for each element."""
    rows = [row for row in (x, y) if type(row) is SmallerTable and row.ndim == 1]
    if len(rows) != 2 or rows[0].shape != rows[1].shape or not rows[0].shape[0]:
        raise graph.refuse(
            "torch.dot takes two rows of arrays, of one length: dot(table[h], row[q])"
        )
    total = graph.cast(0, BOOL)
    for n in range(rows[0].shape[0]):
        product = ops.multiply(graph, *[graph.lookup(row, n) for row in rows])
        total = product if n == 0 else ops.add(graph, total, product)
    return total


# ---- activations ----


def relu(graph: Graph, x: Any, *, inplace: bool = False) -> Node:
    """`maximum(x, 0)`."""
    return ops.bounded(graph, "rectify", x, 0)


def leaky_relu(graph: Graph, x: Any, negative_slope: Any = 0.01, *, inplace: bool = False) -> Node:
    """`x`, or `negative_slope * x` where it is negative."""
    a = graph.cast(x, REAL)
    negative = ops.less(graph, a, 0.0)
    below = ops.multiply(graph, a, negative_slope)
    return _where_negative(graph, negative, below, a)


def elu(graph: Graph, x: Any, alpha: Any = 1.0, *, inplace: bool = False) -> Node:
    """`x`, or `alpha * expm1(x)` where it is negative."""
    a = graph.cast(x, REAL)
    below = ops.multiply(graph, _expm1(graph, a), alpha)
    return _where_negative(graph, ops.less(graph, a, 0.0), below, a)


def _where_negative(graph: Graph, negative: Node, below: Node, a: Node) -> Node:
    chosen = ops.where(graph, negative, below, a)
    return graph.differ(chosen, "where negative", negative, below, a)


def _one_and_exp_of_negative(graph: Graph, a: Node) -> Node:
    return ops.add(graph, _exp(graph, ops.negative(graph, a)), 1.0)


def sigmoid(graph: Graph, x: Any) -> Node:
    """`1 / (1 + exp(-x))`."""
    a = graph.cast(x, REAL)
    return graph.differ(ops.divide(graph, 1.0, _one_and_exp_of_negative(graph, a)), "sigmoid", a)


def silu(graph: Graph, x: Any, *, inplace: bool = False) -> Node:
    """`x * sigmoid(x)`."""
    a = graph.cast(x, REAL)
    return graph.differ(ops.divide(graph, a, _one_and_exp_of_negative(graph, a)), "silu", a)


def gelu(graph: Graph, x: Any, *, approximate: str = "none") -> Node:
    """`x` times the normal distribution's share below it, or torch's approximation by tanh.

    `1 + erf(z)` is `erfc(-z)`, and `(1 + tanh(z)) / 2` is `sigmoid(2 * z)`, which lose no digits
    where `x` is negative.
    """
    a = graph.cast(x, REAL)
    if approximate == "none":
        share = _erfc(graph, ops.multiply(graph, a, -math.sqrt(0.5)))
        return ops.multiply(graph, ops.multiply(graph, a, 0.5), share)
    if approximate != "tanh":
        raise graph.refuse(f'approximate is {approximate!r}; expected "none" or "tanh"')
    cubic = ops.add(graph, ops.multiply(graph, ops.multiply(graph, a, a), 0.044715), 1.0)
    inner = ops.multiply(graph, ops.multiply(graph, a, cubic), math.sqrt(8 / math.pi))
    return graph.differ(
        ops.divide(graph, a, _one_and_exp_of_negative(graph, inner)), "gelu by tanh", a
    )


def softplus(graph: Graph, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Node:
    """`log(1 + exp(beta * x)) / beta`, and `x` where `beta * x` is above the threshold."""
    a = graph.cast(x, REAL)
    times = ops.multiply(graph, a, beta)
    curve = ops.divide(graph, _log1p(graph, _exp(graph, times)), beta)
    return ops.where(graph, ops.greater(graph, times, threshold), a, curve)


def log_sigmoid(graph: Graph, x: Any) -> Node:
    """`log(sigmoid(x))`."""
    a = graph.cast(x, REAL)
    small = _exp(graph, ops.negative(graph, ops.absolute(graph, a)))
    return ops.subtract(graph, ops.minimum(graph, a, 0.0), _log1p(graph, small))
