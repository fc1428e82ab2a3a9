# SPDX-License-Identifier: MIT
"""PagedKVCache.attend: rows of several sequences at once, over pages that are shared and reused."""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, attention, float32, tolerance
from references.codes import WORDS, exact
from support.checks import assert_close
from support.data import draw
from support.forced import weights_are_rounded
from support.loops import looped
from support.paged_pair import PagedPair
from support.processes import run_on
from support.ragged import seen
from support.variants import force

pytestmark = pytest.mark.by_turns  # each driver reads pages in test_ragged.py

NAN = np.nan


class Attending(PagedPair):
    """A cache and plain arrays: attention over both agrees."""

    def numbers(self, which, sequence):
        """The keys, 0, or the values, 1, of a sequence, as the cache keeps them: heads first."""
        rows = self.held[sequence][which]
        if self.is_kept:
            rows = exact(rows, self.dtype, self.scales[which][:, None])
        return rows.swapaxes(0, 1)

    def attend(self, sequences, counts, Hq=4, dtype=None, is_causal=True, **options):
        """As many last rows of each sequence attend."""
        ends = np.cumsum([0, *counts])
        self.seed += 1
        query = draw((ends[-1], Hq, self.sizes[0]), dtype or self.given, self.seed)

        def call():
            return self.cache.attend(query, sequences, ends, is_causal, return_lse=True, **options)

        output, lse = call()
        assert output.dtype == query.dtype and output.shape == (ends[-1], Hq, self.sizes[1])
        rounds = weights_are_rounded(output, lambda: call()[0])
        window = [-1 if side is None else side for side in options.pop("window", (None, None))]
        for n, sequence in enumerate(sequences):
            rows = slice(ends[n], ends[n + 1])
            arrays = query[rows].swapaxes(0, 1), *(self.numbers(w, sequence) for w in range(2))
            mask = seen(
                counts[n], arrays[1].shape[1], "lower_right" if is_causal else False, window
            )
            given = {"attn_mask": mask, "enable_gqa": True, **options}
            right, right_lse = attention(*arrays, **given)
            allowed, allowed_lse = tolerance(*arrays, rounds_weights=rounds, **given)
            assert_close(output[rows].swapaxes(0, 1), right, allowed, f"sequence {n}")
            assert_close(lse[:, rows], right_lse, allowed_lse, f"log-sum-exp of sequence {n}")
        return self


@pytest.mark.parametrize("dtype", [*DTYPES, *WORDS], ids=str)
def test_every_dtype(device, dtype):
    """Prompts and single tokens, forks, a truncation, and pages that another sequence had."""
    scales = {"key_scale": 0.05, "value_scale": 0.02} if str(dtype).startswith("float8") else {}
    pair = Attending(device, num_pages=20, page_size=4, dtype=dtype, **scales)
    first, second = pair.open(2)
    pair.append([first, second], [9, 1])
    pair.attend([first, second], [9, 1])
    branch = pair.fork(first)
    pair.append([branch, second, first], [1, 6, 1])
    pair.attend([second, branch, first, branch], [2, 1, 1, 3], softcap=3.0)
    pair.truncate(first, 2)
    third = pair.open()
    pair.append([third, first], [17, 3])
    pair.attend([third, first, second], [5, 1, 0], window=(6, None), scale=0.3)
    pair.close(branch)
    pair.attend([first, third], [3, 1], is_causal=False)


OPTIONS = {
    "plain": {},
    "not causal": {"is_causal": False},
    "window": {"window": (3, None)},
    "both sides": {"window": (2, 1), "is_causal": False},
    "capped": {"softcap": 2.0, "scale": 0.7},
    "sinks": {"sinks": draw((4,), float32, 9)},
}


@looped("dtype", [*DTYPES, *WORDS], ids=str)
def test_every_option(device, monkeypatch, dtype):
    """With the kernel for which all of this is data."""
    force(monkeypatch, "reference")
    pair = Attending(device, dtype=dtype, page_size=3)
    one, other, empty = pair.open(3)
    pair.append([one, other], [9, 4])
    for options in OPTIONS.values():
        pair.attend([other, one, empty, one], [1, 3, 1, 0], **options)


