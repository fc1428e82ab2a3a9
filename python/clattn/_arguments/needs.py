"""Which gradients a caller asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["read_needs"]


def read_needs(needs: Collection[str], known: Sequence[str]) -> frozenset[str]:
    """Return the names, which are among those that are known.

    Raises
    ------
    TypeError
        Not a collection of names.
    ValueError
        An unknown name.
    """
    if isinstance(needs, str):
        raise TypeError(
            f'needs must be a collection of names, got "{needs}"; expected ("{needs}",)'
        )
    try:
        names = list(needs)
    except TypeError:
        kind = type(needs).__name__
        raise TypeError(f"needs must be a collection of names, got {kind}") from None
    for name in names:
        if name not in known:
            raise ValueError(f"needs has {name!r}; expected names of {', '.join(known)}")
    return frozenset(names)
