# SPDX-License-Identifier: MIT
"""Copies between the host and a device that does not read the host's memory.

The child processes run in the mode "copy". Most have the loader of faults.py, which counts copies.
"""

import pytest
from support.processes import index_of, run_on, run_python
from support.variants import decode_for, forced

pytestmark = pytest.mark.by_turns

COUNTED = """
def counts(action):
    "Bytes that were sent and fetched, and kernels that ran, one in pieces as one."
    before = faults.faults_written(), faults.faults_fetched()
    clattn._core.launched()
    action()
    after = faults.faults_written(), faults.faults_fetched()
    return *(b - a for a, b in zip(before, after)), len(clattn._core.launched())

MARK = 4  # bytes by which a kernel says that rows have to be redone; the host looks at them
big = [rng.standard_normal((6, 4, 640, 64)).astype("f4") for _ in range(3)]  # 3.75 MiB each
tbig = [clattn.tensor(a, device) for a in big]
right_big = attend(*tbig).numpy()
start = settled(device)
"""
CALLS = """
import hashlib, sys
import clattn, numpy as np
from support.data import draw

def calls(device):
    "(name, digest) of calls that are large in one way or another."
    def attend(name, *arrays, **options):
        results = clattn.scaled_dot_product_attention(*arrays, device=device, **options)
        results = results if isinstance(results, tuple) else (results,)
        said.append((name, [hashlib.sha1(np.ascontiguousarray(r)).hexdigest() for r in results]))

    said = []
    q, k, v = (draw((5, 6, 300, 64), seed=n) for n in range(3))  # 2.2 MiB each
    attend("batch", q, k, v)
    attend("lse", q, k, v, is_causal=True, return_lse=True)
    attend("one head of keys", q, k[:1, :1], v[:1, :1])
    attend("mask", q, k, v, draw((300, 300)))
    attend("backwards", q[::-1], k[:, ::-1], v[..., ::-1, :])
    attend("other layout", *(a.reshape(5, 300, 6, 64).swapaxes(1, 2) for a in (q, k, v)))
    packed = draw((4, 300, 3, 10, 64))
    attend("packed", *(packed[:, :, n].swapaxes(1, 2) for n in range(3)))
    out = np.zeros((5, 6, 300, 80), "f4")
    attend("gaps", q, k, v, out=out[..., :64])
    attend("all of it", out, out, out)
    apart = np.zeros((6, 5, 300, 64), "f4").swapaxes(0, 1)
    attend("results between others", q, k, v, out=apart)
    outer = draw((8, 3, 4, 4, 4, 64, 64))[:, :, ::-2, ::2, ::2]
    row = draw((1, 1, 1, 1, 1, 16, 64))
    attend("more dimensions than a kernel walks", outer, row, row)
    for rows in (100, 50000):
        row = draw((rows, 64))
        attend(f"{rows} keys", row[:9], row, row)
        attend(f"{rows} queries", row, row[:9], row[:9])
    return said
"""


def test_results_are_those_of_other_modes(device):
    """Bit by bit, for every layout and for copies of every size."""
    names = {}
    exec(CALLS, names)
    said = names["calls"](device)
    assert len({digests[0] for _, digests in said}) > 10
    done = run_python(
        CALLS + "print(*calls(clattn.devices()[int(sys.argv[1])]), sep='\\n')",
        index_of(device),
        env={"CLATTN_MEMORY": "copy"},
    )
    for got, right in zip(done.stdout.splitlines(), map(str, said), strict=True):
        assert got == right


def test_results_are_those_of_one_thread(device):
    """Bit by bit, where all threads of the process share one core."""
    run_python(
        CALLS
        + """
import os
device = clattn.devices()[int(sys.argv[1])]
right = calls(device)
one = {min(os.sched_getaffinity(0))}
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), one)
assert calls(device) == right
""",
        index_of(device),
    )


def test_everything_is_sent_and_fetched_once(device, run_with_faults):
    """Also arrays that several kernels use: for inputs, for splits of the keys, for their merge."""
    run_with_faults(
        COUNTED
        + """
row, past = (rng.standard_normal((1, 1, n, 64)).astype("f4") for n in (1, 8192))
inputs = row.nbytes + past.nbytes
assert counts(lambda: attend(row, past, past, device=device)) == (inputs, row.nbytes + MARK, 2)

from clattn import onnx
with clattn.use_device(device):
    call = lambda: onnx.attention(row, row + 1, row + 2, past_key=past, past_value=past + 1)
    inputs, results = 3 * row.nbytes + 2 * past.nbytes, 3 * row.nbytes + 2 * past.nbytes
    assert counts(call) == (inputs, results + MARK, 3), (counts(call), inputs, results)
""",
        CLATTN_MEMORY="copy",
        **forced(decode_for(device)),
    )


def test_a_large_call_is_one_launch(run_with_faults):
    """Each array is copied once. A call of Tensors copies nothing.

    Nobody waits for such a call, so the kernel that redoes rows is behind it.
    """
    run_with_faults(
        COUNTED
        + """
whole = lambda: same_bits(attend(*big, device=device), right_big)
assert counts(whole) == (3 * big[0].nbytes, big[0].nbytes + MARK, 1)
assert counts(lambda: (attend(tq, tk, tv), clattn.synchronize(device))) == (0, 0, 2)
del tbig
""",
        CLATTN_MEMORY="copy",
    )


