# SPDX-License-Identifier: MIT
"""Calls with Tensors that do not wait: each sees what the one before wrote, and only that.

Large calls keep a device busy while later ones, small and large, read and write what they use.
The same steps on arrays, which wait, say what is right.
"""

import gc
import threading
import time
from functools import partial

import clattn
import numpy as np
import pytest
from support.data import draw, qkv, sdpa
from support.tensors import CALLS, same_bits, settled
from support.threads import run_together

LARGE = (1, 8, 1024, 64)  # milliseconds; a call of LITTLE rows takes microseconds
LITTLE = np.s_[:, :1, 100:103]


@pytest.fixture
def large(device):
    """Query, key and value as arrays, the Tensors of them, and the result."""
    arrays = tuple(draw(LARGE, seed=n) for n in range(3))
    tensors = tuple(clattn.tensor(a, device) for a in arrays)
    return arrays, tensors, sdpa(*arrays, device=device)


def attend(*tensors, **options):
    return clattn.scaled_dot_product_attention(*tensors, **options)


def test_a_call_does_not_wait(large):
    """Handing over five calls takes a part of the time that they take; a busy host tries again."""
    _, (q, k, v), right = large
    shares = [1]
    while min(shares) >= 0.5 and len(shares) < 30:
        start = time.perf_counter()
        results = [attend(q, k, v) for _ in range(5)]
        handed_over = time.perf_counter()
        clattn.synchronize(q.device)
        shares.append((handed_over - start) / (time.perf_counter() - start))
    assert min(shares) < 0.5, shares
    for result in results:
        same_bits(result, right)


def test_a_chain(device):
    """Thirty calls, each of the result of the one before, which is given up at once."""
    q, k, v = qkv((1, 8), 256, 256, 64)
    right, t = q, clattn.tensor(q, device)
    tk, tv = clattn.tensor(k, device), clattn.tensor(v, device)
    for _ in range(30):
        right = sdpa(right, k, v, device=device)
        t = attend(t, tk, tv)
    same_bits(t, right)


def test_chains_through_every_kind_of_call(device):
    """Attention, diagonal matrices, views, copies by reshape, another operator."""
    a = draw((2, 4, 64, 64))

    def steps(x, **options):
        x = clattn.scaled_dot_product_attention(x, x, x, is_causal=True, **options)
        x = clattn.diagonal_matrix(x.transpose(0, 1, 3, 2), 0, 1, 64, **options)
        x = clattn.openvino.scaled_dot_product_attention(x[:, ::-1], x, x, **options)
        x = clattn.onnx.attention(x, x[:, :2], x[:, 2:], **options).Y
        x = clattn.diagonal_matrix(x, 0.5, 0, 1, **options)
        x = x.transpose(0, 2, 1, 3).reshape(2, 64, 256)
        call = {"query": x, "key": x, "value": x, "scale": 0.1, "head_count": 4}
        return clattn.directml.multihead_attention(**call, **options).output

    t = clattn.tensor(a, device)
    for _ in range(3):
        same_bits(steps(t), steps(a, device=device))
    for _ in range(3):
        a, t = steps(a, device=device).reshape(a.shape), steps(t).reshape(a.shape)
    same_bits(t, a)


def test_small_calls_see_what_large_ones_wrote(device, large):
    """A small one that began before the large one had ended would read what lay there before."""
    _, (q, k, v), right = large
    little = right[LITTLE]
    right = sdpa(little, little, little, device=device)
    low = clattn.diagonal_matrix(little, 0, 1, 64, device=device)
    for _ in range(5):
        part = attend(q, k, v)[LITTLE]
        same_bits(attend(part, part, part), right)
        part = attend(q, k, v)[LITTLE]
        same_bits(clattn.tril(part), low)
        part = attend(q, k, v)[LITTLE]
        same_bits(clattn.tensor(part, device), little)
        part = attend(q, k, v).transpose(0, 2, 1, 3).reshape(1, 1024, 512)[0, 100:103, :64]
        same_bits(part, little[0, 0])


def test_small_calls_do_not_write_what_large_ones_read(device, large):
    """In place, in the middle of keys and of the query."""
    _, (_, _, v), right = large
    for place in (0, 1):
        for _ in range(5):
            arrays = [draw(LARGE, seed=n) for n in range(2)]
            tensors = [clattn.tensor(a, device) for a in arrays]
            result = attend(*tensors, v)
            part = tensors[place][0, 7, 1000:]
            clattn.diagonal_matrix(part, np.nan, -1000, 1000, out=part)
            same_bits(result, right)
            assert np.isnan(tensors[place].numpy()[0, 7, 1000:]).all()


def test_out_of_a_call_that_another_one_reads(large):
    """Written twice, read in between."""
    (q, k, v), (tq, tk, tv), right = large
    second = sdpa(right, k, v, device=tq.device)
    third = sdpa(q, k, second, device=tq.device)
    for _ in range(3):
        out = attend(tq, tk, tv)
        x = attend(out, tk, tv)
        assert attend(tq, tk, x, out=out) is out
        same_bits(x, second)
        same_bits(out, third)


