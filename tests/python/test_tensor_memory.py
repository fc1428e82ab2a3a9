# SPDX-License-Identifier: MIT
"""memory_stats and empty_cache: memory of Tensors and calls, and memory that the pool keeps."""

import gc
from functools import partial

import clattn
import numpy as np
import pytest
from support.data import draw, qkv, sdpa
from support.processes import run_on, run_python
from support.tensors import in_host_memory, same_bits, settled
from support.threads import run_together

KEYS = {"allocated_bytes", "allocated_blocks", "pooled_bytes", "pooled_blocks", "peak_bytes"}
MIB = 1 << 20


@pytest.fixture
def empty_pool(device):
    """No call is running and the pool is empty."""
    gc.collect()
    clattn.synchronize(device)
    clattn.empty_cache(device)
    stats = clattn.memory_stats(device)
    assert stats["pooled_bytes"] == stats["pooled_blocks"] == 0
    return stats


def rise(device, start):
    """How much every count is above that of `start`."""
    now = clattn.memory_stats(device)
    return {key: now[key] - start[key] for key in KEYS}


def zeros(nbytes, device):
    return clattn.tensor(np.zeros(nbytes, np.uint8), device)


def test_what_is_counted(device):
    stats = clattn.memory_stats(device)
    assert stats.keys() == KEYS
    assert all(type(n) is int and n >= 0 for n in stats.values())
    assert stats["peak_bytes"] >= stats["allocated_bytes"]
    assert clattn.memory_stats(device) is not clattn.memory_stats(device)


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 4097, MIB, 3 * MIB + 1, 40 * MIB])
def test_a_tensor_is_one_block(device, empty_pool, nbytes):
    """Somewhat larger than its bytes; it goes to the pool, and from there to the system."""
    t = zeros(nbytes, device)
    up = rise(device, empty_pool)
    assert up["allocated_blocks"] == 1
    block = up["allocated_bytes"]
    assert nbytes <= block <= max(2 * nbytes, 64 << 10)
    assert up["pooled_blocks"] == 0
    assert clattn.memory_stats(device)["peak_bytes"] >= block
    del t
    clattn.synchronize(device)
    down = rise(device, empty_pool)
    assert (down["allocated_blocks"], down["allocated_bytes"]) == (0, 0)
    assert (down["pooled_blocks"], down["pooled_bytes"]) == (1, block)
    again = zeros(nbytes, device)
    assert rise(device, empty_pool) | {"peak_bytes": 0} == up | {"peak_bytes": 0}, "reused"
    del again
    assert clattn.empty_cache(device) is None
    down = rise(device, empty_pool)
    assert (down["pooled_blocks"], down["pooled_bytes"]) == (0, 0)


def test_the_peak(device, empty_pool):
    """The highest so far: it does not fall, and rises only when more is in use."""
    t = zeros(50 * MIB, device)
    higher = clattn.memory_stats(device)
    assert higher["peak_bytes"] >= higher["allocated_bytes"] >= 50 * MIB
    more = zeros(higher["peak_bytes"] - higher["allocated_bytes"] + MIB, device)
    peak = clattn.memory_stats(device)
    assert peak["peak_bytes"] == peak["allocated_bytes"] > higher["peak_bytes"]
    del t, more
    clattn.synchronize(device)
    clattn.empty_cache(device)
    small = zeros(100, device)
    assert clattn.memory_stats(device)["peak_bytes"] == peak["peak_bytes"]
    assert small.size == 100


def test_views_count_once(device, empty_pool):
    t = clattn.tensor(draw((40, 50)), device)
    up = rise(device, empty_pool)
    views = [t[1:], t.T, t[::-1, None], t.reshape(2000), t.T.T, t.transpose(1, 0)[3], *t]
    exports = [view.__dlpack__() for view in views[:3]] if in_host_memory(device) else []
    arrays = [view.numpy() for view in views[:3]]
    assert rise(device, empty_pool) == up
    copied = t.T.reshape(-1)
    assert rise(device, empty_pool)["allocated_blocks"] == 2
    del t, copied, exports, arrays
    clattn.synchronize(device)
    assert rise(device, empty_pool)["allocated_bytes"] == up["allocated_bytes"]
    while views:
        assert rise(device, empty_pool)["allocated_blocks"] == 1
        views.pop()
    assert rise(device, empty_pool)["allocated_blocks"] == 0


def test_arrays_that_share_memory_are_counted(device, empty_pool):
    """An array of numpy() keeps the block, where it is no copy."""
    array = clattn.tensor(draw((40, 50)), device)[3:].numpy()
    assert rise(device, empty_pool)["allocated_blocks"] == in_host_memory(device)
    np.testing.assert_array_equal(array, draw((40, 50))[3:])
    del array
    assert rise(device, empty_pool)["allocated_blocks"] == 0


def test_empty_cache_leaves_what_is_in_use(device, empty_pool):
    """Tensors, their views, arrays of theirs and running calls."""
    q, k = draw((1, 8, 512, 64)), draw((1, 8, 512, 64), seed=1)
    tq, tk = clattn.tensor(q, device), clattn.tensor(k, device)
    right = sdpa(q, k, k, device=device)
    view, array = tq[0, 1:, ::-2], tk.numpy()
    for name in (device, None):
        result = sdpa(tq, tk, tk, device=None)
        zeros(3 * MIB, device)
        clattn.empty_cache(name)
        assert clattn.memory_stats(device)["pooled_bytes"] == 0
        assert rise(device, empty_pool)["allocated_blocks"] >= 3
        same_bits(result, right)
        same_bits(view, q[0, 1:, ::-2])
        np.testing.assert_array_equal(array, k)
        del result
    clattn.empty_cache()


