"""The graph of what a mod computes, with the numbers and arrays that it captures.

Two operands have the higher of their types. A number that a mod captures counts as the lowest type
that it may have, so it takes the type of what stands beside it, if that can hold it:

    True, False           bool
    an int                int, beyond 32 bits long
    a float               real
"""

from __future__ import annotations

from typing import Any

from clattn.flex.kinds import ALL, BOOL, CALL, DTYPES, INT, KEY, LONG, REAL, ROW, TYPE_NAMES
from clattn.flex.smaller_tables import SmallerTable
from clattn.flex.source_lines import definition, user_line
from clattn.flex.tables import (
    MOST_DIMS,
    MOST_TABLES,
    array_of,
    dimensions,
    dtype_name,
    highest,
    read_element,
    requires_gradients,
    share_arguments,
)

__all__ = ["PARAMETERS", "CapturedNumber", "Graph", "Key", "Node", "operands_of"]

# The operations of parameters: score, b, h, q_idx and kv_idx.
PARAMETERS = ("score", "b", "h", "q", "key")

MOST_OPERATIONS = 1000
_INT_RANGE = range(-(2**31), 2**31)
_LONG_RANGE = range(-(2**63), 2**63)
_DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
_UINT64 = _DTYPE_NUMBERS["uint64"]
_DTYPE_TYPES = tuple(DTYPES.values())

# What a node is: the operation, its type, and more, mostly the indexes of its operands.
Key = tuple[Any, ...]

# The numbers of the dtypes that were seen, of any library.
_seen_dtypes: dict[Any, int] = {}


def operands_of(key: Key) -> tuple[int, ...]:
    """Return the indexes of a node's operands."""
    op = key[0]
    if op == "number" or op in PARAMETERS:
        return ()
    return key[3:] if op == "load" else key[2:]


class CapturedNumber(float):
    """The number of an array without dimensions whose gradient is asked for.

    Attributes
    ----------
    which : int
        The array's place among those.
    """

    which: int


class Node:
    """A number that a mod computes, for any position.

    Attributes
    ----------
    graph : Graph
        The graph that it belongs to.
    index : int
        Its place there.
    type, kind : int
        See `clattn.flex.kinds`.
    """

    __slots__ = ("graph", "index", "kind", "type")

    def __init__(self, graph: Graph, index: int, type_: int, kind: int) -> None:
        self.graph = graph
        self.index = index
        self.type = type_
        self.kind = kind


