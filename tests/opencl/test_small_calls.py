# SPDX-License-Identifier: MIT
"""Calls of few rows and little work: their tiles, and the queue that runs in their thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from references.attention import attention, tolerance
from support.checks import assert_close, check_attention, check_band
from support.data import draw, qkv, sdpa
from support.loops import looped
from support.processes import run_on
from support.sizes import REST, WIDE
from support.variants import POCL, forced

# Attention is small below 0.6 million operations, 2 * rows * keys * (E + Ev) of them; diagonal
# matrices are up to 128 KiB.
LAST_SMALL, FIRST_LARGE = (1, 9), (1, 10)
SMALL_SIDE = 181


@looped("lead", [(1,), LAST_SMALL, FIRST_LARGE])
def test_either_side_of_the_limit(device, kernel, lead):
    check_attention(*qkv(lead, 16, 16, 64), device=device)
    check_attention(*qkv(lead, 16, 16, 64, dtype=np.float16), device=device, is_causal=True)


@looped("side", [SMALL_SIDE, SMALL_SIDE + 1])
def test_diagonals_on_either_side_of_the_limit(device, side):
    check_band(draw((side, side)), 2.0, -3, 5, device=device)


def test_small_and_large_calls_at_once(device):
    """They set the arguments of one kernel and run it from two queues."""
    start = threading.Barrier(8, timeout=60)

    def work(number):
        size = ((1, 2), 16, 11 + number) if number % 2 else ((3, 8), 100, 90 + number)
        q, k, v = qkv(*size, 64, seed=number)
        options = {"is_causal": bool(number & 2), "scale": 0.1 + 0.02 * number}
        right, allowed = attention(q, k, v, **options)[0], tolerance(q, k, v, **options)[0]
        start.wait()
        for _ in range(200 if number % 2 else 20):
            assert_close(sdpa(q, k, v, device=device, **options), right, allowed)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, n) for n in range(8)]:
            done.result(timeout=120)


def test_arguments_that_stay_and_change(device):
    """A pointer that stays is not set again: what it points to, and the others, still count."""
    q, k, v = qkv((1, 2), 9, 13, WIDE)
    out = np.empty_like(q)
    for turn in range(4):
        check_attention(
            q, k, v, device=device, out=out, return_lse=bool(turn % 2), is_causal=turn > 1
        )
        mask = draw((9, 13), seed=turn)
        check_attention(q, k, v, device=device, out=out, attn_mask=mask)
        q *= 1.5
        k = k.copy() if turn % 2 else k


def test_a_small_call_runs_in_the_calling_thread(device):
    """Other threads take no time, not even to wake up."""
    if "Intel" not in device.platform:
        pytest.skip("the driver has no cl_intel_exec_by_local_thread")
    run_on(
        device,
        """
        import time
        arrays = qkv((1, 8), 16, 16, 64)
        def calls():
            for _ in range(1000):
                sdpa(*arrays, device=device)
        def share():
            own, all_threads = time.thread_time(), time.process_time()
            calls()
            return (time.process_time() - all_threads) / (time.thread_time() - own)
        calls()
        shares = [share() for _ in range(5)]
        assert min(shares) < 1.2, shares
        """,
        env=forced() | {"CLATTN_MEMORY": None},
    )


def test_a_small_call_is_done_when_it_returns(device, run_with_faults):
    """On PoCL the function waits for a small call of Tensors, and raises the call's error."""
    if device.platform != POCL:
        pytest.skip("the calling thread runs small calls, or they are left pending")
    run_with_faults("""
        small = tq[:1, :1, :16]
        faults.faults_fail(1, LOST)
        refusal(lambda: attend(small, small, small), *WORDS)
        del small
        afterwards()
    """)


@looped("Ev", [REST, WIDE])
@looped("L", [1, 15, 16, 17, 33, 100, 128, 129])
def test_tiles_of_few_rows(device, L, Ev):
    """Tiles of one vector of rows, the last of them part empty, beside those of two.

    A mask is added before the values are read, so one head size of these is enough with it.
    """
    q, k, v = qkv((1, 2), L, 50, WIDE, Ev)
    check_attention(q, k, v, device=device)
    check_attention(q, k, v, device=device, is_causal=True)
    check_attention(q, k, v, device=device, window=(5, 3), is_causal="lower_right")
    if Ev == WIDE:
        check_attention(q, k, v, device=device, attn_mask=draw((L, 50)))


def test_few_rows_into_columns(device):
    """`out` is dense, but its last dimension is not."""
    q, k, v = qkv((1, 2), 36, 40, 64)
    out = np.empty((1, 2, 64, 36), np.float32).swapaxes(-1, -2)
    check_attention(q, k, v, device=device, out=out)
    assert out is sdpa(q, k, v, device=device, out=out)
    assert_close(out, attention(q, k, v)[0], tolerance(q, k, v)[0])
