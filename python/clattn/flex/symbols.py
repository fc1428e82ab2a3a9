"""Symbols: what a mod gets in place of numbers, so that what it does with them is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from clattn.flex import operations as ops
from clattn.flex.graph import Graph, Node
from clattn.flex.kinds import REAL, TYPE_NAMES
from clattn.flex.names import OPERATORS, call_method, call_numpy, call_torch, is_method
from clattn.flex.smaller_tables import SmallerTable
from clattn.flex.tables import dtype_like, dtype_name

__all__ = ["Symbol", "UnknownAttributeError", "find_graph", "node_of", "symbol_of"]


# The dtypes of symbols, by their types. Reals are float64 in calls of that dtype.
_DTYPE_NAMES = ("bool", "int32", "int64", "float32")


def node_of(x: Any) -> Any:
    """Return the node of a symbol, a tuple with nodes for symbols, any other object as it is.

    That of a table's symbol is a `SmallerTable`.
    """
    if type(x) is Symbol or type(x) is TableSymbol:
        return x._node
    return tuple([node_of(value) for value in x]) if type(x) is tuple else x


def symbol_of(node: Any) -> Any:
    """Return the symbol of a node or of a smaller table."""
    return TableSymbol(node) if type(node) is SmallerTable else Symbol(node)


def _unary(operation: Callable[..., Node]) -> Any:
    def method(self: Symbol) -> Symbol:
        return Symbol(operation(self._node.graph, self._node))

    return method


def _refusal(text: str) -> Any:
    """Return a method that raises TypeError."""

    def refuse(self: Symbol, *_: Any, **__: Any) -> NoReturn:
        raise self._node.graph.refuse(text)

    return refuse


class UnknownAttributeError(TypeError, AttributeError):
    """A symbol lacks an attribute: a wrong use, as all that mods are refused for."""


class Symbol:
    """A number that a mod computes: a node, with what NumPy's and torch's numbers can do.

    The operators of two operands are attached below.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __repr__(self) -> str:
        """Return the type."""
        return f"<symbol: {TYPE_NAMES[self._node.type]}>"

    def __format__(self, spec: str) -> str:
        """Return the same as `repr`."""
        return repr(self)

    def __copy__(self) -> Symbol:
        """Return the symbol, which never changes."""
        return self

    def __deepcopy__(self, memo: Any) -> Symbol:
        """Return the symbol."""
        return self

    __neg__ = _unary(ops.negative)
    __pos__ = _unary(ops.positive)
    __invert__ = _unary(ops.invert)
    __abs__ = _unary(ops.absolute)

    # ---- protocols ----

    def __array_ufunc__(self, ufunc: Any, way: str, *inputs: Any, **options: Any) -> Symbol:
        """NumPy's protocol for ufuncs; `way` is "__call__", "reduce" or another."""
        graph = self._node.graph
        if way != "__call__":
            raise graph.refuse(f"np.{ufunc.__name__}.{way} of a symbol, which is a single number")
        return Symbol(call_numpy(graph, ufunc.__name__, node_of(inputs), options))

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Symbol:
        """NumPy's protocol for other functions."""
        graph = self._node.graph
        options = {name: node_of(option) for name, option in options.items()}
        return Symbol(call_numpy(graph, function.__name__, node_of(inputs), options))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        """Torch's protocol; the operands are anywhere in the arguments."""
        options = options or {}
        graph = find_graph((*inputs, *options.values()))
        assert graph is not None
        options = {name: node_of(option) for name, option in options.items()}
        return symbol_of(call_torch(graph, function, node_of(inputs), options))

    def __clattn_lookup__(self, table: Any, index: Any) -> Any:
        """`table[index]` of a Tensor whose index is this symbol, or a tuple with it."""
        return symbol_of(self._node.graph.lookup(table, node_of(index)))

    # ---- methods and attributes of arrays ----

    @property
    def device(self) -> None:
        """None, which the methods to, new_ones and new_zeros take."""

    @property
    def dtype(self) -> Any:
        """The dtype of a bool, int32, int64 or float, of torch or of NumPy as the query is."""
        node = self._node
        name = _DTYPE_NAMES[node.type]
        like = node.graph.like
        if node.type == REAL and dtype_name(getattr(like, "dtype", None)) == "float64":
            name = "float64"
        return dtype_like(like, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of what is a function too: score.abs(), score.clamp(min=0)."""
        if name.startswith("_"):  # protocols of Python and of libraries ask for such
            raise AttributeError(name)
        if not is_method(name):
            message = self._node.graph.message(f"a symbol has no {name}; it is a single number")
            raise UnknownAttributeError(message)

        def bound(*inputs: Any, **options: Any) -> Any:
            options = {name: node_of(option) for name, option in options.items()}
            node = self._node
            return symbol_of(call_method(node.graph, name, (node, *node_of(inputs)), options))

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
    __complex__ = _refusal("a symbol is no complex number; a mod computes bools, ints and floats")
    __round__ = _refusal("round of a symbol; write np.round(x)")
    __divmod__ = __rdivmod__ = _refusal("divmod of a symbol; write x // y and x % y")
    __matmul__ = __rmatmul__ = _refusal("@ of a symbol, which is a single number; write x * y")
    __getitem__ = __setitem__ = __delitem__ = _refusal(
        "a symbol is a single number, with nothing to index; clattn.lookup reads an array"
    )
    __contains__ = _refusal("a symbol is a single number, which contains nothing")
    __call__ = _refusal("a symbol is a number, which cannot be called")
    __iter__ = _refusal("a symbol is a single number, with nothing to iterate over")
    __len__ = _refusal("a symbol is a single number, without a length")
    __hash__ = _refusal(
        "a symbol is no key of a dict; make an array and write clattn.lookup(array, index)"
    )


class TableSymbol:
    """An array of which a mod has given some of the indexes: it takes the others.

    As a number it is refused.
    """

    __slots__ = ("_node",)

    def __init__(self, node: SmallerTable) -> None:
        self._node = node

    def __repr__(self) -> str:
        """Return the shape."""
        return f"<symbols of an array: shape {self.shape}>"

    def __getitem__(self, index: Any) -> Any:
        """Return an element, or a smaller table."""
        return symbol_of(self._node.graph.lookup(self._node, node_of(index)))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first dimension."""
        return (self[n] for n in range(len(self)))

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self._node.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return self._node.shape

    @property
    def ndim(self) -> int:
        """How many dimensions there are."""
        return self._node.ndim

    @property
    def device(self) -> None:
        """None, as a symbol's."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self._node.graph.refuse(
            f"an array of {self.ndim} dimensions is used as a number; take an element: "
            "clattn.lookup(array, h, q_idx)"
        )

    __neg__ = __pos__ = __invert__ = __abs__ = __bool__ = __index__ = _refuse
    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __torch_function__ = Symbol.__torch_function__
    __hash__ = object.__hash__


def _attach(name: str, operation: Callable[..., Node]) -> None:
    """Give symbols an operator, and that with the operands exchanged."""

    def forward(self: Symbol, other: Any, *more: Any) -> Symbol:
        node = self._node
        if more:
            raise node.graph.refuse("pow of a symbol with three arguments; write x ** y % z")
        return Symbol(operation(node.graph, node, other._node if type(other) is Symbol else other))

    def reflected(self: Symbol, other: Any) -> Symbol:
        node = self._node
        return Symbol(operation(node.graph, other, node))

    setattr(Symbol, name, forward)
    setattr(TableSymbol, name, TableSymbol._refuse)
    if hasattr(int, f"__r{name[2:]}"):  # comparisons have none
        setattr(Symbol, f"__r{name[2:]}", reflected)
        setattr(TableSymbol, f"__r{name[2:]}", TableSymbol._refuse)


for _name, _operation in OPERATORS.items():
    _attach(_name, _operation)


def find_graph(values: Any) -> Graph | None:
    """Return the graph of the first symbol among values, and in tuples and lists of them."""
    for value in values:
        if type(value) is Symbol or type(value) is TableSymbol:
            return value._node.graph
        if isinstance(value, (tuple, list)):
            found = find_graph(value)
            if found is not None:
                return found
    return None
