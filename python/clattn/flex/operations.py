"""What can be done with symbols: each function adds the nodes of one operation to a trace.

Operands are symbols and numbers. Types are promoted as NumPy and torch promote dtypes; numbers of
Python and of NumPy are weak: they take the type of the other operand if it can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clattn.flex.kinds import BOOL, CASTS, INT, REAL, dtype_name

if TYPE_CHECKING:
    from clattn.flex.graph import Trace
    from clattn.flex.symbols import Symbol

# The highest exponent that makes a product; others are data.
_MOST_FACTORS = 4


# ---- arithmetic ----


def add(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x + y`; of bools their "or", as in NumPy."""
    a, b, common = trace.pair(x, y)
    op = "|" if common == BOOL else "+"
    return trace.node((op, common, a.index, b.index), common, a.kind | b.kind)


def subtract(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x - y`."""
    a, b, common = trace.pair(x, y)
    if common == BOOL:
        raise trace.refuse("a bool minus a bool; write a ^ b, or a & ~b")
    return trace.node(("-", common, a.index, b.index), common, a.kind | b.kind)


def multiply(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x * y`; of bools their "and", as in NumPy."""
    a, b, common = trace.pair(x, y)
    op = "&" if common == BOOL else "*"
    return trace.node((op, common, a.index, b.index), common, a.kind | b.kind)


def divide(trace: Trace, x: Any, y: Any, *, rounding_mode: str | None = None) -> Symbol:
    """`x / y`, which is real; with torch's rounding mode "floor" `x // y`."""
    if rounding_mode == "floor":
        return floor_divide(trace, x, y)
    if rounding_mode is not None:
        raise trace.refuse(f'rounding_mode is {rounding_mode!r}; expected None or "floor"')
    a, b, _ = trace.pair(x, y, REAL)
    return trace.node(("/", REAL, a.index, b.index), REAL, a.kind | b.kind)


def floor_divide(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x // y`."""
    return _call_two(trace, "floor_div", x, y)


def remainder(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x % y`, with the sign of `y`."""
    return _call_two(trace, "modulo", x, y)


def power(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x ** y`. An exponent that is an int from 0 to 4 is no data: it makes a product."""
    if type(y) is not int or not 0 <= y <= _MOST_FACTORS:
        return _call_two(trace, "power", x, y)
    base = trace.at_least(x, INT)
    if y == 0:
        return trace.cast(1, base.type)
    if y == _MOST_FACTORS:
        base = multiply(trace, base, base)
        y = 2
    product = base
    for _ in range(y - 1):
        product = multiply(trace, product, base)
    return product


def square(trace: Trace, x: Any) -> Symbol:
    """`x * x`."""
    return power(trace, x, 2)


def negative(trace: Trace, x: Any) -> Symbol:
    """`-x`."""
    a = trace.symbol(x)
    if a.type == BOOL:
        raise trace.refuse("the negative of a bool; write ~x for not x")
    return trace.node(("negate", a.type, a.index), a.type, a.kind)


def positive(trace: Trace, x: Any) -> Symbol:
    """`+x`."""
    return trace.symbol(x)


def absolute(trace: Trace, x: Any) -> Symbol:
    """`abs(x)`."""
    a = trace.symbol(x)
    return a if a.type == BOOL else trace.call("absolute", a)


def sign(trace: Trace, x: Any) -> Symbol:
    """-1, 0 or 1; NaN for NaN."""
    return trace.call("sign", trace.at_least(x, INT))


def minimum(trace: Trace, x: Any, y: Any) -> Symbol:
    """Return the lower one, or NaN if one is NaN."""
    a, b, common = trace.pair(x, y)
    return bitwise_and(trace, a, b) if common == BOOL else _call_two(trace, "minimum", a, b)


def maximum(trace: Trace, x: Any, y: Any) -> Symbol:
    """Return the higher one, or NaN if one is NaN."""
    a, b, common = trace.pair(x, y)
    return bitwise_or(trace, a, b) if common == BOOL else _call_two(trace, "maximum", a, b)


def clip(
    trace: Trace, x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Symbol:
    """`minimum(maximum(x, low), high)`; a bound that is None does not bind."""
    low = a_min if min is None else min
    high = a_max if max is None else max
    clipped = trace.symbol(x) if low is None else maximum(trace, x, low)
    return clipped if high is None else minimum(trace, clipped, high)


def floor(trace: Trace, x: Any) -> Symbol:
    """Return the greatest integer that is not above `x`, in the type of `x`."""
    a = trace.symbol(x)
    return trace.call("floor", a) if a.type == REAL else a


def real_function(name: str) -> Callable[[Trace, Any], Symbol]:
    """Return the operation of a function of reals, such as exp."""

    def operation(trace: Trace, x: Any) -> Symbol:
        return trace.call(name, trace.cast(x, REAL))

    operation.__doc__ = f"{name}(x), which is real."
    return operation


def _call_two(trace: Trace, name: str, x: Any, y: Any) -> Symbol:
    a, b, common = trace.pair(x, y, INT)
    return trace.node((name, common, a.index, b.index), common, a.kind | b.kind)


# ---- comparisons and logic ----


def comparison(name: str) -> Callable[[Trace, Any, Any], Symbol]:
    """Return the operation of a comparison: lt, le, gt, ge, eq or ne."""

    def operation(trace: Trace, x: Any, y: Any) -> Symbol:
        a, b, common = trace.pair(x, y)
        if common == BOOL and name in ("eq", "ne"):
            differ = bitwise_xor(trace, a, b)
            return differ if name == "ne" else invert(trace, differ)
        if common == BOOL:
            a, b, common = trace.pair(a, b, INT)
        return trace.node((name, common, a.index, b.index), BOOL, a.kind | b.kind)

    operation.__doc__ = f"Compare with {name}; the result is a bool."
    return operation


less = comparison("lt")
less_equal = comparison("le")
greater = comparison("gt")
greater_equal = comparison("ge")
equal = comparison("eq")
not_equal = comparison("ne")


def bitwise_and(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x & y`."""
    return _bits(trace, "&", x, y)


def bitwise_or(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x | y`."""
    return _bits(trace, "|", x, y)


def bitwise_xor(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x ^ y`."""
    return _bits(trace, "^", x, y)


def invert(trace: Trace, x: Any) -> Symbol:
    """`~x`."""
    a = trace.symbol(x)
    if a.type == REAL:
        raise trace.refuse("~ of a real; it takes bools and integers: write a comparison, x != 0")
    return trace.node(("invert", a.type, a.index), a.type, a.kind)


def left_shift(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x << y`."""
    return _bits(trace, "shift_left", x, y, INT)


def right_shift(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x >> y`."""
    return _bits(trace, "shift_right", x, y, INT)


def logical_and(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x` and `y`, each compared with 0."""
    return _bits(trace, "&", trace.cast(x, BOOL), trace.cast(y, BOOL))


def logical_or(trace: Trace, x: Any, y: Any) -> Symbol:
    """`x` or `y`, each compared with 0."""
    return _bits(trace, "|", trace.cast(x, BOOL), trace.cast(y, BOOL))


def logical_xor(trace: Trace, x: Any, y: Any) -> Symbol:
    """Either `x` or `y`, each compared with 0."""
    return _bits(trace, "^", trace.cast(x, BOOL), trace.cast(y, BOOL))


def logical_not(trace: Trace, x: Any) -> Symbol:
    """Not `x`, compared with 0."""
    return invert(trace, trace.cast(x, BOOL))


def _bits(trace: Trace, op: str, x: Any, y: Any, lowest: int = BOOL) -> Symbol:
    a, b, common = trace.pair(x, y, lowest)
    if common == REAL:
        raise trace.refuse(
            f"{op} of a real; it takes bools and integers: put comparisons in brackets, "
            "(a >= b) & (c < d), and cast with x.astype(np.int32)"
        )
    return trace.node((op, common, a.index, b.index), common, a.kind | b.kind)


# ---- choices ----


def where(trace: Trace, condition: Any, x: Any, y: Any) -> Symbol:
    """`x` where the condition holds, else `y`."""
    c = trace.cast(condition, BOOL)
    a, b, common = trace.pair(x, y)
    key = ("where", common, c.index, a.index, b.index)
    return trace.node(key, common, c.kind | a.kind | b.kind)


def tensor_where(trace: Trace, x: Any, condition: Any, y: Any) -> Symbol:
    """Torch's method: `x` where the condition holds, else `y`."""
    return where(trace, condition, x, y)


def masked_fill(trace: Trace, x: Any, mask: Any, value: Any) -> Symbol:
    """Torch's method: `value` where the mask holds, else `x`."""
    return where(trace, mask, value, x)


# ---- casts and constants ----


def cast(trace: Trace, x: Any, dtype: Any) -> Symbol:
    """`x` as a bool, int32, int64 or float. All floats are the call's real, and are not rounded."""
    name = dtype_name(dtype)
    if name not in CASTS:
        raise trace.refuse(f"a cast to {dtype}; expected one of {', '.join(CASTS)}")
    return trace.cast(x, CASTS[name])


def full_like(trace: Trace, x: Any, fill_value: Any) -> Symbol:
    """Return a number, of the type of `x`."""
    return trace.cast(fill_value, trace.symbol(x).type)


def zeros_like(trace: Trace, x: Any) -> Symbol:
    """0, of the type of `x`."""
    return full_like(trace, x, 0)


def ones_like(trace: Trace, x: Any) -> Symbol:
    """1, of the type of `x`."""
    return full_like(trace, x, 1)


def new_constant(trace: Trace, x: Symbol, value: int, size: Any, dtype: Any) -> Symbol:
    """Torch's `x.new_ones(())` and `x.new_zeros(())`: a number of a type."""
    if size not in ((), []):
        raise trace.refuse(f"size is {size!r}; expected (), for a mod computes single numbers")
    return cast(trace, value, dtype) if dtype is not None else trace.cast(value, x.type)
