# SPDX-License-Identifier: MIT
"""The oracle of paged sequences: pages are lists of rows, and owners are counted anew each time."""

import copy


class PagesModel:
    """What the sequences of a pool of pages hold. A position is any object."""

    def __init__(self, num_pages, page_size):
        self.num_pages, self.page_size = num_pages, page_size
        self.pages = {}  # of each sequence
        self.lengths = {}

    def owners(self, page):
        return sum(page is other for pages in self.pages.values() for other in pages)

    @property
    def free(self):
        held = {id(page) for pages in self.pages.values() for page in pages}
        return self.num_pages - len(held)

    def positions(self, name):
        rows = [row for page in self.pages[name] for row in page]
        return rows[: self.lengths[name]]

    def open(self, name):
        self.pages[name], self.lengths[name] = [], 0

    def append(self, new):
        """`new` has the positions for each name. False, and no change, if pages do not suffice."""
        before = copy.deepcopy((self.pages, self.lengths))
        for name, positions in new.items():
            for position in positions:
                if not self._add(name, position):
                    self.pages, self.lengths = before
                    return False
        return True

    def _add(self, name, position):
        pages, row = self.pages[name], self.lengths[name] % self.page_size
        if (row == 0 or self.owners(pages[-1]) > 1) and self.free == 0:
            return False
        if row == 0:
            pages.append([None] * self.page_size)
        elif self.owners(pages[-1]) > 1:
            pages[-1] = list(pages[-1])
        pages[-1][row] = position
        self.lengths[name] += 1
        return True

    def fork(self, name, other):
        self.pages[other], self.lengths[other] = list(self.pages[name]), self.lengths[name]

    def truncate(self, name, length):
        self.pages[name] = self.pages[name][: -(-length // self.page_size)]
        self.lengths[name] = length

    def close(self, name):
        del self.pages[name], self.lengths[name]
