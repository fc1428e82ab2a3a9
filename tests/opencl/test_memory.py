# SPDX-License-Identifier: MIT
"""Memory: none is kept, scratch does not grow with L * S, every transfer mode gives the numbers.

Child processes measure, so that what other tests left behind does not count.
"""

import os

import numpy as np
import pytest
from support.checks import assert_references_return
from support.data import draw, qkv, sdpa
from support.loops import looped
from support.processes import has_memory, run_on, run_python
from support.random_calls import LONG
from support.variants import forced

MIB = 1 << 20


@pytest.mark.by_turns
def test_long_causal_sequences_need_no_square_matrix(device):
    """S = 16384 causal: less than 64 MiB beyond inputs and output (scores alone were 1 GiB)."""
    run_on(
        device,
        """
        sdpa(*qkv((1, 1), 2048, 16384, 64), device=device, is_causal=True)
        q, k, v = qkv((1, 1), 16384, 16384, 64)
        out, rise = measure_memory(lambda: sdpa(q, k, v, device=device, is_causal=True))
        grown = rise - out.nbytes
        assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB"
        rows = np.r_[0:3, 8190:8193, 16380:16384]
        from references.attention import attention, max_error
        mask = np.arange(16384)[None, :] <= rows[:, None]
        right = attention(q[..., rows, :], k, v, attn_mask=mask)[0]
        assert max_error(out[..., rows, :], right) < 2e-6
        """,
    )


@pytest.mark.by_turns
def test_long_gradients_need_no_square_matrix(device):
    """The same of the backward pass: three gradients, and less than 64 MiB."""
    run_on(
        device,
        """
        from support.gradients import backward

        def gradients(L):
            q, k, v = qkv((1, 1), L, L, 64)
            return lambda: backward(v, q, k, v, device=device, is_causal=True)

        gradients(2048)()
        _, rise = measure_memory(gradients(16384))
        grown = rise - 4 * 16384 * 64 * 4
        assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB"
        """,
    )


@pytest.mark.by_turns
def test_a_broadcast_batch_is_not_copied_out(device):
    """Keys of zero stride stand for 64 times their bytes: scratch stays small."""
    run_on(
        device,
        """
        sdpa(*qkv((1, 1), 16, 2048, 64), device=device)
        q, (k, v) = draw((64, 1, 16, 64)), (draw((1, 1, 8192, 64)) for _ in range(2))
        out, rise = measure_memory(lambda: sdpa(q, k, v, device=device))
        assert rise - out.nbytes < 64 * MIB, f"{rise / MIB:.0f} MiB"
        """,
    )


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_repeated_calls_keep_nothing(device, kind):
    """Thousands of calls, right or refused, strided or not: no growth of memory or open files."""
    run_on(
        device,
        """
        import pytest
        q, k, v = qkv((1, 4), 64, 64, 64)
        mask = draw((64, 64)) > 0
        packed, ends = draw((3, 64, 4, 64)), [0, 9, 64]
        cache = clattn.PagedKVCache(8, 16, 4, 64, dtype="int8", device=device)
        wrong = [{"scale": "x"}, {"attn_mask": mask[:5]}, {"out": q[:1, :1]}, {"window": (1, -1)},
                 {"device": "no such device"}, {"dropout_p": 1.5}, {"is_causal": "x"}]

        def several():
            if sys.argv[2] == "wrong":
                for options in wrong * 20:
                    with pytest.raises((TypeError, ValueError, NotImplementedError)):
                        sdpa(q, k, v, **{"device": device} | options)
                    with pytest.raises(ValueError):
                        clattn.varlen_attn(*packed, ends, [0, 65, 64], device=device)
                return
            for _ in range(20):
                sdpa(q, k, v, device=device)
                sdpa(q[:, ::-1], k[..., ::-1], v, mask, device=device, return_lse=True)
                sdpa(q, k, v, mask[:, ::-1], device=device, out=np.empty_like(q), is_causal=True)
                clattn.varlen_attn(*packed, ends, ends, device=device, return_lse=True)
                sequences = cache.open(2)
                cache.append(sequences, *packed[1:], ends)
                cache.attend(packed[0], sequences, ends)
                for sequence in (*sequences, cache.fork(sequences[1])):
                    cache.close(sequence)

        def measure():
            gc.collect()
            return memory_field("VmRSS"), len(os.listdir("/proc/self/fd"))

        for _ in range(10):
            several()
        start, files = measure()
        for _ in range(50):
            several()
        end, files_after = measure()
        assert end - start < 4 * MIB, f"{(end - start) / MIB:.1f} MiB"
        assert files_after <= files
        """,
        kind,
    )