@pytest.mark.parametrize("page_size", [1, 3, 16, 100])
def test_page_sizes(device, page_size):
    pair = Attending(device, num_pages=200 // page_size + 3, page_size=page_size)
    one, other = pair.open(2)
    pair.append([one, other], [120, 7])
    pair.attend([one, other], [30, 1])


@looped("size", [1, 8, 31, 32, 33, 80, 256])
@looped("dtype", WORDS)
def test_head_sizes(device, size, dtype):
    pair = Attending(device, dtype=dtype, E=size, EV=max(1, size - 3))
    one, other = pair.open(2)
    pair.append([one, other], [9, 2]).attend([one, other], [4, 1])


@pytest.mark.parametrize("dtype", WORDS)
def test_queries_of_halves_over_codes(device, dtype):
    pair = Attending(device, dtype=dtype, given=np.float16, key_scale=1.0)
    sequence = pair.open()
    pair.append([sequence], [30])
    pair.attend([sequence], [12], dtype=np.dtype(np.float16))


def test_a_nan_is_seen_by_those_who_attend_to_it(device):
    for dtype in ("float32", *WORDS):
        cache = clattn.PagedKVCache(4, 4, 1, 8, dtype=dtype, device=device)
        (sequence,) = cache.open()
        rows = draw((6, 1, 8), float32)
        rows[4] = NAN
        cache.append(sequence, rows, rows)
        output = cache.attend(rows[:3], sequence)
        assert np.isfinite(output[0]).all(), dtype
        assert np.isnan(output[1:]).all(), dtype


def test_unused_rows_of_pages_do_not_matter(device):
    """They hold NaN from a sequence that is closed."""
    cache = clattn.PagedKVCache(3, 4, 1, 8, device=device)
    (gone,) = cache.open()
    cache.append(gone, np.full((12, 1, 8), NAN, float32), np.full((12, 1, 8), NAN, float32))
    cache.close(gone)
    (sequence,) = cache.open()
    rows = draw((5, 1, 8), float32)
    cache.append(sequence, rows, rows)
    for window in (None, (1, 0)):
        assert np.isfinite(cache.attend(rows, sequence, window=window)).all()


def test_a_cache_of_more_than_two_thousand_million_codes(device):
    """Pages that nobody has written take no memory: a page has 2**31 codes of keys."""
    run_on(
        device,
        """
    if device.max_allocation > 3 * 2**31 and device.memory_mode != "copy":
        cache = clattn.PagedKVCache(3, 2**16, 1, 2**15, 1, "int8", device=device)
        sequences = cache.open(3)
        numbers = np.float32([1, 2, 3])[:, None, None]
        keys = numbers * np.linspace(-1, 1, 2**15, dtype="f4")
        cache.append(sequences, keys, numbers)
        output, lse = cache.attend(keys, sequences, scale=1e-4, return_lse=True)
        assert output.ravel().tolist() == [1, 2, 3]
        np.testing.assert_allclose(lse[0], (keys[:, 0] ** 2).sum(-1) * 1e-4, rtol=1e-4)
    """,
    )


def test_mods_sinks_out_and_tensors(device):
    pair = Attending(device)
    one, other = pair.open(2)
    pair.append([one, other], [9, 5])
    query = draw((4, 4, pair.sizes[0]), float32, 3)
    plain = pair.cache.attend(query, [one, other])
    out = clattn.tensor(np.full_like(plain, NAN), device=device)
    tensor = clattn.tensor(query, device=device)
    assert pair.cache.attend(tensor, [one, other], out=out) is out
    np.testing.assert_array_equal(out.numpy(), plain)
    same = pair.cache.attend(query, [one, other], score_mod=lambda s, b, h, q, k: s + 0.0 * b)
    np.testing.assert_allclose(same, plain, atol=1e-6)
    lower = pair.cache.attend(query, [one, other], sinks=np.full(4, 100, float32))
    assert np.abs(lower).max() < 1e-6


@looped("dtype", ["float32", *WORDS])
def test_a_score_mod_gets_positions(device, dtype):
    """As that of a KVCache: the rows of a sequence are its last positions."""
    pair = Attending(device, dtype=dtype)
    one, other = pair.open(2)
    pair.append([one, other], [9, 5])
    query = draw((6, 4, pair.sizes[0]), float32, 3)
    ends = [0, 2, 5, 6]
    sequences, lengths = [one, other, one], [9, 5, 9]

    def mod(score, b, h, q_idx, kv_idx):  # each of its parts would be another one at row 0
        return score - 0.1 * (q_idx - kv_idx) ** 2 + 0.05 * q_idx * kv_idx - 0.5 * b * kv_idx

    for is_causal in (True, False):
        output = pair.cache.attend(query, sequences, ends, is_causal, score_mod=mod)
        for b, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            rows = query[ends[b] : ends[b + 1]].swapaxes(0, 1)
            i = np.arange(length - rows.shape[1], length)[:, None]
            bias = mod(0.0, b, 0, i, np.arange(length)).astype(float32)
            bias[(np.arange(length) > i) & is_causal] = -np.inf
            arrays = rows, *(pair.numbers(which, sequence) for which in range(2))
            right, _ = attention(*arrays, attn_mask=bias, enable_gqa=True)
            allowed, _ = tolerance(*arrays, attn_mask=bias, enable_gqa=True)
            assert_close(output[ends[b] : ends[b + 1]].swapaxes(0, 1), right, allowed)


def test_what_is_refused(device):
    pair = Attending(device)
    one, other = pair.open(2)
    pair.append([one, other], [3, 3])
    query = draw((2, 4, pair.sizes[0]), float32)
    attend = pair.cache.attend
    elsewhere = Attending(device).open()
    with pytest.raises(ValueError, match=r"sequences\[1\] is of another cache"):
        attend(query, [one, elsewhere])
    with pytest.raises(TypeError, match="query has dtype float16; expected float32"):
        attend(query.astype(np.float16), [one, other])
    with pytest.raises(
        ValueError, match=r"query has shape \(2, 4, 36\); expected \(total, Hq, 37\)"
    ):
        attend(query[..., :36], [one, other])
    with pytest.raises(ValueError, match="query has 2 rows for 3 sequences"):
        attend(query, [one, other, one])
    with pytest.raises(ValueError, match="cu_seq_q has shape"):
        attend(query, [one, other], [0, 2])
    with pytest.raises(ValueError, match=r"query has shape \(2, 3, 37\); expected .* multiple of"):
        attend(query[:, :3], [one, other])
    for causal in (1, "lower_right", None):
        with pytest.raises(TypeError, match=r"is_causal is .*; expected True or False"):
            attend(query, [one, other], is_causal=causal)
    pair.close(other)
    with pytest.raises(ValueError, match=r"sequences\[1\] is closed"):
        attend(query, [one, other])
