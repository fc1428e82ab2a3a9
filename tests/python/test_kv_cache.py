# SPDX-License-Identifier: MIT
"""clattn.KVCache: what it is and what it holds, against the plain model in references/cache.py.

What it answers is in test_kv_cache_attend.py, wrong arguments in test_kv_cache_errors.py, random
sequences of calls in test_kv_cache_properties.py, memory and threads in test_kv_cache_memory.py.
"""

import copy

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16, float16, float32
from support.cache_pair import CAPACITY, EV, HK, HQ, E, host, pair
from support.data import draw
from support.layouts import (
    columns_first,
    misaligned,
    negative_everywhere,
    one_element_in,
    read_only,
    sliced,
    transposed,
)

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- what a cache is ----


def test_a_new_cache(device):
    cache = clattn.KVCache(3, 2, 50, 8, device=device)
    assert (cache.batch, cache.num_kv_heads, cache.capacity) == (3, 2, 50)
    assert (cache.head_size, cache.v_head_size) == (8, 8)
    assert cache.dtype == float32 and isinstance(cache.dtype, np.dtype)
    assert cache.device == device
    assert cache.length == 0 and cache.lengths.tolist() == [0, 0, 0]
    assert cache.key.shape == cache.value.shape == (3, 2, 0, 8)
    with clattn.use_device(device):
        cache = clattn.KVCache(1, 1, 1, 8, 5)
    assert cache.v_head_size == 5 and cache.device == device


@EVERY_DTYPE
def test_the_dtype_of_a_cache(device, dtype):
    for given in (dtype, dtype.type, dtype.name if dtype != bfloat16 else dtype):
        cache = clattn.KVCache(1, 1, 4, 8, dtype=given, device=device)
        assert cache.dtype == cache.key.dtype == cache.value.dtype == dtype


def test_sizes_may_be_numpys(device):
    sizes = [kind(n) for kind, n in zip((np.int8, np.uint64, np.int32, np.int64), (2, 2, 9, 8),
                                        strict=True)]  # fmt: skip
    cache = clattn.KVCache(*sizes, device=device)
    assert (cache.batch, cache.num_kv_heads, cache.capacity, cache.head_size) == (2, 2, 9, 8)
    assert type(cache.capacity) is int


def test_a_cache_takes_keywords(device):
    named = {"batch": 1, "num_kv_heads": HK, "capacity": 3, "head_size": E, "v_head_size": EV}
    cache = clattn.KVCache(**named, dtype=float16, device=device)
    assert {name: getattr(cache, name) for name in named} == named
    query, key, value = (draw((1, heads, 1, size), float16)
                         for heads, size in ((HQ, E), (HK, E), (HK, EV)))  # fmt: skip
    cache.append(key=key, value=value, counts=None)
    right = cache.attend(query, None, True, None, None, 0.0)
    same = cache.attend(query=query, attn_mask=None, is_causal=True, scale=None, window=None,
                        softcap=0.0)  # fmt: skip
    assert same.tobytes() == right.tobytes()
    cache.truncate(n=0)
    assert cache.length == 0


def test_attributes_are_read_only(device):
    cache = clattn.KVCache(1, 1, 4, 8, device=device)
    for name in ("length", "lengths", "key", "value", "capacity", "batch", "num_kv_heads",
                 "head_size", "v_head_size", "dtype", "device"):  # fmt: skip
        with pytest.raises(AttributeError):
            setattr(cache, name, getattr(cache, name))


def test_lengths_are_a_copy(device):
    both = pair(device, lengths=(3, 5))
    both.cache.lengths[:] = 0
    both.contents_agree()


def test_repr(device):
    """Sizes, how much is in it, dtype and device; of an empty and of an uneven one."""
    both = pair(device, B=2, capacity=437, E=31, EV=53, dtype=float16)
    for counts, filled in ((None, "219"), ((3, 0), "222")):
        both.append(219 if counts is None else 3, counts)
        said = repr(both.cache)
        for part in ("KVCache", "437", "31", "53", filled, "float16", device.name):
            assert part in said, said
    assert "KVCache" in repr(pair(device).cache)


