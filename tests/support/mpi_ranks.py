# SPDX-License-Identifier: MIT
"""What each process of tests/python/test_mpi.py runs: mpirun -n N python -m support.mpi_ranks.

Rank 0 prints a line for each case that failed on some rank, and the number of cases at the end.
"""

import os
import sys

os.environ["CLATTN_TUNING"] = "off"

import clattn
import clattn.mpi
import numpy as np
import pytest
from clattn._parts import ring
from mpi4py import MPI
from references.attention import attention, compute_dtype, eps, judged, largest
from support.checks import assert_close
from support.data import qkv
from support.mpi_cases import (
    ATTENTION,
    BACKWARD,
    CASES,
    COMM,
    drawn,
    even,
    fail_at,
    messages_of,
    places,
    refuse,
)
from support.mpi_gradients import GRADIENT_CHECKS, WRONG_GRADIENTS, check_gradients, gradients


def check_ring(given, layout):
    """Compare this rank's result with its rows of the answer for the whole sequence."""
    query, key, value, options = drawn(given)
    kind = given.get("kind", np.array)
    rows, keys = places(given, layout, query, key)
    parts = [kind(query[..., rows, :]), kind(key[..., keys, :]), kind(value[..., keys, :])]
    if given["rows"] is given["keys"] is even:
        for whole, part in zip((query, key, value), parts, strict=True):
            np.testing.assert_array_equal(np.array(part), clattn.mpi.split(whole, COMM, layout))
    with messages_of(given):
        out, lse = clattn.mpi.ring_attention(*parts, layout=layout, return_lse=True, **options)
        whole, whole_lse = (
            clattn.mpi.join(result, COMM, layout, axis)
            for result, axis in ((out, -2), (lse, query.ndim - 2))
        )

    right = judged(query, key, value, **options)
    # Each of the merges, two in a step, rounds weights, products and sums.
    merging = 6 * COMM.size * eps(compute_dtype(query.dtype))
    expected = clattn.Tensor if kind is clattn.tensor else np.ndarray
    for got, all_rows, answer, error, size in (
        (out, whole, right.result, right.allowed.each, largest(value)),
        (lse, whole_lse, right.lse, right.allowed_lse, max(1, largest(right.lse))),
    ):
        assert type(got) is type(all_rows) is expected, f"a {type(got).__name__}"
        got, all_rows = np.array(got), np.array(all_rows)
        assert_close(all_rows, answer, error + merging * size, "joined")
        own = all_rows[..., rows, :] if got.ndim == query.ndim else all_rows[..., rows]
        np.testing.assert_array_equal(got, own)
    assert out.dtype == parts[0].dtype.newbyteorder("=")
    assert lse.dtype == compute_dtype(query.dtype)


# name: (rank, what it does differently, the error, what it says)
WRONG = {
    "dtype": (1, {"dtype": np.float64}, ValueError,
              "ranks disagree on dtype: ranks 0, 2: float32; rank 1: float64"),
    "heads": (2, {"lead": (2, 1)}, ValueError,
              "ranks disagree on shape of query without L and S: ranks 0, 1: (2, 3, 8); rank 2"),
    "head size": (0, {"Ev": 5}, ValueError, "ranks disagree on shape of value"),
    "is_causal": (1, {"is_causal": True}, ValueError, "is_causal: ranks 0, 2: False; rank 1: True"),
    "scale": (1, {"scale": 0.5}, ValueError, "ranks disagree on scale"),
    "window": (2, {"window": (1, 1)}, ValueError, "rank 2: (1, 1)"),
    "layout": (0, {"layout": "zigzag"}, ValueError, "ranks disagree on layout"),
    "integers": (2, {"dtype": np.int32}, TypeError, "rank 2: query"),
    "no array": (0, {"key": "words"}, TypeError, "rank 0: key must be an array"),
    "masked": (2, {"value": np.ma.masked_array(np.ones((2, 3, 7, 8), np.float32))}, TypeError,
               "rank 2: value must be an array, got MaskedArray"),
    "keys and values": (0, {"value": np.ones((2, 3, 2, 8), np.float32)}, ValueError,
                        "rank 0: value has length 2 (shape (2, 3, 2, 8)); expected 7, that of key"),
    "head sizes": (1, {"key": np.ones((2, 3, 7, 5), np.float32)}, ValueError,
                   "rank 1: key has head size 5 (shape (2, 3, 7, 5)); expected 8, that of query"),
    "key heads": (1, {"key": np.ones((2, 2, 7, 8), np.float32)}, ValueError,
                  "rank 1: key has shape (2, 2, 7, 8), whose dimension -3"),
    "an unknown layout": (1, {"layout": "striped"}, ValueError, "rank 1: layout is 'striped'"),
    "a number for return_lse": (2, {"return_lse": 1}, TypeError, "rank 2: return_lse must be True"),
    "an unknown causality": (1, {"is_causal": "upper"}, ValueError, "rank 1: is_causal"),
    "memory": (1, {"fails": (2, MemoryError("no room"))}, MemoryError, "rank 1: no room"),
    "a device": (0, {"fails": (3, clattn.DeviceError("lost"))}, clattn.DeviceError, "rank 0: lost"),
    "another error": (2, {"fails": (1, KeyError("x"))}, RuntimeError, "rank 2: 'x'"),
}  # fmt: skip


def interrupt(function, right, name):
    """One rank is interrupted, and hears that; the others end too, and the next call is right."""
    mend = fail_at(1, 2, KeyboardInterrupt(), name)
    with pytest.raises(KeyboardInterrupt if COMM.rank == 1 else RuntimeError):
        function(*qkv(L=6, S=7))
    mend()
    right(CASES["causal"], "zigzag")


