# SPDX-License-Identifier: MIT
"""clattn.KVCache: wrong arguments are refused by name, and leave the cache as it was.

Each row breaks one rule. It replaces keyword arguments of a call that is right.
"""

import pickle

import clattn
import ml_dtypes
import numpy as np
import pytest
from clattn import _core
from support.cache_pair import EV, HK, HQ, B, E, host, pair
from support.data import draw
from support.loops import looped
from support.refusals import FLOATS, WRONGLY_KEPT, cases, of, refuse, wrong, wrong_arrays

NAN, INF = float("nan"), float("inf")
f32 = np.float32
BF16 = ml_dtypes.bfloat16
HUGE = 1 << 45


# ---- KVCache() ----

SIZES = {"batch": 2, "num_kv_heads": 2, "capacity": 9, "head_size": 8, "v_head_size": 6}
MADE = [  # (what is wrong, exception, name the message has to contain, changed arguments)
    *[(f"{name} is {text}", TypeError, name, {name: given})
      for name in SIZES
      for text, given in (("a float", 2.0), ("text", "2"), ("a list", [2]), ("NaN", NAN))],
    *[(f"{name} is None", TypeError, name, {name: None}) for name in list(SIZES)[:-1]],
    *[(f"{name} is negative", ValueError, name, {name: -1}) for name in SIZES],
    *[(f"{name} is 0", ValueError, name, {name: 0}) for name in SIZES if name != "capacity"],
    *[(f"{name} is hugely negative", ValueError, name, {name: -(2**80)}) for name in SIZES],
    *WRONGLY_KEPT,
    *wrong("device", TypeError, 7.5, ["cpu"]),
    ("device is unknown", ValueError, "device", {"device": "no such device"}),
    ("unknown keyword", TypeError, "max_length", {"max_length": 5}),
]  # fmt: skip


@cases(MADE)
def test_wrong_sizes(device, row):
    refuse(clattn.KVCache, row, SIZES | {"device": device})
    assert clattn.KVCache(**SIZES, device=device).length == 0


def test_messages_say_what_was_given(device):
    for changed, given in (({"batch": -3}, "-3"), ({"head_size": 0}, "0"),
                           ({"dtype": np.int16}, "int16"), ({"capacity": "x"}, "str")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=given):
            clattn.KVCache(**SIZES | {"device": device} | changed)


TOO_LARGE = [
    {"capacity": HUGE}, {"capacity": 2**63 - 1}, {"capacity": 2**62, "head_size": 1},
    {"batch": HUGE}, {"batch": 2**40, "capacity": 2**40, "num_kv_heads": 2**40},
    {"v_head_size": HUGE}, {"capacity": 2**64}, {"capacity": 2**200},
]  # fmt: skip


@looped("changed", TOO_LARGE, ids=str)
def test_sizes_that_no_device_has(device, changed):
    """More than there is, more than 64 bits count: an error, and nothing is kept."""
    before = clattn.memory_stats(device)["allocated_bytes"]
    with pytest.raises((MemoryError, ValueError)) as caught:
        clattn.KVCache(**SIZES | {"device": device} | changed)
    assert str(caught.value)
    del caught
    assert clattn.memory_stats(device)["allocated_bytes"] <= before
    pair(device, (3, 5)).attend(1)


def test_the_second_allocation_fails(device):
    """Keys fit, values do not: the keys' memory is given back."""
    with pytest.raises(MemoryError):
        clattn.KVCache(1, 1, 1 << 22, 1, 1 << 16, device=device)  # values of 1 TiB
    before = clattn.memory_stats(device)["allocated_bytes"]
    for _ in range(20):
        with pytest.raises(MemoryError):
            clattn.KVCache(1, 1, 1 << 22, 1, 1 << 16, device=device)  # values of 1 TiB
    assert clattn.memory_stats(device)["allocated_bytes"] <= before


