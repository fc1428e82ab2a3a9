"""Functions of the user that see the places of the whole arrays, traced once for all chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from clattn._arguments.arrays import host_array
from clattn.flex.compile import Mods, trace_mods

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ChunkMods", "trace_for_chunks"]

_INT_MAX = (1 << 31) - 1


class ChunkMods(NamedTuple):
    """What a score_mod, a mask_mod or both compute, for any chunk.

    Attributes
    ----------
    traced : Mods
        Its tables are copies, as they were when the graph was made.
    slots : tuple of (int, int)
        (n, m): number n of `traced` is number m of the chunk, see `at`.
    """

    traced: Mods
    slots: tuple[tuple[int, int], ...]

    def at(self, lead: Sequence[int], origins: Sequence[int]) -> Mods:
        """Return the Mods of a chunk.

        `lead` is the chunk's shape before the heads. `origins` are the places in the whole arrays
        where the chunk begins: in each dimension of `lead`, then heads, rows and keys.
        """
        of_chunk = [*(max(size, 1) for size in lead[1:]), *origins]
        numbers = list(self.traced.numbers)
        for n, m in self.slots:
            numbers[n] = of_chunk[m]
        return self.traced._replace(numbers=tuple(numbers))


def trace_for_chunks(mods: dict[str, Any], shape: tuple[int, ...], keys: int) -> ChunkMods:
    """Trace functions of places in the whole arrays as functions of places in a chunk.

    `shape` is (..., Hq, L) of the result; without heads it is (1, L).
    """
    whole = shape[:-2]
    count = max(len(whole) - 1, 0) + len(whole) + 3
    # A kernel's integers are of 32 bits where these suffice.
    entries = 1
    for size in whole:
        entries *= size
    start = (_INT_MAX if max(entries, *shape, keys) > _INT_MAX else _INT_MAX // 2) + 1
    own = trace_mods(**mods).numbers
    while any(number in range(start, start + count) for number in own):
        start += count
    # These numbers stand for those of a chunk, and are found again by their values.
    marks = range(start, start + count)
    traced = trace_mods(**_moved(mods, whole, marks))
    slots = tuple((n, int(x) - start) for n, x in enumerate(traced.numbers) if x in marks)
    tables = tuple(host_array(table, "a captured array").copy() for table in traced.tables)
    return ChunkMods(traced._replace(tables=tables), slots)


def _moved(mods: dict[str, Any], whole: tuple[int, ...], of_chunk: Sequence[int]) -> dict[str, Any]:
    """Return the functions with their arguments moved from a chunk to the whole arrays."""
    after_first = max(len(whole) - 1, 0)
    sizes, origins = of_chunk[:after_first], of_chunk[after_first:]
    head, row, key = origins[len(whole) :]

    def moved_batch(b: Any) -> Any:
        # With chunks of shape (2, 3) of a whole (4, 6), b = 5 of the chunk that begins at (2, 3)
        # has the places (1, 2) in the chunk and (3, 5) in the whole, where its number is 23.
        places = zip(_unravel(b, sizes), origins, strict=False)
        return _ravel([place + origin for place, origin in places], whole[1:]) if whole else b

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mods["mask_mod"](moved_batch(b), h + head, q_idx + row, kv_idx + key)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mods["score_mod"](score, moved_batch(b), h + head, q_idx + row, kv_idx + key)

    given = {"mask_mod": mask, "score_mod": score}
    return {name: None if mods[name] is None else mod for name, mod in given.items()}


def _unravel(number: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the places that a number stands for; `sizes` are those after the first dimension."""
    places: list[Any] = []
    for size in reversed(sizes):
        places.insert(0, number % size)
        number = number // size
    return [number, *places]


def _ravel(places: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the number of places, as `numpy.ravel_multi_index` does."""
    number = places[0]
    for place, size in zip(places[1:], sizes, strict=True):
        number = number * size + place
    return number
