# SPDX-License-Identifier: MIT
"""clattn.KVCache of codes: each method, against codes of plain float32 and float64 attention.

The model has the numbers that codes stand for: support/cache_pair.py.
"""

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import DTYPES, attention, bfloat16, float16, float32, tolerance
from references.codes import WORDS
from support.cache_pair import HK, HQ, B, host, pair
from support.checks import assert_close
from support.data import draw
from support.layouts import misaligned, negative_everywhere, sliced
from support.loops import looped
from support.tensors import settled
from support.variants import force, takes_cpu_kernels

pytestmark = (
    pytest.mark.by_turns
)  # each driver reads and writes codes in test_bytes.py, test_paged_cache.py

E, EV = 37, 33  # a rest behind whole groups of int4, of one number
EVERY_WORD = pytest.mark.parametrize("word", WORDS)
NAN = np.nan


def of_codes(device, word, lengths=None, **sizes):
    scales = {"key_scale": [0.05, 0.5], "value_scale": 0.02} if word.startswith("float8") else {}
    return pair(device, lengths, dtype=word, **{"E": E, "EV": EV, **scales} | sizes)


@EVERY_WORD
def test_every_method(device, word):
    """append, attend, truncate, reorder, copy and reset, of sequences of unequal lengths."""
    both = of_codes(device, word)
    both.append(9, (9, 4)).contents_agree().attend(9)
    for _ in range(3):
        both.append(1).attend(1)
    both.truncate([7, 7]).append(2, [0, 2]).contents_agree().attend(3)
    both.reorder([1, 0]).contents_agree().attend(1)
    branch = both.copy().append(3).contents_agree()
    both.contents_agree().reorder([0, 0]).append(1).contents_agree().attend(2)
    branch.attend(5)
    both.reset().append(2, (1, 2)).contents_agree().attend(1)
    branch.contents_agree()


@EVERY_WORD
def test_every_option(device, word):
    both = of_codes(device, word, (23, 9))
    query, added = both.queries(3), draw((B, 1, 3, 23), seed=7)
    both.attend(query, attn_mask=added > -0.5)
    both.attend(query, attn_mask=np.where(added > 1, -np.inf, added).astype(float32),
                is_causal=False, scale=0.3)  # fmt: skip
    both.attend(query, window=(4, 0), softcap=3.0)
    plain = both.cache.attend(query)
    biased = both.cache.attend(query, score_mod=lambda s, b, h, q, k: s + 0.0 * (q - k))
    np.testing.assert_allclose(biased, plain, atol=1e-6)
    out = clattn.tensor(np.full_like(plain, NAN), device=device)
    given, lse = both.cache.attend(clattn.tensor(query, device=device), return_lse=True, out=out)
    assert given is out and host(out).tobytes() == plain.tobytes()
    for b, (arrays, known) in enumerate(both.model.problems(query)):
        allowed = tolerance(*arrays, rounds_weights=False, **known)[1]
        assert_close(host(lse)[b], attention(*arrays, **known)[1], allowed, f"sequence {b}")


@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_rows_and_queries_of_any_float_dtype(device, given):
    """The dtype of the result is the query's."""
    both = of_codes(device, "int8", given=given)
    both.append(7, (3, 7)).contents_agree().attend(4)


@looped("word", WORDS)
@looped("sizes", [(1, 1), (64, 32), (64, 64), (128, 100)], ids=str)
def test_head_sizes(device, word, sizes):
    E, EV = sizes
    of_codes(device, word, (40, 21), E=E, EV=EV).contents_agree().attend(1)


@looped("word", WORDS)
def test_many_rows(device, word):
    """More than one block of keys, and rows for every core."""
    both = of_codes(device, word, (700, 300), E=64, EV=64, capacity=701, HQ=8)
    both.append(1).contents_agree().attend(1)
    both.attend(40)