def test_missing_sizes():
    for sizes in ((), (1,), (1, 1, 1)):
        with pytest.raises(TypeError):
            clattn.KVCache(*sizes)
    with pytest.raises(TypeError):
        clattn.KVCache(1, 1, 1, 1, 1, f32, None, 1)


def test_the_core_refuses_tensors_that_are_no_caches(device):
    """The caches refuse sizes before they make Tensors; the C type writes to these."""
    rows, other = (_core.empty((2, 1, 4, size), f32, device) for size in (8, 6))
    codes = _core.empty((2, 1, 4, 8), np.int8, device)
    scales = _core.empty((2, 1, 4), f32, device)
    assert _core.Cache(0, 8, 6, rows, other, None, None, None, None).length == 0
    assert _core.Cache(1, 8, 8, codes, codes, scales, scales, None, None).length == 0
    without_heads = _core.empty((2, 0, 4, 8), f32, device)
    for given in ((0, 8, 8, without_heads, without_heads, None, None),
                  (0, 8, 8, rows, other, None, None), (0, 6, 6, rows, rows, None, None),
                  (0, 8, 8, rows, codes, None, None), (1, 8, 8, codes, codes, scales, None),
                  (1, 8, 8, rows, rows, scales, scales), (2, 8, 8, codes, codes, scales, scales),
                  (4, 16, 16, codes, codes, scales, scales), (5, 8, 8, rows, rows, None, None),
                  (-1, 8, 8, rows, rows, None, None), (0, 8, 8, rows[1:], rows, None, None),
                  (0, 4, 4, rows[..., ::2], rows[..., ::2], None, None),
                  (0, 8, 8, None, rows, None, None), (0, 8, 8, rows, rows, 3, None),
                  (0, 8, 8, np.zeros((2, 1, 4, 8), f32), rows, None, None)):  # fmt: skip
        with pytest.raises(ValueError, match=r"^key and value are no cache's$"):
            _core.Cache(*given, None, None)
    with pytest.raises(TypeError):
        _core.Cache(0, 8, 8, rows)


# ---- the calls of a cache with 5 and 3 positions, 6 of 11 free ----

LENGTHS, SPACE = (5, 3), 11
KEY, VALUE = (B, HK, 4, E), (B, HK, 4, EV)


def filled(device, **sizes):
    return pair(device, LENGTHS, capacity=SPACE, **sizes)


def state(cache):
    """Everything there is to see of a cache."""
    return (cache.length, cache.lengths.tolist(), host(cache.key).tobytes(),
            host(cache.value).tobytes())  # fmt: skip


def refuse_and_go_on(device, method, row, arguments):
    """The call raises, the cache is as before, and the next right calls work."""
    both = filled(device)
    before = state(both.cache)
    error = refuse(getattr(both.cache, method), row, arguments)
    assert state(both.cache) == before
    both.append(1).attend(1)
    return str(error)


def good_append():
    return {"key": draw(KEY), "value": draw(VALUE)}


