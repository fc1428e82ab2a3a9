# SPDX-License-Identifier: MIT
"""Long calls: they run in pieces, Ctrl-C ends them, and those without end are refused."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from support.alarms import InterruptedCall, alarm, interrupted
from support.processes import run_python
from support.tensors import same_bits

pytestmark = pytest.mark.arrays_only

attend = clattn.scaled_dot_product_attention
built_programs = clattn._core.built_programs

# Of a call that would take minutes. One that ends within LATE seconds has not run to its end.
KEYS = 2**31
LATE = 20


def operands(device, rows=8, heads=1):
    """A query, and a key that is repeated very often: as a row, and as one number."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, heads, rows, 64)).astype("f4")
    row = np.broadcast_to(rng.standard_normal(64).astype("f4"), (1, heads, KEYS, 64))
    number = np.broadcast_to(np.float32(0.5), (1, heads, KEYS, 64))
    return query, row, number


def test_ctrl_c_ends_a_call(device):
    """It ends at once, nothing is lost or under way, and the next call is right."""
    query, row, number = operands(device)
    tensor = clattn.tensor(query, device)
    small = attend(query, query, query, device=device)
    many = np.broadcast_to(query[:, :, :1], (1, 512, 1024, 64))
    keys = np.broadcast_to(row[:, :, : KEYS // 512], (1, 512, KEYS // 512, 64))
    few = keys[:, :, : KEYS // 2**13]
    calls = {
        "many work-groups": lambda: attend(many, keys, keys, device=device),
        "gradients": lambda: clattn.scaled_dot_product_attention_backward(
            many, many, few, few, many, many[..., 0], needs=["query"], device=device
        ),
    }
    if device.type == "cpu" and device.memory_mode != "copy":  # the host ends groups that run
        calls |= few_work_groups(device, query, row, number)
    for name, call in calls.items():
        with contextlib.suppress(InterruptedCall):  # builds what the call needs
            interrupted(call, 1e-3)
        before = clattn.memory_stats(device)["allocated_bytes"]
        assert interrupted(call) < LATE, name
        assert clattn.memory_stats(device)["allocated_bytes"] == before
        same_bits(attend(query, query, query, device=device), small)
        same_bits(attend(tensor, tensor, tensor), small)


def few_work_groups(device, query, row, number):
    """Calls of which one work-item has a large part."""
    tensor = clattn.tensor(query, device)
    rows = np.broadcast_to(query[:, :, :1], (1, 1, 100, 64))

    def into_a_tensor():
        attend(tensor, row, row, out=clattn.tensor(query, device))

    return {
        "arrays": lambda: attend(query, row, row, device=device),
        "many rows": lambda: attend(rows, row[:, :, : KEYS // 8], row[:, :, : KEYS // 8],
                                    device=device),
        "Tensors": into_a_tensor,
        "one work-item": lambda: attend(query, number, number, device=device),
        "sequences": lambda: clattn.varlen_attn(
            query[0].swapaxes(0, 1), *[row[0].swapaxes(0, 1)] * 2, [0, 3, 8], [0, 9, KEYS],
            device=device),
    }  # fmt: skip


def test_ctrl_c_while_calls_are_pending(device):
    """It ends the waiting. The calls go on, and their results are right."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, 512, 64)).astype("f4") for _ in range(3))
    expected = attend(q, k, v, device=device)
    tq, tk, tv = (clattn.tensor(a, device) for a in (q, k, v))
    same_bits(attend(tq, tk, tv), expected)

    def run():
        results.extend(attend(tq, tk, tv) for _ in range(200))
        results[-1].numpy()
        time.sleep(10)

    results = []
    late = interrupted(run)
    start = time.perf_counter()
    results[-1].numpy()
    assert late < max(2, time.perf_counter() - start), "it has waited for the calls"
    for result in results:
        same_bits(result, expected)


@pytest.mark.by_turns
def test_ctrl_c_ends_no_other_call(device):
    """Neither one that shares a word of the marks with the call that ends: there are 1024."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 8192, 64)).astype("f4") for _ in range(3))
    row = np.broadcast_to(k[:, :1, :1], (1, 1, KEYS, 64))
    small, out = (clattn.tensor(q[:, :1, :8], device) for _ in range(2))
    attend(small, small, small, out=out)
    expected = attend(q, k, v, device=device)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(attend, q, k, v, device=device)
        time.sleep(0.02)
        for _ in range(1023):
            attend(small, small, small, out=out)
        interrupted(lambda: attend(q[:, :1, :8], row, row, device=device), 0.05)
        same_bits(result.result(), expected)


def test_a_handler_that_returns(device):
    """The call goes on, also if the handler has used the device itself."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, 2048, 64)).astype("f4") for _ in range(3))
    expected = attend(q, k, v, device=device)
    seen = []
    with alarm(0.01, lambda *_: seen.append(attend(q[:, :, :8], k, v, device=device))):
        result = attend(q, k, v, device=device)
        time.sleep(0.02)
    same_bits(result, expected)
    assert len(seen) == 1


def test_without_end(device):
    """A call of years is refused with its estimate, before its memory is taken.

    The estimate counts on the fastest kernels: fast devices would take days or hours.
    """
    time_told = r"would take about \S+ (years|days|hours) on device"
    for rows, heads, keys in ((200, 1, 2**57), (16, 8, 2**60)):
        query = np.ones((1, heads, rows, 64), "f4")
        key = np.broadcast_to(np.float32(1), (1, heads, keys // heads, 1))
        value = np.broadcast_to(np.float32(1), (1, heads, keys // heads, 1))
        with pytest.raises(ValueError, match=time_told) as told:
            attend(query[..., :1], key, value, device=device)
        sizes = f"{rows} query rows in each of {heads} heads, {keys // heads} keys"
        limit = "at most 24 hours, or the environment variable CLATTN_MAX_SECONDS"
        for words in ("scaled_dot_product_attention", device.name, sizes, limit):
            assert words in str(told.value)
    with pytest.raises(ValueError, match=rf"varlen_attn.*{time_told}"):
        clattn.varlen_attn(query[0].swapaxes(0, 1)[..., :1], *[key[0].swapaxes(0, 1)] * 2,
                           [0, 1, 16], [0, 9, key.shape[2]], device=device)  # fmt: skip


def test_the_longest_call_is_chosen(run_with_faults):
    """A call may turn out to be too long after some pieces. It says the same, and ends at once."""
    run_with_faults(
        """
        big = [np.broadcast_to(np.float32(1), (1, 4, 2**15, 64)) for _ in range(3)]
        for _ in range(2):
            before = faults.faults_kernels()
            try:
                attend(*big, device=device)
            except ValueError as error:
                assert "expected at most 0.1 seconds" in str(error), error
            else:
                raise SystemExit("no error")
            assert faults.faults_kernels() - before < 20
        """,
        CLATTN_MAX_SECONDS="0.1",
    )


def test_a_limit_that_is_no_number():
    """The first call says what it expects."""
    for words in ("a day", "-1", "nan"):
        done = run_python("import clattn; clattn.devices()", check_exit=False,
                          env={"CLATTN_MAX_SECONDS": words})  # fmt: skip
        expected = f'CLATTN_MAX_SECONDS is "{words}"; expected seconds above 0'
        assert f"SettingError: {expected}" in done.stderr


@pytest.mark.by_turns
def test_pieces(run_with_faults):
    """They give the bits of short calls. Whichever piece fails, the call says so.

    The call has as many rows as make it long where the test runs.
    """
    run_with_faults("""
        keys = [np.repeat(rng.standard_normal((1, 4, 512, 64)).astype("f4"), 32, axis=2)
                for _ in range(2)]
        rows, pieces = 128 * device.compute_units, 0
        while pieces < 8:
            rows *= 2
            wide = [rng.standard_normal((1, 4, rows, 64)).astype("f4"), *keys]
            whole = attend(*wide, device=device)
            before = faults.faults_kernels()
            same_bits(attend(*wide, device=device), whole)
            pieces = faults.faults_kernels() - before
        by_heads = [attend(*(a[:, n:n + 1] for a in wide), device=device) for n in range(4)]
        same_bits(whole, np.concatenate(by_heads, axis=1))
        on_device = [clattn.tensor(a, device) for a in wide]
        start = settled(device)
        for tensors in (wide, on_device):
            for n in (1, 2):
                faults.faults_fail(n, LOST)
                refusal(lambda: attend(*tensors, device=device), *WORDS[2:], "CL_")
                afterwards()
                faults.faults_refuse(n, -36)
                refusal(lambda: attend(*tensors, device=device), "CL_INVALID_COMMAND_QUEUE")
                afterwards()
    """)


def test_a_call_that_was_expected_to_be_long(run_with_faults):
    """All its pieces together are timed, although each one is short, so the next call is whole."""
    run_with_faults("""
        def pieces(rows):
            before = faults.faults_kernels()
            attend(query[:, :, :rows], keys, keys, no_key, device=device)
            return faults.faults_kernels() - before

        query = np.ones((1, 1, 1024 * device.compute_units, 64), "f4")
        keys = np.broadcast_to(np.float32(1), (1, 1, 2**13, 64))
        no_key = np.zeros((1, 2**13), bool)
        assert pieces(64) == 1  # builds the kernel
        assert pieces(None) > 1
        assert pieces(None) == 1
    """)


def test_ctrl_c_during_a_build():
    """A driver's compiler knows no signals. The call ends after it, not after the next program."""
    device = clattn.devices()[-1]  # each build takes a second, so one device has to do
    q = np.ones((1, 1, 40, 64), "f4")
    number = np.random.default_rng().random()  # of this run alone, so that there is no program yet

    def call():
        """Rows of NaN are redone by another program."""
        clattn.flex_attention(q, q, q, lambda s, b, h, i, j: s * np.where(j > 5, number, np.nan),
                              device=device)  # fmt: skip

    start = built_programs()[0]
    interrupted(call, 0.02)
    assert built_programs()[0] - start <= 1
