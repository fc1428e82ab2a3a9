# SPDX-License-Identifier: MIT
"""clattn.KVCache.attend: values against the plain model, bits against plain attention."""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, attention, compute_dtype, float16, float32, tolerance
from support.cache_pair import HK, HQ, B, E, host
from support.cache_pair import pair_of_one_size as pair
from support.checks import assert_close
from support.data import draw
from support.layouts import columns_first, misaligned, negative_everywhere, sliced
from support.loops import looped, looped_dtypes

EV = E
EVERY_DTYPE = looped_dtypes("dtype", DTYPES)


@looped("heads", [(4, 4), (4, 2), (6, 2), (8, 1), (1, 1)], ids=str)
def test_heads(device, heads):
    """One query as in decoding, and several, of equal and of unequal lengths."""
    hq, hk = heads
    for lengths in ((17, 17), (17, 5)):
        both = pair(device, lengths, HQ=hq, HK=hk)
        both.attend(1)
        both.attend(4)


@EVERY_DTYPE
def test_dtypes(device, dtype):
    """The number of query rows of a key is a macro: 3, as in other files."""
    for lengths in ((17, 17), (17, 5)):
        pair(device, lengths, dtype=dtype).attend(3)


@looped("lengths", [(9, 9), (9, 4), (0, 9), (1, 0), (0, 0)], ids=str)
@looped("is_causal", [True, False])
def test_more_and_fewer_queries_than_keys(device, lengths, is_causal):
    """Rows before the first key see none if causal, all if not."""
    both = pair(device, lengths)
    for rows in (0, 1, 2, 8, 9, 10, 40):
        both.attend(rows, is_causal=is_causal)


@looped("window", [(0, 0), (3, 0), (None, 2), (3, None), (0, 5), (2**40, 2**40),
                                    (2**63 - 1, 2**63 - 1), [4, 1]], ids=str)  # fmt: skip
@looped("is_causal", [True, False])
def test_windows(device, window, is_causal):
    """The window of a row stands at the row's position in each sequence, causal or not."""
    for lengths in ((13, 13), (13, 6)):
        both = pair(device, lengths)
        for rows in (1, 5, 20):
            both.attend(rows, window=window, is_causal=is_causal)


SHAPES = [(B, HQ, "L", "S"), (1, 1, "L", "S"), (B, 1, 1, "S"), ("L", "S"), ("S",), (1, "S"),
          (B, HQ, "L", 1), (HQ, 1, 1), (1,), (HQ, "L", "S")]  # fmt: skip


@looped("shape", SHAPES, ids=str)
def test_masks(device, shape):
    """bool and float, alone and with causality; they reach over the longest sequence."""
    for lengths in ((11, 11), (4, 11)):
        both = pair(device, lengths)
        for rows in (1, 3):
            size = [{"L": rows, "S": 11}.get(n, n) for n in shape]
            added = draw(size, seed=7)
            for mask in (added > -0.5, np.where(added > 1, -np.inf, added).astype(float32)):
                for is_causal in (True, False):
                    both.attend(rows, attn_mask=mask, is_causal=is_causal)


@looped_dtypes("dtypes", [*((float32, of) for of in DTYPES), (float16, float16)])
def test_float_masks_of_every_dtype(device, dtypes):
    dtype, of = dtypes
    both = pair(device, (4, 11), dtype=dtype)
    mask = np.where(draw((3, 11)) > 1, -np.inf, draw((3, 11), seed=1)).astype(of)
    both.attend(3, attn_mask=mask)


