# SPDX-License-Identifier: MIT
"""clattn.PagedKVCache: what its pages hold, against plain arrays of each sequence.

The bookkeeping alone is in test_pages.py, codes are in test_quantize.py, attention in
test_paged_attend.py, wrong arguments in test_paged_cache_errors.py, threads and signals in
test_paged_cache_threads.py.
"""

import itertools

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16
from support.data import draw
from support.layouts import misaligned, negative_everywhere, one_element_in, read_only, sliced
from support.loops import looped
from support.paged_pair import EV, HK, WORDS, E, PagedPair
from support.tensors import settled

KINDS = [*DTYPES, *WORDS]
EVERY_KIND = looped("dtype", KINDS, ids=str)


def test_a_new_cache(device):
    cache = clattn.PagedKVCache(20, 16, 2, 8, device=device)
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads) == (20, 16, 2)
    assert (cache.head_size, cache.v_head_size, cache.free_pages) == (8, 8, 20)
    assert cache.dtype == np.float32 and cache.device == device
    assert cache.key.shape == cache.value.shape == (20, 2, 16, 8)
    assert cache.key_scale is cache.key_offset is cache.value_scale is cache.value_offset is None
    assert cache.open(0) == [] and len(cache.open(3)) == 3
    for part in ("PagedKVCache", "20", "16", "float32", device.name):
        assert part in repr(cache)
    assert cache.block_table([]).shape == (0, 0)
    assert cache.block_table(cache.open(2)).shape == (2, 0)


@EVERY_KIND
def test_the_dtype_of_a_cache(device, dtype):
    """A word, NumPy's dtype or its type."""
    types = {word: getattr(ml_dtypes, word, np.int8) for word in WORDS}
    for given in (dtype, types.get(dtype, getattr(dtype, "type", dtype))):
        cache = clattn.PagedKVCache(3, 2, 1, 40, 33, given, device=device)
        assert cache.dtype == dtype
        assert cache.key.shape == (3, 1, 2, 20 if dtype == "int4" else 40)
        assert cache.value.shape == (3, 1, 2, 17 if dtype == "int4" else 33)
    shapes = {"int8": (3, 1, 2), "int4": (3, 1, 2, 2)} | dict.fromkeys(WORDS[1:3], (1,))
    if dtype in WORDS:
        assert cache.key_scale.shape == cache.value_scale.shape == shapes[dtype]
        assert (cache.key_offset is not None) == (dtype == "int4")


# ---- every method, for every way to keep rows ----


@EVERY_KIND
def test_every_method(device, dtype):
    """Prompts of unequal lengths, tokens, forks, truncation, closing: contents after each call."""
    both = PagedPair(device, 14, 4, dtype)
    first, second, third = both.open(3)
    both.append([first, second, third], [6, 0, 3])
    for _ in range(3):
        both.append([third, first], [1, 1])
    branch = both.fork(first)
    both.append([first, branch, second], [2, 1, 5])
    both.truncate(branch, 5).append([branch], [2])
    both.truncate(first, 0).append([first], [1])
    both.close(third)
    late = both.open()
    both.append([late, first], [9, 1], spare=3)
    for sequence in (late, branch, second, first):
        both.close(sequence)


@EVERY_KIND
def test_a_copied_page_has_all_that_belongs_to_it(device, dtype):
    """Codes and scales; the parent's bits stay."""
    both = PagedPair(device, 6, 4, dtype)
    parent = both.open()
    both.append([parent], [3])
    child, other = both.fork(parent), both.fork(parent)
    both.append([child], [2])
    both.append([other, parent], [1, 1])
    both.truncate(child, 1).append([child], [1])


@EVERY_KIND
def test_one_append_or_many(device, dtype):
    """Rows in any portions become the same bits, and no position stays unwritten."""
    rows = [draw((11, HK, size), seed=5) for size in (E, EV)]
    found = []
    for portions in ([11], [3, *[1] * 8], [1, 5, 0, 5]):
        both = PagedPair(device, 3, 4, dtype)
        sequence, start = both.open(), 0
        for n in portions:
            part = [array[start : start + n].astype(both.given) for array in rows]
            both.append([sequence], [n], rows=part)
            start += n
        found.append([part[:2].tobytes() for of in both.stored() for part in of])
    assert found[0] == found[1] == found[2]


@looped("given", DTYPES, ids=str)
@looped("dtype", WORDS)
def test_codes_of_rows_of_any_float_dtype(device, dtype, given):
    PagedPair(device, 2, 4, dtype, given=given).append([], [])
    both = PagedPair(device, 2, 4, dtype, given=given)
    both.append([both.open()], [7])


