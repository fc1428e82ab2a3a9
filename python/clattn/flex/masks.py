"""What users call around mods: lookups, masks of masks, the text of a mod."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from clattn.flex.compile import MASK_PARAMETERS, SCORE_PARAMETERS, run_mask, takes, trace_mods
from clattn.flex.source_lines import definition
from clattn.flex.symbols import Symbol, find_graph, node_of, symbol_of
from clattn.flex.tables import array_of, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["and_masks", "explain", "lookup", "or_masks"]


def lookup(table: Any, *indices: Any) -> Any:
    """Read an element of an array in a mod.

    The same as ``table[indices]``, which NumPy's arrays cannot do with the arguments of a mod. A
    mod that is called with numbers or arrays in place of its arguments gets just that.

    Parameters
    ----------
    table : array
        A NumPy array, Tensor, torch tensor or other array with ``__dlpack__``, of 1 to 5
        dimensions, or a list of numbers. A bool, integer or float dtype; with uint64, numbers
        below 2**63, which each call checks.
    *indices : integers
        One for each dimension. A negative one counts from the end. With fewer, or with a colon
        or an ellipsis, the result is a smaller array, which takes the others.

    Returns
    -------
    element
        Where the index is outside the array, a score becomes NaN and a mask False.

    Raises
    ------
    TypeError
        Not an array, or not an integer for each dimension.
    ValueError
        A torch tensor that requires gradients, where torch computes them; a uint64 number of
        2**63 or more.

    Examples
    --------
    >>> import numpy as np
    >>> slopes = np.exp2(-np.arange(1, 9, dtype=np.float32))
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score + lookup(slopes, h) * (kv_idx - q_idx)
    """
    graph = find_graph((table, *indices))
    if graph is not None:
        return symbol_of(graph.lookup(node_of(table), node_of(indices)))
    if indices and isinstance(table, (list, tuple)):
        table = array_of(table)
    if not (indices and hasattr(type(table), "__dlpack__")):
        raise TypeError(
            f"lookup is given a {type(table).__name__} and {len(indices)} indices; expected an "
            "array and an integer for each of its dimensions"
        )
    return table[indices]


def and_masks(*mods: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask_mod that attends where all of the given ones do.

    Parameters
    ----------
    *mods : callable
        Functions of (b, h, q_idx, kv_idx), at least one.

    Returns
    -------
    callable
        A function of (b, h, q_idx, kv_idx).

    Raises
    ------
    TypeError
        No function, or an object that is none.

    Examples
    --------
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> def near(b, h, q_idx, kv_idx):
    ...     return q_idx - kv_idx < 256
    >>> window = and_masks(causal, near)
    >>> window(0, 0, 5, 3), window(0, 0, 3, 5)
    (True, False)
    """
    return _combine("and_masks", operator.and_, mods)


def or_masks(*mods: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask_mod that attends where one of the given ones does.

    Parameters
    ----------
    *mods : callable
        Functions of (b, h, q_idx, kv_idx), at least one.

    Returns
    -------
    callable
        A function of (b, h, q_idx, kv_idx).

    Raises
    ------
    TypeError
        No function, or an object that is none.

    Examples
    --------
    >>> prefix = or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 16)
    >>> prefix(0, 0, 2, 9), prefix(0, 0, 2, 16)
    (True, False)
    """
    return _combine("or_masks", operator.or_, mods)


def _combine(
    name: str, operation: Callable[[Any, Any], Any], mods: tuple[Callable[..., Any], ...]
) -> Callable[..., Any]:
    if not mods:
        raise TypeError(f"{name} is given no mask_mod; expected at least one")
    for mod in mods:
        if not callable(mod):
            raise TypeError(
                f"{name} is given an object of type {type(mod).__name__}; expected functions of "
                f"{MASK_PARAMETERS}"
            )
        if not takes(mod, 4):
            raise TypeError(
                f"{name}: a function takes other parameters; expected {MASK_PARAMETERS}"
                f"{definition(mod)}"
            )

    def combined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        places = (b, h, q_idx, kv_idx)
        graph = find_graph(places)
        if graph is None:
            results = [mod(*places) for mod in mods]
        else:  # each is checked alone, so that messages show it
            results = [Symbol(run_mask(graph, mod, places)) for mod in mods]
        return functools.reduce(operation, results)

    return combined


def explain(
    mod: Callable[..., Any] | None = None,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> None:
    """Print the OpenCL C of a mod.

    ``OP(int, S)`` and the like stand for a vector or a single number, as a kernel has it. R is
    what depends on head and query position, K on key position, S on both, U on neither.

    Parameters
    ----------
    mod : callable, optional
        A score_mod if it takes five arguments, a mask_mod if it takes four.
    score_mod, mask_mod : callable, optional
        The same by name, together or alone.

    Raises
    ------
    TypeError
        No mod, or one that cannot be traced.
    ValueError
        A captured array does not fit, as for `clattn.lookup`.

    Examples
    --------
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> explain(causal)  # doctest: +ELLIPSIS
    /* mask_mod */
    typedef struct {
    ...
    """
    if mod is not None:
        if score_mod is not None or mask_mod is not None:
            raise TypeError("mod is given, and score_mod or mask_mod too; expected one way")
        score_mod, mask_mod = _sort(mod)
    if score_mod is None and mask_mod is None:
        raise TypeError("explain is given no mod; expected a score_mod or a mask_mod")
    mods = trace_mods(score_mod, mask_mod)
    names = [*["score_mod"] * mods.has_score, *["mask_mod"] * mods.has_mask]
    lines = [" and ".join(names)]
    for n, number in enumerate(mods.numbers):
        lines.append(f"number {n}: {number} ({'real' if isinstance(number, float) else 'int'})")
    for n, table in enumerate(mods.tables):
        lines.append(f"table {n}: {dtype_name(table.dtype)}, shape {tuple(table.shape)}")
    print("/* " + "\n * ".join(lines) + " */")
    print(mods.text, end="")


def _sort(mod: Any) -> tuple[Any, Any]:
    """Return a mod as (score_mod, None) or (None, mask_mod)."""
    if not callable(mod):
        raise TypeError(f"mod is of type {type(mod).__name__}; expected a function")
    as_score, as_mask = takes(mod, 5), takes(mod, 4)
    if as_score == as_mask:
        raise TypeError(
            f"mod takes other parameters; expected a score_mod {SCORE_PARAMETERS} or a mask_mod "
            f"{MASK_PARAMETERS}, or say which by keyword"
        )
    return (mod, None) if as_score else (None, mod)