def test_memory_that_is_given_up_is_still_in_use(device, large):
    """What takes the place of a freed Tensor comes after the call that reads it."""
    (q, k, v), (tq, tk, tv), right = large
    for _ in range(5):
        fresh = [clattn.tensor(a, device) for a in (q, k, v)]
        result = attend(*fresh)
        del fresh
        others = [clattn.tensor(np.full(LARGE, np.nan, np.float32), device) for _ in range(4)]
        same_bits(result, right)
        others.append(attend(tq, tk, tv))
        lost = others.pop()
        del lost  # nobody waits for this one
        others = [clattn.tensor(q, device) for _ in range(4)]
        for other in others:
            same_bits(other, q)


def test_empty_cache_in_the_middle_of_calls(device, large):
    _, (q, k, v), right = large
    for _ in range(3):
        result = attend(attend(q, k, v), k, v)
        first = attend(q, k, v)
        clattn.empty_cache(device)
        same_bits(first, right)
        assert result.shape == LARGE
        del result, first
        clattn.empty_cache(device)


def test_arrays_may_change_at_once(device, large):
    """Host arrays among Tensors are copied before the call returns, temporary ones too."""
    (_, k, v), (tq, _, _), right = large
    for _ in range(5):
        key, value = k.copy(), v.copy()
        result = attend(tq, key, value)
        key[...], value[...] = np.nan, np.nan
        same_bits(result, right)
        same_bits(attend(tq, k.copy(), v.copy()), right)
        result = attend(tq, k[:, ::-1].copy()[:, ::-1], v)
        np.testing.assert_allclose(result.numpy(), right, rtol=0, atol=1e-6)
    mask = np.tri(1024, dtype=bool)
    right = sdpa(tq.numpy(), k, v, attn_mask=mask, device=device)
    result = attend(tq, k, v, attn_mask=mask)
    mask[...] = False
    same_bits(result, right)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arrays_of_every_call_may_change_at_once(device, large, call):
    """While the device is busy with something else."""
    _, (q, k, v), _ = large
    right = call.run(device=device)
    copies = {name: a.copy() for name, a in call.arrays.items() if name != call.query}
    query = clattn.tensor(call.arrays[call.query], device)
    busy = attend(attend(q, k, v), k, v)
    got = call.run(lambda name, a: query if name == call.query else copies[name])
    for a in copies.values():
        a[...] = 77
    del busy
    for name, result in got.items():
        same_bits(result, right[name], name)


def test_arrays_that_come_out_are_complete(device, large):
    """With a NumPy query, or a NumPy out, the call waits; also for those before it."""
    (_, k, v), (tq, tk, tv), right = large
    second = sdpa(right, k, v, device=device)
    for _ in range(3):
        x = attend(tq, tk, tv)
        np.testing.assert_array_equal(sdpa(right, x, tv, device=None),
                                      sdpa(right, right, v, device=device))  # fmt: skip
        out = np.zeros_like(right)
        attend(attend(tq, tk, tv), tk, tv, out=out)
        np.testing.assert_array_equal(out, second)
        got = attend(tq, tk, tv).numpy().copy()
        np.testing.assert_array_equal(got, right)


def test_threads(device):
    """Chains of several threads on the same Tensors, and each on its own."""
    arrays = qkv((1, 4), 128, 128, 64)
    right = arrays[0]
    for _ in range(10):
        right = sdpa(right, *arrays[1:], device=device)
    shared = [clattn.tensor(a, device) for a in arrays]

    def work(own):
        for _ in range(5):
            q, k, v = [clattn.tensor(a, device) for a in arrays] if own else shared
            for _ in range(10):
                q = attend(q, k, v)
            same_bits(q, right)

    run_together(*(partial(work, own) for own in (True, False) * 2))


def test_threads_that_wait_for_one_tensor(device, large):
    """All of them see the whole of it; others hand calls over meanwhile."""
    _, (q, k, v), right = large
    results = [attend(q, k, v) for _ in range(3)]

    def wait():
        for result in results:
            same_bits(result, right)
            clattn.synchronize(device)

    def call():
        for _ in range(5):
            same_bits(attend(q, k, v), right)

    run_together(wait, call, wait, call)


def test_a_tensor_that_a_thread_frees_while_others_use_it(device):
    """Its memory is in use until the last call has ended."""
    q, k, v = qkv((1, 4), 128, 128, 64)
    right = sdpa(q, k, v, device=device)
    start = settled(device)
    box = {}
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            box["k"] = clattn.tensor(k, device)
            clattn.tensor(np.full_like(k, np.nan), device)

    box["k"] = clattn.tensor(k, device)
    tq, tv = clattn.tensor(q, device), clattn.tensor(v, device)

    def use(tq, tv):
        try:
            for _ in range(100):
                same_bits(attend(tq, box["k"], tv), right)
        finally:
            stop.set()

    run_together(replace, partial(use, tq, tv))
    del tq, tv
    box.clear()
    gc.collect()
    assert settled(device) == start
