# SPDX-License-Identifier: MIT
"""A server, simulated: requests arrive, fork, are cut and leave; each step is compared with NumPy.

CLATTN_FUZZ is the number of steps.
"""

import gc
import os

import clattn
import numpy as np
import pytest
from references.codes import WORDS, exact

STEPS = int(os.environ.get("CLATTN_FUZZ", "150"))
HK, HQ, E, EV = 2, 4, 16, 8
PAGES, PAGE = 24, 4


def attention(query, key, value):
    """Causal attention of the last rows of a sequence in float64, (rows, Hq, Ev)."""
    key, value = (np.repeat(a.astype(float), HQ // HK, axis=1) for a in (key, value))
    scores = np.einsum("ihe,jhe->hij", query.astype(float), key) / np.sqrt(E)
    i, j = np.arange(len(query))[:, None], np.arange(len(key))
    scores[:, j > i + len(key) - len(query)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhe->ihe", weights / weights.sum(-1, keepdims=True), value)


class Server:
    """A cache, and what each of its sequences holds, as plain arrays."""

    def __init__(self, device, dtype, seed):
        self.rng = np.random.default_rng(seed)
        self.cache = clattn.PagedKVCache(PAGES, PAGE, HK, E, EV, dtype, device=device)
        self.dtype = dtype
        self.held = {}
        self.refused = 0

    def as_kept(self, rows):
        return rows if self.dtype == "float32" else exact(rows, self.dtype, 1.0)

    def draw(self, rows, *rest):
        return self.rng.standard_normal((rows, *rest), np.float32)

    def grow(self, counts):
        """Append new rows to sequences, then let these rows attend, in one call each."""
        sequences = list(counts)
        ends = np.cumsum([0, *counts.values()])
        key, value = self.draw(ends[-1], HK, E), self.draw(ends[-1], HK, EV)
        free = self.cache.free_pages
        try:
            self.cache.append(sequences, key, value, ends)
        except MemoryError:
            self.refused += 1
            assert self.cache.free_pages == free
            return False
        query = self.draw(ends[-1], HQ, E)
        got = self.cache.attend(query, sequences, ends)
        for n, sequence in enumerate(sequences):
            rows = slice(ends[n], ends[n + 1])
            new = self.as_kept(key[rows]), self.as_kept(value[rows])
            before = self.held[sequence]
            self.held[sequence] = tuple(map(np.concatenate, zip(before, new, strict=True)))
            right = attention(query[rows], *self.held[sequence])
            np.testing.assert_allclose(got[rows], right, atol=2e-5)
        return True

    def step(self):
        """One step of the server: at most a change of each kind, then a token for each sequence."""
        rng, cache = self.rng, self.cache
        if rng.random() < 0.4:
            (opened,) = cache.open()
            self.held[opened] = np.zeros((0, HK, E), np.float32), np.zeros((0, HK, EV), np.float32)
            if not self.grow({opened: int(rng.integers(1, 12))}):
                cache.close(opened)
                del self.held[opened]
        running = list(self.held)
        if running and rng.random() < 0.25:
            parent = running[rng.integers(len(running))]
            self.held[cache.fork(parent)] = self.held[parent]
        if running and rng.random() < 0.2:
            cut = running[rng.integers(len(running))]
            length = int(rng.integers(1, cache.length(cut) + 1))
            cache.truncate(cut, length)
            self.held[cut] = tuple(part[:length] for part in self.held[cut])
        while len(self.held) > 6 or (self.held and rng.random() < 0.15):
            self.close_one()
        while self.held and not self.grow(dict.fromkeys(self.held, 1)):
            self.close_one()

    def close_one(self):
        gone = list(self.held)[self.rng.integers(len(self.held))]
        self.cache.close(gone)
        del self.held[gone]


@pytest.mark.parametrize("dtype", ["float32", *WORDS])
def test_each_step_is_that_of_numpy(device, dtype):
    """Full pools included; at the end no page and no memory is left over."""
    gc.collect()
    before = clattn.memory_stats(device)["allocated_bytes"]
    server = Server(device, dtype, 5)
    for _ in range(STEPS):
        server.step()
    assert server.refused > STEPS // 100
    while server.held:
        server.close_one()
    assert server.cache.free_pages == PAGES
    del server
    gc.collect()
    assert clattn.memory_stats(device)["allocated_bytes"] == before