@looped("of", [sliced, negative_everywhere, columns_first, misaligned],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_masks_and_queries_of_any_strides(device, of):
    both = pair(device, (4, 11))
    both.attend(of(both.queries(3)), attn_mask=of(draw((B, HQ, 3, 11))))


def test_tensor_masks(device):
    both = pair(device, (4, 11))
    query, mask = both.queries(3), draw((3, 11))
    for given in (mask, mask > 0):
        right = both.attend(query, attn_mask=given)
        got = both.cache.attend(query, clattn.tensor(given, device=device))
        assert type(got) is np.ndarray and got.tobytes() == right.tobytes()


def test_a_mask_of_nothing(device):
    """Of an empty cache masks have no keys, or one that broadcasts to none."""
    both = pair(device)
    for mask in (np.ones((3, 0), bool), np.ones((3, 1), bool), np.ones((B, HQ, 3, 0), float32)):
        assert not both.attend(3, attn_mask=mask).any()


@looped("softcap", [0.0, 2.0, 30.0])
@looped("scale", [None, 0.0, 0.7, -1.5])
def test_scale_and_softcap(device, softcap, scale):
    for lengths in ((13, 13), (13, 6)):
        both = pair(device, lengths)
        both.attend(2, softcap=softcap, scale=scale)
    both.attend(2, softcap=softcap, scale=scale, attn_mask=draw((13,)), window=(5, 0))


@looped("sizes", [(1, 1), (80, 17)], ids=str)
def test_head_sizes(device, sizes):
    width, v_width = sizes
    both = pair(device, (9, 30), E=width, EV=v_width)
    both.attend(1)
    both.attend(3)


def test_many_keys(device):
    """Enough keys for splits, and enough queries for more than one block."""
    both = pair(device, (2900,), B=1, capacity=3001)
    both.attend(1)
    both.attend(40)
    both.append(1)
    both.attend(1, window=(999, 0))
    both = pair(device, (2100, 700), capacity=3001)
    both.attend(1)
    both.attend(33, window=(1500, None), is_causal=False)


def test_prefill_then_decode(device):
    """As a model does it: a prompt, tokens, a second prompt of unequal lengths, tokens."""
    both = pair(device, capacity=80, B=3)
    both.append(20, (20, 7, 13))
    both.attend(20)
    for _ in range(12):
        both.append(1)
        both.attend(1)
    both.append(9, (0, 9, 4))
    both.attend(9)
    for turn in range(12):
        both.append(1, (1, turn % 2, 1))
        both.attend(1, window=(15, 0))
    both.contents_agree()


def test_numbers_behind_the_end_do_not_matter(device):
    """NaN and infinities of positions that were cut off, or that a shorter sequence lacks."""
    both = pair(device, (9, 9))
    query = both.queries(2)
    right = both.attend(query)
    junk = np.full((B, HK, 20, E), np.nan, "f4"), np.full((B, HK, 20, EV), np.inf, "f4")
    both.cache.append(*junk)
    both.cache.truncate(9)
    assert both.attend(query).tobytes() == right.tobytes()
    both.cache.append(*junk)
    both.cache.truncate([4, 9])
    both.model.truncate([4, 9])
    for rows in (1, 2, 9):
        for options in ({}, {"is_causal": False}, {"attn_mask": draw((9,))}, {"window": (3, 9)}):
            both.attend(rows, **options)
    both.append(3)
    both.attend(2)


def test_nan_that_is_attended_to_stays_visible(device):
    both = pair(device, (5, 5))
    key, value = both.tokens(1)
    value[1] = np.nan
    both.cache.append(key, value)
    both.model.append(key, value)
    got = both.attend(1)
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all()
    got = both.attend(1, attn_mask=np.arange(6) < 5)
    assert np.isfinite(got).all()


OPTIONS = {
    "causal": ({}, {"is_causal": "lower_right"}),
    "not causal": ({"is_causal": False}, {"is_causal": False}),
    "window": ({"window": (6, 1)}, {"is_causal": "lower_right", "window": (6, 1)}),
    "scale": ({"scale": 0.3}, {"is_causal": "lower_right", "scale": 0.3}),
    "softcap": ({"softcap": 3.0}, {"is_causal": "lower_right", "softcap": 3.0}),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, float32) for name in OPTIONS),
                                         *(("causal", dtype) for dtype in DTYPES[1:])],
                         ids=str)  # fmt: skip
def test_the_bits_are_those_of_attention(device, name, dtype):
    """With equal lengths attend is scaled_dot_product_attention of what the cache holds."""
    ours, theirs = OPTIONS[name]
    both = pair(device, (19, 19), dtype=dtype)
    for rows in (1, 3, 19, 25) if dtype == float32 else (3, 19):
        masks = (None, draw((rows, 19)) > -1, draw((HQ, rows, 19)))
        query = clattn.tensor(both.queries(rows), device=device)
        for mask in masks if dtype == float32 and ours == {} else masks[:1]:
            got = both.cache.attend(query, mask, **ours)
            right = clattn.scaled_dot_product_attention(
                query, both.cache.key, both.cache.value, mask, enable_gqa=True, **theirs
            )
            assert host(got).tobytes() == host(right).tobytes()


def test_the_bits_of_decoding(device):
    """Caches of several lengths, of a model's sizes."""
    both = pair(device, B=1, HQ=32, HK=8, capacity=300)
    query = clattn.tensor(both.queries(1), device=device)
    key, value = both.tokens(300)
    for first, n in [(0, 1), (1, 1), (2, 30), (32, 1), (33, 100), (133, 1), (134, 165), (299, 1)]:
        both.cache.append(key[:, :, first : first + n], value[:, :, first : first + n])
        got = both.cache.attend(query)
        right = clattn.scaled_dot_product_attention(
            query, both.cache.key, both.cache.value, is_causal="lower_right", enable_gqa=True
        )
        assert host(got).tobytes() == host(right).tobytes(), first + n


