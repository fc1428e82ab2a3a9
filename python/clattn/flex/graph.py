"""A trace: the operations of one call of the user's functions, as a graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from clattn.flex.kinds import (
    ALL,
    BOOL,
    CALL,
    DTYPES,
    INT,
    KEY,
    LONG,
    REAL,
    ROW,
    TYPE_NAMES,
    dtype_name,
)
from clattn.flex.source_lines import definition, user_line
from clattn.flex.symbols import Symbol

__all__ = ["Key", "Trace"]

MOST_OPERATIONS = 1000
MOST_TABLES = 4
MOST_DIMS = 5
_PARAMETERS = 5
_INT_RANGE = range(-(2**31), 2**31)
_LONG_RANGE = range(-(2**63), 2**63)
_DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
_DTYPE_TYPES = tuple(DTYPES.values())

# What a node is: the operation, its type, and more, mostly the indexes of its operands.
Key = tuple[Any, ...]

# The numbers of the dtypes that were seen, of any library.
_seen_dtypes: dict[Any, int] = {}


class Trace:
    """A graph of nodes, each of which is there once.

    Attributes
    ----------
    nodes : dict
        The symbol of each node, by what the node is. An operand comes before its users.
    numbers : list of int and float
        The values of the number slots.
    tables : list of arrays
        The captured arrays.
    mod : callable
        The function that runs.
    role : str
        What the function is: "score_mod" or "mask_mod".
    """

    __slots__ = ("closed", "mod", "nodes", "numbers", "role", "tables")

    def __init__(self) -> None:
        self.nodes: dict[Key, Symbol] = {}
        self.numbers: list[int | float] = []
        self.tables: list[Any] = []
        self.mod: Any = None
        self.role = ""
        self.closed = False

    def close(self) -> None:
        """Let go of symbols and arrays; symbols that a mod has kept cannot be used any more."""
        self.closed = True
        self.nodes = {}
        self.tables = []

    # ---- nodes ----

    def node(self, key: Key, type_: int, kind: int) -> Symbol:
        """Return the symbol of a node, which is made if there is none like it."""
        found = self.nodes.get(key)
        return self._add(key, type_, kind) if found is None else found

    def call(self, name: str, x: Symbol) -> Symbol:
        """Return the node of a function that keeps the type."""
        return self.node((name, x.type, x.index), x.type, x.kind)

    def parameters(self) -> tuple[Symbol, ...]:
        """Return the symbols of score, b, h, q_idx and kv_idx."""
        return (
            self.node(("score", REAL), REAL, ALL),
            self.node(("b", INT), INT, CALL),
            self.node(("h", INT), INT, ROW),
            self.node(("q", INT), INT, ROW),
            self.node(("key", INT), INT, KEY),
        )

    def _add(self, key: Key, type_: int, kind: int) -> Symbol:
        index = len(self.nodes)
        if self.closed:
            raise self.refuse("a symbol of another call; a mod must not keep symbols")
        if index - len(self.numbers) >= MOST_OPERATIONS + _PARAMETERS:
            raise self.refuse(f"more than {MOST_OPERATIONS} operations; look numbers up in a table")
        symbol = self.nodes[key] = Symbol(self, index, type_, kind)
        return symbol

    # ---- operands ----

    def symbol(self, x: Any) -> Symbol:
        """Return a symbol as it is, a number as a symbol."""
        return self.at_least(x, BOOL)

    def at_least(self, x: Any, lowest: int) -> Symbol:
        """Return a symbol or number in its type, or in the lowest one."""
        if type(x) is not Symbol:
            x = self.read_number(x)
        type_ = x.type if isinstance(x, Symbol) else self._type_of(x)
        return self.cast(x, type_ if type_ > lowest else lowest)

    def pair(self, x: Any, y: Any, lowest: int = BOOL) -> tuple[Symbol, Symbol, int]:
        """Return two operands in their common type, and the type."""
        if type(x) is Symbol:
            first = x.type
        else:
            x = self.read_number(x)
            first = self._type_of(x)
        if type(y) is Symbol:
            second = y.type
        else:
            y = self.read_number(y)
            second = self._type_of(y)
        common = first if first > second else second
        common = common if common > lowest else lowest
        return self.cast(x, common), self.cast(y, common), common

    def cast(self, x: Any, type_: int) -> Symbol:
        """Return a symbol or number in a type."""
        if type(x) is not Symbol:
            return self._add_number(self.read_number(x), type_)
        if x.trace is not self:
            raise self.refuse("a symbol of another call; a mod must not keep symbols")
        if x.type == type_:
            return x
        key = (f"{TYPE_NAMES[type_]}_of", x.type, x.index)
        return self.node(key, type_, x.kind)

    def _type_of(self, number: int | float) -> int:
        kind = type(number)
        if kind is int:
            return INT if number in _INT_RANGE else LONG
        return REAL if kind is float else BOOL

    def _add_number(self, number: int | float, type_: int) -> Symbol:
        if type_ == BOOL:
            return self.cast(self._add_number(int(number != 0), INT), BOOL)
        try:
            number = float(number) if type_ == REAL else int(number)
        except (OverflowError, ValueError):
            raise self.refuse(f"{number} is out of the range of {TYPE_NAMES[type_]}") from None
        if type_ != REAL and number not in (_INT_RANGE if type_ == INT else _LONG_RANGE):
            raise self.refuse(f"{number} is out of the range of {TYPE_NAMES[type_]}")
        self.numbers.append(number)
        return self.node(("number", type_, len(self.numbers) - 1), type_, CALL)

    def read_number(self, value: Any) -> int | float:
        """Return a number of Python, of NumPy, or of an array without dimensions."""
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            return value  # type: ignore[no-any-return]
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        dims = _dims(value)
        if dims is None:
            raise self.refuse(f"{_show(value)} in a mod; expected a number, a bool or an array")
        if dims:
            raise self.refuse(
                f"an array of {dims} dimensions is used as a number; take an element: "
                "clattn.lookup(array, h, q_idx)"
            )
        return self._read_element(value)

    def _read_element(self, value: Any) -> int | float:
        read = getattr(value, "item", None)
        element = np.array(value, copy=True).item() if read is None else read()
        if isinstance(element, np.generic):
            element = float(element)
        if not isinstance(element, (bool, int, float)):
            raise self.refuse(f"{_show(element)} in a mod; expected a number or a bool")
        return element

    # ---- tables ----

    def lookup(self, table: Any, index: Any) -> Symbol:
        """Return the element of a captured array at one index, or at a tuple of them."""
        keys = index if type(index) is tuple else (index,)
        indexes = [self._read_index(key) for key in keys]
        dtype = self._check_table(table, len(keys))
        number = self._number_table(table)
        kind = 0
        for position in indexes:
            kind |= position.kind
        key = ("load", dtype, number, *[position.index for position in indexes])
        return self.node(key, _DTYPE_TYPES[dtype], kind)

    def _read_index(self, key: Any) -> Symbol:
        if type(key) is Symbol:
            if key.type == REAL or key.type == BOOL:
                raise self.refuse(
                    f"an index is a {TYPE_NAMES[key.type]}; expected an integer: write "
                    "index.astype(np.int32)"
                )
            return self.cast(key, key.type)
        if key is None or key is Ellipsis or isinstance(key, (slice, list)):
            raise self.refuse(f"an index is {_show(key)}; expected an integer for each dimension")
        number = self.read_number(key)
        if type(number) is not int:
            raise self.refuse(f"an index is {_show(key)}; expected an integer")
        return self._add_number(number, self._type_of(number))

    def _check_table(self, table: Any, given: int) -> int:
        """Return the number of a table's dtype."""
        dims = _dims(table)
        if dims is None or not hasattr(type(table), "__dlpack__"):
            raise self.refuse(f"clattn.lookup reads {_show(table)}; expected an array")
        if not 1 <= dims <= MOST_DIMS:
            raise self.refuse(f"a captured array has {dims} dimensions; expected 1 to {MOST_DIMS}")
        if given != dims:
            raise self.refuse(
                f"{given} indexes of an array of {dims} dimensions; expected one for each "
                "dimension: table[h, q_idx]"
            )
        number = _seen_dtypes.get(table.dtype)
        if number is None:
            number = _DTYPE_NUMBERS.get(dtype_name(table.dtype))
            if number is None:
                raise self.refuse(
                    f"a captured array has dtype {table.dtype}; expected one of {', '.join(DTYPES)}"
                )
            _seen_dtypes[table.dtype] = number
        return number

    def _number_table(self, table: Any) -> int:
        for number, other in enumerate(self.tables):
            if other is table:
                return number
        if len(self.tables) == MOST_TABLES:
            raise self.refuse(
                f"more than {MOST_TABLES} captured arrays; put numbers of one dtype into one array"
            )
        self.tables.append(table)
        return len(self.tables) - 1

    # ---- errors ----

    def message(self, text: str) -> str:
        """Return a message with the line of the mod that runs, or else its first line."""
        return f"{self.role}: {text}{user_line() or definition(self.mod)}"

    def refuse(self, text: str) -> TypeError:
        """Return the exception of a wrong use of symbols."""
        return TypeError(self.message(text))


def _dims(array: Any) -> int | None:
    """Return the number of dimensions of an array; None if the object is none."""
    dims = getattr(array, "ndim", None)
    if dims is None and hasattr(type(array), "__dlpack__"):
        dims = len(getattr(array, "shape", ()))
    return dims if type(dims) is int else None


def _show(value: Any) -> str:
    """Return the value, if that is short, and the type of an object."""
    text = repr(value) if isinstance(value, (int, float, complex, str, slice, type(None))) else ""
    name = type(value).__name__
    return f"{text} ({name})" if 0 < len(text) <= 40 else f"a {name}"
