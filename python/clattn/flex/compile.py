"""From the user's functions to what the core needs of them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from clattn.flex.derivatives import derive
from clattn.flex.graph import MOST_OPERATIONS, Graph, Node, operands_of
from clattn.flex.kinds import BOOL, REAL, TYPE_NAMES
from clattn.flex.opencl_c import Read, Slopes, write
from clattn.flex.operations import where
from clattn.flex.source_lines import call_mod, definition
from clattn.flex.symbols import Symbol, node_of
from clattn.flex.tables import dimensions, share_arguments, stack_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from clattn.flex.tables import Arguments

__all__ = [
    "MASK_PARAMETERS",
    "SCORE_PARAMETERS",
    "Mods",
    "find_learnable",
    "run_mask",
    "takes",
    "trace_backward",
    "trace_both",
    "trace_mods",
]

SCORE_PARAMETERS = "(score, b, h, q_idx, kv_idx)"
MASK_PARAMETERS = "(b, h, q_idx, kv_idx)"

# A cache of OpenCL C, by the structure of the graph. Writing OpenCL C takes several times as long
# as tracing a mod.
_MOST_TEXTS = 256
_texts: dict[Any, str] = {}


class Mods(NamedTuple):
    """A score_mod, a mask_mod or both, as kernels compute them.

    Attributes
    ----------
    text : str
        OpenCL C. It depends on the operations, on the types of numbers, and on the dtypes and
        ranks of tables alone.
    has_score, has_mask : bool
        Which functions the text has.
    numbers : tuple of int and float
        The values of the numbers that the text reads.
    tables : tuple of arrays
        The arrays that the text reads.
    """

    text: str
    has_score: bool
    has_mask: bool
    numbers: tuple[int | float, ...]
    tables: tuple[Any, ...]


def trace_mods(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, like: Any = None
) -> Mods:
    """Call the functions once, with symbols.

    Parameters
    ----------
    score_mod : callable or None
        A function of (score, b, h, q_idx, kv_idx) that returns a number.
    mask_mod : callable or None
        A function of (b, h, q_idx, kv_idx) that returns a bool.
    like : array, optional
        The query, whose library and precision the dtypes of symbols have.

    Returns
    -------
    Mods
        What the functions compute.

    Raises
    ------
    TypeError
        A function does something that symbols cannot do, or returns something else. The message
        shows the line of the function. Exceptions of the function's own pass through.
    ValueError
        A captured tensor requires gradients while torch computes them, or an array of uint64 has
        an element that int64 does not hold.
    """
    return trace_both(score_mod, mask_mod, like)[1]


def trace_both(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, like: Any = None
) -> tuple[Mods, Mods]:
    """Call the functions once, as `trace_mods`; return the mask_mod alone, and both.

    The mask_mod is called first. So what it becomes alone does not depend on the score_mod.
    """
    graph = Graph(like)
    try:
        arguments = tuple(map(Symbol, graph.parameters()))
        score = mask = None
        if mask_mod is not None:
            mask = run_mask(graph, mask_mod, arguments[1:])
        alone = both = _mods_of(graph, None, mask)
        if score_mod is not None:
            score = _run_score(graph, score_mod, arguments)
            both = _mods_of(graph, score, mask)
        return alone, both
    finally:
        graph.close()


def find_learnable(score_mod: Callable[..., Any], like: Any = None) -> tuple[Any, ...]:
    """Call the function once; return the tensors that it reads and that require gradients.

    TypeError and ValueError as of `trace_mods`.
    """
    graph = Graph(like)
    graph.learnable = []
    try:
        _run_score(graph, score_mod, tuple(map(Symbol, graph.parameters())))
        return tuple({id(array): array for array in graph.learnable}.values())
    finally:
        graph.close()


# Derivatives of 1,000 operations have so many times as many, at most.
_MORE_OPERATIONS = 16


def trace_backward(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    like: Any,
    captured: tuple[Any, ...],
    in_order: bool = False,
) -> tuple[Mods, Mods, tuple[int, ...]]:
    """Call the functions once; return the mask_mod alone, and both with the score's derivatives.

    Parameters
    ----------
    score_mod, mask_mod, like
        As for `trace_mods`.
    captured : tuple of arrays
        Those whose gradients are asked for.
    in_order : bool
        They are all tensors that require gradients, in the order in which the score_mod reads them,
        which may have computed them anew.

    Returns
    -------
    alone, both : Mods
        The text of the second one is for kernels of the backward pass.
    apart : tuple of int
        For each captured array the bits 1, 2 and 4 if rows of different b, h and q_idx never read
        the same element, as long as none of these is negative.

    Raises
    ------
    TypeError
        As `trace_mods`.
    ValueError
        As `trace_mods`; the score_mod has no derivative, or does not read a captured array.
    """
    graph = Graph(like, captured)
    graph.in_order = in_order
    try:
        arguments = tuple(map(Symbol, graph.parameters()))
        score = mask = slopes = None
        if mask_mod is not None:
            mask = run_mask(graph, mask_mod, arguments[1:])
        alone = _mods_of(graph, None, mask)
        if score_mod is not None:
            score = _run_score(graph, score_mod, arguments)
        for which in range(len(captured)):
            if which not in graph.read:
                raise ValueError(
                    f"captured[{which}] is never read by the score_mod; expected the very array "
                    f"that it reads{definition(score_mod)}"
                )
        if score is not None:
            slopes = _find_slopes(graph, score)
        apart = tuple([_apart_of(graph, slopes, which) for which in range(len(captured))])
        return alone, _mods_of(graph, score, mask, slopes), apart
    finally:
        graph.close()


def _apart_of(graph: Graph, slopes: Slopes | None, which: int) -> int:
    """Return the bits of the parameters that are the index of one dimension in each read."""
    keys = list(graph.nodes)
    bits = 0
    all_reads = () if slopes is None else slopes.reads
    reads = [keys[read.node.index] for read in all_reads if read.which == which]
    for bit, parameter in enumerate(("b", "h", "q")):
        places = [
            {d for d, index in enumerate(operands_of(key)) if keys[index][0] == parameter}
            for key in reads
        ]
        if places and set.intersection(*places):
            bits |= 1 << bit
    return bits


def _find_slopes(graph: Graph, score: Node) -> Slopes:
    """Add the derivatives of a score to its graph."""
    leaves = list(graph.captured_numbers)
    for key, node in graph.nodes.items():
        if key[0] == "load":
            table = graph.tables[key[2]]
            leaves += [(n, node) for n, one in enumerate(graph.captured) if one is table]
    graph.most = _MORE_OPERATIONS * MOST_OPERATIONS
    parameter = graph.parameters()[0]
    found = derive(graph, score, [parameter, *[node for _, node in leaves]])
    reads = [Read(n, node, found[node.index]) for n, node in leaves if node.index in found]
    by_score = found.get(parameter.index)
    if by_score is None:
        slope = graph.cast(0.0, REAL)
    elif by_score.guard is None:
        slope = by_score.value
    else:
        slope = where(graph, by_score.guard, by_score.value, 0.0)
    return Slopes(slope, tuple(reads))


def _mods_of(
    graph: Graph, score: Node | None, mask: Node | None, slopes: Slopes | None = None
) -> Mods:
    arguments = share_arguments(graph.tables)
    assert arguments is not None  # the graph has refused other tables
    return Mods(
        _text_of(graph, score, mask, arguments, slopes),
        score is not None,
        mask is not None,
        tuple(graph.numbers),
        stack_shared(graph.tables, arguments),
    )


def _run(graph: Graph, role: str, mod: Any, arguments: tuple[Any, ...], expected: str) -> Any:
    if not callable(mod):
        raise TypeError(
            f"{role} is of type {type(mod).__name__}; expected a function of {expected}"
        )
    outer = graph.role, graph.mod  # of and_masks, or the function that calls these
    graph.role, graph.mod = role, mod
    try:
        return call_mod(mod, arguments)
    except RecursionError as error:
        raise TypeError(
            f"{role}: the function calls itself without end; symbols cannot end a recursion: "
            f"write np.where{definition(mod)}"
        ) from error
    except IndexError as error:
        if "<symbol: " in str(error):  # JAX's refusal of an index
            raise TypeError(
                f"{role}: an array is indexed by a symbol; write clattn.lookup(array, index) for "
                f"array[index]{definition(mod)}"
            ) from error
        raise
    except TypeError:
        if not takes(mod, len(arguments)):
            advice = " Is it a mask_mod?" if role == "score_mod" and takes(mod, 4) else ""
            raise TypeError(
                f"{role}: the function takes other parameters; expected {expected}.{advice}"
                f"{definition(mod)}"
            ) from None
        raise
    finally:
        if outer[0]:
            graph.role, graph.mod = outer


def takes(mod: Any, count: int) -> bool:
    """Return whether a function takes so many arguments; True if that is not known."""
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


# ---- results ----


def _run_score(graph: Graph, mod: Any, arguments: tuple[Any, ...]) -> Node:
    result = _run(graph, "score_mod", mod, arguments, SCORE_PARAMETERS)
    node = _read_result(graph, result, "score_mod", mod)
    if node.type == BOOL:
        raise _refuse_result(
            "score_mod", mod, "a bool", "write np.where(condition, score, -np.inf)"
        )
    return graph.cast(node, REAL)


def run_mask(graph: Graph, mod: Any, arguments: tuple[Any, ...]) -> Node:
    """Call a mask_mod with symbols, or what stands for them; return the node of its bool."""
    result = _run(graph, "mask_mod", mod, arguments, MASK_PARAMETERS)
    node = _read_result(graph, result, "mask_mod", mod)
    if node.type != BOOL:
        given = f"a number ({TYPE_NAMES[node.type]})"
        raise _refuse_result("mask_mod", mod, given, "write a comparison, x != 0")
    return node


def _read_result(graph: Graph, result: Any, role: str, mod: Any) -> Node:
    if type(result) is Symbol:
        node: Node = node_of(result)
        if node.graph is not graph:
            given = "a symbol of another call"
            raise _refuse_result(role, mod, given, "a mod must not keep symbols")
        return node
    if result is None:
        raise _refuse_result(role, mod, "None", "write return before the result")
    if not isinstance(result, (bool, int, float)) and dimensions(result) != 0:
        given = f"a {type(result).__name__}"
        raise _refuse_result(role, mod, given, "return one result of the arguments")
    return graph.operand(result)


def _refuse_result(role: str, mod: Any, given: str, remedy: str) -> TypeError:
    expected = "a number" if role == "score_mod" else "a bool"
    return TypeError(
        f"{role}: the function returns {given}; expected {expected}: {remedy}{definition(mod)}"
    )


# ---- text ----


def _text_of(
    graph: Graph,
    score: Node | None,
    mask: Node | None,
    arguments: Arguments,
    slopes: Slopes | None,
) -> str:
    key = (
        tuple(graph.nodes),
        None if score is None else score.index,
        None if mask is None else mask.index,
        tuple(arguments),
        None if slopes is None else _places_of(slopes),
    )
    text = _texts.get(key)
    if text is None:
        text = write(graph.nodes, score, mask, arguments, slopes)
        if len(_texts) >= _MOST_TEXTS:
            _texts.clear()
        _texts[key] = text
    return text


def _places_of(slopes: Slopes) -> tuple[Any, ...]:
    """Return the indexes of the nodes of slopes."""
    reads = []
    for which, node, (value, guard) in slopes.reads:
        reads.append((which, node.index, value.index, None if guard is None else guard.index))
    return slopes.score.index, *reads
