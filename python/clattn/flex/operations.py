"""What can be done with symbols: each function adds the nodes of one operation to a graph.

Operands are nodes, and numbers that a mod captures. Types are promoted as NumPy and torch promote
dtypes, see `clattn.flex.graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clattn.flex.graph import Graph, Node
from clattn.flex.kinds import BOOL, CASTS, INT, REAL
from clattn.flex.tables import dtype_name

# The highest exponent that makes a product; others are data.
_MOST_FACTORS = 4


# ---- arithmetic ----


def add(graph: Graph, x: Any, y: Any) -> Node:
    """`x + y`; of bools their "or", as in NumPy."""
    a, b = graph.operands(x, y)
    op = "|" if a.type == BOOL else "+"
    return graph.node((op, a.type, a.index, b.index), a.type, a.kind | b.kind)


def subtract(graph: Graph, x: Any, y: Any) -> Node:
    """`x - y`."""
    a, b = graph.operands(x, y)
    if a.type == BOOL:
        raise graph.refuse("a bool minus a bool; write a ^ b, or a & ~b")
    return graph.node(("-", a.type, a.index, b.index), a.type, a.kind | b.kind)


def multiply(graph: Graph, x: Any, y: Any) -> Node:
    """`x * y`; of bools their "and", as in NumPy."""
    a, b = graph.operands(x, y)
    op = "&" if a.type == BOOL else "*"
    return graph.node((op, a.type, a.index, b.index), a.type, a.kind | b.kind)


def divide(graph: Graph, x: Any, y: Any, *, rounding_mode: str | None = None) -> Node:
    """`x / y`, which is real; with torch's rounding mode "floor" `x // y`."""
    if rounding_mode == "floor":
        return floor_divide(graph, x, y)
    if rounding_mode == "trunc":
        return _truncated_division(graph, x, y)
    if rounding_mode is not None:
        raise graph.refuse(f'rounding_mode is {rounding_mode!r}; expected None, "floor" or "trunc"')
    a, b = graph.operands(x, y, REAL)
    return graph.node(("/", REAL, a.index, b.index), REAL, a.kind | b.kind)


def _truncated_division(graph: Graph, x: Any, y: Any) -> Node:
    """`x / y`, rounded towards 0, in the type of the two."""
    a, b = graph.operands(x, y, INT)
    if a.type == REAL:
        return rounding("trunc")(graph, divide(graph, a, b))
    down = floor_divide(graph, a, b)
    inexact = not_equal(graph, multiply(graph, down, b), a)
    up = bitwise_and(graph, less(graph, down, 0), inexact)
    return where(graph, up, add(graph, down, 1), down)


def floor_divide(graph: Graph, x: Any, y: Any) -> Node:
    """`x // y`."""
    return call_two(graph, "floor_div", x, y)


def remainder(graph: Graph, x: Any, y: Any) -> Node:
    """`x % y`, with the sign of `y`."""
    return call_two(graph, "modulo", x, y)


def power(graph: Graph, x: Any, y: Any) -> Node:
    """`x ** y`. An exponent that is an int from 0 to 4 is no data: it makes a product."""
    if type(y) is not int or not 0 <= y <= _MOST_FACTORS:
        return call_two(graph, "power", x, y)
    base = graph.operand(x, INT)
    if y == 0:
        return graph.cast(1, base.type)
    if y == _MOST_FACTORS:
        base = multiply(graph, base, base)
        y = 2
    product = base
    for _ in range(y - 1):
        product = multiply(graph, product, base)
    return product


def square(graph: Graph, x: Any) -> Node:
    """`x * x`."""
    return power(graph, x, 2)


def negative(graph: Graph, x: Any) -> Node:
    """`-x`."""
    a = graph.operand(x)
    if a.type == BOOL:
        raise graph.refuse("the negative of a bool; write ~x for not x")
    return graph.node(("negate", a.type, a.index), a.type, a.kind)


def positive(graph: Graph, x: Any) -> Node:
    """`+x`."""
    return graph.operand(x)


def absolute(graph: Graph, x: Any) -> Node:
    """`abs(x)`."""
    a = graph.operand(x)
    return a if a.type == BOOL else graph.call("absolute", a)


def sign(graph: Graph, x: Any) -> Node:
    """-1, 0 or 1; NaN for NaN."""
    return graph.call("sign", graph.operand(x, INT))


