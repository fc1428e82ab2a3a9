# SPDX-License-Identifier: MIT
"""clattn.PagedKVCache: wrong arguments are refused by name, and leave the cache as it was."""

import copy
import pickle
import re

import clattn
import numpy as np
import pytest
from support.data import draw
from support.loops import looped
from support.paged_pair import EV, HK, E, PagedPair
from support.refusals import FLOATS, WRONGLY_KEPT, cases, of, refuse, wrong, wrong_arrays

NAN, INF = float("nan"), float("inf")
SIZES = {"num_pages": 5, "page_size": 4, "num_kv_heads": 2, "head_size": 8, "v_head_size": 6}
MADE = [  # (what is wrong, exception, name the message has to contain, changed arguments)
    *[(f"{name} is {text}", TypeError, name, {name: given})
      for name in SIZES for text, given in (("a float", 2.0), ("text", "2"), ("NaN", NAN))],
    *[(f"{name} is negative", ValueError, name, {name: -1}) for name in SIZES],
    *[(f"{name} is 0", ValueError, name, {name: 0}) for name in SIZES if name != "num_pages"],
    ("more pages than a table numbers", ValueError, "num_pages", {"num_pages": 2**31}),
    ("a huge head", ValueError, "head_size", {"head_size": 2**17}),
    *WRONGLY_KEPT,
    *wrong("device", TypeError, 7.5, ["cpu"]),
    ("device is unknown", ValueError, "device", {"device": "no such device"}),
]  # fmt: skip


@cases(MADE)
def test_wrong_sizes(device, row):
    refuse(clattn.PagedKVCache, row, SIZES | {"device": device})
    assert clattn.PagedKVCache(**SIZES, device=device).free_pages == 5


@looped("changed", [{"num_pages": 2**31 - 1, "page_size": 2**40}, {"page_size": 2**62},
                    {"num_kv_heads": 2**45}], ids=str)  # fmt: skip
def test_sizes_that_no_device_has(device, changed):
    before = clattn.memory_stats(device)["allocated_bytes"]
    for dtype in ("float32", "int4"):
        with pytest.raises((MemoryError, ValueError)):
            clattn.PagedKVCache(**SIZES | {"device": device, "dtype": dtype} | changed)
    assert clattn.memory_stats(device)["allocated_bytes"] <= before


def filled(device, **sizes):
    both = PagedPair(device, 6, 4, **sizes)
    sequences = both.open(2)
    both.append(sequences, [5, 3])
    return both, sequences


KEY, VALUE = (4, HK, E), (4, HK, EV)
APPENDED = [
    *wrong_arrays("key", KEY, {"float32"}),
    *wrong_arrays("value", VALUE, {"float32"}),
    *[(f"key of {shape}", ValueError, "key", {"key": of("f4", *shape)})
      for shape in ((4, HK, E - 1), (4, HK + 1, E), (4, E), (1, 4, HK, E), (), (4 * HK * E,))],
    ("value has more rows", ValueError, "value", {"value": of("f4", 5, HK, EV)}),
    ("rows that do not divide", ValueError, "key has 3 rows for 2 sequences",
     {"key": of("f4", 3, HK, E), "value": of("f4", 3, HK, EV)}),
    *[(f"cu_seq is {ends!r}", ValueError, "cu_seq", {"cu_seq": ends})
      for ends in ([0, 4], [0, 1, 2, 3], [1, 2, 4], [0, 3, 2], [0, -1, 4], [0, 2, 5], [],
                   [[0, 2, 4]], [0, 2, 2**70])],
    *[(f"the entry of {ends!r} is named", ValueError, re.escape(words), {"cu_seq": ends})
      for ends, words in (
          ([1, 2, 4], "cu_seq[0] is 1; expected 0"),
          ([0, 3, 2], "cu_seq[2] is 2; expected 3 or more, which cu_seq[1] is"),
          ([0, 2, 5], "cu_seq[2] is 5; expected at most 4, the rows of key"))],
    *[(f"cu_seq is {ends!r}", TypeError, "cu_seq", {"cu_seq": ends})
      for ends in (4, "024", [0, 2.0, 4], [0, True, 4], [None] * 3)],
    *[(f"sequences is {given!r}", TypeError, "sequences", {"sequences": given})
      for given in (None, 3, "ab", [1, 2], [None, None])],
]  # fmt: skip


