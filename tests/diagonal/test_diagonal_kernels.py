# SPDX-License-Identifier: MIT
"""The diagonal kernel's layouts, tiles and stores; the memory it touches.

Both ways of running it: a work-item alone with a tile, and a group that shares one.
"""

from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from support.checks import assert_references_return, check_band
from support.layouts import columns_first
from support.processes import has_memory, run_on, run_python

BANDS = ((0, 1), (-3, 5), (1, -1), (1, 10**6), (-(10**6), 0), (4, 4), (10**6, -(10**6)))
DTYPES = ("u1", "f2", "f4", "f8")  # one of each width

# Every width by work-items alone. Groups that share a tile have the same text for all widths but
# for the lanes of a vector, so the extremes; test_oclgrind.py and others have those between.
WAYS = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(None, dtype) for dtype in DTYPES] + [("reference", dtype) for dtype in ("u1", "f8")],
    indirect=["kernel"],
)


def numbers(shape, dtype):
    return np.random.default_rng(shape).integers(0, 127, shape, "u1").astype(dtype)


@pytest.mark.full
@WAYS
@pytest.mark.parametrize("shape", [(3, 150, 133), (1, 2, 9001), (9001, 2), (65, 64), (9, 129)])
def test_rows_and_blocks(device, kernel, shape, dtype):
    """Tiles of many rows, rows of many tiles; sizes of 32, 64 and one more."""
    a = numbers(shape, dtype)
    for begin, end in BANDS:
        check_band(a, 3, begin, end, device=device)
        check_band(columns_first(a), 3, begin, end, device=device)
        check_band(a[..., ::-1], 3, begin, end, device=device)
        check_band(shape, 3, begin, end, device=device, dtype=dtype)


@pytest.mark.full
@WAYS
@pytest.mark.parametrize("matrix", [(1, 1), (2, 2), (3, 5), (8, 8), (1, 70), (61, 4), (16, 32)])
def test_many_small_matrices(device, kernel, matrix, dtype):
    """Matrices smaller than a vector, of sizes that divide none, and as large as a tile."""
    a = numbers((1501, *matrix), dtype)
    for begin, end in BANDS:
        check_band(a, 3, begin, end, device=device)
        check_band(a.shape, 3, begin, end, device=device, dtype=dtype)
        inside = a.copy()
        check_band(inside, 3, begin, end, device=device, out=inside)
        check_band(a[::2], 3, begin, end, device=device)  # gaps between them