APPENDED = [
    *wrong_arrays("key", KEY, ["float32"], none=None),
    ("key has rank 3", ValueError, "key", {"key": of(f32, HK, 4, E)}),
    ("key has rank 5", ValueError, "key", {"key": of(f32, 1, *KEY)}),
    ("key has rank 0", ValueError, "key", {"key": of(f32)}),
    ("key has another batch", ValueError, "key", {"key": of(f32, B + 1, HK, 4, E)}),
    ("key would broadcast over the batch", ValueError, "key", {"key": of(f32, 1, HK, 4, E)}),
    ("key has query heads", ValueError, "key", {"key": of(f32, B, HQ, 4, E)}),
    ("key has another E", ValueError, "key", {"key": of(f32, B, HK, 4, E + 1)}),
    ("key is transposed", ValueError, "key", {"key": of(f32, B, 4, HK, E)}),
    *wrong_arrays("value", VALUE, ["float32"], none=None),
    ("value has rank 3", ValueError, "value", {"value": of(f32, HK, 4, EV)}),
    ("value is longer", ValueError, "value", {"value": of(f32, B, HK, 5, EV)}),
    ("value is shorter", ValueError, "value", {"value": of(f32, B, HK, 1, EV)}),
    ("value has E for Ev", ValueError, "value", {"value": of(f32, *KEY)}),
    ("value has another batch", ValueError, "value", {"value": of(f32, 1, HK, 4, EV)}),
    ("value has other heads", ValueError, "value", {"value": of(f32, B, 1, 4, EV)}),
    ("counts is a number", (TypeError, ValueError), "counts", {"counts": 2}),
    *wrong("counts", TypeError, "12", [1.0, 2.0]),
    ("counts are float arrays", TypeError, "counts", {"counts": np.array([1.0, 2.0])}),
    ("counts are a set", TypeError, "counts", {"counts": {1, 2}}),
    ("a count is None", TypeError, "counts", {"counts": [1, None]}),
    *wrong("counts", ValueError, [1], (1, 2, 3)),
    ("counts are none", ValueError, "counts", {"counts": of(np.int64, 0)}),
    ("counts are a matrix", ValueError, "counts", {"counts": of(np.int64, B, 1)}),
    ("counts have no dimension", ValueError, "counts", {"counts": of(np.int64)}),
    *wrong("counts", ValueError, [1, -1], [5, 0], [1, 2**32], [2**64, 1]),
    ("a count is the largest of its type", ValueError, "counts",
     {"counts": np.array([1, 2**64 - 1], np.uint64)}),
    ("unknown keyword", TypeError, "count", {"count": [1, 1]}),
    ("too long", ValueError, "capacity|key", {"key": of(f32, B, HK, 7, E),
                                              "value": of(f32, B, HK, 7, EV)}),
    ("far too long", ValueError, "capacity|key", {
        "key": np.broadcast_to(f32(1), (B, HK, 2**40, E)),
        "value": np.broadcast_to(f32(1), (B, HK, 2**40, EV))}),
    ("too long for the longest alone", ValueError, "capacity|key|counts",
     {"key": of(f32, B, HK, 8, E), "value": of(f32, B, HK, 8, EV), "counts": [7, 8]}),
    ("too long for the shortest alone", ValueError, "capacity|key|counts",
     {"key": of(f32, B, HK, 9, E), "value": of(f32, B, HK, 9, EV), "counts": [6, 9]}),
]  # fmt: skip


@cases(APPENDED)
def test_wrong_tokens(device, row):
    refuse_and_go_on(device, "append", row, good_append())


def test_missing_tokens(device):
    cache = filled(device).cache
    for arguments in ((), (draw(KEY),), (*good_append().values(), None, 1)):
        with pytest.raises(TypeError):
            cache.append(*arguments)


def test_overflow_is_told(device):
    """The message says how much room there is and how much was given."""
    both = filled(device)
    before = state(both.cache)
    for n in (7, 8, 100):
        with pytest.raises(ValueError, match=str(SPACE)) as caught:
            both.append(n)
        assert str(n) in str(caught.value)
        assert state(both.cache) == before
    both.append(6).contents_agree().attend(2)
    with pytest.raises(ValueError, match=str(SPACE)):
        both.append(1)
    both.append(1, (0, 1)).append(1, (0, 1)).append(0).contents_agree().attend(2)
    with pytest.raises(ValueError, match=str(SPACE)):
        both.append(1, (0, 1))
    both.contents_agree()


def test_overflow_by_tensors_and_strided_arrays(device):
    """Tensors and strided arrays are copied in other ways; nothing is copied before the refusal."""
    both = filled(device)
    before = state(both.cache)
    key, value = draw((B, HK, 7, E)), draw((B, HK, 7, EV))
    for given in ([clattn.tensor(a, device=device) for a in (key, value)],
                  [a[:, ::-1, ::-1] for a in (key, value)]):  # fmt: skip
        with pytest.raises(ValueError, match=str(SPACE)):
            both.cache.append(*given)
        assert state(both.cache) == before


