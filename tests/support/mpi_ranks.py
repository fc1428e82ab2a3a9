# SPDX-License-Identifier: MIT
"""What each process of tests/python/test_mpi.py runs: mpirun -n N python -m support.mpi_ranks.

Rank 0 prints a line for each case that failed on some rank, and the number of cases at the end.
"""

import os
import sys

os.environ["CLATTN_TUNING"] = "off"

import clattn
import clattn.mpi
import ml_dtypes
import numpy as np
import pytest
from clattn._parts import ring
from clattn.mpi import messages
from mpi4py import MPI
from references.attention import attention, compute_dtype, eps, judged, largest
from support.checks import assert_close
from support.data import qkv

COMM = MPI.COMM_WORLD
CAUSAL = {"is_causal": True}


def even(total, ranks, layout):
    """The lengths of the parts that `split` makes."""
    parts = ranks if layout == "contiguous" else 2 * ranks
    sizes = [len(part) for part in np.array_split(np.empty(total), parts)]
    return sizes if parts == ranks else [sizes[r] + sizes[-1 - r] for r in range(ranks)]


def uneven(total, ranks, layout):
    """Parts of random lengths; 0 among them."""
    cuts = np.sort(np.random.default_rng(total).integers(0, total + 1, ranks - 1))
    return np.diff([0, *cuts, total]).tolist()


def first(total, ranks, layout):
    return [total] + [0] * (ranks - 1)


def last(total, ranks, layout):
    return first(total, ranks, layout)[::-1]


