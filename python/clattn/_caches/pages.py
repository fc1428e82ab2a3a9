"""Which pages hold the positions of which sequences: bookkeeping, without OpenCL.

A page has one owner for each sequence that names it, or none: then it is free. A change is a
`Draft` until `Pages.settle` lets it happen. It consists of new values only: if the handler of a
signal interrupts it, it happens anew, as a whole, before anybody looks.
"""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Draft", "PagedSequence", "Pages"]

_NO_PAGES = np.zeros(0, np.int32)
_NO_PLACES = np.zeros(0, np.int64)


class PagedSequence:
    """A sequence of a `clattn.PagedKVCache`, which its methods `open` and `fork` return."""

    __slots__ = ("cache", "held")

    def __init__(self, cache: Pages) -> None:
        self.cache = cache
        # Its pages and its length; None: it is closed. The array is never changed.
        self.held: tuple[np.ndarray, int] | None = (_NO_PAGES, 0)

    def __del__(self) -> None:
        """Leave the pages of a sequence that nobody has closed to the next call."""
        if self.held is not None and len(self.held[0]) > 0:
            self.cache.left[next(self.cache.numbers)] = self.held[0]

    def __reduce__(self) -> str:
        """Refuse: a copy would not count as an owner of its pages."""
        raise TypeError("a sequence of a clattn.PagedKVCache cannot be pickled or copied; fork it")

    def __repr__(self) -> str:
        """Return how long it is."""
        held = self.held
        return f"<PagedSequence, {'closed' if held is None else f'{held[1]} positions'}>"


