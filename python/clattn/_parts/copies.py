"""Copies from one array to another of any library."""

from __future__ import annotations

from typing import Any

from clattn import _core

__all__ = ["copy_into"]


def copy_into(out: Any, array: Any) -> None:
    """Copy an array to `out`, a Tensor or another array of its shape and dtype."""
    # A matrix with a diagonal of no width is the matrix itself.
    _core.diagonal_matrix(array, value=0, begin=0, end=0, out=out)