def held(lengths, layout, rank):
    """The places in the sequence of what a rank holds."""
    if layout == "contiguous":
        start = sum(lengths[:rank])
        return [*range(start, start + lengths[rank])]
    heads, tails = [-(-n // 2) for n in lengths], [n // 2 for n in lengths]
    start, end = sum(heads[:rank]), sum(heads) + sum(tails[rank + 1 :])
    return [*range(start, start + heads[rank]), *range(end, end + tails[rank])]


def case(sizes, options, layouts=("contiguous", "zigzag"), rows=even, keys=even, spoil=None, **how):
    return {"sizes": sizes, "options": options, "layouts": layouts, "rows": rows, "keys": keys,
            "spoil": spoil, **how}  # fmt: skip


def far_keys(query, key, value):
    """Keys that no row sees are NaN."""
    key[..., 20:, :] = np.nan
    value[..., 20:, :] = np.inf


def hidden_rows(query, key, value):
    query[..., 3, :] = np.nan


PLAIN = {"L": 40, "S": 56}
ZIGZAG = ("zigzag",)
CASES = {
    "plain": case(PLAIN, {}),
    "causal": case({"L": 49, "S": 49}, CAUSAL),
    "causal, fewer rows": case(PLAIN, CAUSAL),
    "lower right": case(PLAIN, {"is_causal": "lower_right", "scale": 0.3}),
    "lower right, fewer keys": case({"L": 56, "S": 40}, {"is_causal": "lower_right"}, ZIGZAG),
    "window": case(PLAIN, {"window": (5, 2)}),
    "window and causal": case(PLAIN, {"window": (7, None), **CAUSAL}),
    "window of nothing": case({"L": 60, "S": 8}, {"window": (3, 0)}),
    "grouped heads": case({"L": 49, "S": 49, "E": 16, "Ev": 24}, CAUSAL, ZIGZAG, heads=(6, 2)),
    "float64": case({"L": 49, "S": 49, "dtype": np.float64}, CAUSAL, ZIGZAG),
    "float16": case({"L": 49, "S": 49, "dtype": np.float16}, CAUSAL),
    "bfloat16": case({"L": 49, "S": 49, "dtype": ml_dtypes.bfloat16}, CAUSAL, ZIGZAG),
    "uneven": case(PLAIN, {"is_causal": True}, rows=uneven, keys=uneven),
    "uneven with a window": case(PLAIN, {"window": (4, 9)}, rows=uneven, keys=uneven),
    "rows on the first rank, keys on the last": case(PLAIN, CAUSAL, rows=first, keys=last),
    "keys on the first rank": case(PLAIN, {"window": (9, 9)}, ZIGZAG, rows=last, keys=first),
    "fewer entries than ranks": case({"L": 2, "S": 3}, CAUSAL),
    "no keys": case({"L": 9, "S": 0}, CAUSAL),
    "no rows": case({"L": 0, "S": 9}, CAUSAL),
    "no columns": case({"L": 9, "S": 9, "E": 0, "Ev": 4}, CAUSAL),
    "no heads": case({"L": 40, "S": 56, "lead": ()}, CAUSAL),
    "NaN that nobody sees": case({"L": 20, "S": 56}, CAUSAL, spoil=far_keys),
    "a row of NaN": case(PLAIN, CAUSAL, ZIGZAG, spoil=hidden_rows),
    "small messages": case(PLAIN, {}, message=100),
    "Tensors": case(PLAIN, CAUSAL, ZIGZAG, kind=clattn.tensor),
    "Tensors of float16": case({"L": 9, "S": 9, "dtype": np.float16}, {}, kind=clattn.tensor),
    "another byte order": case(PLAIN, {}, ZIGZAG, kind=lambda a: a.astype(a.dtype.newbyteorder())),
}  # fmt: skip


def check_ring(given, layout):
    """Compare this rank's result with its rows of the answer for the whole sequence."""
    query, key, value = qkv(**given["sizes"])
    options = dict(given["options"])
    if heads := given.get("heads"):
        query, key, value = qkv((2, heads[0]), **given["sizes"])
        key, value = key[:, : heads[1]], value[:, : heads[1]]
        options["enable_gqa"] = True
    if given["spoil"]:
        given["spoil"](query, key, value)
    kind = given.get("kind", np.array)
    rows = held(given["rows"](query.shape[-2], COMM.size, layout), layout, COMM.rank)
    keys = held(given["keys"](key.shape[-2], COMM.size, layout), layout, COMM.rank)
    parts = [kind(query[..., rows, :]), kind(key[..., keys, :]), kind(value[..., keys, :])]
    if given["rows"] is given["keys"] is even:
        for whole, part in zip((query, key, value), parts, strict=True):
            np.testing.assert_array_equal(np.array(part), clattn.mpi.split(whole, COMM, layout))
    given_messages, messages._MOST = messages._MOST, given.get("message", 1 << 30)
    try:
        out, lse = clattn.mpi.ring_attention(*parts, layout=layout, return_lse=True, **options)
        whole, whole_lse = (
            clattn.mpi.join(result, COMM, layout, axis)
            for result, axis in ((out, -2), (lse, query.ndim - 2))
        )
    finally:
        messages._MOST = given_messages

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


def fail_at(rank, call, error):
    """Let attention to a piece raise on a rank; return what puts it right again."""
    plain, calls = ring.scaled_dot_product_attention, []

    def attend(*args, **options):
        calls.append(args)
        if rank == COMM.rank and len(calls) == call:
            raise error
        return plain(*args, **options)

    ring.scaled_dot_product_attention = attend
    return lambda: setattr(ring, "scaled_dot_product_attention", plain)


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


def refuse(rank, change, kind, words):
    """All ranks raise the same error, and the next call is right."""
    options = dict(change) if rank == COMM.rank else {}
    sizes = {name: options.pop(name) for name in ("dtype", "lead", "Ev") if name in options}
    query, key, value = qkv(L=6, S=7, **sizes)
    key, value = options.pop("key", key), options.pop("value", value)
    mend = fail_at(rank, *options.pop("fails")) if "fails" in options else lambda: None
    try:
        clattn.mpi.ring_attention(query, key, value, **options)
        said = None
    except Exception as error:
        said = type(error), str(error)
    finally:
        mend()
    everyone = COMM.allgather(said)
    assert everyone == [said] * COMM.size, everyone
    assert said and said[0] is kind and words in said[1], said
    check_ring(CASES["causal"], "zigzag")


def interrupt():
    """One rank is interrupted, and hears that; the others end too, and the next call is right."""
    mend = fail_at(1, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt if COMM.rank == 1 else RuntimeError):
        clattn.mpi.ring_attention(*qkv(L=6, S=7))
    mend()
    check_ring(CASES["causal"], "zigzag")


def refuse_communicators():
    freed = COMM.Dup()
    freed.Free()
    x = np.ones((1, 4, 8), np.float32)
    for comm, kind in ((freed, ValueError), (MPI.COMM_NULL, ValueError), (3, TypeError)):
        for call in (
            lambda comm=comm: clattn.mpi.ring_attention(x, x, x, comm=comm),
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


def main():
    clattn.set_default_device(clattn.devices()[int(sys.argv[1])])
    if sys.argv[2] == "results":
        runs = {f"{name}, {layout}": (check_ring, given, layout)
                for name, given in CASES.items() for layout in given["layouts"]}  # fmt: skip
        runs |= {f.__name__: (f,) for f in (other_communicators, equal_scores, device_of_the_keys)}
    else:
        runs = {name: (refuse, *given) for name, given in WRONG.items()}
        runs |= {f.__name__: (f,) for f in (refuse_communicators, refuse_joins, interrupt)}
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