def good_attend():
    return {"query": draw((B, HQ, 2, E))}


ATTENDED = [
    *wrong_arrays("query", (B, HQ, 2, E), ["float32"], none=None),
    ("query has rank 3", ValueError, "query", {"query": of(f32, HQ, 2, E)}),
    ("query has rank 5", ValueError, "query", {"query": of(f32, 1, B, HQ, 2, E)}),
    ("query has another batch", ValueError, "query", {"query": of(f32, B + 1, HQ, 2, E)}),
    ("query would broadcast over the batch", ValueError, "query", {"query": of(f32, 1, HQ, 2, E)}),
    ("query has another E", ValueError, "query", {"query": of(f32, B, HQ, 2, EV)}),
    ("query heads are no multiple", ValueError, "query", {"query": of(f32, B, HQ + 1, 2, E)}),
    ("query heads are fewer", ValueError, "query", {"query": of(f32, B, 1, 2, E)}),
    *wrong_arrays("attn_mask", (2, 5), [*FLOATS, "bool"], true=True),
    ("mask has the shortest length", ValueError, "attn_mask", {"attn_mask": of(bool, 2, 3)}),
    ("mask has the capacity", ValueError, "attn_mask", {"attn_mask": of(bool, 2, SPACE)}),
    ("mask has another L", ValueError, "attn_mask", {"attn_mask": of(f32, 3, 5)}),
    ("mask has key heads", ValueError, "attn_mask", {"attn_mask": of(f32, HK, 2, 5)}),
    ("mask has another batch", ValueError, "attn_mask", {"attn_mask": of(f32, 3, 1, 2, 5)}),
    ("mask has more dimensions", ValueError, "attn_mask", {"attn_mask": of(bool, 1, 2, 4, 2, 5)}),
    ("mask is empty", ValueError, "attn_mask", {"attn_mask": of(bool, 2, 0)}),
    *wrong("is_causal", TypeError, None, 3.5),
    ("causal is another word", (TypeError, ValueError), "is_causal", {"is_causal": "upper"}),
    ("scale is text", TypeError, "scale", {"scale": "1"}),
    *wrong("scale", ValueError, NAN, -INF),
    ("window is a number", TypeError, "window", {"window": 3}),
    ("window has one bound", ValueError, "window", {"window": (1,)}),
    ("window bound is a float", TypeError, "window", {"window": (1.5, None)}),
    *wrong("window", ValueError, (-1, None), (None, -1)),
    *wrong("softcap", ValueError, -1.0, NAN),
    ("softcap is None", TypeError, "softcap", {"softcap": None}),
    *wrong("return_lse", TypeError, 1, None),
    *wrong("out", TypeError, [], True),
    ("out is wider", TypeError, "out", {"out": of(np.float64, B, HQ, 2, EV)}),
    ("out has another shape", ValueError, "out", {"out": of(f32, B, HQ, 2, EV + 1)}),
    ("unknown keyword", TypeError, "enable_gqa", {"enable_gqa": True}),
]  # fmt: skip


@cases(ATTENDED)
def test_wrong_questions(device, row):
    refuse_and_go_on(device, "attend", row, good_attend())


CUT = [
    ("n is None", TypeError, r"\bn\b", {"n": None}),
    ("n is a float", TypeError, r"\bn\b", {"n": 2.0}),
    ("n is text", TypeError, r"\bn\b", {"n": "2"}),
    ("n is negative", ValueError, r"\bn\b", {"n": -1}),
    ("n is above the length", ValueError, r"\bn\b", {"n": 6}),
    ("n is the capacity", ValueError, r"\bn\b", {"n": SPACE}),
    ("n is beyond 64 bits", ValueError, r"\bn\b", {"n": 2**70}),
    ("n is far below 0", ValueError, r"\bn\b", {"n": -(2**70)}),
    ("n are too few", ValueError, r"\bn\b", {"n": [3]}),
    ("n are too many", ValueError, r"\bn\b", {"n": [3, 3, 3]}),
    ("n are floats", TypeError, r"\bn\b", {"n": [3.0, 3.0]}),
    ("n are a float array", TypeError, r"\bn\b", {"n": np.array([3.0, 3.0])}),
    ("one of n is above its length", ValueError, r"\bn\b", {"n": [4, 4]}),
    ("one of n is negative", ValueError, r"\bn\b", {"n": [-1, 3]}),
    ("one of n is None", TypeError, r"\bn\b", {"n": [1, None]}),
    ("n are a matrix", ValueError, r"\bn\b", {"n": np.zeros((2, 1), np.int64)}),
    ("n is an empty list", ValueError, r"\bn\b", {"n": []}),
]  # fmt: skip


