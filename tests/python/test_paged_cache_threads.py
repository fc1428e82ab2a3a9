# SPDX-License-Identifier: MIT
"""clattn.PagedKVCache in several threads, beside handlers of signals, and in forked processes."""

import signal
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from clattn._caches.pages import Draft
from support.alarms import alarm, interrupted
from support.data import draw
from support.paged_pair import HK, PagedPair
from support.processes import index_of, run_on, run_python


def test_threads_that_share_a_cache(device):
    """Each has sequences of its own; contents are right, and all pages come back."""
    both = PagedPair(device, 200, 4, "int8")

    def work(number):
        random = np.random.default_rng(number)
        for _ in range(6):
            first, second = both.cache.open(2)
            rows = [draw((9, HK, size), seed=number) for size in both.sizes]
            both.cache.append([first, second], *rows, cu_seq=[0, 6, 9])
            branch = both.cache.fork(first)
            both.cache.truncate(first, int(random.integers(7)))
            both.cache.append(branch, *(array[:1] for array in rows))
            assert both.cache.length(branch) == 7
            table = both.cache.block_table(branch)[0]
            pages = np.array(both.cache.key)[table].swapaxes(1, 2).reshape(-1, HK, both.sizes[0])
            scales = np.array(both.cache.key_scale)[table].swapaxes(1, 2).reshape(-1, HK)
            found = pages[:7] * scales[:7, :, None]
            right = np.concatenate((rows[0][:6], rows[0][:1]))
            assert abs(found - right).max() < abs(right).max() / 250
            for sequence in (first, second, branch):
                both.cache.close(sequence)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8), timeout=120))
    assert both.cache.free_pages == 200


def test_appends_of_many_threads_all_arrive(device):
    """To one sequence, until no page is free."""
    both = PagedPair(device, 5, 4, E=8, EV=8, HK=1)
    sequence = both.open()

    def append(number):
        token = np.full((3, 1, 8), number, np.float32)
        try:
            both.cache.append(sequence, token, token)
        except MemoryError:
            return 0
        return 3

    with ThreadPoolExecutor(8) as pool:
        taken = sum(pool.map(append, range(30), timeout=120))
    assert both.cache.length(sequence) == taken == 18
    pages = both.cache.block_table(sequence)[0]
    rows = np.array(both.cache.key)[pages].reshape(-1, 8)[:18].reshape(6, 24)
    assert (rows == rows[:, :1]).all() and len(set(rows[:, 0])) == 6


LENGTH = 400_000
ROW = np.broadcast_to(np.float32(2), (LENGTH, 1, 300))