@pytest.mark.options
@pytest.mark.parametrize("word", ["int8", "float8_e4m3fn", "int4"])
def test_kernels(device, monkeypatch, word):
    """Each that takes codes, for keys of a few blocks and a mask."""
    for_cpus = ("cpu", "decode_cpu") if takes_cpu_kernels(device) else ()
    for_gpus = ("tiled",) if word == "int4" else ("tiled", "decode_gpu")
    for kernel in ("reference", *for_gpus, *for_cpus):
        force(monkeypatch, kernel)
        both = of_codes(device, word, (150, 77), E=64, EV=64, capacity=150)
        both.attend(3, attn_mask=draw((3, 150)) > -0.5)


@looped("word", WORDS)
def test_one_append_or_many(device, word):
    """Rows in any portions become the same bits."""
    rows = [draw((B, HK, 11, size), seed=5) for size in (E, EV)]
    found = []
    for portions in ([11], [3, *[1] * 8], [1, 5, 0, 5]):
        both, start = of_codes(device, word), 0
        for n in portions:
            both.take(*(array[:, :, start : start + n] for array in rows))
            start += n
        both.contents_agree()
        parts = both.cache.key, both.cache.value, both.cache.key_scale, both.cache.value_offset
        found.append([None if part is None else host(part).tobytes() for part in parts])
    assert found[0] == found[1] == found[2]


@looped("dtype", [float16, "int8", "int4"], ids=str)
def test_full_sequences(device, dtype):
    """Their places follow each other from one sequence to the next; their rows do not."""
    both = pair(device, capacity=70, E=64, EV=64, B=3, dtype=dtype)
    both.append(70).contents_agree()
    both.copy().contents_agree().reorder([1, 2, 0]).contents_agree()


@looped("word", ["int8", "int4"])
@looped("of", [sliced, negative_everywhere, misaligned,
               lambda a: a.swapaxes(1, 2).copy().swapaxes(1, 2),
               lambda a: a.swapaxes(0, 2).copy().swapaxes(0, 2)])  # fmt: skip
def test_any_strides_are_appended(device, word, of):
    both = of_codes(device, word)
    both.append(5, (5, 2), of).append(3, (0, 3), of).contents_agree()
    both.append(4, None, lambda a: clattn.tensor(a[:, ::-1], device=device)[:, ::-1])
    both.contents_agree()


def test_a_nan_is_seen_by_those_who_attend_to_it(device):
    for dtype in (float32, *WORDS):
        cache = clattn.KVCache(1, 1, 9, 8, dtype=dtype, device=device)
        rows = draw((1, 1, 6, 8))
        rows[0, 0, 4] = NAN
        cache.append(rows, rows)
        output = cache.attend(rows[:, :, :3])
        assert np.isfinite(output[:, :, 0]).all(), dtype
        assert np.isnan(output[:, :, 1:]).all(), dtype


@looped("dtype", [*DTYPES, *WORDS], ids=str)
def test_what_nobody_has_filled_does_not_matter(device, dtype):
    """Sequences that follow a reset and a reorder, in memory of NaN."""
    given = float32 if isinstance(dtype, str) else dtype
    cache = clattn.KVCache(2, HK, 16, 32, dtype=dtype, device=device)
    nan = np.full((2, HK, 16, 32), NAN, given)
    rows = draw((2, HK, 5, 32), given)
    query = draw((2, HQ, 2, 32), given, 3)
    fresh = clattn.KVCache(2, HK, 16, 32, dtype=dtype, device=device)
    cache.append(nan, nan)
    for each, counts in ((cache, (5, 2)), (fresh, (5, 2))):
        each.reset()
        each.append(rows, rows, counts)
        each.reorder([1, 0])
    for options in ({}, {"window": (1, 0)}, {"attn_mask": np.ones(5, bool)}):
        for of in (query, query[:, :, :1]):
            got = cache.attend(of, **options)
            assert np.isfinite(got).all() and got.tobytes() == fresh.attend(of, **options).tobytes()