@cases(CUT)
def test_wrong_cuts(device, row):
    refuse_and_go_on(device, "truncate", row, {})


def test_cuts_are_told(device):
    for what, given, length in (("n is above the length", "6", "5"),
                                ("one of n is above its length", "4", "3")):  # fmt: skip
        [row] = [row for row in CUT if row[0] == what]
        said = refuse_and_go_on(device, "truncate", row, {})
        assert given in said and length in said


def test_reset_takes_nothing(device):
    with pytest.raises(TypeError):
        filled(device).cache.reset(1)


def test_arrays_of_another_device(device):
    """The message names both devices and the argument; the cache is unchanged."""
    others = [d for d in clattn.devices() if d != device]
    if not others:
        pytest.skip("one device alone")
    other = others[0]
    both = filled(device)
    before = state(both.cache)
    key, value = (clattn.tensor(a, device=other) for a in good_append().values())
    query = clattn.tensor(draw((B, HQ, 2, E)), device=other)
    mask = clattn.tensor(np.ones((2, 5), bool), device=other)
    calls = [("append", "key", (key, value)), ("append", "value", (draw(KEY), value)),
             ("attend", "query", (query,)),
             ("attend", "attn_mask", (draw((B, HQ, 2, E)), mask))]  # fmt: skip
    for method, name, arguments in calls:
        with pytest.raises(ValueError, match=name) as caught:
            getattr(both.cache, method)(*arguments)
        said = str(caught.value)
        assert device.platform in said and other.platform in said, said
        assert state(both.cache) == before
    both.append(1).attend(1)


def test_many_errors_keep_nothing(device):
    """Refused calls keep no memory."""
    both = filled(device)
    calls = (("append", APPENDED, good_append()), ("attend", ATTENDED, good_attend()),
             ("truncate", CUT, {}))  # fmt: skip
    start = None
    for _ in range(3):
        for method, rows, arguments in calls:
            for row in rows:
                refuse(getattr(both.cache, method), row, arguments)
        now = {n: b for n, b in clattn.memory_stats(device).items() if "allocated" in n}
        start = start or now
        assert now == start
    both.contents_agree()


# ---- reorder ----


@pytest.mark.parametrize(("indices", "error"), [
    ([0], ValueError), ([0, 1, 0], ValueError), ([0, 2], ValueError), ([-1, 0], ValueError),
    ([0, 2**70], ValueError), ([[0, 1]], ValueError), ([0.0, 1.0], TypeError), ("01", TypeError),
    (1, TypeError), (None, TypeError), (np.array([0.5, 1]), TypeError),
    ([True, False], TypeError),
], ids=str)  # fmt: skip
def test_wrong_indices(device, indices, error):
    both = filled(device)
    before = state(both.cache)
    with pytest.raises(error, match="indices"):
        both.cache.reorder(indices)
    assert state(both.cache) == before


def test_a_cache_is_not_pickled(device):
    for dtype, said in ((f32, r"pickled; pickle cache\.key\.numpy\(\)"), ("int8", "pickled$")):
        with pytest.raises(TypeError, match=f"a clattn.KVCache cannot be {said}"):
            pickle.dumps(filled(device, dtype=dtype).cache)