@pytest.fixture
def large(first_device):
    """A cache whose append of ROW takes some tenths of a second, and a fork in it."""
    cache = clattn.PagedKVCache(LENGTH // 500, 1000, 1, 300, 1, "int8", device=first_device)
    sequence = cache.open()[0]
    cache.append(sequence, ROW[:1500], ROW[:1500, :, :1])
    return cache, sequence, cache.fork(sequence)


def state_of(cache, sequence, branch):
    tables = cache.block_table([sequence, branch])
    seen = [np.array(cache.key[int(page)]).tobytes() for page in tables[0]]
    return cache.free_pages, cache.length(sequence), cache.length(branch), tables.tobytes(), seen


@pytest.mark.by_turns
def test_ctrl_c_ends_an_append(large):
    """The cache is as before, and the next append is right."""
    cache, sequence, branch = large
    before = state_of(*large)
    late = interrupted(lambda: cache.append(branch, ROW, ROW[..., :1]), 0.03)
    assert late < 2
    assert state_of(*large) == before
    cache.append([sequence, branch], ROW[:20], ROW[:20, :, :1])
    assert cache.length(sequence) == cache.length(branch) == 1510
    assert cache.free_pages == LENGTH // 500 - 3


@pytest.mark.by_turns
def test_a_handler_that_uses_the_cache(large):
    """It may read. A change is refused, as it would wait for its own thread; the append goes on."""
    cache, sequence, branch = large
    seen = []

    def handler(*_):
        seen.append((cache.length(branch), cache.free_pages, cache.block_table(branch).shape))
        for change in (lambda: cache.append(sequence, ROW[:1], ROW[:1, :, :1]),
                       lambda: cache.truncate(sequence, 0), lambda: cache.fork(sequence),
                       lambda: cache.close(sequence)):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"PagedKVCache\.\w+: the handler of a signal"):
                change()

    with alarm(0.03, handler):
        cache.append(branch, ROW, ROW[..., :1])
    assert seen == [(1500, LENGTH // 500 - 2, (1, 2))]
    assert cache.length(branch) == 1500 + LENGTH and cache.length(sequence) == 1500


@pytest.mark.by_turns
def test_ctrl_c_while_another_thread_appends(large, monkeypatch):
    """It ends the waiting at once; the other thread's append goes on. Readers do not wait."""
    cache, sequence, branch = large
    began = threading.Event()
    moves = Draft.moves
    monkeypatch.setattr(Draft, "moves", lambda draft: began.set() or moves(draft))
    other = threading.Thread(target=cache.append, args=(branch, ROW, ROW[..., :1]))
    other.start()
    began.wait(10)
    assert cache.length(branch) == 1500 and other.is_alive()
    interrupted(lambda: cache.close(sequence), 0.01)
    assert other.is_alive(), "the change has waited for the other thread"
    other.join()
    assert cache.length(branch) == 1500 + LENGTH and cache.length(sequence) == 1500


@pytest.mark.by_turns
def test_an_interrupted_change_has_happened(first_device):
    """`length` and `block_table` are the new ones, though an exception interrupted the change."""
    cache = clattn.PagedKVCache(4, 4, 1, 8, device=first_device)
    rows = draw((3, 1, 8))

    class Stopped(BaseException):
        pass

    class Stops(array):
        stops = False

        def __setitem__(self, page, count):
            if self.stops:
                self.stops = False
                raise Stopped
            super().__setitem__(page, count)

    owners = cache._pages._owners = Stops("q", cache._pages._owners)
    (sequence,) = cache.open()
    owners.stops = True
    with pytest.raises(Stopped):
        cache.append(sequence, rows, rows)
    assert cache.length(sequence) == 3
    assert cache.block_table(sequence).tolist() == [[0]]


def test_handlers_that_raise_at_any_time(first_device):
    """Signals among many short changes: after each the books are those of before or of after."""
    cache = clattn.PagedKVCache(64, 4, 1, 8, device=first_device)
    rows = draw((3, 1, 8))

    class Raised(Exception):
        pass

    within = False

    def handler(*_):
        if within:
            raise Raised

    before = signal.signal(signal.SIGALRM, handler)
    try:
        sequences = cache.open(4)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.3e-4)
        end = time.monotonic() + 1
        raised = 0
        while time.monotonic() < end:
            try:
                within = True
                for sequence in sequences:
                    if cache.length(sequence) > 30:
                        cache.truncate(sequence, 2)
                    cache.append(sequence, rows, rows)
                within = False
            except Raised:
                within = False
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised > 10
    table = cache.block_table(sequences)
    lengths = [cache.length(sequence) for sequence in sequences]
    used = table[table >= 0].tolist()
    assert len(set(used)) == len(used) == sum(-(-n // 4) for n in lengths)
    assert cache.free_pages == 64 - len(used)
    for sequence in sequences:
        cache.close(sequence)
    assert cache.free_pages == 64


@pytest.mark.by_turns
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_during_an_append(device):
    """The lock that the appending thread holds does not exist in the child."""
    run_python(
        """
        import sys, threading, time, clattn, numpy as np
        from support.processes import run_forked
        cache = clattn.PagedKVCache(300, 1000, 8, 128, dtype="int8",
                                    device=clattn.devices()[int(sys.argv[1])])
        first, second = cache.open(2)
        key = np.zeros((200_000, 8, 128), np.float16)
        cache.append(second, key[:1000], key[:1000])
        thread = threading.Thread(target=cache.append, args=(first, key, key))
        thread.start()
        time.sleep(0.05)
        assert cache.length(first) == 0

        def child():
            cache.close(second)
            assert cache.free_pages == 300

        run_forked(child, 10)
        thread.join()
        assert cache.length(first) == 200_000 and cache.length(second) == 1000
        """,
        index_of(device),
    )


@pytest.mark.by_turns
def test_growth_allocates_nothing(device):
    run_on(
        device,
        """
        cache = clattn.PagedKVCache(40, 16, 2, 64, dtype="int8", device=device)
        sequences = cache.open(3)
        key = clattn.tensor(draw((3, 2, 64)), device=device)

        def grow():
            for sequence in sequences:
                cache.truncate(sequence, 0)
            for n in range(200):
                cache.append(sequences, key, key)
            clattn.synchronize(device)

        grow()
        start = clattn.memory_stats(device)
        grow()
        end = clattn.memory_stats(device)
        assert end["allocated_bytes"] == start["allocated_bytes"], (start, end)
        assert end["pooled_bytes"] <= start["pooled_bytes"] + MIB // 4, (start, end)
        """,
    )


STORY = """
import sys, clattn, numpy as np
from support.paged_pair import PagedPair
from support.layouts import negative_everywhere, sliced
device = next((d for d in clattn.devices() if [d.platform, d.name] == sys.argv[1:3]), None)
if device is None:  # it lacks this kind of memory
    print("refused", file=sys.stderr)
    raise SystemExit(1)
for dtype in (np.float32, "int8", "float8_e4m3fn", "int4"):
    both = PagedPair(device, 12, 4, dtype)
    first, second = both.open(2)
    for of in (lambda a: a, sliced, negative_everywhere, lambda a: clattn.tensor(a, device=device)):
        both.append([first, second], [1, 3], of)
    branch = both.fork(second)
    both.append([second, branch], [2, 1]).truncate(second, 1)
    view = both.cache.key.numpy()
    both.append([first, branch], [2, 9])
del both, view, first, second, branch
assert clattn.memory_stats(device)["allocated_blocks"] == 0, clattn.memory_stats(device)
"""


@pytest.mark.parametrize("mode", ["svm", "host", "copy"])
def test_memory_modes(device, mode):
    """The same contents whatever the memory is; a mode that a device lacks is refused."""
    said = run_python(STORY, device.platform, device.name, env={"CLATTN_MEMORY": mode},
                      check_exit=False)  # fmt: skip
    if said.stderr != "refused\n":
        assert said.returncode == 0, said.stderr
