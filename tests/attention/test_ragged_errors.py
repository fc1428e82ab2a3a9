# SPDX-License-Identifier: MIT
"""Wrong arguments of clattn.varlen_attn: offsets, lengths, pages, and what others have too."""

import clattn
import numpy as np
import pytest
from support.data import draw
from support.refusals import (
    FLOATS,
    cases,
    check_without_opencl,
    of,
    refuse,
    refuse_without_opencl,
    wrong,
    wrong_arrays,
    wrong_shapes,
)

NAN, INF = float("nan"), float("inf")
f32 = np.float32


def arrays():
    """A correct call: sequences of 3 and 2 rows, of 4 and 3 keys."""
    return {
        "query": draw((5, 4, 8)), "key": draw((7, 2, 8)), "value": draw((7, 2, 6)),
        "cu_seq_q": [0, 3, 5], "cu_seq_k": [0, 4, 7], "enable_gqa": True,
    }  # fmt: skip


def paged(**changed):
    """What makes it a call with keys in 3 pages of 2, of which the sequences need 2 each."""
    pages = {
        "key": of(f32, 3, 2, 2, 8), "value": of(f32, 3, 2, 2, 6), "cu_seq_k": None,
        "block_table": [[0, 1, 7], [2, 0, -1]], "seqused_k": [4, 3],
    }  # fmt: skip
    return pages | changed


class Other:
    """An array of a library that nobody knows."""

    shape, dtype = (3, 4, 8), np.dtype(f32)


def listed(*rows, heads=2, size=8, dtype=f32):
    return [of(dtype, n, heads, size) for n in rows]


# Lists of arrays, which have offsets of their own.
QUERIES = {"query": listed(3, 2, heads=4), "cu_seq_q": None}
KEYS = {"key": listed(4, 3), "value": listed(4, 3, size=6), "cu_seq_k": None}
LISTS = [
    ("offsets beside a list of queries", ValueError, "^cu_seq_q is given beside a list",
     QUERIES | {"cu_seq_q": [0, 3, 5]}),
    ("offsets beside lists of keys", ValueError, "^cu_seq_k is given beside a list",
     KEYS | {"cu_seq_k": [0, 4, 7]}),
    ("out beside a list of queries", ValueError, "^out is given beside a list",
     QUERIES | {"out": of(f32, 5, 4, 6)}),
    ("a list of no query", ValueError, "^query is an empty list", QUERIES | {"query": []}),
    ("a list of lists", TypeError, r"^query\[0\] must be an array, got list",
     QUERIES | {"query": [[[[1.0]]]]}),
    ("queries of two dtypes", TypeError, r"^query\[1\] is ndarray of float64; expected ndarray",
     QUERIES | {"query": [of(f32, 3, 4, 8), of("f8", 2, 4, 8)]}),
    ("queries of two kinds of heads", ValueError,
     r"^query\[1\] has shape \(2, 2, 8\); expected \(rows, 4, 8\)",
     QUERIES | {"query": [of(f32, 3, 4, 8), of(f32, 2, 2, 8)]}),
    ("queries of two dimensions", ValueError,
     r"^query\[0\] has shape \(3, 8\); expected \(rows, heads, size\)",
     QUERIES | {"query": [of(f32, 3, 8)]}),
    ("fewer keys than queries", ValueError, "^key has 1 arrays; expected 2, as query",
     QUERIES | KEYS | {"key": listed(4), "value": listed(4, size=6)}),
    ("fewer values than keys", ValueError, "^value has 1 arrays; expected 2, as key",
     KEYS | {"value": listed(7, size=6)}),
    ("values of other lengths", ValueError, r"^value\[0\] has 3 rows; expected 4, as key\[0\]",
     KEYS | {"value": listed(3, 4, size=6)}),
    ("a list of keys alone", ValueError, "one of key and value is a list",
     {"key": listed(4, 3), "cu_seq_k": None}),
    ("a list of what cannot be joined", TypeError, "^query is a list of Other; expected arrays of",
     QUERIES | {"query": [Other()]}),
]  # fmt: skip

OFFSETS = [  # (argument, a right number of rows or keys)
    ("cu_seq_q", 5),
    ("cu_seq_k", 7),
]


def repeated(page_size, keys, **changed):
    """Many keys: each row of the table has one page often, whose rows are one number."""
    pages = {
        name: np.broadcast_to(f32(1), (1, page_size, 2, size))
        for name, size in (("key", 8), ("value", 6))
    }
    return paged(**pages, block_table=np.zeros((2, 256), int), seqused_k=[keys, 3], **changed)