class Graph:
    """The nodes of one call of a mod or two, each of which is there once.

    Attributes
    ----------
    nodes : dict
        The node of each key. An operand comes before its users.
    numbers : list of int and float
        The values of the number slots.
    tables : list of arrays
        The captured arrays.
    lists : list of pairs
        The lists of numbers that are read as tables, with their arrays.
    mod : callable
        The function that runs, or has run last.
    role : str
        What the function is: "score_mod" or "mask_mod".
    like : array or None
        The query, whose library and precision the dtypes of symbols have.
    captured : tuple of arrays
        Those whose gradients are asked for.
    in_order : bool
        Those are all tensors that require gradients, in the order in which the score_mod reads
        them. It may compute them anew in each call.
    read : set of int
        The places, among these, of those that the score_mod has read.
    captured_numbers : list of pairs
        The place of each that is read as a number, and the number's node.
    learnable : list of arrays or None
        Those that require gradients, where they are gathered and not refused.
    specials : dict
        By the index of a node whose derivative is not that of its operation: the name of a rule of
        `clattn.flex.derivatives`, and the indexes of the rule's operands.
    most : int
        Operations that the graph may have.
    """

    __slots__ = (
        "captured",
        "captured_numbers",
        "closed",
        "in_order",
        "learnable",
        "like",
        "lists",
        "mod",
        "most",
        "nodes",
        "numbers",
        "read",
        "role",
        "specials",
        "tables",
    )

    def __init__(self, like: Any = None, captured: tuple[Any, ...] = ()) -> None:
        self.like = like
        self.captured = captured
        self.read: set[int] = set()
        self.in_order = False
        self.learnable: list[Any] | None = None
        self.captured_numbers: list[tuple[int, Node]] = []
        self.specials: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.most = MOST_OPERATIONS
        self.nodes: dict[Key, Node] = {}
        self.numbers: list[int | float] = []
        self.tables: list[Any] = []
        self.lists: list[tuple[Any, Any]] = []
        self.mod: Any = None
        self.role = ""
        self.closed = False

    def close(self) -> None:
        """Let go of nodes and arrays; symbols that a mod has kept cannot be used any more."""
        self.closed = True
        self.nodes = {}
        self.tables = []
        self.lists = []
        self.captured = ()

    # ---- nodes ----

    def node(self, key: Key, type_: int, kind: int) -> Node:
        """Return a node, which is made if there is none like it."""
        found = self.nodes.get(key)
        return self._add(key, type_, kind) if found is None else found

    def differ(self, node: Node, rule: str, *operands: Node) -> Node:
        """Note a rule for the derivative of a node, and return the node."""
        self.specials[node.index] = (rule, tuple([operand.index for operand in operands]))
        return node

    def call(self, name: str, x: Node) -> Node:
        """Return the node of a function that keeps the type."""
        return self.node((name, x.type, x.index), x.type, x.kind)

    def parameters(self) -> tuple[Node, ...]:
        """Return the nodes of score, b, h, q_idx and kv_idx."""
        return (
            self.node(("score", REAL), REAL, ALL),
            self.node(("b", INT), INT, CALL),
            self.node(("h", INT), INT, ROW),
            self.node(("q", INT), INT, ROW),
            self.node(("key", INT), INT, KEY),
        )

    def _add(self, key: Key, type_: int, kind: int) -> Node:
        index = len(self.nodes)
        if self.closed:
            raise self.refuse("a symbol of another call; a mod must not keep symbols")
        if index - len(self.numbers) >= self.most + len(PARAMETERS):
            raise self.refuse(f"more than {MOST_OPERATIONS} operations; look numbers up in a table")
        node = self.nodes[key] = Node(self, index, type_, kind)
        return node

    # ---- operands: nodes, and numbers that the mod captures ----

    def operand(self, x: Any, lowest: int = BOOL) -> Node:
        """Return an operand in its type, or in the lowest one."""
        if type(x) is Node:
            type_ = x.type
        else:
            x = self.read_number(x)
            type_ = _lowest_type(x)
        return self.cast(x, type_ if type_ > lowest else lowest)

    def operands(self, x: Any, y: Any, lowest: int = BOOL) -> tuple[Node, Node]:
        """Return two operands in their common type, or in the lowest one."""
        if type(x) is Node:
            first = x.type
        else:
            x = self.read_number(x)
            first = _lowest_type(x)
        if type(y) is Node:
            second = y.type
        else:
            y = self.read_number(y)
            second = _lowest_type(y)
        common = first if first > second else second
        common = common if common > lowest else lowest
        return self.cast(x, common), self.cast(y, common)

    def cast(self, x: Any, type_: int) -> Node:
        """Return an operand in a type."""
        if type(x) is not Node:
            return self._add_number(self.read_number(x), type_)
        if x.graph is not self:
            raise self.refuse("a symbol of another call; a mod must not keep symbols")
        if x.type == type_:
            return x
        return self.node((f"{TYPE_NAMES[type_]}_of", x.type, x.index), type_, x.kind)

    def _add_number(self, number: int | float, type_: int) -> Node:
        """Return the node of a new slot: equal numbers may differ in the next call."""
        if type_ == BOOL:
            return self.cast(self._add_number(int(number != 0), INT), BOOL)
        which = number.which if type(number) is CapturedNumber else None
        try:
            number = float(number) if type_ == REAL else int(number)
        except (OverflowError, ValueError):
            raise self._out_of_range(number, type_) from None
        if type_ != REAL and number not in (_INT_RANGE if type_ == INT else _LONG_RANGE):
            raise self._out_of_range(number, type_)
        self.numbers.append(number)
        node = self.node(("number", type_, len(self.numbers) - 1), type_, CALL)
        if which is not None and type_ == REAL:
            self.captured_numbers.append((which, node))
        return node

    def _out_of_range(self, number: int | float, type_: int) -> TypeError:
        return self.refuse(f"{_show(number)} is out of the range of {TYPE_NAMES[type_]}")

    def read_number(self, value: Any) -> int | float:
        """Return a number of Python, of NumPy, or of an array without dimensions."""
        kind = type(value)
        if kind is float or kind is int or kind is bool or kind is CapturedNumber:
            return value  # type: ignore[no-any-return]
        which = self.note_read(value)
        if which is not None and not dimensions(value):
            number = CapturedNumber(read_element(value))
            number.which = which
            return number
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        dims = dimensions(value)
        if dims is None:
            raise self.refuse(f"{_show(value)} in a mod; expected a number, a bool or an array")
        if dims:
            raise self.refuse(
                f"an array of {dims} dimensions is used as a number; take an element: "
                "clattn.lookup(array, h, q_idx)"
            )
        self._check_gradients(value)
        element = read_element(value)
        if not isinstance(element, (bool, int, float)):
            raise self.refuse(f"{_show(element)} in a mod; expected a number or a bool")
        return element

    # ---- arrays whose gradients are asked for ----

    def note_read(self, array: Any) -> int | None:
        """Note that an array is read; return its place among those with gradients, or None."""
        which = next((n for n, one in enumerate(self.captured) if one is array), None)
        scores = self.role == "score_mod"
        if which is None and self.in_order and scores and requires_gradients(array):
            which = len(self.read)
            if which == len(self.captured):
                raise ValueError(
                    self.message("it reads more tensors that require gradients than before")
                )
            self.captured = (*self.captured[:which], array, *self.captured[which + 1 :])
        if which is not None and scores:
            self.read.add(which)
        return which

    # ---- tables ----

    def lookup(self, table: Any, index: Any) -> Node | SmallerTable:
        """Return the element of a captured array at one index, or at a tuple of them.

        An index that leaves dimensions gives a smaller table, whose elements are read as these.
        """
        whole = table if type(table) is SmallerTable else self._whole_table(table)
        places = whole.at(index, self._read_index)
        if None in places:
            return SmallerTable(self, whole.table, whole.dtype, places)
        number = self._number_table(whole.table, whole.dtype)
        self.note_read(whole.table)
        kind = 0
        for position in places:
            kind |= position.kind
        indexes = [position.index for position in places]
        key = ("load", whole.dtype, number, *indexes)
        return self.node(key, _DTYPE_TYPES[whole.dtype], kind)

    def _whole_table(self, table: Any) -> SmallerTable:
        if isinstance(table, (list, tuple)):
            table = self._array_of(table)
        dims, dtype = self._check_table(table)
        return SmallerTable(self, table, dtype, (None,) * dims)

    def _array_of(self, numbers: list[Any] | tuple[Any, ...]) -> Any:
        """Return the array of a list of numbers; the same one for the same list."""
        for given, array in self.lists:
            if given is numbers:
                return array
        try:
            array = array_of(numbers)
        except ValueError as error:
            raise self.refuse(f"clattn.lookup reads {_show(numbers)}: {error}") from None
        self.lists.append((numbers, array))
        return array

    def _read_index(self, key: Any) -> Node:
        if type(key) is Node:
            if key.type == REAL or key.type == BOOL:
                raise self.refuse(
                    f"an index is a {TYPE_NAMES[key.type]}; expected an integer: write "
                    "index.astype(np.int32)"
                )
            return self.cast(key, key.type)
        if key is None or isinstance(key, (slice, list)):
            raise self.refuse(f"an index is {_show(key)}; expected an integer for each dimension")
        number = self.read_number(key)
        if type(number) is not int:
            raise self.refuse(f"an index is {_show(key)}; expected an integer")
        return self._add_number(number, _lowest_type(number))

    def _check_table(self, table: Any) -> tuple[int, int]:
        """Return the number of a table's dimensions, and that of its dtype."""
        dims = dimensions(table)
        if dims is None or not hasattr(type(table), "__dlpack__"):
            raise self.refuse(f"clattn.lookup reads {_show(table)}; expected an array")
        if not 1 <= dims <= MOST_DIMS:
            raise self.refuse(f"a captured array has {dims} dimensions; expected 1 to {MOST_DIMS}")
        number = _seen_dtypes.get(table.dtype)
        if number is None:
            number = _DTYPE_NUMBERS.get(dtype_name(table.dtype))
            if number is None:
                raise self.refuse(
                    f"a captured array has dtype {table.dtype}; expected one of {', '.join(DTYPES)}"
                )
            _seen_dtypes[table.dtype] = number
        return dims, number

    def _number_table(self, table: Any, dtype: int) -> int:
        for number, other in enumerate(self.tables):
            if other is table:
                return number
        self._check_gradients(table)
        if dtype == _UINT64 and (most := highest(table)) >= 2**63:
            raise ValueError(
                self.message(
                    f"a captured array of dtype uint64 has the element {most}; expected less than "
                    "2**63: mods compute with int64"
                )
            )
        self.tables.append(table)
        if len(self.tables) > MOST_TABLES and share_arguments(self.tables) is None:
            raise self.refuse(
                f"more than {MOST_TABLES} captured arrays, and other dtypes or shapes than these "
                "have; put numbers of one dtype into one array"
            )
        return len(self.tables) - 1

    # ---- errors ----

    def message(self, text: str) -> str:
        """Return a message with the line of the mod that runs, or else its first line."""
        return f"{self.role}: {text}{user_line() or definition(self.mod)}"

    def refuse(self, text: str) -> TypeError:
        """Return the exception of a wrong use of symbols."""
        return TypeError(self.message(text))

    def _check_gradients(self, array: Any) -> None:
        if not requires_gradients(array) or self.note_read(array) is not None:
            return
        if self.in_order:  # a mask_mod reads it
            return
        if self.learnable is not None:
            self.learnable.append(array)
        else:
            raise ValueError(
                self.message(
                    f"a captured tensor of shape {tuple(array.shape)} requires gradients; call "
                    "clattn.torch.flex_attention, which computes them, call under "
                    "torch.no_grad(), or capture tensor.detach()"
                )
            )


def _lowest_type(number: int | float) -> int:
    """Return the lowest type that a number may have."""
    kind = type(number)
    if kind is int:
        return INT if number in _INT_RANGE else LONG
    return BOOL if kind is bool else REAL


def _show(value: Any) -> str:
    """Return the value, if that is short, and the type of an object."""
    name = type(value).__name__
    if isinstance(value, (int, float, complex, str, slice, type(None))):
        try:
            text = repr(value)
        except ValueError:  # an int of more digits than Python prints
            text = ""
        if 0 < len(text) <= 40:
            return f"{text} ({name})"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