@pytest.mark.by_turns
def test_distinct_shapes_keep_nothing(device):
    """A growing sequence neither recompiles nor collects one buffer for each length."""
    run_on(
        device,
        """
        def grow(first, last):
            for length in range(first, last):
                sdpa(*(np.ones((1, 2, n, 64), np.float32) for n in (1, length, length)),
                     device=device)
        grow(1, 200)
        start = memory_field("VmRSS")
        grow(200, 1000)
        end = memory_field("VmRSS")
        assert end - start < 16 * MIB, f"{(end - start) / MIB:.1f} MiB"
        """,
    )


def test_reference_counts(device):
    """Arguments and singletons have as many references after a call as before, error or not."""
    q, k, v = qkv((1, 2), 5, 7, 8)
    mask, out, window, big = draw((5, 7)), np.empty_like(q), (3, 1), 12345678901
    things = [q, k, v, mask, out, window, device, big, q.dtype, None, True, np.float32]

    def calls():
        options = {"attn_mask": mask, "device": device, "window": window, "out": out}
        sdpa(q, k, v, is_causal=True, seed=big, return_lse=True, **options)
        for wrong in ({"scale": "x"}, {"out": mask}, {"seed": 1.5}, {"softcap": -1.0}):
            with pytest.raises((TypeError, ValueError)):
                sdpa(q, k, v, **options | wrong)

    assert_references_return(calls, things)


def test_the_result_owns_its_memory(device):
    """It outlives its inputs, is not shared with the next result, and is freed."""
    first = sdpa(*qkv((1, 2), 64, 64, 64), device=device)
    copy = first.copy()
    for _ in range(20):
        sdpa(*qkv((1, 2), 64, 64, 64, seed=5), device=device)
    np.testing.assert_array_equal(first, copy)
    first[...] = 0


@pytest.mark.parametrize("mode", ["svm", "host", "copy"])
def test_memory_modes(device, mode):
    """CLATTN_MEMORY forces a way of transfer: same numbers; 'svm' only where there is such memory.

    Layouts and alignments differ in what each mode has to do.
    """
    said = run_python(
        """
        import sys, clattn, numpy as np
        import support.layouts as layouts
        from support.checks import check_attention
        from support.data import draw, qkv, sdpa
        q, k, v = qkv((2, 3), 17, 33, 8)
        try:
            devices = [d for d in clattn.devices() if [d.platform, d.name] == sys.argv[1:3]]
            device = devices[0] if devices else sys.exit("refused")
            check_attention(q, k, v, device=device)
        except (ValueError, clattn.DeviceError) as error:
            assert sys.argv[3] in str(error), error
            sys.exit("refused")
        for dtype in ("float32", "float16", "float64"):
            arrays = qkv((2, 3), 17, 33, 8, dtype=dtype)
            check_attention(*arrays, device=device, is_causal=True)
            check_attention(*arrays, device=device, attn_mask=draw((17, 33)) > 0, window=(5, 5))
        for layout in layouts.LAYOUTS:
            arrays = [layout(a) for a in (q, k, v)]
            check_attention(*arrays, device=device, attn_mask=draw((3, 1, 33)))
            if layout is not layouts.read_only:
                check_attention(*arrays, device=device,
                    out=layout(np.empty((2, 3, 17, 8), np.float32)))
        check_attention(*(np.broadcast_to(a[:1], a.shape) for a in (q, k, v)), device=device)
        check_attention(*qkv((2, 3), 5, 0, 8), device=device)
        check_attention(*qkv((1, 2), 97, 1000, 64), device=device)
        sdpa(q, k, v, device=device, out=q)
        for _ in range(100):
            check_attention(k, k, v, device=device)
        """,
        device.platform,
        device.name,
        mode,
        env={"CLATTN_MEMORY": mode},
        check_exit=False,
    )
    if has_memory(device, mode) or said.stderr != "refused\n":
        assert said.returncode == 0, said.stderr


def test_an_unknown_memory_mode():
    run_python(
        """
        import clattn, pytest
        from support.data import qkv, sdpa
        with pytest.raises((ValueError, clattn.DeviceError), match="CLATTN_MEMORY"):
            sdpa(*qkv(), device=None)
        """,
        env={"CLATTN_MEMORY": "no-such-mode", "CLATTN_DEVICE": None},
    )


SPREAD = """
    import pytest
    far = 1 << 30

    def spread(array):
        "Same values, entry i of the first dimension at element i * 2**30 (4 GiB in all)."
        buffer = np.empty(far * (len(array) - 1) + 64, array.dtype)
        strides = (2 * far, *array.strides[1:])
        view = np.lib.stride_tricks.as_strided(buffer, array.shape, strides)
        view[...] = array
        return view
"""