def test_tensors_of_every_size(device):
    """A Tensor keeps its values when the array that it was made of changes."""
    run_on(
        device,
        """
        sizes = [1, 1000, MIB // 4, MIB - 1, MIB, MIB + 1, 3 * MIB + 7, 17 * MIB + 5]
        rng = np.random.default_rng(1)
        for _ in range(2):
            kept = []
            for size in rng.permutation(sizes * 2):
                source = np.frombuffer(rng.bytes(size), "u1").copy()
                right = source.copy()
                kept.append((clattn.tensor(source, device), right))
                source[:] = 0
            for n, (t, right) in enumerate(kept):
                assert (t.numpy() == right).all(), (n, right.size)
            clattn.empty_cache(device)
        """,
        env={"CLATTN_MEMORY": "copy"},
    )


def test_an_array_may_change_behind_a_call_that_nobody_waits_for(device):
    """A call with Tensors and an array has read the array when it returns, however large it is."""
    run_on(
        device,
        """
        attend = clattn.scaled_dot_product_attention
        for keys in (16, 512, 8192):
            q, k = draw((1, 4, 300, 64)), draw((1, 4, keys, 64))
            tq, tk = clattn.tensor(q, device), clattn.tensor(k, device)
            right = attend(tq, tk, tk).numpy()
            for _ in range(5):
                source = k.copy()
                result = attend(tq, tk, source)
                source[:] = np.nan
                assert (result.numpy() == right).all(), keys
        """,
        env={"CLATTN_MEMORY": "copy"},
    )


def test_several_threads(device):
    """Threads make large and small calls and Tensors, and empty the cache, at once."""
    run_on(
        device,
        """
        from functools import partial
        from support.threads import run_together
        attend = clattn.scaled_dot_product_attention
        sets = [[draw((4, 6, 200 + 60 * n, 64), seed=3 * n + m) for m in range(3)]
                for n in range(5)]
        right = [attend(*(clattn.tensor(a, device) for a in arrays)).numpy() for arrays in sets]

        def work(start):
            for n in range(start, start + 5):
                arrays, expected = sets[n % 5], right[n % 5]
                assert (attend(*arrays, device=device) == expected).all(), ("arrays", n)
                tensors = [clattn.tensor(a, device) for a in arrays]
                t = attend(*tensors)
                assert (attend(*arrays, device=device) == expected).all(), ("after Tensors", n)
                assert (t.numpy() == expected).all(), ("Tensors", n)
                if n % 4 == 0:
                    clattn.empty_cache(device)
                clattn.synchronize(device)

        run_together(*(partial(work, n) for n in range(6)))
        """,
        env={"CLATTN_MEMORY": "copy"},
    )


@pytest.mark.parametrize("fault", ["write", "read", "kernel", "late"])
def test_a_failure_in_the_middle(run_with_faults, fault):
    """Any command of a large call may fail: DeviceError, no memory is lost, the next call works."""
    run_with_faults(
        COUNTED
        + f"""
arm = {{"write": lambda n: faults.faults_refuse_write(n, LOST),
       "read": lambda n: faults.faults_refuse_read(n, LOST),
       "kernel": lambda n: faults.faults_refuse(n, -36),  # says nothing about the kernel
       "late": lambda n: faults.faults_fail(n, LOST)}}["{fault}"]
disarm = (faults.faults_refuse_write, faults.faults_refuse_read, faults.faults_refuse,
          faults.faults_fail)
n = 0
while True:
    n += 1
    arm(n)
    try:
        result = attend(*big, device=device)
    except clattn.DeviceError as error:
        assert device.name in str(error) and "CL_" in str(error), error
        if "{fault}" == "late":
            assert "scaled_dot_product_attention" in str(error) and "attention_" in str(error)
    else:
        same_bits(result, right_big)
        break
    afterwards()
    same_bits(attend(*big, device=device), right_big)
for disable in disarm:
    disable(0, 0)
for t, array in zip(tbig, big):  # and of Tensors alone
    arm(2)
    try:
        same_bits(clattn.tensor(array, device).numpy(), array)
    except clattn.DeviceError:
        pass
    for disable in disarm:
        disable(0, 0)
    afterwards()
del t, tbig
""",
        CLATTN_MEMORY="copy",
        timeout=200,
    )


def test_order_beside_running_calls(device):
    """Memory that a running call of Tensors uses is not changed by the next call."""
    run_on(
        device,
        """
        attend = clattn.scaled_dot_product_attention
        arrays = [draw((4, 4, 640, 64), seed=n) for n in range(3)]
        half = [a[:2] for a in arrays]
        tensors = [clattn.tensor(a, device) for a in half]
        right = attend(*tensors).numpy()
        chained = attend(attend(*tensors), *tensors[1:]).numpy()
        rest = attend(*(clattn.tensor(a[2:], device) for a in arrays)).numpy()
        whole = np.concatenate([right, rest])
        for _ in range(8):
            running = attend(attend(*tensors), *tensors[1:])  # the first result is released
            gone = [[clattn.tensor(a, device) for a in half] for _ in range(4)]
            kept = [attend(*three) for three in gone]
            del gone
            assert (attend(*arrays, device=device) == whole).all()
            assert (running.numpy() == chained).all()
            assert all((t.numpy() == right).all() for t in kept)
        """,
        env={"CLATTN_MEMORY": "copy"},
    )