def minimum(graph: Graph, x: Any, y: Any) -> Node:
    """Return the lower one, or NaN if one is NaN."""
    a, b = graph.operands(x, y)
    return bitwise_and(graph, a, b) if a.type == BOOL else call_two(graph, "minimum", a, b)


def maximum(graph: Graph, x: Any, y: Any) -> Node:
    """Return the higher one, or NaN if one is NaN."""
    a, b = graph.operands(x, y)
    return bitwise_or(graph, a, b) if a.type == BOOL else call_two(graph, "maximum", a, b)


def clip(
    graph: Graph, x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Node:
    """`minimum(maximum(x, low), high)`; a bound that is None does not bind."""
    low = a_min if min is None else min
    high = a_max if max is None else max
    clipped = graph.operand(x) if low is None else bounded(graph, "at_least", x, low)
    return clipped if high is None else bounded(graph, "at_most", clipped, high)


def bounded(graph: Graph, name: str, x: Any, bound: Any) -> Node:
    """Return the maximum (name "at_least" or "rectify") or minimum ("at_most") of `x` and a bound.

    Only the derivative at ties differs from that of `maximum` and `minimum`.
    """
    a, b = graph.operands(x, bound)
    if a.type != REAL:
        return minimum(graph, a, b) if name == "at_most" else maximum(graph, a, b)
    return call_two(graph, name, a, b)


def rounding(name: str) -> Callable[[Graph, Any], Node]:
    """Return the operation of floor, ceil, trunc or rint, which keeps the type of `x`."""

    def operation(graph: Graph, x: Any) -> Node:
        a = graph.operand(x)
        return graph.call(name, a) if a.type == REAL else a

    operation.__doc__ = f"{name}(x), in the type of x."
    return operation


def real_function(name: str) -> Callable[[Graph, Any], Node]:
    """Return the operation of a function of reals, such as exp."""

    def operation(graph: Graph, x: Any) -> Node:
        return graph.call(name, graph.cast(x, REAL))

    operation.__doc__ = f"{name}(x), which is real."
    return operation


def real_function_of_two(name: str) -> Callable[[Graph, Any, Any], Node]:
    """Return the operation of a function of two reals, such as hypot."""

    def operation(graph: Graph, x: Any, y: Any) -> Node:
        return call_two(graph, name, graph.cast(x, REAL), y)

    operation.__doc__ = f"{name}(x, y), which is real."
    return operation


def call_two(graph: Graph, name: str, x: Any, y: Any) -> Node:
    """Return the node of a function of two numbers of one type, which is int or higher."""
    a, b = graph.operands(x, y, INT)
    return graph.node((name, a.type, a.index, b.index), a.type, a.kind | b.kind)


# ---- comparisons and logic ----


def comparison(name: str) -> Callable[[Graph, Any, Any], Node]:
    """Return the operation of a comparison: lt, le, gt, ge, eq or ne."""

    def operation(graph: Graph, x: Any, y: Any) -> Node:
        a, b = graph.operands(x, y)
        if a.type == BOOL and name in ("eq", "ne"):
            differ = bitwise_xor(graph, a, b)
            return differ if name == "ne" else invert(graph, differ)
        if a.type == BOOL:
            a, b = graph.operands(a, b, INT)
        return graph.node((name, a.type, a.index, b.index), BOOL, a.kind | b.kind)

    operation.__doc__ = f"Compare with {name}; the result is a bool."
    return operation


less = comparison("lt")
less_equal = comparison("le")
greater = comparison("gt")
greater_equal = comparison("ge")
equal = comparison("eq")
not_equal = comparison("ne")


def bitwise_and(graph: Graph, x: Any, y: Any) -> Node:
    """`x & y`."""
    return _bits(graph, "&", x, y)


def bitwise_or(graph: Graph, x: Any, y: Any) -> Node:
    """`x | y`."""
    return _bits(graph, "|", x, y)


def bitwise_xor(graph: Graph, x: Any, y: Any) -> Node:
    """`x ^ y`."""
    return _bits(graph, "^", x, y)


def invert(graph: Graph, x: Any) -> Node:
    """`~x`."""
    a = graph.operand(x)
    if a.type == REAL:
        raise graph.refuse("~ of a real; it takes bools and integers: write a comparison, x != 0")
    return graph.node(("invert", a.type, a.index), a.type, a.kind)


def left_shift(graph: Graph, x: Any, y: Any) -> Node:
    """`x << y`."""
    return _bits(graph, "shift_left", x, y, INT)


def right_shift(graph: Graph, x: Any, y: Any) -> Node:
    """`x >> y`."""
    return _bits(graph, "shift_right", x, y, INT)


def logical_and(graph: Graph, x: Any, y: Any) -> Node:
    """`x` and `y`, each compared with 0."""
    return _bits(graph, "&", graph.cast(x, BOOL), graph.cast(y, BOOL))


def logical_or(graph: Graph, x: Any, y: Any) -> Node:
    """`x` or `y`, each compared with 0."""
    return _bits(graph, "|", graph.cast(x, BOOL), graph.cast(y, BOOL))


def logical_xor(graph: Graph, x: Any, y: Any) -> Node:
    """Either `x` or `y`, each compared with 0."""
    return _bits(graph, "^", graph.cast(x, BOOL), graph.cast(y, BOOL))


def logical_not(graph: Graph, x: Any) -> Node:
    """Not `x`, compared with 0."""
    return invert(graph, graph.cast(x, BOOL))


def _bits(graph: Graph, op: str, x: Any, y: Any, lowest: int = BOOL) -> Node:
    a, b = graph.operands(x, y, lowest)
    if a.type == REAL:
        raise graph.refuse(
            f"{op} of a real; it takes bools and integers: put comparisons in brackets, "
            "(a >= b) & (c < d), and cast with x.astype(np.int32)"
        )
    return graph.node((op, a.type, a.index, b.index), a.type, a.kind | b.kind)


# ---- choices ----


def where(graph: Graph, condition: Any, x: Any, y: Any) -> Node:
    """`x` where the condition holds, else `y`."""
    c = graph.cast(condition, BOOL)
    a, b = graph.operands(x, y)
    key = ("where", a.type, c.index, a.index, b.index)
    return graph.node(key, a.type, c.kind | a.kind | b.kind)


def tensor_where(graph: Graph, x: Any, condition: Any, y: Any) -> Node:
    """Torch's method: `x` where the condition holds, else `y`."""
    return where(graph, condition, x, y)


def masked_fill(graph: Graph, x: Any, mask: Any, value: Any) -> Node:
    """Torch's method: `value` where the mask holds, else `x`."""
    return where(graph, mask, value, x)


# ---- casts and constants ----


def cast(graph: Graph, x: Any, dtype: Any) -> Node:
    """`x` as a bool, int32, int64 or float. All floats are the call's real, and are not rounded."""
    name = dtype_name(dtype)
    if name not in CASTS:
        raise graph.refuse(f"a cast to {dtype}; expected one of {', '.join(CASTS)}")
    return graph.cast(x, CASTS[name])


def to(graph: Graph, x: Any, dtype: Any = None) -> Node:
    """Torch's method. None is the device of a symbol: `x.to(y.device)` is `x`."""
    return graph.operand(x) if dtype is None else cast(graph, x, dtype)


def cast_to(type_: int) -> Callable[[Graph, Any], Node]:
    """Return the operation of torch's methods bool, int, long, float and the like."""

    def operation(graph: Graph, x: Any) -> Node:
        return graph.cast(x, type_)

    return operation


def full_like(graph: Graph, x: Any, fill_value: Any, dtype: Any = None) -> Node:
    """Return a number, of the type of `x` or of a dtype."""
    if dtype is not None:
        return cast(graph, fill_value, dtype)
    return graph.cast(fill_value, graph.operand(x).type)


def zeros_like(graph: Graph, x: Any, dtype: Any = None) -> Node:
    """0, of the type of `x` or of a dtype."""
    return full_like(graph, x, 0, dtype)


def ones_like(graph: Graph, x: Any, dtype: Any = None) -> Node:
    """1, of the type of `x` or of a dtype."""
    return full_like(graph, x, 1, dtype)


def new_constant(value: int) -> Callable[..., Node]:
    """Return the operation of torch's methods new_ones, of which `size` is (), and new_zeros.

    Torch's `noop_mask`, `and_masks` and `or_masks` call them.
    """

    def operation(graph: Graph, x: Any, size: Any, *, dtype: Any = None) -> Node:
        if size not in ((), []):
            raise graph.refuse(f"size is {size!r}; expected (), for a mod computes single numbers")
        return full_like(graph, x, value, dtype)

    return operation