@looped("shape", [(3, 4, 8), (3, 8)], ids=["heads", "rows"])
def test_offsets_beyond_32_bits(device, shape):
    """Heads or rows 2**30 elements apart, forwards and backwards, in inputs and result.

    A few pages are touched; a call that copied what lies between would not pass. A single matrix
    may be too far spread for one buffer of the device: then that is said. Each variant reads and
    writes heads so far apart in test_kernel_designed.py.
    """
    run_on(
        device,
        SPREAD
        + f"""
    q, k, v = (draw({shape}, "float16", n) for n in range(3))
    sdpa(q, k, v, device=device)

    def calls():
        check_attention(q, spread(k), spread(v), device=device)
        check_attention(spread(q), spread(k[::-1])[::-1], v, device=device,
            out=spread(np.zeros_like(q)))

    in_place = device.memory_mode == "svm" or device.max_allocation > 4 * far
    if len(q.shape) == 3 or in_place:
        _, rise = measure_memory(calls)
        assert rise < 200 * MIB, f"{{rise / MIB:.0f}} MiB"
    else:
        with pytest.raises(MemoryError, match=str(device.max_allocation)):
            calls()
    """,
        env=forced(),
    )


def test_keys_of_more_than_two_thousand_million_elements(device):
    """Pages that nobody has written take no memory, and are read as zeros: a kernel reads all keys.

    One key at the start, in the middle or at the end weighs more than all others together.
    """
    run_on(
        device,
        """
    S = 2**25 + 5
    k, v = (np.zeros((S, 64), "float16") for _ in range(2))
    q = np.ones((1, 64), "float16")
    assert k.size > 2**31

    def call():
        return sdpa(q, k, v, device=device, scale=1.0)

    if device.memory_mode != "svm" and device.max_allocation < k.nbytes:
        try:
            call()
        except MemoryError as error:
            assert f"allocates at once ({device.max_allocation} bytes)" in str(error)
            raise SystemExit
        raise AssertionError("one buffer held more than the device allows")
    for place in 3, S // 2, S - 1:
        k[place], v[place] = 1, np.arange(64) / 64
        result, rise = measure_memory(call)
        assert (result == v[place]).all(), place
        assert rise < 200 * MIB, f"{rise / MIB:.0f} MiB"
        k[place] = v[place] = 0
    """,
        env=forced() | {"CLATTN_MEMORY": None},
    )


def test_a_matrix_of_more_than_two_thousand_million_elements(device):
    """A band is written in place; the pages between take no memory."""
    run_on(
        device,
        """
    a = np.zeros((48, 1 << 26), np.uint8)
    assert a.size > 2**31
    result, rise = measure_memory(lambda: clattn.diagonal_matrix(a, 7, 3, 4, out=a, device=device))
    assert result is a
    rows = np.arange(48)
    assert (a[rows, rows + 3] == 7).all()
    assert a[-1].sum() == a[20].sum() == 7
    assert rise < 600 * MIB, f"{rise / MIB:.0f} MiB"  # large pages, two of each row
    """,
        env={"CLATTN_MEMORY": None},
    )


@pytest.mark.skipif(not LONG, reason="takes 9 GiB; CLATTN_FUZZ runs it")
def test_two_thousand_million_elements(device):
    """For real: the last rows of a query and of a matrix of more than 2**31 elements."""
    run_on(
        device,
        """
    few = draw((1, 64, 64), "float16")
    q = np.zeros((1, 2**25 + 64, 64), "float16")
    q[:, -64:] = few
    result = sdpa(q, few, few, device=device)
    right = check_attention(few, few, few, device=device)
    np.testing.assert_allclose(result[:, -64:].astype("f4"), right.astype("f4"), atol=2e-3)
    mean = few.astype("f8").mean(axis=1)
    np.testing.assert_allclose(result[:, :-64:2**20].astype("f8") - mean, 0, atol=2e-3)
    del q, result
    a = np.full((46400, 46400), 3, np.uint8)
    got = clattn.tril(a)
    assert a.size > 2**31
    assert (got[-1] == 3).all() and (got[0, 1:] == 0).all() and got[0, 0] == 3
    assert (got[-2, :-1] == 3).all() and got[-2, -1] == 0
    """,
        timeout=900,
    )


@pytest.mark.by_turns
def test_queries_too_far_apart_for_one_buffer(device):
    """Such a call is made in parts, along with which causality and window move."""
    run_on(
        device,
        SPREAD
        + """
    q, k, v = (draw((3, 8), "float16", n) for n in range(3))
    check_attention(spread(q), k, v, device=device, is_causal=True)
    check_attention(spread(q), k, v, device=device, is_causal="lower_right", window=(1, None))
    mask = spread(draw((3, 3), "float16"))
    check_attention(q, k, v, device=device, attn_mask=mask, window=(1, 0))
    """,
    )


def test_devices_report_their_memory(device):
    """Not more than the machine has, where the device shares it; one buffer at most all of it."""
    assert device.memory >= 1 << 28
    assert 0 < device.max_allocation <= device.memory
    if device.type == "cpu":
        assert device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