def test_memory_goes_back_to_the_system(device):
    """Memory in the pool is resident. empty_cache gives it back."""
    if not in_host_memory(device):
        pytest.skip("the process's own memory says nothing")
    run_on(
        device,
        """
        from support.tensors import pooled_twice
        clattn.tensor(np.zeros(10), device).numpy()
        size = pooled_twice(device, 64 * MIB)
        start = memory_field("VmRSS")
        ones = np.ones(size, np.uint8)
        tensors = [clattn.tensor(ones, device) for _ in range(2)]
        assert memory_field("VmRSS") - start > 2.9 * size
        del tensors, ones
        clattn.synchronize(device)
        assert clattn.memory_stats(device)["pooled_bytes"] >= 2 * size
        clattn.empty_cache(device)
        assert memory_field("VmRSS") - start < 32 * MIB
        """,
    )


def test_the_pool_does_not_grow_with_calls(device):
    """A loop that gives its results up takes its memory from the pool from the second turn on."""
    q, k, v = (clattn.tensor(a, device) for a in qkv((1, 4), 128, 128, 64))

    def turn():
        x = q
        for _ in range(5):
            x = clattn.tril(sdpa(x, k, v, device=None).transpose(0, 1, 3, 2)).reshape(q.shape)
        return x.numpy().sum()

    def footprint():
        clattn.synchronize(device)
        stats = clattn.memory_stats(device)
        return stats["allocated_bytes"] + stats["pooled_bytes"]

    for _ in range(3):
        turn()
    before = footprint()
    for _ in range(30):
        turn()
    assert footprint() <= before + MIB


HUGE = np.broadcast_to(np.float32(1), (2**20, 2**20, 4))  # 16 TiB


def test_sizes_that_do_not_exist(device):
    """MemoryError, nothing is lost, and the next call works."""
    t = clattn.tensor(np.ones((2, 3), np.float32), device)
    q = clattn.tensor(np.ones((2**20, 1, 1, 4), np.float32), device)
    k = clattn.tensor(np.ones((2**20, 1, 4), np.float32), device)
    start = settled(device)
    for too_large in (lambda: clattn.tensor(HUGE, device), lambda: sdpa(q, k, k, device=None)):
        with pytest.raises(MemoryError):
            too_large()
        assert settled(device) == start
        same_bits(sdpa(t, t, t, device=None), np.ones((2, 3), np.float32))


def test_a_memory_error_says_so(device):
    with pytest.raises(MemoryError, match=r"\d{6}"):
        clattn.tensor(HUGE, device)
    with pytest.raises(MemoryError):
        clattn.tensor(np.broadcast_to(np.uint8(1), (2**62,)), device)


def test_pressure(device):
    """When memory is short, the pool is emptied before a MemoryError is raised."""
    if not in_host_memory(device):
        pytest.skip("the process's limit is not the device's")
    run_on(
        device,
        """
        import resource
        from support.tensors import pooled_twice
        size = pooled_twice(device, 256 << 20)
        small = clattn.tensor(np.ones((4, 64, 64), np.float32), device)
        right = sdpa(small, small, small, device=None).numpy().copy()
        source = np.ones(size + size // 2, np.uint8)
        limit = memory_field("VmSize") + 5 * size // 2
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

        tensors = [clattn.tensor(source[:size], device) for _ in range(2)]
        try:
            clattn.tensor(source[:size], device)
        except MemoryError as error:
            print(error)
        else:
            raise SystemExit("the limit is none")
        assert all(int(t[::4096].numpy().sum()) == size // 4096 for t in tensors)
        del tensors
        clattn.synchronize(device)
        assert clattn.memory_stats(device)["pooled_bytes"] >= 2 * size
        larger = clattn.tensor(source, device)
        assert clattn.memory_stats(device)["pooled_blocks"] <= 1
        assert larger[-1].numpy() == 1
        again = sdpa(small, small, small, device=None).numpy()
        assert (again == right).all()
        """,
    )


def test_threads(device):
    """Threads allocate and free at once: every count comes back, and every value is right."""
    start = settled(device)

    def work(seed):
        rng = np.random.default_rng(seed)
        kept = []
        for _ in range(150):
            size = int(rng.integers(1, 5000))
            kept.append((clattn.tensor(np.full(size, seed, np.int32), device), size))
            if len(kept) > 5:
                t, size = kept.pop(int(rng.integers(len(kept))))
                assert t.shape == (size,) and (t.numpy() == seed).all()
            if rng.random() < 0.05:
                clattn.empty_cache(device)
                clattn.memory_stats(device)

    run_together(*(partial(work, seed) for seed in range(4)))
    gc.collect()
    assert settled(device) == start


def test_wrong_devices(device):
    for ask in (clattn.memory_stats, clattn.empty_cache):
        with pytest.raises(ValueError, match="names no"):
            ask("no such device")
        with pytest.raises(TypeError, match="device"):
            ask(7.5)
        assert ask(device=device) == ask(device)
    with clattn.use_device(device):
        assert clattn.memory_stats() == clattn.memory_stats(device)


@pytest.mark.cpus
def test_memory_at_the_start():
    """A process that has used no device has no memory of any in use, and asking is no error."""
    run_python("""
        import clattn
        clattn.empty_cache()
        clattn.synchronize()
        stats = clattn.memory_stats()
        assert stats["allocated_bytes"] == stats["allocated_blocks"] == 0
        clattn.empty_cache("cpu")
    """)
