# SPDX-License-Identifier: MIT
"""Threads that share what clattn's objects hold, with the interpreter's lock and without it.

CLATTN_STRESS is the seconds that the threads of each device work; tools/try_pythons.py sets it.
"""

import os
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from functools import partial

import clattn
import numpy as np
import pytest
from support.data import draw, sdpa
from support.fake_dlpack import Producer
from support.processes import index_of, run_python
from support.threads import run_together

SECONDS = float(os.environ.get("CLATTN_STRESS", 0.5))
THREADS = 8
E = 8


@pytest.fixture(autouse=True)
def quick_switches():
    """A lock that there is changes hands often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has the lock"
)
def test_the_lock_stays_off():
    """A module that did not declare itself would bring the lock back."""
    assert sys._is_gil_enabled() is False


class Shared:
    """What all threads work on, and the right answers."""

    def __init__(self, device):
        self.device = device
        self.arrays = [draw((1, 2, 16, E), seed=n) for n in range(3)]
        self.tensors = [clattn.tensor(array, device=device) for array in self.arrays]
        self.right = sdpa(*self.arrays, device=device)
        self.cache = clattn.KVCache(2, 1, 64, E, device=device)
        self.pages = clattn.PagedKVCache(4 * THREADS, 4, 1, E, dtype="int8", device=device)
        self.packed = [array[0].swapaxes(0, 1) for array in self.arrays]
        self.of_parts = self.attend_to_parts()
        self.table = np.arange(16, dtype=np.float32)
        self.biased = self.bias(self.table)
        self.exports = []

    def bias(self, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + clattn.lookup(table, kv_idx)

        return clattn.flex_attention(*self.arrays, score_mod, device=self.device)

    def attend(self, number):
        assert np.array_equal(sdpa(*self.arrays, device=self.device), self.right)
        assert np.array_equal(sdpa(*self.tensors, device=self.device).numpy(), self.right)

    def attend_to_parts(self):
        ends = [0, 9, 16]
        return clattn.varlen_attn(*self.packed, ends, ends, is_causal=True, device=self.device)

    def pack(self, number):
        assert np.array_equal(self.attend_to_parts(), self.of_parts)

    def serve(self, number):
        """Sequences of the thread's own, in pages that all threads take and give back."""
        first, second = self.pages.open(2)
        token = np.full((6, 1, E), number + 1, np.float32)
        self.pages.append([first, second], token, token, [0, 5, 6])
        branch = self.pages.fork(first)
        self.pages.append(branch, token[:1], token[:1])
        output = self.pages.attend(token[:4], [second, branch, first], [0, 1, 2, 4])
        np.testing.assert_allclose(output, token[:4], rtol=1e-6)
        for sequence in (first, second, branch):
            self.pages.close(sequence)

    def view(self, number):
        query = self.tensors[0]
        part = query.transpose(0, 2, 1, 3)[:, number % 16].reshape(-1)
        assert np.array_equal(part.numpy(), self.arrays[0][:, :, number % 16].reshape(-1))
        assert query.shape == (1, 2, 16, E) and query.device == self.device and repr(query)

    def trace(self, number):
        """Texts and dtypes are kept by the process, for any thread."""
        assert np.array_equal(self.bias(self.table), self.biased)

    def hand_out(self, number):
        """A thread makes an export, and any other one ends it."""
        self.exports.append(np.from_dlpack(clattn.tensor(self.arrays[1], device="cpu")))
        with suppress(IndexError):
            assert np.array_equal(self.exports.pop(0), self.arrays[1])

    def append(self, number):
        token = np.full((2, 1, 2, E), number, np.float32)
        try:
            self.cache.append(token, token, [2, 1])
        except ValueError:
            self.cache.reset()

    def read(self, number):
        """Appended numbers are whole, and their attention lies between them."""
        if number % 4 == 0:
            self.cache.reorder([1, 0])
        copy = self.cache.copy()
        keys = copy.key.numpy()
        for b, length in enumerate(copy.lengths):
            assert (keys[b, 0, :length] == keys[b, 0, :length, :1]).all()
            assert np.array_equal(keys[b, 0, :length], copy.value.numpy()[b, 0, :length])
        given = self.cache.attend(np.ones((2, 1, 1, E), np.float32))
        assert (given == given[..., :1]).all() and 0 <= given.min() <= given.max() < THREADS

    def choose(self, number):
        """A context is the thread's own; the default is everyone's."""
        with clattn.use_device(self.device):
            clattn.set_default_device(None if number % 2 else self.device)
            assert clattn.get_default_device() == self.device
        assert hash(self.device) == hash(clattn.devices()[clattn.devices().index(self.device)])

    def count(self, number):
        assert clattn.memory_stats(self.device)["allocated_bytes"] >= 0
        clattn.synchronize(self.device)
        clattn.empty_cache(self.device)

    def work(self, end, number):
        """All kinds of work, from another one on in each thread, until the time is over."""
        kinds = (self.attend, self.view, self.trace, self.hand_out, self.append, self.read,
                 self.pack, self.serve, self.choose, self.count)  # fmt: skip
        turn = number
        while time.monotonic() < end or turn < number + len(kinds):
            kinds[turn % len(kinds)](number)
            turn += 1


