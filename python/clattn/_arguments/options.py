"""Options that functions of attention share, for their overloads and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np

if TYPE_CHECKING:
    from typing import Any, Literal

__all__ = ["BandOptions", "check_flag"]


class BandOptions(TypedDict, total=False):
    """Keywords that say which keys a row attends to by its position, and how."""

    is_causal: bool | Literal["lower_right"]
    scale: float | None
    enable_gqa: bool
    window: tuple[int | None, int | None] | None


def check_flag(name: str, flag: Any) -> None:
    """Refuse what is neither True nor False, in the words of the core."""
    if not isinstance(flag, bool | np.bool):
        raise TypeError(f"{name} must be True or False, got {type(flag).__name__}")
