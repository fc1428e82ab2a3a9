"""Functions that `torch.compile` calls, and does not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["opaque"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def opaque(function: FunctionT) -> FunctionT:
    """Return a function that torch's compiler leaves to Python, with all that it calls.

    A mod is called with symbols, which the compiler cannot follow. Nothing imports torch: its
    compiler is there if it runs.
    """
    disabled: dict[Any, Any] = {}  # by the compiler's function; a cache of functools it warns of

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:
            return function(*args, **options)
        if disable not in disabled:
            disabled[disable] = disable(function)
        return disabled[disable](*args, **options)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]
