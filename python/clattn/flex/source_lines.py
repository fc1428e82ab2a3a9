"""The line of the user's function that an error message shows."""

from __future__ import annotations

import inspect
import linecache
import sys
from types import CodeType
from typing import Any

__all__ = ["call_mod", "definition", "user_line"]

_LIBRARIES = frozenset({"numpy", "torch", "jax", "jaxlib"})


def call_mod(mod: Any, arguments: tuple[Any, ...]) -> Any:
    """Call the user's function. Frames of this function bound the search of `user_line`."""
    return mod(*arguments)


def user_line() -> str:
    """Return the place and text of the user's line that runs now, as in tracebacks.

    An empty string if there is none between here and `call_mod`.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not call_mod.__code__:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("clattn.flex") and module.partition(".")[0] not in _LIBRARIES:
            code = frame.f_code
            return _show(code.co_filename, frame.f_lineno, code.co_name, frame.f_globals)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def definition(mod: Any) -> str:
    """Return the place and first line of a function; an empty string if it has none."""
    mod = inspect.unwrap(getattr(mod, "func", mod))
    method = type(mod).__call__
    code = getattr(mod, "__code__", None) or getattr(method, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    line = code.co_firstlineno
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line += 1
    return _show(code.co_filename, line, code.co_name, None)


def _show(file: str, line: int, name: str, module: dict[str, Any] | None) -> str:
    text = linecache.getline(file, line, module).strip()
    return f'\n  File "{file}", line {line}, in {name}' + (f"\n    {text}" if text else "")