@cases(APPENDED)
def test_wrong_appends(device, row):
    both, sequences = filled(device)
    right = {"sequences": sequences, "key": draw(KEY), "value": draw(VALUE), "cu_seq": [0, 2, 4]}
    changed = row[3] if "rows that" not in row[0] else row[3] | {"cu_seq": None}
    refuse(both.cache.append, (*row[:3], changed), right)
    both.agree()


def test_codes_take_floats_alone(device):
    for dtype in ("int8", "int4", "float8_e5m2"):
        both, sequences = filled(device, dtype=dtype)
        for row in wrong_arrays("key", KEY, FLOATS):
            right = {"sequences": sequences, "key": draw(KEY), "value": draw(VALUE)}
            refuse(both.cache.append, row, right)
        both.agree()


def test_wrong_sequences(device):
    """Closed ones, those of another cache, and what is none; anywhere."""
    both, (first, second) = filled(device)
    cache = both.cache
    closed, foreign = both.open(), clattn.PagedKVCache(1, 1, HK, E, EV, device=device).open()[0]
    both.close(closed)
    rows = draw((2, HK, E)), draw((2, HK, EV))
    for wrong_one, exception, said in ((closed, ValueError, "closed"), (0, TypeError, "int"),
                                       (foreign, ValueError, "another cache")):  # fmt: skip
        for call in (lambda s: cache.append([first, s], *rows),
                     lambda s: cache.append([s, first], *rows),
                     lambda s: cache.block_table([first, s]), cache.fork, cache.close,
                     cache.length, lambda s: cache.truncate(s, 0)):  # fmt: skip
            with pytest.raises(exception, match=said):
                call(wrong_one)
    with pytest.raises(ValueError, match=r"sequences\[2\] is there twice"):
        cache.append([first, second, first], draw((3, HK, E)), draw((3, HK, EV)))
    both.agree()
    assert cache.block_table([first, first]).shape == (2, 2)


def test_wrong_truncations(device):
    both, (first, _) = filled(device)
    for n in (-1, 6, 2**70):
        with pytest.raises(ValueError, match=r"\bn is"):
            both.cache.truncate(first, n)
    for n in (1.0, None, "1", True):
        with pytest.raises(TypeError, match=r"\bn must"):
            both.cache.truncate(first, n)
    for n in (-1, 2**70):
        with pytest.raises(ValueError, match=r"\bn is"):
            both.cache.open(n)
    both.truncate(first, 5).truncate(first, np.int8(0))
    assert both.cache.free_pages == 5


def test_a_tensor_of_another_device(device):
    others = [d for d in clattn.devices() if d != device]
    both, sequences = filled(device)
    for other in others:
        elsewhere = clattn.tensor(draw((2, HK, E)), other)
        with pytest.raises(ValueError, match="key is on"):
            both.cache.append(sequences, elsewhere, draw((2, HK, EV)))
    both.agree()


def test_no_copies_and_no_pickles(device):
    cache = clattn.PagedKVCache(**SIZES, device=device)
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="PagedKVCache"):
            take(cache)


def test_the_core_refuses_what_is_no_place(device):
    """Python checks first; the core's methods write to memory."""
    cache = clattn.PagedKVCache(2, 4, 1, 8, device=device)._state
    rows = of("f4", 3, 1, 8)
    assert cache.count_rows(rows, rows) == 3
    assert cache.write_rows(rows, rows, np.arange(3)) is None
    assert cache.copy_rows(np.array([1, 0])) is None
    for places in ([8], [-1], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="places"):
            cache.write_rows(rows, rows, np.array(places))
    for wrong_one in (rows[:2], of("f4", 3, 1, 7), of("f2", 3, 1, 8), of("f4", 3, 8), 1):
        for given in ((rows, wrong_one), (wrong_one, rows)):
            with pytest.raises((ValueError, TypeError)):
                cache.write_rows(*given, np.arange(2))
            with pytest.raises((ValueError, TypeError)):
                cache.count_rows(*given)
    for moves in ([8, 0], [0, -1]):
        with pytest.raises(ValueError, match=r"moves\["):
            cache.copy_rows(np.array(moves))
    for wrong_call in (cache.write_rows, cache.copy_rows, cache.count_rows, cache.hold):
        with pytest.raises(TypeError):
            wrong_call()
    for word in ("writes", None):
        with pytest.raises(ValueError, match="hold"):
            cache.hold(word, "a method")
