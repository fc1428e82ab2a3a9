"""Checks of a call that is carried out in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clattn import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["check_flag", "shape_of_call"]


def shape_of_call(attend: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[int, ...]:
    """Let a function of attention check its arguments; return the shape (..., Hq, L, Ev).

    It needs no device. `return_lse` is not among the options.
    """
    shape: tuple[int, ...] = attend(*arguments, return_lse=_core.only_check, **options)
    return shape


def check_flag(name: str, flag: Any) -> None:
    """Raise TypeError, with the message of the core, for what is neither True nor False."""
    if not isinstance(flag, bool | np.bool):
        raise TypeError(f"{name} must be True or False, got {type(flag).__name__}")
