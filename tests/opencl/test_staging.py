# SPDX-License-Identifier: MIT
"""Copies by several threads, between the host and a device with memory of its own.

CLATTN_MEMORY=copy makes a CPU such a device.
"""

import pytest
from support import faults
from support.processes import run_on

pytestmark = pytest.mark.arrays_only

MIB = 1 << 20


@pytest.mark.by_turns
@pytest.mark.parametrize("size", [16 * MIB - 1, 16 * MIB, 16 * MIB + 1, 33 * MIB - 7])
def test_every_byte_arrives(device, size):
    """To the device and back, at the edges of chunks, to memory that begins anywhere."""
    run_on(
        device,
        f"""
        rng = np.random.default_rng(0)
        bytes = rng.integers(0, 256, {size} + 3, np.uint8)
        tensor = clattn.tensor(bytes[3:], device)
        assert np.array_equal(tensor.numpy(), bytes[3:])
        back = np.zeros({size} + 2, np.uint8)
        clattn.tril(tensor.reshape(1, -1), {size}, out=back[None, 1:-1])
        assert np.array_equal(back[1:-1], bytes[3:]) and back[0] == back[-1] == 0
        """,
        env={"CLATTN_MEMORY": "copy"},
    )


@pytest.mark.by_turns
def test_calls_with_large_arrays(device):
    """The results are those of Tensors, in new memory and in the caller's, also from threads."""
    run_on(
        device,
        """
        from concurrent.futures import ThreadPoolExecutor

        q, k, v = qkv((1, 2), 40001, 70, 64)
        tensors = [clattn.tensor(a, device) for a in (q, k, v)]
        right = sdpa(*tensors, device=device).numpy()
        check_attention(q[:, :, -9:], k, v, device=device)
        out = np.empty_like(right)
        sdpa(q, k, v, out=out, device=device)
        assert np.array_equal(out, right)
        with ThreadPoolExecutor(4) as threads:
            for got in threads.map(lambda _: sdpa(q, k, v, device=device), range(12)):
                assert np.array_equal(got, right)
        """,
        env={"CLATTN_MEMORY": "copy"},
    )


@pytest.mark.parametrize(("function", "n"), [("clCreateBuffer", 2), ("clEnqueueMapBuffer", 1)])
def test_without_pinned_memory(sweep_library, first_device, function, n):
    """The driver refuses pinned memory once: it copies alone, and the next copy asks again."""
    code = f"""
    import numpy as np
    device = clattn._core.all_devices()[index]
    assert device.usable
    loader = sweep.Loader(library, device)
    large = np.arange(5 << 20, dtype=np.int32)
    tensor = clattn.tensor(large[:9], device)
    tensor.numpy()
    before = loader.state()
    loader.fail("{function}", {n}, -5)
    tensor = clattn.tensor(large, device)
    assert loader.end()
    assert loader.state()[0] == before[0]
    assert np.array_equal(tensor.numpy(), large)
    assert loader.state()[0] == before[0] + 1  # the pinned memory
    """
    faults.sweep_with(sweep_library, first_device, code, CLATTN_MEMORY="copy")


def test_faults(sweep_library, first_device):
    """A call fails: the message names the call, nothing is lost, the next copy is right."""
    code = """
    import numpy as np
    device = clattn._core.all_devices()[index]
    assert device.usable
    loader = sweep.Loader(library, device)
    large = np.arange((4 << 20) + 3, dtype=np.int32)
    run = lambda: [clattn.tensor(large, device).numpy()]
    run()
    before = loader.state()
    counts = dict.fromkeys(("raised", "right"), 0)
    for function in ("clEnqueueWriteBuffer", "clEnqueueReadBuffer", "clFlush", "clWaitForEvents",
                     "clReleaseEvent"):
        for n in (1, 2, 9, 17):
            for code in list(sweep.errors_of(function).values())[:2]:
                case = f"call {n} of {function}"
                assert sweep.one_case(loader, run, [large], before, function, n, code, case, counts)
    assert counts["raised"] == 32, counts
    """
    faults.sweep_with(sweep_library, first_device, code, CLATTN_MEMORY="copy")