@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_results_larger_than_caches(device, dtype):
    """Stores that bypass the caches need aligned addresses; most rows begin at others."""
    width = np.dtype(dtype).itemsize
    rows, columns = 1031, (36 << 20) // width // 1031 | 1
    a = numbers((rows, columns), dtype)
    memory = np.empty((rows + 1) * (columns + 3), dtype)
    for skip in (0, 1):
        out = memory[skip : skip + rows * columns].reshape(rows, columns)
        check_band(a, 3, -5, 700, device=device, out=out)
        gaps = memory[skip:][: rows * (columns + 3)].reshape(rows, -1)[:, :columns]
        check_band(a, 3, 9, -9, device=device, out=gaps)
    inside = a.copy()
    check_band(inside, 3, -5, 700, device=device, out=inside)
    check_band(a, 0, 1, columns, device=device)
    small = numbers((36 << 10, 1024 // width // 4, 4), dtype)
    check_band(small, 3, 0, 2, device=device, out=small)


def test_more_dimensions_than_a_kernel_walks(device, kernel):
    """The kernel walks few leading dimensions, so the host makes several launches."""
    a = numbers((2, 3, 2, 3, 2, 4, 5), "f4").transpose(4, 2, 0, 3, 1, 6, 5)
    check_band(a, 3, -1, 2, device=device)
    out = np.empty(a.shape[::-1], "f4").transpose(6, 4, 5, 2, 3, 1, 0).copy()
    check_band(a, 3, 2, -1, device=device, out=out)
    check_band(out, 3, 2, -1, device=device, out=out.swapaxes(0, 1).swapaxes(0, 1))


def test_what_lies_between_rows_stays(device):
    """`out` with gaps, also from two threads at a time, each with half the columns."""
    a, b = numbers((2, 500, 640), "f4"), np.full((500, 640), 9, "f4")
    whole = a[0].copy()
    views = [whole[:, :320], whole[:, 320:]]
    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(clattn.diagonal_matrix, v, 7, 0, 9, device=device, out=v)
                    for v in views]  # fmt: skip
            assert all(d.result() is v for d, v in zip(done, views, strict=True))
    for view, before in zip(views, (a[0][:, :320], a[0][:, 320:]), strict=True):
        np.testing.assert_array_equal(view, check_band(before, 7, 0, 9, device=device))
    check_band(a[1, ::2, 1:40], 3, 0, 1, device=device, out=b[::2, 1:40])
    assert (b[1::2] == 9).all()
    assert (b[:, 0] == 9).all()
    assert (b[:, 40:] == 9).all()


def test_zeros_are_never_touched(device):
    """5 GiB, of which the diagonal touches one large page a row; offsets beyond 32 bits."""
    if device.memory_mode == "copy":
        pytest.skip("a device with memory of its own sends every page")
    run_on(
        device,
        """
        clattn.eye(8, dtype="u1", device=device)
        n = 80
        a, rise = measure_memory(lambda: clattn.eye(n, 1 << 26, dtype="u1", device=device))
        assert rise < 1000 * MIB, f"{rise / MIB:.0f} MiB"
        for i in (0, 1, 64, n - 1):
            assert a[i, i] == 1 and a[i, : 1 << 20].sum() == 1, i
        before = memory_field("VmSize")
        del a
        assert before - memory_field("VmSize") > 4000 * MIB
        """,
    )


def test_matrices_far_apart(device):
    """2**30 elements from one to the next, in input and result."""
    run_on(
        device,
        """
        from support.checks import check_band
        far = 1 << 30
        def spread(a):
            memory = np.empty(2 * far + 64, a.dtype)
            view = np.lib.stride_tricks.as_strided(memory, a.shape, (2 * far, *a.strides[1:]))
            view[...] = a
            return view
        a = np.arange(60).astype("f2").reshape(3, 4, 5)
        check_band(a, 7, 0, 2, device=device)
        def calls():
            check_band(spread(a), 7, 0, 2, device=device)
            check_band(a, 7, 0, 2, device=device, out=spread(a))
            b = spread(a)
            check_band(b, 7, 0, 2, device=device, out=b)
        _, rise = measure_memory(calls)
        assert rise < 200 * MIB, f"{rise / MIB:.0f} MiB"
        """,
    )


def test_repeated_calls_keep_nothing(device):
    run_on(
        device,
        """
        a = np.ones((3, 40, 50), "f4")
        def several():
            clattn.eye(4096, device=device)
            clattn.eye(8192, device=device)
            for _ in range(20):
                clattn.diagonal_matrix(a, 7, 0, 2, device=device)
                clattn.diagonal_matrix(a.swapaxes(1, 2), 7, 0, 2, device=device)
                clattn.diagonal_matrix(a, 7, 0, 2, device=device, out=a)
                for wrong in ({"out": a[:2]}, {"out": a[:, ::-1]}, {"dtype": "f8"}):
                    try:
                        clattn.diagonal_matrix(a, 7, 0, 2, device=device, **wrong)
                    except ValueError:
                        continue
                    raise SystemExit(f"accepted {wrong}")
        for _ in range(3):
            several()
        gc.collect()
        start = [memory_field(name) for name in ("VmRSS", "VmSize")]
        for _ in range(10):
            several()
        gc.collect()
        end = [memory_field(name) for name in ("VmRSS", "VmSize")]
        assert end[0] - start[0] < 8 * MIB, (start, end)
        assert end[1] - start[1] < 64 * MIB, (start, end)
        """,
    )


def test_reference_counts(device):
    a, out = np.ones((3, 4), "f4"), np.ones((3, 4), "f4")
    dtype, value, begin = np.dtype("f4"), 7, -1
    things = [a, out, dtype, value, begin, device, None, np.float32]

    def calls():
        clattn.diagonal_matrix(a, value, begin, 2, dtype=dtype, device=device)
        clattn.diagonal_matrix(a, value, begin, 2, out=out, device=device)
        clattn.diagonal_matrix((3, 4), value, begin, 2, dtype=dtype, out=out, device=device)
        clattn.directml.diagonal_matrix(a, dtype=dtype, value=value, offset=0, device=device)
        for wrong in ({"out": a[:, ::-1]}, {"dtype": "f8"}, {"dtype": "no such"}, {"out": a.T}):
            with pytest.raises((TypeError, ValueError)):
                clattn.diagonal_matrix(a, value, begin, 2, device=device, **wrong)

    assert_references_return(calls, things)


@pytest.mark.parametrize("mode", ["host", "copy"])
def test_memory_modes(device, mode):
    """Every layout, in place and not, with gaps; memory that would be zero elsewhere is not."""
    if not has_memory(device, mode):
        pytest.skip("the device has no such memory")
    run_python(
        """
        import sys, clattn, numpy as np
        from diagonal import test_diagonal_kernels as kernels
        from support.checks import check_band
        from support.layouts import columns_first
        device, = [d for d in clattn.devices() if [d.platform, d.name] == sys.argv[1:3]]
        for shape in ((3, 150, 133), (300, 8, 8)):
            a = kernels.numbers(shape, "f4")
            gaps = np.empty((*shape[:-1], 200), "f4")[..., 1 : 1 + shape[-1]]
            for begin, end in kernels.BANDS:
                check_band(a, 3, begin, end, device=device)
                check_band(a[..., ::-1], 3, begin, end, device=device)
                check_band(columns_first(a), 3, begin, end, device=device)
                check_band(a, 3, begin, end, device=device, out=gaps)
                gaps[...] = a
                check_band(gaps, 3, begin, end, device=device, out=gaps)
                b = a.copy()
                check_band(b, 3, begin, end, device=device, out=b)
        check_band((3000, 3001), 1, 0, 1, device=device)
        assert not clattn.diagonal_matrix((3000, 3001), 0, 0, 1, device=device).any()
        """,
        device.platform,
        device.name,
        env={"CLATTN_MEMORY": mode},
    )