ROWS = [  # (what is wrong, exception, pattern in the message, changed arguments)
    *wrong_arrays("query", (5, 4, 8), FLOATS, none=None),
    *LISTS,
    *wrong_shapes("query", f32, (), (5, 8), (1, 5, 4, 8), (5, 3, 8), (5, 4, 9)),
    *wrong_shapes("key", f32, (7, 8), (1, 7, 2, 8), (7, 3, 8), (7, 2, 9), (6, 2, 8), (8, 2, 8)),
    *wrong_shapes("value", f32, (7, 6), (1, 7, 2, 6), (7, 1, 6), (6, 2, 6)),
    ("key has another dtype", TypeError, "key", {"key": of(np.float64, 7, 2, 8)}),
    ("heads without enable_gqa", ValueError, "enable_gqa|key", {"enable_gqa": False}),
    *(row for name, total in OFFSETS for row in [
        *wrong(name, TypeError, "0, 3", 5, [0.0, 3.0, 5.0], [0, True, total], {0, 3},
               np.array([0.0, 3.0, 5.0]), np.array([False, True, True])),
        *wrong(name, ValueError, [], [[0, 3, 5]], np.zeros((1, 3), int), [0, 2**63, 2**63]),
        *wrong(name, ValueError, [1, 3, 5], [-1, 3, 5], [0, 4, 3], [0, -1, 5],
               [0, 3, total + 1], [0, 2**62, 2**62], [0, 5], [0, 1, 2, 3]),
    ]),
    ("cu_seq_q is None", TypeError, "cu_seq_q", {"cu_seq_q": None}),
    ("cu_seq_k is None", ValueError, "cu_seq_k", {"cu_seq_k": None}),
    *wrong("seqused_k", ValueError, [4], [4, 3, 0], [5, 3], [4, 4], [-1, 3], [[4, 3]], [2**63, 1]),
    *wrong("seqused_k", TypeError, [4.0, 3.0], 4, "43"),
    *wrong("max_q", TypeError, 1.5, "3", True),
    *wrong("max_k", TypeError, 1.5, np.zeros(2)),
    *wrong("window_size", TypeError, 3, None, (1,), (1, 2, 3), (1.5, 0), ("1", 0), (True, 0)),
    *wrong("window_size", ValueError, (-2, 0), (0, -(2**70))),
    *wrong("page_layout", ValueError, "nhd", None, 0, "BHLE"),
    *wrong("is_causal", ValueError, "upper_left", "left"),
    *wrong("is_causal", TypeError, 1, None),
    *wrong("scale", TypeError, "1", 1j),
    *wrong("scale", ValueError, NAN, -INF),
    *wrong("softcap", ValueError, -1.0, NAN, INF),
    *wrong_shapes("sinks", f32, (), (2,), (5,), (4, 2)),
    *wrong_shapes("out", f32, (5, 4, 8), (1, 5, 4, 6), (4, 5, 6)),
    ("out is wider", TypeError, "out", {"out": of(np.float64, 5, 4, 6)}),
    *wrong("device", TypeError, 7.5, b"cpu"),
    *wrong("score_mod", TypeError, 3),
    *wrong("key_scale", TypeError, 1j, "x", [1.0]),
    *wrong("value_scale", ValueError, 1e39),
    ("a scale too large for any float", ValueError, "key_scale", {"key_scale": 10**400}),
    *wrong("return_lse", TypeError, 1, None),
    ("pages without lengths", ValueError, "cu_seq_k is None.*seqused_k", paged(seqused_k=None)),
    ("a page below 0", ValueError, r"block_table\[1, 1\] is -1; expected 0 to 2",
     paged(block_table=[[0, 1], [2, -1]])),
    ("a page behind the last", ValueError, r"block_table\[0, 0\] is 3; expected 0 to 2",
     paged(block_table=[[3, 1], [2, 0]])),
    ("a page of more than 63 bits", ValueError, "block_table",
     paged(block_table=np.full((2, 2), 2**63, np.uint64))),
    ("a table of another count", ValueError, "block_table", paged(block_table=[[0, 1]])),
    ("a table of unequal rows", ValueError, "block_table.*one length",
     paged(block_table=[[0, 1], [2]])),
    ("a table of one dimension", ValueError, "block_table", paged(block_table=[0, 1])),
    *wrong("block_table", TypeError, [[0.0, 1.0], [2.0, 0.0]], [0.5], "01", 0.5, [[True], [False]],
           [[None, 1], [2, 0]], {0: 1}),
    ("more keys than the table has", ValueError, r"seqused_k\[0\] is 7; expected 0 to 6",
     paged(seqused_k=[7, 3])),
    ("fewer keys than none", ValueError, r"seqused_k\[1\] is -1", paged(seqused_k=[4, -1])),
    ("more keys by offsets than the table has", ValueError, "sequence 0 has 7 keys by cu_seq_k",
     paged(seqused_k=None, cu_seq_k=[0, 7, 8])),
    ("keys of pages without a table", ValueError, "key", paged(block_table=None)),
    ("pages of three dimensions", ValueError, "key.*with block_table",
     paged(key=of(f32, 7, 2, 8), value=of(f32, 7, 2, 6))),
    ("pages without rows", ValueError, "key.*page_size",
     paged(key=of(f32, 3, 0, 2, 8), value=of(f32, 3, 0, 2, 6))),
    ("more keys than 64 bits add up", ValueError, r"seqused_k\[0\] is \d+; expected 0 to \d+",
     repeated(2**56, 2**63 - 1, is_causal="lower_right")),
    ("more keys than 32 bits count, with mods", ValueError, "key has 1073741825; expected at most",
     repeated(2**29, 2**30 + 1, score_mod=lambda s, b, h, i, j: s + j)),
    ("fewer pages of values", ValueError, "value.*pages", paged(value=of(f32, 2, 2, 2, 6))),
    ("longer pages of values", ValueError, "value.*pages", paged(value=of(f32, 3, 4, 2, 6))),
    ("pages of another head size", ValueError, r"key has head size 9 \(shape \(3, 2, 2, 9\)\)",
     paged(key=of(f32, 3, 2, 2, 9))),
    ("pages with heads first", ValueError, "query has 4 heads; expected a multiple of key's 3",
     paged(key=of(f32, 3, 3, 2, 8), value=of(f32, 3, 3, 2, 6), page_layout="HND")),
    ("pages without enable_gqa", ValueError, r"value has 2 heads \(shape \(3, 2, 2, 6\)\)",
     paged(key=of(f32, 3, 2, 1, 8)) | {"enable_gqa": False}),
    *[(f"a huge head of {name}", ValueError, rf"{name} has head size 131072 \(shape \({rows}, ",
       {name: np.broadcast_to(f32(0), (rows, 2, 2**17)) for name, rows in names.items()})
      for name, rows, names in (("query", 5, {"query": 5, "key": 7}), ("value", 7, {"value": 7}))],
]  # fmt: skip


