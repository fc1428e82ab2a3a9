# SPDX-License-Identifier: MIT
"""clattn.KVCache: memory, threads, memory modes.

Child processes measure, so that what other tests left behind does not count.
"""

from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from support.cache_pair import HK, HQ, B, E, host
from support.cache_pair import pair_of_one_size as pair
from support.checks import assert_references_return
from support.data import draw
from support.processes import has_memory, index_of, run_on, run_python
from support.tensors import settled


def test_a_cache_is_allocated_once(device):
    """KVCache() allocates all memory. append, truncate, reset and views allocate none."""
    start = settled(device)
    cache = clattn.KVCache(2, 3, 500, 64, 32, device=device)
    made = settled(device)
    assert made[0] - start[0] >= 2 * 3 * 500 * (64 + 32) * 4
    assert made[0] - start[0] < 1.5 * 2 * 3 * 500 * (64 + 32) * 4 + 8192
    key, value = draw((2, 3, 50, 64)), draw((2, 3, 50, 32))
    tensors = [clattn.tensor(a, device=device) for a in (key, value)]
    with_tensors = settled(device)
    for given in ((key, value), tensors, (key[:, :, ::-1], value), (key, value, [3, 50])):
        cache.append(*given)
        assert settled(device) == with_tensors
    views = [cache.key, cache.value]
    assert settled(device) == with_tensors
    cache.truncate(60)
    cache.truncate([1, 2])
    cache.reset()
    assert settled(device) == with_tensors
    del tensors, given
    assert settled(device) == made
    del cache
    assert settled(device)[0] > start[0], "a view keeps the memory"
    del views
    assert settled(device) == start


def test_attending_keeps_nothing(device):
    """Only the result takes memory, while it lives."""
    both = pair(device, (20, 13))
    query = clattn.tensor(both.queries(1), device=device)
    for given in (query, host(query)):
        start = settled(device)
        for options in ({}, {"attn_mask": draw((20,))}, {"is_causal": False}, {"window": (3, 0)}):
            result = both.cache.attend(given, **options)
            del result
            assert settled(device) == start


@pytest.mark.by_turns
def test_growth_allocates_nothing(device):
    """400 tokens, in a process of its own, whose pool no other test has filled."""
    run_on(
        device,
        """
        def tensor(*shape):
            return clattn.tensor(draw(shape), device=device)

        B, HQ, HK, E, N = 2, 8, 2, 64, 400
        cache = clattn.KVCache(B, HK, N, E, device=device)
        query, key, value = tensor(B, HQ, 1, E), tensor(B, HK, 1, E), tensor(B, HK, 1, E)

        def grow():
            cache.reset()
            for n in range(N):
                cache.append(key, value)
                cache.attend(query)
            clattn.synchronize(device)
            assert cache.length == N

        grow()
        start = clattn.memory_stats(device)
        grow()
        end = clattn.memory_stats(device)
        assert end["allocated_bytes"] == start["allocated_bytes"], (start, end)
        assert end["pooled_bytes"] <= start["pooled_bytes"] + MIB // 4, (start, end)
        assert end["peak_bytes"] <= start["peak_bytes"], (start, end)
        """,
    )


