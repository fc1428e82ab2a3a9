# SPDX-License-Identifier: MIT
"""What ranks compute in tests/python/test_mpi.py: sequences, their parts, and failures."""

from contextlib import contextmanager

import clattn
import ml_dtypes
import numpy as np
from clattn._parts import ring
from clattn.mpi import messages
from mpi4py import MPI
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


def drawn(given):
    """Query, key and value of all ranks, and the options of a case."""
    query, key, value = qkv(**given["sizes"])
    options = dict(given["options"])
    if heads := given.get("heads"):
        query, key, value = qkv((2, heads[0]), **given["sizes"])
        key, value = key[:, : heads[1]], value[:, : heads[1]]
        options["enable_gqa"] = True
    if given["spoil"]:
        given["spoil"](query, key, value)
    return query, key, value, options


def places(given, layout, query, key):
    """The rows and the keys that this rank holds."""
    rows = given["rows"](query.shape[-2], COMM.size, layout)
    keys = given["keys"](key.shape[-2], COMM.size, layout)
    return held(rows, layout, COMM.rank), held(keys, layout, COMM.rank)


@contextmanager
def messages_of(given):
    """The most bytes of a message are those of the case."""
    before, messages._MOST = messages._MOST, given.get("message", 1 << 30)
    try:
        yield
    finally:
        messages._MOST = before


# What fails: the functions that a rank calls for a pair of pieces.
ATTENTION = "scaled_dot_product_attention"
BACKWARD = "scaled_dot_product_attention_backward"


def fail_at(rank, call, error, name=ATTENTION):
    """Let a function raise for a piece on a rank; return what puts it right again."""
    plain, calls = getattr(ring, name), []

    def attend(*args, **options):
        calls.append(args)
        if rank == COMM.rank and len(calls) == call:
            raise error
        return plain(*args, **options)

    setattr(ring, name, attend)
    return lambda: setattr(ring, name, plain)


def refuse(function, right, rank, change, kind, words):
    """All ranks raise the same error, and the next call is right."""
    options = dict(change) if rank == COMM.rank else {}
    sizes = {name: options.pop(name) for name in ("dtype", "lead", "Ev") if name in options}
    query, key, value = qkv(L=6, S=7, **sizes)
    key, value = options.pop("key", key), options.pop("value", value)
    mend = fail_at(rank, *options.pop("fails")) if "fails" in options else lambda: None
    try:
        function(query, key, value, **options)
        said = None
    except Exception as error:
        said = type(error), str(error)
    finally:
        mend()
    everyone = COMM.allgather(said)
    assert everyone == [said] * COMM.size, everyone
    assert said and said[0] is kind and words in said[1], said
    right(CASES["causal"], "zigzag")