def refuse_communicators():
    freed = COMM.Dup()
    freed.Free()
    x = np.ones((1, 4, 8), np.float32)
    for comm, kind in ((freed, ValueError), (MPI.COMM_NULL, ValueError), (3, TypeError)):
        for call in (
            lambda comm=comm: clattn.mpi.ring_attention(x, x, x, comm=comm),
            lambda comm=comm: gradients(x, x, x, comm=comm),
            lambda comm=comm: clattn.mpi.split(x, comm),
            lambda comm=comm: clattn.mpi.join(x, comm),
        ):
            with pytest.raises(kind, match="comm"):
                call()


def refuse_joins():
    for part, options, words in (
        (np.ones((4, 2 + COMM.rank)), {}, "ranks disagree on shape beside the axis"),
        (np.ones((4, 2)), {"axis": -2 if COMM.rank else -1}, "ranks disagree on axis"),
        (np.ones((4, 2)), {"axis": 0 if COMM.rank else 2}, "rank 0: axis is 2; expected a dim"),
        (np.ones((4, 2), "f4" if COMM.rank else "i4"), {}, "ranks disagree on dtype"),
        (np.ones((4, 2), [("a", "f4" if COMM.rank else "i4")]), {}, "ranks disagree on dtype"),
        (np.ones((4, 2), [("a", "i4")] if COMM.rank else "V4"), {}, "ranks disagree on dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            clattn.mpi.join(part, COMM, **options)
    for call in (clattn.mpi.join, clattn.mpi.split):
        for axis in (0.0, True, None):
            with pytest.raises(TypeError, match="axis must be an int"):
                call(np.ones((4, 2)), COMM, axis=axis)
    with pytest.raises(TypeError, match="array must be an array, got MaskedArray"):
        clattn.mpi.split(np.ma.masked_array(np.ones((4, 2))), COMM)


def equal_scores():
    """Scores of any size: rows are the mean of all values, the same bits on every rank."""
    for dtype, number, sign in (("f4", 1e18, -1), ("f4", 840, -1), ("f4", 1, 1), ("f2", 200, 1)):
        query = np.full((3, 8), number, dtype)
        value = np.full((3, 8), COMM.rank, dtype)
        out, lse = clattn.mpi.ring_attention(
            query, np.asarray(sign * query, dtype), value, return_lse=True
        )
        right = np.full((3, 8), (COMM.size - 1) / 2).astype(dtype)
        np.testing.assert_array_equal(out, right)
        assert len(set(COMM.allgather((out.tobytes(), lse.tobytes())))) == 1


def device_of_the_keys():
    """A query of NumPy goes to the device where the keys are, as in one call."""
    device, plain, used = clattn.devices()[-1], ring.scaled_dot_product_attention, set()

    def attend(*args, **options):
        used.add(clattn.get_default_device())
        return plain(*args, **options)

    ring.scaled_dot_product_attention = attend
    try:
        query, key, value = qkv(L=6, S=7)
        keys = (clattn.tensor(array, device) for array in (key, value))
        assert type(clattn.mpi.ring_attention(query, *keys)) is np.ndarray
    finally:
        ring.scaled_dot_product_attention = plain
    assert used == {device}


def other_communicators():
    """Ranks in another order, and each half of the ranks alone."""
    query, key, value = qkv(L=20, S=20)
    right = attention(query, key, value, is_causal=True)[0]
    # Options that are equal, however they are written.
    scale, window = (0.5, [9, None]) if COMM.rank % 2 else (np.float32(0.5), (np.int64(9), None))
    given = clattn.mpi.ring_attention(query, key, value, scale=scale, window=window)
    assert given.shape == query.shape
    for comm in (COMM.Split(0, -COMM.rank), COMM.Split(COMM.rank % 2, 0)):
        parts = [clattn.mpi.split(whole, comm) for whole in (query, key, value)]
        part = clattn.mpi.ring_attention(*parts, comm=comm, is_causal=True)
        assert_close(clattn.mpi.join(part, comm), right, 1e-5, "joined")
        comm.Free()


def runs_of(what):
    """What every rank runs, by name: (function, *arguments)."""
    if what in ("results", "gradients"):
        compare = check_ring if what == "results" else check_gradients
        runs = {f"{what}, {name}, {layout}": (compare, given, layout)
                for name, given in CASES.items() for layout in given["layouts"]}  # fmt: skip
        others = (other_communicators, equal_scores, device_of_the_keys)
        return runs | {f.__name__: (f,) for f in (others if what == "results" else GRADIENT_CHECKS)}
    ring_attention = clattn.mpi.ring_attention, check_ring
    runs = {name: (refuse, *ring_attention, *given) for name, given in WRONG.items()}
    backward = gradients, check_gradients
    runs |= {f"{name}, backwards": (refuse, *backward, *given)
             for name, given in WRONG_GRADIENTS.items()}  # fmt: skip
    runs |= {f.__name__: (f,) for f in (refuse_communicators, refuse_joins)}
    return runs | {f"interrupt {function.__name__}": (interrupt, function, compare, name)
                   for (function, compare), name in ((ring_attention, ATTENTION),
                                                     (backward, BACKWARD))}  # fmt: skip


def main():
    clattn.set_default_device(clattn.devices()[int(sys.argv[1])])
    runs = {name: run for what in sys.argv[2:] for name, run in runs_of(what).items()}
    for name, (run, *args) in runs.items():
        try:
            run(*args)
            words = None
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        for rank, said in enumerate(COMM.gather(words) or []):
            if said:
                print(f"{name}, rank {rank}: {said}", flush=True)
    if COMM.rank == 0:
        print(len(runs), "cases")


if __name__ == "__main__":
    main()
