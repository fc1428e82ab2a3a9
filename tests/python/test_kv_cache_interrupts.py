# SPDX-License-Identifier: MIT
"""Signals while a KVCache changes, and while a thread waits for another one's change.

A sequence of its own length is a copy of its own, so a batch of a million makes a call of a second.
"""

import signal
import threading
import time

import clattn
import numpy as np
import pytest
from support.alarms import alarm, interrupted

pytestmark = pytest.mark.by_turns  # how a process lives and ends depends on no kernel

B = 1_000_000
ROW = np.broadcast_to(np.arange(2, dtype="f4")[:, None], (B, 1, 2, 1))
COUNTS = np.arange(B) % 2 + 1


@pytest.fixture
def cache(first_device):
    """Many sequences, whose first two have other lengths than the rest."""
    cache = clattn.KVCache(B, 1, 5, 1, device=first_device)
    cache.append(ROW[:, :, :1], ROW[:, :, 1:])
    cache.truncate(np.minimum(np.arange(B), 1))
    return cache


def state_of(cache):
    return cache.lengths.tobytes(), cache.key.numpy().tobytes(), cache.value.numpy().tobytes()


def few(cache):
    """The first sequences, as far as they are filled."""
    return [cache.key[b, 0, : cache.lengths[b], 0].numpy().tolist() for b in range(4)]


def test_ctrl_c_ends_an_append(cache):
    """It ends soon, the cache is as before, and the next append is right."""
    lengths, before = cache.lengths, few(cache)
    late = interrupted(lambda: cache.append(ROW, ROW, COUNTS), 0.01)
    assert late < 2
    np.testing.assert_array_equal(cache.lengths, lengths)
    assert few(cache) == before == [[], [0], [0], [0]]
    cache.truncate(0)
    cache.append(ROW, ROW)
    assert few(cache) == [[0, 1]] * 4


def test_ctrl_c_ends_a_reorder_before_it_changes_anything(cache):
    """The first half of a reorder of 0.4 s (Zen 5) changes nothing, and can be ended."""
    before = state_of(cache)
    late = interrupted(lambda: cache.reorder(np.arange(B)[::-1]), 0.05)
    assert late < 2
    same = [now == then for now, then in zip(state_of(cache), before, strict=True)]
    assert all(same)  # pytest would take minutes to show where the bytes differ


def test_a_handler_that_uses_the_cache(cache):
    """It may read. A change is refused, as it would wait for its own thread; the append goes on."""
    seen = []

    def handler(*_):
        if cache.key[0, 0, 0, 0].numpy() != 1:  # the append has not begun
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        seen.append(cache.length)
        for change in (lambda: cache.append(ROW, ROW), lambda: cache.truncate(0),
                       lambda: cache.reorder(np.zeros(B, int)), cache.copy):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"KVCache\.\w+: the handler of a signal"):
                change()

    with alarm(0.01, handler):
        cache.append(ROW, ROW, COUNTS)
    assert seen == [1]
    assert few(cache) == [[1], [0, 0, 1], [0, 1], [0, 0, 1]]


def test_ctrl_c_while_another_thread_appends(cache):
    """It ends the waiting at once; the other thread's append goes on."""
    other = threading.Thread(target=cache.append, args=(ROW, ROW, COUNTS))
    other.start()
    while cache.key[0, 0, 0, 0].numpy() != 1:  # until it has begun
        time.sleep(1e-3)
    for change in (lambda: cache.truncate(0), lambda: cache.append(ROW, ROW)):
        interrupted(change, 0.01)
        assert other.is_alive(), "the change has waited for the other thread"
    other.join()
    assert few(cache) == [[1], [0, 0, 1], [0, 1], [0, 0, 1]]