@pytest.mark.by_turns
def test_nothing_is_copied(device):
    """append, attend and views copy nothing of a cache of 128 MiB."""
    run_on(
        device,
        """
        def several(B):
            cache = clattn.KVCache(B, 2, 128, 64, device=device)
            for counts in (None, [5, 1][:B], [0, 5][:B]):
                cache.append(draw((B, 2, 5, 64)), draw((B, 2, 5, 64)), counts)
                cache.attend(draw((B, 8, 1, 64)))
                cache.attend(draw((B, 8, 20, 64)), attn_mask=draw((20, cache.length)))
            cache.truncate(3)

        several(1), several(2)
        for B in (1, 2):
            capacity = 131072 // B
            cache = clattn.KVCache(B, 2, capacity, 64, device=device)
            half = np.broadcast_to(np.float32(0.5), (B, 2, capacity - 8, 64))
            cache.append(half, half)
            clattn.synchronize(device)

            def work():
                for counts in (None, [5, 1][:B], [0, 2][:B]):
                    n = 5 if counts else 1
                    cache.append(draw((B, 2, n, 64)), draw((B, 2, n, 64)), counts)
                    cache.attend(draw((B, 8, 1, 64)))
                cache.attend(draw((B, 8, 20, 64)), window=(1000, 0))
                cache.key, cache.value
                clattn.synchronize(device)
                cache.truncate(capacity - 10)

            start = clattn.memory_stats(device)["allocated_bytes"]
            _, rise = measure_memory(work)
            assert rise < 16 * MIB, f"{rise / MIB:.0f} MiB"
            assert clattn.memory_stats(device)["allocated_bytes"] <= start
            del cache
        """,
    )


def test_reference_counts(device):
    """Right and wrong calls keep no reference to their arguments or to the cache."""
    both = pair(device, (5, 3))
    cache, query = both.cache, both.queries(2)
    key, value = both.tokens(3)
    counts, mask, cut, window = [0, 1], draw((2, 5)), [5, 3], (3, 1)
    things = [cache, query, key, value, counts, mask, cut, window, device, None, True,
              cache.dtype, np.int64, clattn.Tensor]  # fmt: skip

    def calls():
        cache.append(key, value, counts)
        cache.truncate(cut)
        cache.attend(query, mask, window=window)
        for wrong in (lambda: cache.append(key, query), lambda: cache.truncate(77),
                      lambda: cache.append(key, value, cut), lambda: cache.attend(mask),
                      lambda: cache.attend(query, key)):  # fmt: skip
            with pytest.raises((TypeError, ValueError)):
                wrong()
        assert repr(cache) and cache.key.shape and cache.value.dtype and cache.device == device
        assert cache.lengths.tolist() == cut

    assert_references_return(calls, things)