def judge_right(device):
    """The call of all rows, without their changes, and one with pages."""
    output = clattn.varlen_attn(**arrays(), device=device)
    assert output.shape == (5, 4, 6) and np.isfinite(output).all()
    assert not clattn.varlen_attn(**arrays() | paged(), device=device).any()


@cases(ROWS)
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards correct calls work."""
    refuse(clattn.varlen_attn, row, arrays())
    judge_right(device)


SAID = {
    "cu_seq_q is [0, 4, 3]": "cu_seq_q[2] is 3; expected 4 or more, which cu_seq_q[1] is",
    "cu_seq_k is [0, 3, 8]": "cu_seq_k[2] is 8; expected at most 7, the rows of key",
    "cu_seq_q is [1, 3, 5]": "cu_seq_q[0] is 1; expected 0",
    "cu_seq_k is [0, 5]": "cu_seq_k has shape (2,); expected (3,), as cu_seq_q",
    "seqused_k is [5, 3]": "seqused_k[0] is 5; expected 0 to 4, the keys of the sequence",
    "key of float32 (7, 2, 9)": "key has head size 9 (shape (7, 2, 9)); expected 8, that of query "
    "(shape (5, 4, 8))",
    "value of float32 (6, 2, 6)": "value has length 6 (shape (6, 2, 6)); expected 7, that of key "
    "(shape (7, 2, 8))",
    "heads without enable_gqa": "key has 2 heads (shape (7, 2, 8)); expected 4, or one (for "
    "grouped heads: enable_gqa=True)",
    "window_size is (-2, 0)": "window_size is (-2, 0); expected -1 or more",
    "page_layout is 'nhd'": 'page_layout is \'nhd\'; expected "NHD" or "HND"',
}


def test_messages_say_what_was_given():
    """And not only which argument is wrong."""
    rows = {row[0]: row for row in ROWS}
    for name, said in SAID.items():
        assert said in str(refuse(clattn.varlen_attn, rows[name], arrays()))


def test_out_is_untouched_after_an_error(device):
    out = np.full((5, 4, 6), 7.5, f32)
    for row in ROWS:
        if row[0] in SAID:
            refuse(clattn.varlen_attn, row, arrays() | {"out": out})
    assert (out == 7.5).all()
    judge_right(device)


OF_TENSORS = {
    r"cu_seq_q\[2\] is 3": {"cu_seq_q": [0, 4, 3]},
    r"cu_seq_k\[2\] is 8": {"cu_seq_k": [0, 3, 8]},
    r"seqused_k\[1\] is -1": {"seqused_k": [4, -1]},
    r"seqused_k\[0\] is 9": paged(seqused_k=[9, 3]),
    r"block_table\[0, 1\] is 3": paged(block_table=[[0, 3], [2, 0]]),
}


def test_wrong_numbers_of_tensors(device):
    """They are read before anything runs."""
    for said, changed in OF_TENSORS.items():
        for dtype in (np.int32, np.int64):
            call = arrays() | changed
            for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
                if call.get(name) is not None:
                    call[name] = clattn.tensor(np.array(call[name], dtype), device=device)
            with pytest.raises(ValueError, match=said):
                clattn.varlen_attn(**call, device=device)
    judge_right(device)


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""
    call, right = clattn.varlen_attn, arrays()
    refuse_without_opencl(lambda: call(**right), lambda: [refuse(call, row, right) for row in ROWS])


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("attention.test_ragged_errors", tmp_path)