def test_results_are_arrays_of_their_own(device):
    """A later call does not write into an earlier result, nor into the cache."""
    both = pair(device, (9, 5))
    query = clattn.tensor(both.queries(1), device=device)
    first = both.cache.attend(query)
    right = host(first)
    both.append(1)
    second = both.cache.attend(query)
    assert host(first).tobytes() == right.tobytes() != host(second).tobytes()
    first, second = (both.cache.attend(both.queries(1)) for _ in range(2))
    right = first.copy()
    second[:] = np.nan
    assert first.tobytes() == right.tobytes()
    both.contents_agree()


def test_a_chain_of_layers_without_a_wait(device):
    """Results go on as queries, keys and values: the numbers are those of waiting every time."""

    def decode(handed_on):
        layers = [clattn.KVCache(B, HK, 30, E, device=device) for _ in range(4)]
        results = []
        for token in range(30):
            state = handed_on(clattn.tensor(draw((B, HK, 1, E), seed=token), device=device))
            for cache in layers:
                cache.append(state, state)
                state = handed_on(cache.attend(state))
            results.append(state)
        return b"".join(host(result).tobytes() for result in results)

    assert decode(lambda state: state) == decode(host)


@EVERY_DTYPE
def test_the_lse(device, dtype):
    """Of equal and unequal lengths, with rows before the first key; the output stays the same."""
    for lengths in ((17, 17), (17, 5), (0, 0)):
        both = pair(device, lengths, dtype=dtype)
        for rows, options in ((3, {}), (8, {}), (3, {"window": (2, 0)}), (3, {"is_causal": False})):
            query = both.queries(rows)
            right = both.attend(query, **options)
            got, lse = both.cache.attend(query, return_lse=True, **options)
            assert got.tobytes() == right.tobytes() and lse.shape == (B, HQ, rows)
            assert lse.dtype == compute_dtype(dtype)
            for b, (arrays, known) in enumerate(both.model.problems(query, **options)):
                assert_close(lse[b], attention(*arrays, **known)[1],
                             tolerance(*arrays, **known)[1], f"lse of {b}")  # fmt: skip
            on_device = both.cache.attend(
                clattn.tensor(query, device=device), return_lse=True, **options
            )
            assert [type(x) for x in on_device] == [clattn.Tensor] * 2
            assert host(on_device[1]).tobytes() == lse.tobytes()


def test_out(device):
    """Written and returned, whatever its strides; it may share memory with the query."""
    both = pair(device, (17, 5))
    query = both.queries(3)
    right = both.attend(query)
    for out in (np.full_like(right, 7.5), np.full((B, 3, HQ, EV), 7.5, float32).swapaxes(1, 2),
                np.full((B, HQ, 3, 2 * EV), 7.5, float32)[..., ::2]):  # fmt: skip
        assert both.cache.attend(query, out=out) is out
        np.testing.assert_array_equal(out, right)
    got, lse = both.cache.attend(query, out=out, return_lse=True)
    assert got is out and lse.shape == (B, HQ, 3)
    tensor = clattn.tensor(query, device=device)
    assert both.cache.attend(tensor, out=tensor) is tensor
    np.testing.assert_array_equal(host(tensor), right)
    filled = both.cache.key  # (B, HK, 17, E): the queries of the next call are in the cache
    shared = filled[:, :, :3]
    want = both.cache.attend(shared)
    assert both.cache.attend(clattn.tensor(shared), out=shared) is shared
    np.testing.assert_array_equal(host(shared), host(want))


def test_a_score_mod(device):
    """Its q_idx is the position in the sequence; it composes with causality and a mask."""
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], float32)

    def mod(score, b, h, q_idx, kv_idx):
        return score + clattn.lookup(slopes, h) * (kv_idx - q_idx) * (b + 1)

    for lengths in ((17, 17), (17, 5)):
        both = pair(device, lengths)
        for rows in (1, 3):
            query = both.queries(rows)
            places = np.array(lengths)[:, None] - rows + np.arange(rows)
            b, h = np.arange(B)[:, None, None, None], np.arange(HQ)[:, None, None]
            added = mod(0, b, h, places[:, None, :, None], np.arange(17)).astype(float32)
            allowed = draw((rows, 17), seed=3) > -1
            wanted = both.cache.attend(query, np.where(allowed, added, -np.inf).astype(float32))
            got = both.cache.attend(query, allowed, score_mod=mod)
            assert_close(got.astype(np.float64), wanted.astype(np.float64), 2e-6)
