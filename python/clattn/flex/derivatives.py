"""Derivatives of a score_mod, by reverse mode: more nodes of the graph that its tracing has made.

They are torch's. Of two equal numbers, minimum and maximum have one half each; `abs` has 0 at 0,
and so has relu; the ends of clip belong to its inside. Comparisons, integers, floor, ceil, trunc,
round and sign have the derivative 0.

A derivative that reaches a node by a branch of `where` counts only where the branch is taken: it
has a guard, a node of type bool. What is computed where the guard is False, NaN perhaps, is not
used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from clattn.flex import operations as ops
from clattn.flex.graph import Graph, Key, Node, operands_of
from clattn.flex.kinds import REAL
from clattn.flex.source_lines import definition

__all__ = ["Derivative", "derive"]


class Derivative(NamedTuple):
    """What a result changes by, for what a node changes by.

    Attributes
    ----------
    value : Node
        Of type real.
    guard : Node or None
        Where it is False, the derivative is 0, whatever the value is. None: it is True everywhere.
    """

    value: Node
    guard: Node | None


# What a rule returns for an operand: nothing, or a value, or a value and a guard.
_Share = Node | tuple[Node, Node] | None
_Rule = Callable[..., "tuple[_Share, ...]"]


def derive(graph: Graph, result: Node, leaves: Iterable[Node]) -> dict[int, Derivative]:
    """Return the derivatives of a real result by some nodes that it depends on.

    Parameters
    ----------
    graph : Graph
        Where the nodes are; more of them are added.
    result : Node
        What a score_mod returns.
    leaves : nodes of type real
        The score, elements of tables, numbers.

    Returns
    -------
    dict
        By the indexes of the leaves. One that does not reach the result is missing.

    Raises
    ------
    ValueError
        An operation has no derivative.
    """
    wanted = {leaf.index for leaf in leaves}
    sweep = _Sweep(graph)
    depends = sweep.find_dependent(result, wanted)
    found: dict[int, Derivative] = {}
    if result.index not in depends:
        return found
    pending = {result.index: Derivative(sweep.one, None)}
    for index in range(result.index, -1, -1):
        derivative = pending.pop(index, None)
        if derivative is None:
            continue
        if index in wanted:
            found[index] = derivative
            continue
        for operand, share in sweep.shares(index, derivative.value):
            if operand not in depends or share is None:
                continue
            value, guard = share if isinstance(share, tuple) else (share, None)
            given = Derivative(value, sweep.both(derivative.guard, guard))
            before = pending.get(operand)
            pending[operand] = given if before is None else sweep.sum(before, given)
    return found


class _Sweep:
    """The operations of derivatives, on a graph whose nodes so far are the forward pass.

    Attributes
    ----------
    one : Node
        The derivative of the result by itself.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.keys: list[Key] = list(graph.nodes)
        self.nodes: list[Node] = list(graph.nodes.values())
        self.constants: dict[float, Node] = {}
        self.one = self.number(1.0)

    def find_dependent(self, result: Node, wanted: set[int]) -> set[int]:
        """Return the indexes of the real nodes that depend on the wanted ones."""
        depends = set(wanted)
        for index in range(result.index + 1):
            is_real = self.nodes[index].type == REAL
            if is_real and not depends.isdisjoint(operands_of(self.keys[index])):
                depends.add(index)
        return depends

    def shares(self, index: int, g: Node) -> Iterable[tuple[int, _Share]]:
        """Return the operands of a node, and what each has of the node's derivative."""
        special = self.graph.specials.get(index)
        name, operands = special or (self.keys[index][0], operands_of(self.keys[index]))
        rule = _RULES.get(name)
        if rule is None:
            mod = self.graph.mod
            raise ValueError(f"score_mod: {name} has no derivative{definition(mod)}")
        nodes = [self.nodes[operand] for operand in operands]
        return zip(operands, rule(self, g, self.nodes[index], *nodes), strict=True)

    # ---- guards ----

    def both(self, a: Node | None, b: Node | None) -> Node | None:
        """Return the guard that holds where both do."""
        if a is None or b is None:
            return a if b is None else b
        return a if a is b else ops.bitwise_and(self.graph, a, b)

    def sum(self, a: Derivative, b: Derivative) -> Derivative:
        """Return the sum of two derivatives by one node."""
        if a.guard is b.guard:
            return Derivative(ops.add(self.graph, a.value, b.value), a.guard)
        value = ops.add(self.graph, self.guarded(a), self.guarded(b))
        if a.guard is None or b.guard is None:
            return Derivative(value, None)
        return Derivative(value, ops.bitwise_or(self.graph, a.guard, b.guard))

    def guarded(self, derivative: Derivative) -> Node:
        """Return the value of a derivative, 0 where its guard is False."""
        value, guard = derivative
        return value if guard is None else ops.where(self.graph, guard, value, self.number(0.0))

    # ---- operations ----

    def number(self, value: float) -> Node:
        """Return the node of a constant."""
        if value not in self.constants:
            self.constants[value] = self.graph.cast(value, REAL)
        return self.constants[value]

    def times(self, a: Node, *factors: Node | float) -> Node:
        """Return a product, whose first factor may be the one."""
        for factor in factors:
            b = factor if isinstance(factor, Node) else self.number(factor)
            a = b if a is self.one else ops.multiply(self.graph, a, b)
        return a

    def over(self, a: Node | float, b: Node) -> Node:
        """Return a quotient."""
        return ops.divide(self.graph, a if isinstance(a, Node) else self.number(a), b)

    def minus(self, a: Node) -> Node:
        """Return `-a`."""
        return ops.negative(self.graph, a)

    def plus(self, a: Node, b: Node | float) -> Node:
        """Return a sum."""
        return ops.add(self.graph, a, b if isinstance(b, Node) else self.number(b))

    def call(self, name: str, *x: Node) -> Node:
        """Return the node of a function of reals."""
        if len(x) == 1:
            return ops.real_function(name)(self.graph, x[0])
        return ops.call_two(self.graph, name, x[0], x[1])

    def is_(self, comparison: str, a: Node, b: Node | float) -> Node:
        """Return the bool of a comparison."""
        other = b if isinstance(b, Node) else self.number(b)
        return ops.comparison(comparison)(self.graph, a, other)

    def not_(self, a: Node) -> Node:
        """Return the other bool."""
        return ops.invert(self.graph, a)

    def where(self, condition: Node, a: Node, b: Node) -> Node:
        """Return `a` where the condition holds, else `b`."""
        return ops.where(self.graph, condition, a, b)


