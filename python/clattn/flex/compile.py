"""From the user's functions to what the core needs of them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from clattn.flex.graph import Trace
from clattn.flex.kinds import BOOL, REAL, TYPE_NAMES
from clattn.flex.opencl_c import score_is_read, write
from clattn.flex.source_lines import call_mod, definition
from clattn.flex.symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MASK_PARAMETERS", "SCORE_PARAMETERS", "Mods", "trace_mods"]

SCORE_PARAMETERS = "(score, b, h, q_idx, kv_idx)"
MASK_PARAMETERS = "(b, h, q_idx, kv_idx)"

# Texts by the structure of traces. Writing a text takes several times as long as tracing.
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


def trace_mods(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None) -> Mods:
    """Call the functions once, with symbols.

    Parameters
    ----------
    score_mod : callable or None
        A function of (score, b, h, q_idx, kv_idx) that returns a number.
    mask_mod : callable or None
        A function of (b, h, q_idx, kv_idx) that returns a bool.

    Returns
    -------
    Mods
        What the functions compute.

    Raises
    ------
    TypeError
        A function does something that symbols cannot do, or returns something else. The message
        shows the line of the function. Exceptions of the function's own pass through.
    """
    trace = Trace()
    try:
        arguments = trace.parameters()
        score = mask = None
        if score_mod is not None:
            score = _read_score(trace, _run(trace, "score_mod", score_mod, arguments))
        if mask_mod is not None:
            mask = _read_mask(trace, _run(trace, "mask_mod", mask_mod, arguments[1:]))
        return Mods(
            _text_of(trace, score, mask),
            score is not None,
            mask is not None,
            tuple(trace.numbers),
            tuple(trace.tables),
        )
    finally:
        trace.close()


def _run(trace: Trace, role: str, mod: Any, arguments: tuple[Symbol, ...]) -> Any:
    trace.role = role
    trace.mod = mod
    expected = SCORE_PARAMETERS if role == "score_mod" else MASK_PARAMETERS
    if not callable(mod):
        raise TypeError(
            f"{role} is of type {type(mod).__name__}; expected a function of {expected}"
        )
    try:
        return call_mod(mod, arguments)
    except RecursionError as error:
        raise TypeError(
            f"{role}: the function calls itself without end; symbols cannot end a recursion: "
            f"write np.where{definition(mod)}"
        ) from error
    except TypeError:
        if not takes(mod, len(arguments)):
            advice = " Is it a mask_mod?" if role == "score_mod" and takes(mod, 4) else ""
            raise TypeError(
                f"{role}: the function takes other parameters; expected {expected}.{advice}"
                f"{definition(mod)}"
            ) from None
        raise


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


def _read_score(trace: Trace, result: Any) -> Symbol:
    symbol = _read_result(trace, result, "a number")
    if symbol.type == BOOL:
        raise _refuse_result(
            trace, "a bool", "a number", "write np.where(condition, score, -np.inf)"
        )
    return trace.cast(symbol, REAL)


def _read_mask(trace: Trace, result: Any) -> Symbol:
    symbol = _read_result(trace, result, "a bool")
    if symbol.type != BOOL:
        raise _refuse_result(
            trace, f"a number ({TYPE_NAMES[symbol.type]})", "a bool", "write a comparison, x != 0"
        )
    if score_is_read(trace.nodes, symbol):
        raise _refuse_result(trace, "a symbol of score_mod", "a bool", "write no symbol elsewhere")
    return symbol


def _read_result(trace: Trace, result: Any, expected: str) -> Symbol:
    if type(result) is Symbol:
        if result.trace is not trace:
            raise _refuse_result(
                trace, "a symbol of another call", expected, "a mod must not keep symbols"
            )
        return result
    if result is None:
        raise _refuse_result(trace, "None", expected, "write return before the result")
    is_number = isinstance(result, (bool, int, float)) or getattr(result, "ndim", None) == 0
    if not is_number:
        raise _refuse_result(
            trace, f"a {type(result).__name__}", expected, "return one result of the arguments"
        )
    return trace.symbol(result)


def _refuse_result(trace: Trace, given: str, expected: str, remedy: str) -> TypeError:
    return TypeError(
        f"{trace.role}: the function returns {given}; expected {expected}: {remedy}"
        f"{definition(trace.mod)}"
    )


# ---- text ----


def _text_of(trace: Trace, score: Symbol | None, mask: Symbol | None) -> str:
    key = (
        tuple(trace.nodes),
        None if score is None else score.index,
        None if mask is None else mask.index,
    )
    text = _texts.get(key)
    if text is None:
        text = write(trace.nodes, score, mask)
        if len(_texts) >= _MOST_TEXTS:
            _texts.clear()
        _texts[key] = text
    return text
