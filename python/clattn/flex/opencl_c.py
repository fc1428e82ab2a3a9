"""The OpenCL C of a graph: functions for kernels/attention/mods.clh."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from clattn.flex.graph import operands_of
from clattn.flex.kinds import ALL, BOOL, DTYPES, KEY, KIND_NAMES, REAL, ROW, TYPE_NAMES

if TYPE_CHECKING:
    from clattn.flex.derivatives import Derivative
    from clattn.flex.graph import Key, Node
    from clattn.flex.tables import Arguments

__all__ = ["Read", "Slopes", "uses", "write"]

_INFIX = frozenset({"+", "-", "*", "/", "&", "|", "^"})
_SPELLED = {"at_least": "maximum", "at_most": "minimum", "rectify": "maximum"}
_PREFIX = {"negate": "-", "invert": "~"}
_PARAMETERS = {"score": "score", "b": "row->b", "h": "row->h", "q": "row->q", "key": "key"}
_DTYPE_NAMES = tuple(DTYPES)

# What a function of the text calls its nodes, by their indexes.
_Names = dict[int, str]


class Read(NamedTuple):
    """A place where a score_mod reads an array whose gradient is asked for.

    Attributes
    ----------
    which : int
        The place of the array among those.
    node : Node
        The element: a load, or a number.
    derivative : Derivative
        That of the score by it.
    """

    which: int
    node: Node
    derivative: Derivative


class Slopes(NamedTuple):
    """The derivatives of a score_mod.

    Attributes
    ----------
    score : Node
        That by the score.
    reads : tuple of Read
        Those by elements of arrays.
    """

    score: Node
    reads: tuple[Read, ...]


def write(
    nodes: dict[Key, Node],
    score: Node | None,
    mask: Node | None,
    arguments: Arguments,
    slopes: Slopes | None = None,
) -> str:
    """Return the text of the functions of a score_mod and a mask_mod, one of which may be None.

    `arguments` says where each table is, as `share_arguments` does. With slopes, the text has the
    functions for kernels/attention/backward.cl, too.
    """
    return _Writer(nodes, score, mask, arguments, slopes).write()


def uses(text: str, parameter: str) -> bool:
    """Return whether a text uses a parameter of its functions, "b" or "h"."""
    return re.search(rf"{_PARAMETERS[parameter]}\b", text) is not None


def _needed(keys: list[Key], results: Iterable[Node | None]) -> set[int]:
    """Return the indexes of the nodes that results depend on, and of their own."""
    needed = {result.index for result in results if result is not None}
    for index in range(len(keys) - 1, -1, -1):
        if index in needed:
            needed.update(operands_of(keys[index]))
    return needed


def _spell(name: str, kind: int) -> str:
    return f"OP({name}, {KIND_NAMES[kind]})"


class _Writer:
    def __init__(
        self,
        nodes: dict[Key, Node],
        score: Node | None,
        mask: Node | None,
        arguments: Arguments,
        slopes: Slopes | None,
    ) -> None:
        self.arguments = arguments
        self.keys = list(nodes)
        self.nodes = list(nodes.values())
        self.results = {"score": score, "mask": mask}
        self.slopes = slopes
        roots: dict[str, list[Node | None]] = {name: [root] for name, root in self.results.items()}
        if slopes is not None:
            roots["slope"] = [slopes.score]
            roots["reads"] = [node for read in slopes.reads for node in self._roots_of(read)]
        self.roots = [root.index for some in roots.values() for root in some if root is not None]
        self.needed = {name: _needed(self.keys, some) for name, some in roots.items()}
        self.lines: list[str] = []

    def _roots_of(self, read: Read) -> list[Node | None]:
        """Return what the gradient of an array needs of a read: a derivative, and the place."""
        places = [self.nodes[index] for index in operands_of(self.keys[read.node.index])]
        return [read.derivative.value, read.derivative.guard, *places]

    def write(self) -> str:
        either = set().union(*self.needed.values())
        names = self._names(either)
        row = [i for i in sorted(either) if self._is_of_row(i) and not self._is_parameter(i)]
        kept = self._kept(either)
        members = [i for i in row if i in kept]
        self._write_row(names, row, members)
        in_mods = names | {index: f"row->{names[index]}" for index in members}
        for name, result in self.results.items():
            if result is not None:
                self._write_mod(in_mods, name, result)
        if self.slopes is not None:
            self._write_slope(in_mods, self.slopes.score)
            self._write_reads(in_mods, self.slopes.reads)
        return "\n".join(self.lines) + "\n"

    def _is_of_row(self, index: int) -> bool:
        return self.nodes[index].kind <= ROW

    def _is_parameter(self, index: int) -> bool:
        return self.keys[index][0] in _PARAMETERS

    def _kept(self, needed: set[int]) -> set[int]:
        """Return what the functions of scores read: results, and operands of their nodes."""
        kept = set(self.roots)
        for user in needed:
            if not self._is_of_row(user):
                kept.update(operands_of(self.keys[user]))
        return kept

    def _names(self, needed: Iterable[int]) -> _Names:
        """Name nodes by kind and place, so that a node which is not needed changes no name."""
        names = {}
        for place, index in enumerate(sorted(needed)):
            op = self.keys[index][0]
            kind = KIND_NAMES[self.nodes[index].kind].lower()
            names[index] = _PARAMETERS.get(op, f"{kind}{place}")
        return names

    # ---- functions ----

    def _write_row(self, names: _Names, row: list[int], members: list[int]) -> None:
        """Write the struct of a row, and the function that computes its members."""
        self.lines += [
            "typedef struct {",
            "    int b;",
            f"    {_spell('int', ROW)} h, q;",
            f"    {_spell('bool', ROW)} outside, mask_outside;",
            *[f"    {self._type(i)} {names[i]};" for i in members],
            "} mod_row;",
            "",
            "INLINED void start_mod_row(mod_row *row, const attention_call *call)",
            "{",
            f"    {_spell('bool', ROW)} outside = 0;",
            f"    {_spell('bool', ROW)} mask_outside = 0;",
        ]
        for index in row:
            flags = {"score": "outside", "mask": "mask_outside"}
            flags_of = [f for n, f in flags.items() if index in self.needed[n]]
            self._write_node(names, index, ROW, flags_of)
        self.lines += [
            *[f"    row->{names[index]} = {names[index]};" for index in members],
            "    row->outside = outside;",
            "    row->mask_outside = mask_outside;",
            "}",
        ]

    def _write_mod(self, names: _Names, name: str, result: Node) -> None:
        is_score = name == "score"
        needed = sorted(self.needed[name])
        type_ = REAL if is_score else BOOL
        returned = _spell(TYPE_NAMES[type_], ALL)
        loads = any(self.keys[index][0] == "load" for index in needed)
        score = f", {_spell('real', ALL)} score" if is_score else ""
        self.lines += [
            "",
            f"INLINED {returned} mod_{name}(const attention_call *call, const mod_row *row, "
            f"{_spell('int', KEY)} key{score})",
            "{",
        ]
        if loads:
            flag = "row->outside" if is_score else "row->mask_outside"
            self.lines.append(f"    {_spell('bool', ALL)} outside = ({_spell('bool', ALL)}){flag};")
        for index in needed:
            if not self._is_of_row(index) and not self._is_parameter(index):
                self._write_node(names, index, ALL, ["outside"])
        value = self._as_kind(names, result.index, ALL)
        if loads and is_score:
            value = f"{_spell('where_real', ALL)}(outside, ({returned})NAN, {value})"
        elif loads:
            value = f"{value} & ~outside"
        self.lines += [f"    return {value};", "}"]

    # ---- functions of the backward pass ----

    def _write_body(self, names: _Names, name: str) -> None:
        """Write the nodes that a function needs, and that are not the row's."""
        for index in sorted(self.needed[name]):
            if not self._is_of_row(index) and not self._is_parameter(index):
                self._write_node(names, index, ALL, [])

    def _write_slope(self, names: _Names, slope: Node) -> None:
        real = _spell("real", ALL)
        self.lines += [
            "",
            f"INLINED {real} mod_score_slope(const attention_call *call, const mod_row *row, "
            f"{_spell('int', KEY)} key, {real} score)",
            "{",
        ]
        self._write_body(names, "slope")
        self.lines += [f"    return {self._as_kind(names, slope.index, ALL)};", "}"]

    def _write_reads(self, names: _Names, reads: Iterable[Read]) -> None:
        real = _spell("real", ALL)
        self.lines += [
            "",
            "INLINED void add_captured(const attention_call *call, const mod_row *row, "
            f"{_spell('int', KEY)} key, {real} score, {real} factor, int which, "
            "__global real *sums)",
            "{",
        ]
        self._write_body(names, "reads")
        for read in reads:
            value, guard = read.derivative
            zeros = ", ".join(f"({_spell(name, ALL)})0" for name in ("int", "bool"))
            reaches = f"~({_spell('bool', ALL)})0"
            if guard is not None:
                reaches = self._as_kind(names, guard.index, ALL)
            term = f"factor * {self._as_kind(names, value.index, ALL)}"
            self.lines += [
                f"    if (which == {read.which}) {{",
                f"        {_spell('element_place', ALL)} place = {{{zeros}}};",
                *[f"        {line}" for line in self._find_element(names, read.node)],
                f"        {_spell('add_to_element', ALL)}(sums, &place, {reaches}, {term});",
                "    }",
            ]
        self.lines.append("}")

    def _find_element(self, names: _Names, node: Node) -> list[str]:
        """Return lines that find an element in the gradient; the one of a number is at place 0."""
        key = self.keys[node.index]
        if key[0] == "number":
            return []
        argument, shared = self.arguments[key[2]]
        first = 0 if shared is None else 1  # of stacked tables each has a gradient
        return [
            f"{_spell('find_element_' + TYPE_NAMES[self.nodes[place].type], ALL)}"
            f"(call, {argument}, {first + d}, {self._as_kind(names, place, ALL)}, &place);"
            for d, place in enumerate(operands_of(key))
        ]

    # ---- nodes ----

    def _type(self, index: int) -> str:
        node = self.nodes[index]
        return _spell(TYPE_NAMES[node.type], node.kind)

    def _as_kind(self, names: _Names, index: int, kind: int) -> str:
        """Return the name of a node, cast to a kind."""
        node = self.nodes[index]
        name = names[index]
        return name if node.kind == kind else f"({_spell(TYPE_NAMES[node.type], kind)}){name}"

    def _write_node(self, names: _Names, index: int, flags_kind: int, flags: list[str]) -> None:
        """Write the node; a load sets the flags, which are of that kind, where it is outside."""
        name = names[index]
        kind = self.nodes[index].kind
        if self.keys[index][0] == "load":
            value = self._write_place(names, index)
            wide = "" if kind == flags_kind else f"({_spell('bool', flags_kind)})"
            self.lines += [f"    {flag} |= {wide}{name}_outside;" for flag in flags]
        else:
            value = self._expression(names, index)
        self.lines.append(f"    const {self._type(index)} {name} = {value};")

    def _write_place(self, names: _Names, index: int) -> str:
        """Write where in its table a load finds the element; return the load."""
        _, dtype, table, *places = self.keys[index]
        node = self.nodes[index]
        name = names[index]
        self.lines += [
            f"    {_spell('int', node.kind)} {name}_at = 0;",
            f"    {_spell('bool', node.kind)} {name}_outside = 0;",
        ]
        indexes = [
            (TYPE_NAMES[self.nodes[place].type], self._as_kind(names, place, node.kind))
            for place in places
        ]
        argument, shared = self.arguments[table]
        if shared is not None:
            indexes.insert(0, ("int", f"({_spell('int', node.kind)}){shared}"))
        for d, (type_, value) in enumerate(indexes):
            function = _spell(f"index_{type_}", node.kind)
            self.lines.append(
                f"    {function}(call, {argument}, {d}, {value}, &{name}_at, &{name}_outside);"
            )
        load = _spell(f"load_{TYPE_NAMES[node.type]}", node.kind)
        return f"{load}(call, {argument}, {dtype} /* {_DTYPE_NAMES[dtype]} */, {name}_at)"

    def _expression(self, names: _Names, index: int) -> str:
        op, type_, *rest = self.keys[index]
        if op == "number":
            return f"number_{TYPE_NAMES[type_]}(call, {rest[0]})"
        kind = self.nodes[index].kind
        operands = [self._as_kind(names, operand, kind) for operand in rest]
        if op in _INFIX:
            return f"{operands[0]} {op} {operands[1]}"
        if op in _PREFIX:
            return f"{_PREFIX[op]}{operands[0]}"
        function = f"{_SPELLED.get(op, op)}_{TYPE_NAMES[type_]}"
        return f"{_spell(function, kind)}({', '.join(operands)})"