LAYOUTS = [sliced, negative_everywhere, one_element_in, read_only, misaligned,
           lambda a: a.swapaxes(0, 2).copy().swapaxes(0, 2),
           lambda a: a.swapaxes(0, 1).copy().swapaxes(0, 1),
           lambda a: a.astype(a.dtype.newbyteorder())]  # fmt: skip


@looped("of", LAYOUTS)
@looped("dtype", [np.float32, bfloat16, "int8", "int4"], ids=str)
def test_any_strides_are_appended(device, dtype, of):
    """NumPy's arrays, and views of Tensors."""
    both = PagedPair(device, 5, 4, dtype)
    first, second = both.open(2)
    both.append([first, second], [5, 1], of)

    def tensor(array):
        big = np.zeros([n + 3 for n in array.shape], array.dtype)
        big[1:-2, 1:-2, 2:-1] = array
        return clattn.tensor(big, device=device)[1:-2, 1:-2, 2:-1]

    both.append([second, first], [3, 2], tensor)
    both.append([second], [1], lambda a: clattn.tensor(a, device=device)[::-1])


@looped("page_size", [1, 3, 100, 256, 512])
@looped("dtype", [np.float16, "int8"], ids=str)
def test_many_rows(device, page_size, dtype):
    """More than the host copies, in pages of any size."""
    both = PagedPair(device, -(-700 // page_size) + 2, page_size, dtype, E=64, EV=64)
    first, second = both.open(2)
    both.append([first, second], [699, 1], heads_first(device))
    both.append([first], [1])
    both.truncate(first, 0).append([first], [690], given_of(device))


def given_of(device):
    return lambda array: clattn.tensor(array, device=device)


def heads_first(device):
    """Rows of a head lie behind each other, as in a page."""
    return lambda a: clattn.tensor(a.swapaxes(0, 1).copy(), device=device).transpose(1, 0, 2)


def test_the_host_array_may_change_at_once(device):
    for dtype in (np.float32, "int8"):
        both = PagedPair(device, 10, 100, dtype, E=64, EV=64)
        sequence = both.open()
        rows = both.rows(900)
        given = [array.copy() for array in rows]
        both.cache.append(sequence, *given)
        for array in given:
            array[:] = np.nan
        both.held[sequence] = rows
        both.agree()


def test_rows_of_the_cache_itself(device):
    """Views of its own pages, which the append writes to."""
    both = PagedPair(device, 4, 4, E=E, EV=E)
    first, second = both.open(2)
    both.append([first], [3])
    page = both.cache.block_table(first)[0, 0]
    views = [each[int(page)].transpose(1, 0, 2) for each in (both.cache.key, both.cache.value)]
    rows = [np.array(view) for view in views]
    both.cache.append([first, second], *views, cu_seq=[0, 3, 4])
    for n, part in ((first, slice(0, 3)), (second, slice(3, 4))):
        both.held[n] = [np.concatenate((old, new[part])) for old, new in
                        zip(both.held[n], rows, strict=True)]  # fmt: skip
    both.held[second] = [array[:0] for array in both.held[second]]
    both.cache.truncate(second, 0)
    both.agree()


def test_rows_without_offsets(device):
    """As many for each sequence; one sequence need not be a list."""
    both = PagedPair(device)
    sequences = both.open(3)
    rows = both.rows(6)
    both.cache.append(tuple(sequences), *rows)
    both.cache.append(sequences[0], *[array[:2] for array in rows])
    both.cache.append([], *[array[:0] for array in rows])
    for n, sequence in enumerate(sequences):
        both.held[sequence] = [array[2 * n : 2 * n + 2] for array in rows]
    both.held[sequences[0]] = [np.concatenate((array[:2], array[:2])) for array in rows]
    both.agree()


def test_offsets_of_every_kind(device):
    for ends in ([0, 1, 3], (0, 1, 3), np.array([0, 1, 3], np.int32), np.array([0, 1, 3]),
                 clattn.tensor(np.array([0, 1, 3]), device=device)):  # fmt: skip
        both = PagedPair(device, 4, 4)
        first, second = both.open(2)
        both.cache.append([first, second], *both.rows(4), ends)
        assert both.cache.length(first) == 1 and both.cache.length(second) == 2


# ---- what went wrong elsewhere ----


def test_a_page_beyond_16_bits(device):
    both = PagedPair(device, 65_540, 1, HK=1, E=1, EV=1)
    filler, last = both.open(2)
    both.cache.append(filler, *[np.ones((65_536, 1, 1), "f4")] * 2)
    both.cache.append(last, *[np.full((2, 1, 1), 2, "f4")] * 2)
    table = both.cache.block_table([last])
    assert table.max() >= 65_536
    assert (np.array(both.cache.value)[table[0]] == 2).all()


def test_a_table_of_unequal_lengths(device):
    """The rest of a short row is one number that is no page."""
    both = PagedPair(device)
    long, short = both.open(2)
    both.append([long, short], [17, 1])
    table = both.cache.block_table([long, short, long])
    assert table.shape == (3, 5) and (table[1, 1:] == -1).all() and (table[0] == table[2]).all()
    table[:] = -5
    both.agree()


def test_pages_are_used_again(device):
    both = PagedPair(device, 10, 4)
    first = both.open()
    both.append([first], [40]).close(first)
    second = both.open()
    both.append([second], [2])
    for n in (1, 5, 12):
        both.append([second], [n])


def test_forks_of_forks_are_closed_in_any_order(device):
    for order in itertools.permutations(range(3)):
        both = PagedPair(device, 9, 4)
        chain = [both.open()]
        both.append(chain, [6])
        for _ in range(2):
            chain.append(both.fork(chain[-1]))
            both.append(chain[-1:], [3])
        for n in order:
            both.close(chain[n])


def test_a_sequence_that_is_gone_gives_its_pages_back(device):
    """Without having been closed: those that no fork of it has, at once and to the next append."""
    both = PagedPair(device, 4, 4)
    first, second = both.open(2)
    both.append([first, second], [9, 2])
    cache, held = both.cache, both.held
    branch = both.fork(first)
    held.pop(first)
    del first
    assert cache.free_pages == 0
    both.append([branch], [1])
    held.pop(branch)
    del branch
    assert cache.free_pages == 3
    third = both.open()
    both.append([third, second], [11, 2])
    assert cache.free_pages == 0
    held.clear()
    del second, third
    assert cache.free_pages == 4
    assert cache.open(2) and cache.free_pages == 4, "they have had none"


def test_out_of_pages(device):
    """MemoryError says how many there are, and no sequence has changed."""
    both = PagedPair(device, 3, 4)
    first, second = both.open(2)
    both.append([first, second], [4, 2])
    with pytest.raises(MemoryError, match=r"sequences\[1\].* 0 of 3 pages"):
        both.append([first, second], [1, 3])
    both.agree().append([second, first], [2, 4])
    with pytest.raises(MemoryError):
        both.append([second], [1])
    both.agree().close(first)
    both.append([second], [8])


def test_equal_sequences_have_equal_bits(device):
    both = PagedPair(device, 4, 2, "int8")
    first, second = both.open(2)
    rows = [np.concatenate((array, array)) for array in both.rows(1)]
    both.append([first, second], [1, 1], rows=rows)


def test_rows_far_apart(device, tmp_path):
    """A stride of 2**31 bytes and more, in a file without blocks."""
    for dtype in (np.float32, "int8"):
        both = PagedPair(device, 2, 4, dtype, HK=1, E=8, EV=8)
        stride = 2**29 + 8
        file = np.memmap(tmp_path / "sparse", "f4", "w+", shape=(5 * stride,))
        view = np.lib.stride_tricks.as_strided(file, (5, 1, 8), (4 * stride, 32, 4))
        rows = both.rows(5)
        view[:] = rows[0]
        sequence = both.open()
        both.cache.append(sequence, view, rows[1])
        both.held[sequence] = rows
        both.agree()


def test_memory_is_allocated_once(device):
    """Codes and scales, of odd sizes too; appends allocate nothing."""
    for dtype, size in (("int8", 37 + 4), ("int4", 19 + 2 * 8), ("float8_e5m2", 37)):
        start = settled(device)
        both = PagedPair(device, 500, 16, dtype, E=37, EV=37)
        made = settled(device)
        expected = 2 * 500 * 16 * HK * size
        assert expected <= made[0] - start[0] <= 1.15 * expected  # sizes of blocks are rounded
        sequences = both.open(4)
        both.cache.append(sequences, *both.rows(400))
        both.cache.fork(sequences[0])
        both.cache.append(sequences, *both.rows(400))
        assert settled(device) == made
        queries = draw((4, HK, 37))
        for query in (queries, clattn.tensor(queries, device)):
            before = settled(device)
            for options in ({}, {"window": (3, 0), "return_lse": True}, {"is_causal": False}):
                result = both.cache.attend(query, sequences, **options)
                del result
                assert settled(device) == before
        del both, sequences, query
        assert settled(device) == start


def test_a_step_is_one_launch_for_keys_and_one_for_values(device):
    """However many sequences there are."""
    from clattn import _core

    both = PagedPair(device, 70, 16, "int8", HK=8, E=64, EV=64)
    sequences = both.open(64)
    both.cache.append(sequences, *both.rows(64))
    _core.launched()
    both.cache.append(sequences, *both.rows(64))
    assert [name for name, *_ in _core.launched()] == ["pages_quantize"] * 2
