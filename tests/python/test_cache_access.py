# SPDX-License-Identifier: MIT
"""Who reads and who changes a cache, in several threads: the rule is in csrc/python/lock.h.

Each test holds what a call of the other thread would hold, so that nothing depends on times.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from support.alarms import interrupted

ROWS = np.ones((1, 1, 3, 8), np.float32)


class Batched:
    """A KVCache of one sequence with three positions."""

    def __init__(self, device):
        self.cache = clattn.KVCache(1, 1, 20, 8, device=device)
        self.grow()

    def grow(self):
        self.cache.append(ROWS, ROWS)

    def forget(self):
        self.cache.truncate(1)

    def read(self):
        return self.cache.attend(ROWS)

    def length(self):
        return self.cache.length


class Paged(Batched):
    """A PagedKVCache with such a sequence."""

    def __init__(self, device):
        self.cache = clattn.PagedKVCache(10, 2, 1, 8, device=device)
        self.sequence = self.cache.open()[0]
        self.grow()

    def grow(self):
        self.cache.append(self.sequence, ROWS[0].swapaxes(0, 1), ROWS[0].swapaxes(0, 1))

    def forget(self):
        self.cache.truncate(self.sequence, 1)

    def read(self):
        return self.cache.attend(ROWS[0].swapaxes(0, 1), self.sequence)

    def length(self):
        return self.cache.length(self.sequence)


BOTH = pytest.mark.parametrize("make", [Batched, Paged])


class Call:
    """A call in another thread."""

    def __init__(self, call):
        self.pool = ThreadPoolExecutor(1)
        self.result = self.pool.submit(call)

    def waits(self):
        time.sleep(0.15)  # longer than a waiting thread sleeps
        return not self.result.done()

    def ends(self):
        self.result.result(20)
        self.pool.shutdown()


@BOTH
def test_an_append_waits_for_none_who_reads(first_device, make):
    """It writes where nobody reads. Those who read wait for no append."""
    both = make(first_device)
    with both.cache._state.hold("reads", "test"):
        Call(both.grow).ends()
    with both.cache._state.hold("grows", "test"):
        Call(both.read).ends()
    assert both.length() == 6


@BOTH
def test_an_append_behind_forgotten_positions_waits_for_those_who_read_them(first_device, make):
    both = make(first_device)
    with both.cache._state.hold("reads", "test"):
        Call(both.forget).ends()
        assert both.length() == 1
        growing = Call(both.grow)
        assert growing.waits()
        Call(both.read).ends()  # of the positions that are left
        assert growing.waits() and both.length() == 1
    growing.ends()
    assert both.length() == 4


@BOTH
def test_one_who_reads_later_is_not_waited_for(first_device, make):
    both = make(first_device)
    both.forget()
    with both.cache._state.hold("reads", "test"):
        Call(both.grow).ends()
    assert both.length() == 4


def test_a_reorder_waits_for_all_who_read(first_device):
    """Those who come later wait for it."""
    both = Batched(first_device)
    cache = both.cache
    with cache._state.hold("reads", "test"):
        reordering = Call(lambda: cache.reorder([0]))
        assert reordering.waits()
        reading = Call(both.read)
        assert reading.waits()
    reordering.ends()
    reading.ends()
    with cache._state.hold("overwrites", "test"):
        readers = [Call(both.read), Call(cache.copy)]
        assert all(reader.waits() for reader in readers) and cache.length == 3
    for reader in readers:
        reader.ends()


@BOTH
def test_changes_wait_for_each_other(first_device, make):
    both = make(first_device)
    for change in ("grows", "shares", "forgets", "overwrites"):
        with both.cache._state.hold(change, "test"):
            calls = [Call(both.forget), Call(both.grow)]
            assert all(call.waits() for call in calls)
        for call in calls:
            call.ends()


@BOTH
def test_what_a_thread_would_wait_for_itself(first_device, make):
    """Only handlers of signals and finalizers meet this: it is refused."""
    both = make(first_device)
    name = type(both.cache).__name__
    with both.cache._state.hold("reads", "test"):
        both.forget()
        with pytest.raises(RuntimeError, match=rf"{name}.append: .* change what .* is reading"):
            both.grow()
        assert both.length() == 1
    both.grow()
    with both.cache._state.hold("overwrites", "test"):
        with pytest.raises(RuntimeError, match=rf"{name}.attend: .* read what .* is changing"):
            both.read()
        with pytest.raises(RuntimeError, match=rf"{name}.truncate: .* change what .* is changing"):
            both.forget()
    both.grow()
    assert both.length() == 7 and both.read().size


@BOTH
def test_ctrl_c_ends_the_waiting_for_one_who_reads(first_device, make):
    """The next change is as before."""
    both = make(first_device)
    started, ended = threading.Event(), threading.Event()

    def read():
        with both.cache._state.hold("reads", "test"):
            started.set()
            ended.wait(20)

    reading = Call(read)
    started.wait(20)
    both.forget()
    assert interrupted(both.grow, 0.05) < 1
    assert both.length() == 1
    ended.set()
    reading.ends()
    both.grow()
    assert both.length() == 4


@BOTH
def test_a_hold_that_nobody_ends_ends_with_its_object(first_device, make):
    both = make(first_device)
    hold = both.cache._state.hold("overwrites", "test")
    del hold
    hold = both.cache._state.hold("reads", "test")
    both.forget()
    del hold
    both.grow()
    with pytest.raises(KeyError), both.cache._state.hold("grows", "test"):
        raise KeyError
    both.grow()