class Pages:
    """The pages of a cache: whose they are, and which are free."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = num_pages
        self._draft: Draft | None = None  # happens now
        # Pages of sequences that are gone without having been closed, numbered.
        self.left: dict[int, np.ndarray] = {}
        self.numbers = itertools.count()
        # Owners of each page. The free pages are a chain: the first, and what follows each of them.
        self._owners = array("q", bytes(8 * num_pages))
        self._first = 0
        self._following = array("q", range(1, num_pages + 1))

    @property
    def free(self) -> int:
        """The number of pages without an owner."""
        return self.draft().free

    def settle(self, draft: Draft | None = None) -> None:
        """Let a change happen, and before it one that was interrupted."""
        for change in (self._draft, draft):
            if change is None:
                continue
            self._draft = change
            for page, count in change.owners.items():
                self._owners[page] = count
            for page, following in change.following.items():
                self._following[page] = following
            self._first, self._free = change.first, change.free
            for sequence, held in change.sequences:
                sequence.held = held
            for number in change.gone:
                self.left.pop(number, None)
            self._draft = None

    def draft(self) -> Draft:
        """Begin a change. Pages of sequences that are gone are free in it."""
        self.settle()
        draft = Draft(self, self._owners, self._following, self._first, self._free)
        for number, pages in self.left.copy().items():
            draft.forget(number, pages)
        return draft

    def check(self, sequence: PagedSequence, name: str) -> None:
        """Raise a ValueError if the sequence is closed."""
        if sequence.held is None:
            raise ValueError(f"{name} is closed; expected an open sequence")

    def table(self, sequences: Sequence[PagedSequence]) -> tuple[np.ndarray, np.ndarray]:
        """Return the pages of open sequences, int32 (n, most), -1 behind them; int64 lengths."""
        held = [sequence.held or (_NO_PAGES, 0) for sequence in sequences]
        most = max((len(pages) for pages, _ in held), default=0)
        table = np.full((len(held), most), -1, np.int32)
        for row, (pages, _) in zip(table, held, strict=True):
            row[: len(pages)] = pages
        return table, np.array([length for _, length in held], np.int64)


class Draft:
    """A change of sequences that has not happened yet: the new values of what differs."""

    def __init__(
        self, pages: Pages, owners: array[int], following: array[int], first: int, free: int
    ) -> None:
        self.pages = pages
        self._owners = owners
        self._following = following
        self.first = first
        self.free = free
        self.owners: dict[int, int] = {}
        self.following: dict[int, int] = {}
        self.sequences: list[tuple[PagedSequence, tuple[np.ndarray, int] | None]] = []
        self.gone: list[int] = []  # numbers of `Pages.left`
        self.copies: list[tuple[int, int, int]] = []  # pages: (target, source, rows in use)

    def _owners_of(self, page: int) -> int:
        return self.owners.get(page, self._owners[page])

    def _take(self) -> int:
        """Return a page that was free."""
        page = self.first
        self.first = self.following.get(page, self._following[page])
        self.free -= 1
        self.owners[page] = 1
        return page

    def _release(self, page: int) -> None:
        """Take one owner from a page."""
        left = self._owners_of(page) - 1
        self.owners[page] = left
        if left == 0:
            self.following[page] = self.first
            self.first = page
            self.free += 1

    def extend(self, sequence: PagedSequence, count: int, name: str) -> np.ndarray | list[int]:
        """Make a sequence `count` positions longer, and return the places of these.

        Place p is row ``p % page_size`` of page ``p // page_size``. A page with other owners is
        copied before it is written to.
        """
        size = self.pages.page_size
        pages, length = sequence.held or (_NO_PAGES, 0)
        if count == 0:
            return _NO_PLACES
        shared = int(pages[-1]) if length % size else -1
        if shared >= 0 and self._owners_of(shared) == 1:
            shared = -1
        missing = -(-(length + count) // size) - len(pages)
        if missing + (shared >= 0) > self.free:
            raise MemoryError(
                f"no page is free for {name}, which needs {missing + (shared >= 0)} more: "
                f"{self.free} of {self.pages.num_pages} pages are left for it; close or truncate "
                f"sequences, or make a larger cache"
            )
        if shared >= 0:
            page = self._take()
            self._release(shared)
            self.copies.append((page, shared, length % size))
            pages = pages.copy()
            pages[-1] = page
        if missing:
            new = np.fromiter((self._take() for _ in range(missing)), np.int32, missing)
            pages = np.concatenate((pages, new))
        self.sequences.append((sequence, (pages, length + count)))
        if count == 1:
            return [int(pages[-1]) * size + length % size]
        positions = np.arange(length, length + count)
        return pages.astype(np.int64)[positions // size] * size + positions % size

    def moves(self) -> np.ndarray:
        """Return the places of rows that are to be copied: targets, then as many sources."""
        rows = [np.arange(used) for *_, used in self.copies]
        starts = np.array(self.copies, np.int64).reshape(-1, 3).T[:2] * self.pages.page_size
        found = [start + row for of in starts for start, row in zip(of, rows, strict=True)]
        return np.concatenate(found, dtype=np.int64) if found else _NO_PLACES

    def truncate(self, sequence: PagedSequence, length: int) -> None:
        """Make a sequence as short as that. Pages without a position left are given back."""
        pages, _ = sequence.held or (_NO_PAGES, 0)
        kept = -(-length // self.pages.page_size)
        for page in pages[kept:].tolist():
            self._release(page)
        self.sequences.append((sequence, (pages[:kept], length)))

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        """Return a new sequence that shares all pages of an open one."""
        held = sequence.held or (_NO_PAGES, 0)
        for page in held[0].tolist():
            self.owners[page] = self._owners_of(page) + 1
        other = PagedSequence(self.pages)
        self.sequences.append((other, held))
        return other

    def forget(self, number: int, pages: np.ndarray) -> None:
        """Give the pages of a sequence back that is gone, of `Pages.left`."""
        for page in pages.tolist():
            self._release(page)
        self.gone.append(number)

    def close(self, sequence: PagedSequence) -> None:
        """Give the pages of a sequence back."""
        self.truncate(sequence, 0)
        self.sequences[-1] = (sequence, None)