# ---- rules: the sweep, the derivative of a node, the node and its operands ----


def _quotient(s: _Sweep, g: Node, y: Node, a: Node, b: Node) -> tuple[_Share, ...]:
    return s.over(g, b), s.minus(s.times(g, s.over(y, b)))


def _power(s: _Sweep, g: Node, y: Node, a: Node, b: Node) -> tuple[_Share, ...]:
    lower = s.call("power", a, s.plus(b, -1.0))
    flat = ops.bitwise_and(s.graph, s.is_("eq", a, 0.0), s.is_("ge", b, 0.0))
    return (
        (s.times(g, s.times(b, lower)), s.is_("ne", b, 0.0)),
        (s.times(g, s.times(y, s.call("log", a))), s.not_(flat)),
    )


def _angle(s: _Sweep, g: Node, y: Node, a: Node, b: Node) -> tuple[_Share, ...]:
    length = s.call("hypot", a, b)
    return (
        s.times(g, s.over(s.over(b, length), length)),
        s.minus(s.times(g, s.over(s.over(a, length), length))),
    )


def _remainder(quotient: Callable[..., Node]) -> _Rule:
    def rule(s: _Sweep, g: Node, y: Node, a: Node, b: Node) -> tuple[_Share, ...]:
        return g, s.minus(s.times(g, quotient(s, a, b)))

    return rule


def _extreme(loses: str, at_ties: float) -> _Rule:
    """Return the rule of minimum or maximum; `at_ties` is what the first operand has there."""
    gains = {"lt": "gt", "gt": "lt"}[loses]

    def rule(s: _Sweep, g: Node, y: Node, a: Node, b: Node) -> tuple[_Share, ...]:
        if at_ties == 0.5:
            halved = s.where(s.is_("eq", a, b), s.times(g, 0.5), g)
            return (
                (halved, s.not_(s.is_(loses, a, b))),
                (halved, s.not_(s.is_(gains, a, b))),
            )
        first, second = (loses, gains[0] + "e") if at_ties == 1.0 else (loses[0] + "e", gains)
        return (g, s.not_(s.is_(first, a, b))), (g, s.not_(s.is_(second, a, b)))

    return rule


def _where(s: _Sweep, g: Node, y: Node, c: Node, a: Node, b: Node) -> tuple[_Share, ...]:
    return None, (g, c), (g, s.not_(c))


