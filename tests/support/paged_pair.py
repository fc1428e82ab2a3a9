# SPDX-License-Identifier: MIT
"""A PagedKVCache and plain arrays of each of its sequences: each call goes to both."""

import clattn
import numpy as np
from references.codes import WORDS, kept
from support.cache_pair import bits
from support.data import draw

HK, E, EV = 2, 37, 24


class PagedPair:
    """A cache and its sequences' keys and values, which are never shared."""

    def __init__(self, device, num_pages=12, page_size=4, dtype=np.float32, HK=HK, E=E, EV=EV,
                 given=None, key_scale=1.0, value_scale=1.0):  # fmt: skip
        self.is_kept = dtype in WORDS if isinstance(dtype, str) else False
        self.dtype = dtype if self.is_kept else np.dtype(dtype)
        self.given = np.dtype(given or (np.float32 if self.is_kept else dtype))
        self.device, self.seed, self.HK = device, 0, HK
        self.scales = [np.broadcast_to(np.float32(s), (HK,)) for s in (key_scale, value_scale)]
        self.sizes = E, EV
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        self.cache = clattn.PagedKVCache(num_pages, page_size, HK, E, EV, dtype, device=device,
                                         **scales)  # fmt: skip
        self.held = {}

    def rows(self, n):
        """Key and value of n new positions."""
        self.seed += 1
        return [draw((n, self.HK, size), self.given, self.seed) for size in self.sizes]

    def open(self, n=1):
        opened = self.cache.open(n)
        for sequence in opened:
            self.held[sequence] = [np.zeros((0, self.HK, size), self.given) for size in self.sizes]
        return opened if n > 1 else opened[0]

    def append(self, sequences, counts, of=lambda array: array, rows=None, spare=0):
        """As many new positions for each sequence, handed over as `of` makes them."""
        ends = np.cumsum([0, *counts])
        given = rows or self.rows(ends[-1] + spare)
        assert self.cache.append(sequences, *map(of, given), cu_seq=ends) is None
        for n, sequence in enumerate(sequences):
            new = slice(ends[n], ends[n + 1])
            self.held[sequence] = [np.concatenate((old, more[new])) for old, more in
                                   zip(self.held[sequence], given, strict=True)]  # fmt: skip
        return self.agree()

    def truncate(self, sequence, n):
        assert self.cache.truncate(sequence, n) is None
        self.held[sequence] = [array[:n] for array in self.held[sequence]]
        return self.agree()

    def fork(self, sequence):
        other = self.cache.fork(sequence)
        self.held[other] = self.held[sequence]
        self.agree()
        return other

    def close(self, sequence):
        assert self.cache.close(sequence) is None
        del self.held[sequence]
        return self.agree()

    def expected(self, which, sequence):
        """What the pages of keys, 0, or of values, 1, hold: arrays (length, HK, …)."""
        rows = self.held[sequence][which]
        if not self.is_kept:
            return [rows]
        scale = self.scales[which][:, None]
        return [part for part in kept(rows, self.dtype, scale) if part is not None]

    def stored(self):
        """The arrays of the pages of keys, and of values."""
        cache = self.cache
        parts = [[cache.key, cache.key_scale, cache.key_offset],
                 [cache.value, cache.value_scale, cache.value_offset]]  # fmt: skip
        return [[np.array(part) for part in of if part is not None and part.ndim > 1]
                for of in parts]  # fmt: skip

    def agree(self):
        """What each sequence has, bit for bit."""
        if not self.held:
            assert self.cache.free_pages == self.cache.num_pages
            return self
        sequences = list(self.held)
        table = self.cache.block_table(sequences)
        assert table.dtype == np.int32 and table.shape[0] == len(sequences)
        used = set(table.ravel().tolist()) - {-1}
        assert self.cache.free_pages == self.cache.num_pages - len(used)
        stored = self.stored()
        for sequence, row in zip(sequences, table, strict=True):
            length = len(self.held[sequence][0])
            assert self.cache.length(sequence) == length
            pages = row[: -(-length // self.cache.page_size)]
            assert (pages >= 0).all() and (row[len(pages) :] == -1).all()
            for which in range(2):
                for part, right in zip(stored[which], self.expected(which, sequence), strict=True):
                    found = part[pages].swapaxes(1, 2)
                    found = found.reshape(-1, *found.shape[2:])[:length]
                    assert found.dtype == right.dtype and found.shape == right.shape
                    assert bits(found).tobytes() == bits(right).tobytes(), ("key", "value")[which]
        return self


def check_pages(device, dtype, given=None):
    """Rows and copied pages, as they are or as codes: a few of each."""
    both = PagedPair(device, 5, 2, dtype, given=given)
    first, second = both.open(2)
    both.append([first, second], [3, 1], lambda array: clattn.tensor(array, device=device))
    both.append([both.fork(first), second], [1, 2], lambda array: array[:, ::-1].copy()[:, ::-1])