# ---- append ----


@EVERY_DTYPE
def test_tokens_one_by_one_and_in_chunks(device, dtype):
    """Each chunk is stored behind the one before, which keeps its bits."""
    both = pair(device, dtype=dtype)
    for n in (1, 1, 1, 5, 1, 0, 16, 2, 1, 11, 1):
        both.append(n).contents_agree()
    assert both.cache.length == both.cache.capacity
    both.attend(1)


def test_sequences_of_unequal_progress(device):
    """counts says how many of the last positions are appended; the padding before is not."""
    both = pair(device, B=4)
    for n, counts in [(5, (5, 0, 3, 1)), (1, (0, 1, 1, 0)), (7, [7, 7, 0, 2]), (3, (0, 0, 0, 0)),
                      (2, (2, 2, 2, 2)), (20, (0, 20, 1, 19)), (0, (0, 0, 0, 0))]:  # fmt: skip
        both.append(n, counts).contents_agree()
        both.attend(1)


def test_counts_of_every_kind(device):
    for counts in ([2, 1], (2, 1), range(2, 0, -1), np.array([2, 1]), np.array([2, 1], np.uint8),
                   np.array([2, 9, 1])[::2], np.array([2, 1], ">i4"), [np.int16(2), 1],
                   clattn.tensor(np.array([2, 1]), device=device),
                   memoryview(np.array([2, 1]))):  # fmt: skip
        both = pair(device)
        both.cache.append(*both.tokens(3), counts)
        assert both.cache.lengths.tolist() == [2, 1]


LAYOUTS = [sliced, negative_everywhere, transposed, columns_first, one_element_in, read_only,
           misaligned, lambda a: a.astype(a.dtype.newbyteorder()),
           lambda a: np.asfortranarray(a)]  # fmt: skip
KINDS = {f"layout {n}": layout for n, layout in enumerate(LAYOUTS)}


@pytest.mark.parametrize("of", KINDS.values(), ids=KINDS)
def test_any_strides_are_appended(device, of):
    for n, counts in ((5, None), (1, None), (6, (0, 4))):
        pair(device).append(3).append(n, counts, of).contents_agree()


@EVERY_DTYPE
def test_tensors_are_appended(device, dtype):
    """Views of Tensors too."""
    both = pair(device, dtype=dtype)

    def padded(array):
        big = np.zeros((*array.shape[:2], array.shape[2] + 4, array.shape[3] + 3), array.dtype)
        big[:, :, 3:-1, 2:-1] = array
        return clattn.tensor(big, device=device)[:, :, 3:-1, 2:-1]

    def backwards(array):
        return clattn.tensor(array[:, :, ::-1], device=device)[:, :, ::-1]

    for of in (lambda a: clattn.tensor(a, device=device), padded, backwards):
        both.append(3, None, of).append(4, (1, 4), of).contents_agree()
    both.attend(1)


def test_a_mix_of_tensor_and_numpy(device):
    both = pair(device)
    key, value = both.tokens(3)
    both.cache.append(clattn.tensor(key, device=device), value)
    both.model.append(key, value)
    key, value = both.tokens(2)
    both.cache.append(key, clattn.tensor(value, device=device))
    both.model.append(key, value)
    both.contents_agree().attend(2)


def test_a_host_array_may_change_at_once(device):
    """append has read its arrays when it returns."""
    both = pair(device, capacity=2000, E=64, EV=64)
    key, value = both.tokens(1900)
    both.model.append(key, value)
    both.cache.append(key, value)
    key[:] = value[:] = np.nan
    both.contents_agree()


def test_one_array_as_key_and_value(device):
    both = pair(device, EV=E)
    key, _ = both.tokens(4)
    both.cache.append(key, key)
    both.model.append(key, key)
    both.contents_agree()


def test_a_key_that_changes_the_cache(device):
    """What __array__ itself appends comes before the array that it returns."""
    cache = clattn.KVCache(1, 2, 10, 8, device=device)
    first, second = draw((1, 2, 3, 8)), draw((1, 2, 2, 8), seed=1)

    class Key:
        def __array__(self, dtype=None, copy=None):
            cache.append(first, first)
            return second

    cache.append(Key(), second)
    np.testing.assert_array_equal(cache.key, np.concatenate((first, second), axis=2))