def _where_negative(s: _Sweep, g: Node, y: Node, c: Node, a: Node, b: Node) -> tuple[_Share, ...]:
    """Where of `b < 0`, whose derivative at 0 is that of the branch below."""
    return _where(s, g, y, s.not_(s.is_("gt", b, 0.0)), a, b)


def _sigmoid(s: _Sweep, g: Node, y: Node, x: Node) -> tuple[_Share, ...]:
    return (s.times(g, s.times(y, _rest(s, y))),)


def _rest(s: _Sweep, share: Node) -> Node:
    return ops.subtract(s.graph, s.number(1.0), share)


def _share_of(s: _Sweep, x: Node) -> Node:
    """Return `1 / (1 + exp(-x))`."""
    return s.over(1.0, s.plus(s.call("exp", s.minus(x)), 1.0))


def _silu(s: _Sweep, g: Node, y: Node, x: Node) -> tuple[_Share, ...]:
    share = _share_of(s, x)
    return (s.times(g, s.times(share, s.plus(s.times(x, _rest(s, share)), 1.0))),)


def _gelu_by_tanh(s: _Sweep, g: Node, y: Node, x: Node) -> tuple[_Share, ...]:
    square = s.times(x, x)
    inner = s.times(x, s.plus(s.times(square, 0.044715), 1.0), math.sqrt(8 / math.pi))
    slope = s.times(s.plus(s.times(square, 3 * 0.044715), 1.0), math.sqrt(8 / math.pi))
    share = _share_of(s, inner)
    return (s.times(g, s.times(share, s.plus(s.times(x, _rest(s, share), slope), 1.0))),)


def _of_one(factor: Callable[[_Sweep, Node, Node], Node]) -> _Rule:
    """Return the rule of a function of one real, from the derivative of `y` by `x`."""
    return lambda s, g, y, x: (s.times(g, factor(s, y, x)),)


def _bell(factor: float) -> _Rule:
    """Return the rule of `erf` times a factor."""
    height = 2 / math.sqrt(math.pi) * factor
    return _of_one(lambda s, y, x: s.times(s.call("exp", s.minus(s.times(x, x))), height))


_RULES: dict[str, _Rule] = {
    "+": lambda s, g, y, a, b: (g, g),
    "-": lambda s, g, y, a, b: (g, s.minus(g)),
    "*": lambda s, g, y, a, b: (s.times(g, b), s.times(g, a)),
    "/": _quotient,
    "negate": lambda s, g, y, x: (s.minus(g),),
    "absolute": lambda s, g, y, x: (s.times(g, ops.sign(s.graph, x)),),
    "where": _where,
    "minimum": _extreme("gt", 0.5),
    "maximum": _extreme("lt", 0.5),
    "at_least": _extreme("lt", 1.0),
    "at_most": _extreme("gt", 1.0),
    "rectify": _extreme("lt", 0.0),
    "power": _power,
    "atan2": _angle,
    "hypot": lambda s, g, y, a, b: (s.times(g, s.over(a, y)), s.times(g, s.over(b, y))),
    "modulo": _remainder(lambda s, a, b: s.call("floor_div", a, b)),
    "fmod": _remainder(lambda s, a, b: s.call("trunc", s.over(a, b))),
    "exp": _of_one(lambda s, y, x: y),
    "exp2": _of_one(lambda s, y, x: s.times(y, math.log(2))),
    "expm1": _of_one(lambda s, y, x: s.call("exp", x)),
    "log": _of_one(lambda s, y, x: s.over(1.0, x)),
    "log2": _of_one(lambda s, y, x: s.over(1 / math.log(2), x)),
    "log1p": _of_one(lambda s, y, x: s.over(1.0, s.plus(x, 1.0))),
    "sqrt": _of_one(lambda s, y, x: s.over(0.5, y)),
    "rsqrt": _of_one(lambda s, y, x: s.times(y, y, y, -0.5)),
    "sin": _of_one(lambda s, y, x: s.call("cos", x)),
    "cos": _of_one(lambda s, y, x: s.minus(s.call("sin", x))),
    "tanh": _of_one(lambda s, y, x: _rest(s, s.times(y, y))),
    "erf": _bell(1.0),
    "erfc": _bell(-1.0),
    # steps
    **dict.fromkeys(("floor", "ceil", "trunc", "rint", "sign"), lambda s, g, y, x: (None,)),
    "floor_div": lambda s, g, y, a, b: (None, None),
    # functions of several operations, which functions.py names
    "where negative": _where_negative,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu by tanh": _gelu_by_tanh,
}
