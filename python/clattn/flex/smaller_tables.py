"""Tables of which a mod has given some of the indexes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SmallerTable"]


class SmallerTable:
    """A captured array, and the nodes of the indexes that a mod has given so far.

    `table[h]` of two dimensions makes one, and so does `table[:, h]`.

    Attributes
    ----------
    graph : Graph
        The graph of the nodes.
    table : array
        The captured array, all of it.
    dtype : int
        The number of its dtype.
    places : tuple of Node or None
        One for each dimension of the array; None where the index is still to be given.
    """

    __slots__ = ("dtype", "graph", "places", "table")

    def __init__(self, graph: Any, table: Any, dtype: int, places: tuple[Any, ...]) -> None:
        self.graph = graph
        self.table = table
        self.dtype = dtype
        self.places = places

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions that are left."""
        sizes = zip(self.table.shape, self.places, strict=True)
        return tuple(int(size) for size, place in sizes if place is None)

    @property
    def ndim(self) -> int:
        """How many dimensions are left."""
        return self.places.count(None)

    def at(self, index: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return the places after more indexes, each of which is read by a function.

        A colon leaves its dimension, and an ellipsis all that the others do not name.
        """
        keys = list(index) if type(index) is tuple else [index]
        left = self.ndim
        given = len(keys) - sum(key is Ellipsis for key in keys)
        if given > left or len(keys) - given > 1:
            raise self.graph.refuse(
                f"{given} indexes of an array of {left} dimensions; expected one for each "
                "dimension: table[h, q_idx]"
            )
        for n, key in enumerate(keys):
            if key is Ellipsis:
                keys[n : n + 1] = [slice(None)] * (left - given)
                break
        found = iter(None if _is_whole(key) else read(key) for key in keys)
        return tuple(next(found, None) if place is None else place for place in self.places)


def _is_whole(key: Any) -> bool:
    return isinstance(key, slice) and key == slice(None)