@pytest.mark.cpus
def test_threads_share_everything(device):
    shared = Shared(device)
    end = time.monotonic() + SECONDS
    try:
        run_together(*(partial(shared.work, end, number) for number in range(THREADS)))
    finally:
        clattn.set_default_device(None)


def test_every_operator_on_every_device():
    """Each thread gets the bits of one thread alone, whatever the others do with what is global."""
    devices = [index_of(device) for device in clattn.devices()]
    run_python(
        """
        import random, sys, time, clattn, numpy as np
        from functools import partial
        from support.data import draw
        from support.sweep import operations
        from support.threads import run_together
        seconds, *numbers = sys.argv[1:]
        devices = [clattn.devices()[int(number)] for number in numbers]
        sys.setswitchinterval(1e-5)
        clattn._core.force = lambda *_: None  # clattn chooses the kernels
        small = draw((1, 2, 16, 8))

        def cases():
            plain = lambda: [clattn.scaled_dot_product_attention(small, small, small)]
            for device in devices:
                yield from ((device, *case) for case in operations(device, False).items())
                yield device, "plain", plain

        def bits(device, run):
            with clattn.use_device(device):
                answer = [array.tobytes() for array in run()]
                assert clattn.get_default_device() == device
            return answer

        right = {(device, title): bits(device, run) for device, title, run in cases()}
        end = time.monotonic() + float(seconds)

        def work(number):
            chance, own, rounds = random.Random(number), list(cases()), 0
            while rounds == 0 or time.monotonic() < end:
                chance.shuffle(own)
                for device, title, run in own:
                    clattn.set_default_device(chance.choice(devices))
                    if chance.random() < 0.1:
                        clattn.empty_cache(chance.choice([None, *devices]))
                    assert bits(device, run) == right[device, title], (device, title)
                rounds += 1

        run_together(*(partial(work, number) for number in range(8)))
        print(len(right))
        """,
        SECONDS,
        *devices,
        timeout=120 + 10 * SECONDS,
    )


def test_one_capsule_for_several_threads(device):
    """One of them reads it, the others are told that it was consumed."""
    array = draw((2, 3))
    for _ in range(20):
        producer = Producer(array)
        producer.answer = producer.capsule()
        start, said = threading.Barrier(4, timeout=30), []

        def read(producer=producer, start=start, said=said):
            start.wait()
            try:
                said.append(clattn.tensor(producer, device=device).numpy().tolist())
            except ValueError as error:
                said.append("consumed before" in str(error))

        run_together(*[read] * 4)
        assert sorted(said, key=str) == [True] * 3 + [array.tolist()]
        assert producer.released() == 1


def test_first_calls_of_many_threads(device):
    """One thread opens OpenCL and reads the environment; the others wait, or are in calls."""
    run_python(
        """
        import sys, threading, clattn, numpy as np
        from support.threads import run_together
        start, ones = threading.Barrier(8, timeout=30), np.ones((1, 1, 4, 8), np.float32)
        def first():
            start.wait()
            for _ in range(10):
                assert (clattn.scaled_dot_product_attention(ones, ones, ones) == 1).all()
        run_together(*[first] * 8)
        """,
        env={"CLATTN_KERNEL": "reference", "CLATTN_DEVICE": device.platform},
    )


def test_a_refused_append_holds_no_lock(device):
    """The exception is made afterwards: making one may run finalizers, which may append too."""
    run_python(
        """
        import gc, sys, clattn, numpy as np
        cache = clattn.KVCache(1, 1, 8, 8, device=sys.argv[1])
        two, nine = (np.zeros((1, 1, n, 8), np.float32) for n in (2, 9))

        class Late:
            def __init__(self):
                self.itself = self

            def __del__(self):
                cache.append(two, two)

        def refuse():
            try:
                raise KeyError
            except KeyError:  # an exception with a context is made at once
                cache.append(nine, nine)

        for allocations in range(1, 20):
            cache.reset()
            gc.collect()
            gc.disable()
            Late()
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            try:
                refuse()
            except ValueError:
                gc.set_threshold(700)
            else:
                sys.exit("nine positions fit into eight")
        """,
        device.platform,
        timeout=20,
    )
