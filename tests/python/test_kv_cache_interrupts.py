# SPDX-License-Identifier: MIT
"""Signals while a KVCache changes, and while a thread waits for another one's change or reading."""

import threading
import time

import clattn
import numpy as np
import pytest
from support.alarms import alarm, interrupted

pytestmark = pytest.mark.by_turns  # how a process lives and ends depends on no kernel

LENGTH = 200_000
# Appending all rows takes some tenths of a second.
ROWS = np.broadcast_to(np.float32([[[[2]]], [[[3]]]]), (2, 1, LENGTH, 300))


@pytest.fixture
def cache(first_device):
    """Two sequences of unequal lengths."""
    cache = clattn.KVCache(2, 1, LENGTH, 300, 1, "int8", device=first_device)
    cache.append(ROWS[:, :, :9], ROWS[:, :, :9, :1], [9, 5])
    return cache


def state_of(cache):
    """What the sequences have: the scale of a row is its number / 127."""
    scales = np.rint(np.array(cache.key_scale[:, 0]) * 127)
    return [scales[b, :n].tolist() for b, n in enumerate(cache.lengths)]


BEFORE = [[2] * 9, [3] * 5]


def append(cache, counts=(LENGTH - 9, LENGTH - 5)):
    cache.append(ROWS, ROWS[..., :1], counts)


def test_ctrl_c_ends_an_append(cache):
    """It ends soon, the cache is as before, and the next append is right."""
    assert interrupted(lambda: append(cache), 0.02) < 2
    assert state_of(cache) == BEFORE
    cache.append(ROWS[:, :, :2], ROWS[:, :, :2, :1], [1, 2])
    assert state_of(cache) == [[2] * 10, [3] * 7]


def test_ctrl_c_ends_a_reorder_before_it_changes_anything(cache):
    """The first half copies rows to spare pages. It changes nothing, and can be ended.

    On a busy machine the signal may come later. Then the whole reorder is done, and it goes on from
    there.
    """
    append(cache)
    before = np.float32([[2], [3]]) / np.float32(127)
    for _ in range(10):
        assert interrupted(lambda: cache.reorder([1, 0]), 0.003) < 2
        scales = np.array(cache.key_scale[:, 0])
        if (scales == before).all():
            return
        before = before[::-1]
        assert (scales == before).all(), "a part of the sequences has changed"
    pytest.fail("no reorder was ended")


def test_a_handler_that_uses_the_cache(cache):
    """It may read. A change is refused, as it would wait for its own thread; the append goes on."""
    seen = []

    def handler(*_):
        seen.append((state_of(cache), cache.copy().lengths.tolist()))
        seen.append(cache.attend(ROWS[:, :, :1, :]).shape)
        for change in (lambda: append(cache), lambda: cache.truncate(0), cache.reset,
                       lambda: cache.reorder([0, 0])):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"KVCache\.\w+: the handler of a signal"):
                change()

    with alarm(0.02, handler):
        append(cache)
    assert seen == [(BEFORE, [9, 5]), (2, 1, 1, 1)]
    assert cache.lengths.tolist() == [LENGTH, LENGTH]


def test_ctrl_c_while_another_thread_appends(cache):
    """It ends the waiting at once; the other thread's append goes on."""
    started = threading.Event()

    class Counts(list):
        """Looked at just before the append."""

        def __iter__(self):
            started.set()
            return super().__iter__()

    other = threading.Thread(target=append, args=(cache, Counts([LENGTH - 9, LENGTH - 5])))
    other.start()
    started.wait(10)
    time.sleep(0.02)
    for change in (lambda: cache.truncate(0), lambda: append(cache)):
        interrupted(change, 0.01)
        assert other.is_alive(), "the change has waited for the other thread"
    other.join()
    assert cache.lengths.tolist() == [LENGTH, LENGTH]


def test_a_handler_while_another_thread_waits_for_the_reading(cache):
    """It may read. Its change would wait for the other one, which waits for it: it is refused."""
    append(cache)
    other = threading.Thread(target=cache.reorder, args=([1, 0],))
    seen = []

    def handler(*_):
        other.start()
        time.sleep(0.1)  # now it waits
        seen.extend([cache.attend(ROWS[:, :, :1]).shape, cache.copy().length, other.is_alive()])
        for change in (lambda: append(cache, (0, 0)), cache.reset, lambda: cache.reorder([1, 0])):
            with pytest.raises(RuntimeError, match="the handler of a signal cannot change what"):
                change()

    with alarm(0.02, handler):
        cache.attend(ROWS[:, :, :256])
    other.join()
    assert seen == [(2, 1, 1, 1), LENGTH, True]
    assert cache.lengths.tolist() == [LENGTH, LENGTH]
