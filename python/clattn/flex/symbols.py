"""Symbols: what a mod gets in place of numbers, so that what it does with them is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from clattn.flex import operations as ops
from clattn.flex.kinds import BOOL, INT, LONG, REAL, TYPE_NAMES
from clattn.flex.names import call_function, call_torch, call_ufunc, method

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn.flex.graph import Trace

__all__ = ["Symbol", "UnknownAttributeError", "find_symbol"]


def _operator(operation: Callable[..., Symbol]) -> tuple[Any, Any]:
    """Return the method of an operator, and that with the operands exchanged."""

    def forward(self: Symbol, other: Any) -> Symbol:
        return operation(self.trace, self, other)

    def reflected(self: Symbol, other: Any) -> Symbol:
        return operation(self.trace, other, self)

    return forward, reflected


def _unary(operation: Callable[..., Symbol]) -> Any:
    def method(self: Symbol) -> Symbol:
        return operation(self.trace, self)

    return method


def _refusal(text: str) -> Any:
    """Return a method that raises TypeError."""

    def refuse(self: Symbol, *_: Any, **__: Any) -> NoReturn:
        raise self.trace.refuse(text)

    return refuse


class UnknownAttributeError(TypeError, AttributeError):
    """A symbol lacks an attribute: a wrong use, as all that mods are refused for."""


class Symbol:
    """A number that a mod computes, for any position.

    Attributes
    ----------
    trace : Trace
        The call that it belongs to.
    index : int
        The place of its node in the trace.
    type, kind : int
        See `clattn.flex.kinds`.
    """

    __slots__ = ("index", "kind", "trace", "type")

    def __init__(self, trace: Trace, index: int, type_: int, kind: int) -> None:
        self.trace = trace
        self.index = index
        self.type = type_
        self.kind = kind

    def __repr__(self) -> str:
        """Return the type."""
        return f"<symbol: {TYPE_NAMES[self.type]}>"

    def __format__(self, spec: str) -> str:
        """Raise TypeError: a number has no text before the kernel runs."""
        raise self.trace.refuse("a symbol has no text; compare symbols: q_idx == 0")

    # ---- operators ----

    __add__, __radd__ = _operator(ops.add)
    __sub__, __rsub__ = _operator(ops.subtract)
    __mul__, __rmul__ = _operator(ops.multiply)
    __truediv__, __rtruediv__ = _operator(ops.divide)
    __floordiv__, __rfloordiv__ = _operator(ops.floor_divide)
    __mod__, __rmod__ = _operator(ops.remainder)
    __pow__, __rpow__ = _operator(ops.power)
    __and__, __rand__ = _operator(ops.bitwise_and)
    __or__, __ror__ = _operator(ops.bitwise_or)
    __xor__, __rxor__ = _operator(ops.bitwise_xor)
    __lshift__, __rlshift__ = _operator(ops.left_shift)
    __rshift__, __rrshift__ = _operator(ops.right_shift)
    __lt__, __gt__ = _operator(ops.less)[0], _operator(ops.greater)[0]
    __le__, __ge__ = _operator(ops.less_equal)[0], _operator(ops.greater_equal)[0]
    __eq__, __ne__ = _operator(ops.equal)[0], _operator(ops.not_equal)[0]
    __neg__ = _unary(ops.negative)
    __pos__ = _unary(ops.positive)
    __invert__ = _unary(ops.invert)
    __abs__ = _unary(ops.absolute)

    # ---- protocols ----

    def __array_ufunc__(self, ufunc: Any, way: str, *inputs: Any, **options: Any) -> Symbol:
        """NumPy's protocol for ufuncs; `way` is "__call__", "reduce" or another."""
        return call_ufunc(self.trace, ufunc.__name__, way, inputs, options)

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Symbol:
        """NumPy's protocol for other functions."""
        return call_function(self.trace, function.__name__, inputs, options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Symbol:
        """Torch's protocol; the operands are anywhere in the arguments."""
        symbol = find_symbol((*inputs, *(options or {}).values()))
        assert symbol is not None
        return call_torch(symbol.trace, function, inputs, options)

    def __clattn_lookup__(self, table: Any, index: Any) -> Symbol:
        """`table[index]` of a Tensor whose index is this symbol, or a tuple with it."""
        return self.trace.lookup(table, index)

    # ---- casts, and attributes of tensors ----

    def astype(self, dtype: Any) -> Symbol:
        """As a bool, int32, int64 or float, see `clattn.flex`."""
        return ops.cast(self.trace, self, dtype)

    def to(self, dtype: Any) -> Symbol:
        """Torch's name of `astype`."""
        return ops.cast(self.trace, self, dtype)

    def bool(self) -> Symbol:
        """`x != 0`."""
        return self.trace.cast(self, BOOL)

    def int(self) -> Symbol:
        """As an int32."""
        return self.trace.cast(self, INT)

    def long(self) -> Symbol:
        """As an int64."""
        return self.trace.cast(self, LONG)

    def float(self) -> Symbol:
        """As a real."""
        return self.trace.cast(self, REAL)

    half = bfloat16 = double = float

    def new_ones(self, size: Any, *, dtype: Any = None, device: Any = None) -> Symbol:
        """Torch's method, of which `size` is ()."""
        return ops.new_constant(self.trace, self, 1, size, dtype)

    def new_zeros(self, size: Any, *, dtype: Any = None, device: Any = None) -> Symbol:
        """Torch's method, of which `size` is ()."""
        return ops.new_constant(self.trace, self, 0, size, dtype)

    @property
    def device(self) -> None:
        """None, which torch's `new_ones` takes."""

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        """Return a method of what is a function too: score.abs(), score.clamp(min=0)."""
        operation = method(name)
        if operation is None:
            raise UnknownAttributeError(
                self.trace.message(f"a symbol has no {name}; it is a single number")
            )

        def bound(*inputs: Any, **options: Any) -> Symbol:
            return operation(self.trace, self, *inputs, **options)

        return bound

    # ---- what a symbol is not ----

    __bool__ = _refusal(
        "a symbol is neither true nor false; write np.where(condition, a, b) for if, & | ~ for "
        "and, or, not, (a <= x) & (x < b) for a <= x < b"
    )
    __index__ = _refusal(
        "a symbol has no value yet, so it can neither index a list nor count a loop; make an array "
        "of the list and write clattn.lookup(array, index)"
    )
    __array__ = _refusal(
        "a symbol is no array, and no index of a NumPy array; write clattn.lookup(array, index) "
        "for array[index]"
    )
    __float__ = _refusal(
        "a symbol has no value yet; write np.exp for math.exp, x.astype(np.float32) for float(x)"
    )
    __int__ = _refusal(
        "a symbol has no value yet; write x.astype(np.int32) for int(x), np.floor for math.floor"
    )
    __iter__ = _refusal("a symbol is a single number, with nothing to iterate over")
    __len__ = _refusal("a symbol is a single number, without a length")
    __hash__ = _refusal(
        "a symbol is no key of a dict; make an array and write clattn.lookup(array, index)"
    )


def find_symbol(values: Any) -> Symbol | None:
    """Return the first symbol of some arguments, or of a tuple or list among them."""
    for value in values:
        if type(value) is Symbol:
            return value
        if isinstance(value, (tuple, list)):
            found = find_symbol(value)
            if found is not None:
                return found
    return None