@looped("word", WORDS)
def test_the_dtype_and_the_scales_of_a_cache(device, word):
    """A word or its type; shapes of what is kept are those of the docstring."""
    types = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
    for dtype in (word, types.get(word, word)):
        cache = clattn.KVCache(2, 3, 9, 40, 33, dtype, device=device)
        assert cache.dtype == word and word in repr(cache)
    cache.append(draw((2, 3, 5, 40)), draw((2, 3, 5, 33)))
    assert cache.key.shape == (2, 3, 5, 20 if word == "int4" else 40)
    assert cache.value.shape == (2, 3, 5, 17 if word == "int4" else 33)
    shape = {"int8": (2, 3, 5), "int4": (2, 3, 5, 2)}.get(word, (3,))
    assert cache.key_scale.shape == cache.value_scale.shape == shape
    assert (cache.key_offset is None) == (word != "int4")
    assert word != "int4" or cache.value_offset.shape == shape
    assert (cache.head_size, cache.v_head_size, cache.capacity) == (40, 33, 9)


@looped("make", [lambda **options: clattn.KVCache(3, 2, 500, 37, **options),
                 lambda **options: clattn.PagedKVCache(3, 500, 2, 37, **options)])  # fmt: skip
def test_bytes(device, make):
    """Those of codes and scales that the docstring tells, of both caches."""
    for dtype, size in {"int8": 37 + 4, "int4": 19 + 2 * 8, "float8_e5m2": 37, "f2": 74}.items():
        start = settled(device)
        made = make(dtype=dtype, device=device)
        expected = 2 * 3 * 500 * 2 * size
        taken = settled(device)[0] - start[0]
        assert expected <= taken <= 1.15 * expected  # sizes of blocks are rounded
        del made
        assert settled(device) == start


def test_queries_of_another_dtype(device):
    """Refused beside floats; beside codes any float dtype is right, and no other."""
    floats, codes = (clattn.KVCache(1, 1, 9, 8, dtype=dtype, device=device)
                     for dtype in (float16, "int8"))  # fmt: skip
    for method, name in (("attend", "query"), ("append", "key")):
        for cache, wrong in ((floats, float32), (codes, np.int8), (floats, bfloat16)):
            given = (np.zeros((1, 1, 2, 8), wrong),) * (1 if method == "attend" else 2)
            with pytest.raises(TypeError, match=f"{name} has dtype"):
                getattr(cache, method)(*given)


def test_a_step_is_one_launch_for_keys_and_one_for_values(device):
    """Of sequences of unequal lengths too, and of prompts whose padding is not written."""
    from clattn import _core

    both = of_codes(device, "int8", E=64, EV=64)
    both.append(9, (9, 3))
    for n, counts in ((1, None), (5, (2, 5))):
        key, value = both.tokens(n)
        _core.launched()
        both.cache.append(key, value, counts)
        assert [name for name, *_ in _core.launched()] == ["pages_quantize"] * 2


def test_arrays_that_a_score_mod_reads(device):
    """A kernel takes eight: int4 needs four of them, the numbers of mods and a mask one each."""
    both = of_codes(device, "int4", (9, 9))
    query, mask = both.queries(2), np.ones((2, 9), bool)
    tables = [np.full(HQ, 0.25, float32) for _ in range(4)]

    def reads(count):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + sum(clattn.lookup(table, h) for table in tables[:count])

        return score_mod

    plain = both.cache.attend(query)
    for options, most in (({}, 3), ({"attn_mask": mask}, 2)):
        got = both.cache.attend(query, score_mod=reads(most), **options)
        np.testing.assert_allclose(got, plain, atol=1e-6)
        with pytest.raises(ValueError, match=rf"read {most + 1} arrays; expected at most {most}"):
            both.cache.attend(query, score_mod=reads(most + 1), **options)