def test_a_cache_appended_to_itself(device):
    both = pair(device).append(7)
    both.cache.append(both.cache.key, both.cache.value)
    both.model.append(np.stack(both.model.keys), np.stack(both.model.values))
    both.contents_agree().attend(3)


def test_a_view_stays_what_it_was(device):
    """key and value of before still have their length when the cache has grown."""
    both = pair(device).append(5)
    key, value = both.cache.key, both.cache.value
    right = host(key), host(value)
    both.append(4)
    assert key.shape[2] == value.shape[2] == 5
    assert host(key).tobytes() == right[0].tobytes()
    assert host(value).tobytes() == right[1].tobytes()
    assert both.cache.key.shape[2] == 9


# ---- truncate, reset ----


def test_truncate_cuts_to_at_most(device):
    """An int leaves shorter sequences as they are; a sequence of ints cuts each by itself."""
    both = pair(device, (20, 6), capacity=25)
    both.truncate(10).contents_agree()
    assert both.cache.lengths.tolist() == [10, 6]
    both.truncate(7).truncate(np.int8(7)).attend(3)
    for n in ((7, 2), [7, 0], np.array([3, 0], np.uint16)):
        both.truncate(n).contents_agree()
        both.attend(3)
    both.append(22, (22, 20)).contents_agree()


def test_reset(device):
    both = pair(device, (20, 6))
    both.reset().contents_agree()
    assert not both.attend(3).any()
    both.reset().append(CAPACITY).contents_agree()
    both.attend(2)


# ---- empty everything ----


def test_a_cache_of_no_capacity(device):
    both = pair(device, capacity=0)
    both.append(0).append(0, (0, 0)).truncate(0).truncate([0, 0]).reset().contents_agree()
    assert both.cache.capacity == 0
    for rows in (0, 1, 5):
        assert not both.attend(rows).any()


def test_nothing_is_appended(device):
    both = pair(device, (4, 2))
    both.append(0).append(0, (0, 0)).append(5, (0, 0)).contents_agree()
    both.attend(0)
    both.attend(2)


# ---- two devices ----


def test_caches_on_two_devices(device):
    """A host query goes to the cache's device, whatever the default device is."""
    pairs = [pair(each, (5, 3)) for each in clattn.devices()]
    with clattn.use_device(device):
        for _ in range(3):
            for both in pairs:
                both.append(1)
                both.attend(2)
                assert both.cache.device == both.device


# ---- other sequences ----


@pytest.mark.parametrize("indices", [(2, 0, 1, 3), (1, 1, 1, 1), (0, 1, 2, 3), (3, 2, 1, 0),
                                     (0, 0, 3, 2)], ids=str)  # fmt: skip
def test_reorder(device, indices):
    """Cycles, copies and what stays; of equal lengths and of others, one of them 0."""
    for lengths in ((7, 7, 7, 7), (4, 0, 9, 1)):
        both = pair(device, lengths, B=4)
        memory = both.cache.key
        both.reorder(indices).contents_agree()
        both.append(2).reorder(np.array(indices, np.int32)).contents_agree().attend(1)
        assert memory.device == both.cache.device


@EVERY_DTYPE
def test_copy(device, dtype):
    """The copy holds the same, in memory of its own, and so do copy.copy and deepcopy."""
    both = pair(device, (5, 3), dtype=dtype)
    for take in (clattn.KVCache.copy, copy.copy, copy.deepcopy):
        other = take(both.cache)
        assert repr(other) == repr(both.cache)
        both.truncate((4, 2)).append(1)
        assert other.lengths.tolist() == [5, 3]
        both.cache, other = other, both.cache
        both.model.truncate((4, 2))
        both.truncate((4, 2)).contents_agree()
        both.append(1)
        both.contents_agree()


def test_an_empty_cache_is_copied_and_reordered(device):
    both = pair(device)
    both.reorder((1, 0)).contents_agree()
    assert both.cache.copy().length == 0