def test_two_caches_in_two_threads(device):
    """Each gives the bits that it gives alone."""

    def decode(number):
        cache = clattn.KVCache(B, HK, 120, E, device=device)
        said = []
        for token in range(60):
            n = 1 + (token + number) % 3
            counts = [n, token % (n + 1)]
            if cache.length + n > 120:
                cache.truncate(20)
            cache.append(*(draw((B, HK, n, size), seed=token + 100 * number) for size in (E, E)),
                         counts)  # fmt: skip
            query = draw((B, HQ, n, E), seed=token + 100 * number)
            if token % 2:
                query = clattn.tensor(query, device=device)
            said.append(host(cache.attend(query)).tobytes())
        return said

    alone = [decode(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(decode, range(4), timeout=120)) == alone


def test_one_cache_in_two_threads(device):
    """Several threads attend at once."""
    both = pair(device, (30, 12))
    queries = [both.queries(2) for _ in range(8)]
    right = [both.cache.attend(query).tobytes() for query in queries]

    def ask(number):
        return [both.cache.attend(queries[number]).tobytes() for _ in range(40)]

    with ThreadPoolExecutor(4) as pool:
        for number, said in enumerate(pool.map(ask, range(8), timeout=120)):
            assert set(said) == {right[number]}


def test_appends_of_many_threads_all_arrive(device):
    """Each append arrives whole, in any order. Appends beyond the capacity are refused."""
    cache = clattn.KVCache(1, 1, 100, E, device=device)

    def append(number):
        token = np.full((1, 1, 3, E), number, np.float32)
        try:
            cache.append(token, token)
        except ValueError:
            return 0
        return 3

    with ThreadPoolExecutor(8) as pool:
        taken = sum(pool.map(append, range(60), timeout=120))
    assert cache.length == taken == 99
    key, value = host(cache.key)[0, 0], host(cache.value)[0, 0]
    assert key.tobytes() == value.tobytes()
    rows = key.reshape(33, 3 * E)
    assert (rows == rows[:, :1]).all() and len(set(rows[:, 0])) == 33


STORY = """
import sys, clattn, numpy as np, pytest
from support.data import draw
from references.attention import bfloat16, float64
from support.layouts import negative_everywhere, sliced
from support.cache_pair import host, pair_of_one_size as pair
device = next((d for d in clattn.devices() if [d.platform, d.name] == sys.argv[1:3]), None)
if device is None:  # it lacks this kind of memory
    print("refused", file=sys.stderr)
    raise SystemExit(1)
for dtype in (np.float32, bfloat16, float64):
    both = pair(device, (5, 3), dtype=dtype)
    for of in (lambda a: a, sliced, negative_everywhere, lambda a: clattn.tensor(a, device=device)):
        both.append(4, (1, 3), of).contents_agree()
        both.attend(1)
        both.attend(9, window=(4, 1), is_causal=False)
        both.attend(2, attn_mask=draw((2, both.cache.length)))
    both.truncate([7, 2]).append(1).contents_agree().attend(3)
    view = both.cache.key.numpy()
    both.append(2).contents_agree().attend(1)
    both.reset().append(40).contents_agree().attend(1)
    query = clattn.tensor(both.queries(1), device=device)
    right = clattn.scaled_dot_product_attention(
        query, both.cache.key, both.cache.value, is_causal="lower_right", enable_gqa=True)
    assert host(both.cache.attend(query)).tobytes() == host(right).tobytes()
    for wrong in (lambda: both.append(1), lambda: both.truncate(41)):
        with pytest.raises(ValueError):
            wrong()
        both.contents_agree()
many = pair(device, (700, 300), E=64, EV=64, capacity=701)
many.append(1).contents_agree().attend(1)
del both, many, query, right, view
assert clattn.memory_stats(device)["allocated_blocks"] == 0, clattn.memory_stats(device)
"""


@pytest.mark.by_turns
@pytest.mark.parametrize("mode", ["svm", "host", "copy"])
def test_memory_modes(device, mode):
    """The same answers whatever the memory is; a mode that a device lacks is refused."""
    said = run_python(STORY, device.platform, device.name, env={"CLATTN_MEMORY": mode},
                      check_exit=False)  # fmt: skip
    if has_memory(device, mode) or said.stderr != "refused\n":
        assert said.returncode == 0, said.stderr


def test_emptying_the_pool_leaves_a_cache(device):
    """empty_cache gives back only memory that nothing uses."""
    both = pair(device, (5, 3))
    clattn.empty_cache(device)
    both.contents_agree().append(2).attend(2)
    clattn.empty_cache()
    both.append(1).contents_agree().attend(2)


@pytest.mark.by_turns
def test_a_cache_of_a_default_device_in_a_child(device):
    """CLATTN_DEVICE, and exit with a cache alive and calls that nobody waited for."""
    peers = [d for d in clattn.devices() if d.type == device.type]
    run_python(
        """
        import clattn, numpy as np
        from support.data import draw
        cache = clattn.KVCache(1, 8, 500, 64)
        key = clattn.tensor(draw((1, 8, 100, 64)))
        for _ in range(5):
            cache.append(key, key)
            result = cache.attend(key)
        """,
        env={"CLATTN_DEVICE": f"{device.type}:{peers.index(device)}"},
    )


@pytest.mark.by_turns
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_during_an_append(device):
    """The lock that the appending thread holds does not exist in the child."""
    run_python(
        """
        import sys, threading, time, clattn, numpy as np
        from support.processes import run_forked
        cache = clattn.KVCache(1, 8, 32768, 128, device=clattn.devices()[int(sys.argv[1])])
        key = np.zeros((1, 8, 32768, 128), np.float32)
        thread = threading.Thread(target=cache.append, args=(key, key))
        thread.start()
        time.sleep(0.01)

        def child():
            cache.reset()
            assert cache.length == 0

        run_forked(child, 10)
        thread.join()
        assert cache.length == 32768
        """,
        index_of(device),
    )
