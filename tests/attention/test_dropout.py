# SPDX-License-Identifier: MIT
"""Dropout of scaled_dot_product_attention: values, against the oracle with the same mask.

Which probabilities are dropped, and statistics of that, are in test_dropout_which.py.
"""

import random

import clattn
import numpy as np
import pytest
import references.attention as reference
import references.dropout as oracle
from references.attention import DTYPES, float16
from support.checks import assert_close
from support.data import draw, qkv, sdpa
from support.dropout_calls import SEED, P, check_dropout
from support.layouts import LAYOUTS, ODD
from support.loops import looped, looped_dtypes
from support.variants import force

pytestmark = pytest.mark.tensors

NAN, INF = float("nan"), float("inf")

quick = pytest.mark.usefixtures("reference_kernel")


KNOWN_ANSWERS = [  # Random123's kat_vectors, philox4x32 10: counter, key, result
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@looped("vector", KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_the_generator_of_the_oracle(vector):
    counter, key, right = ([int(word, 16) for word in text.split()] for text in vector)
    assert [int(word) for word in oracle.philox(counter, key)] == right


def test_the_layout_of_the_oracle():
    """Seed 0, row 0: keys 0 to 3 are the first block's words, in order; others as defined."""
    first = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert oracle.words((1, 1), 4, 0).ravel().tolist() == first
    whole = oracle.words((2, 3, 5), 7, SEED)
    key = (0x89AB_CDEF, 0x0123_4567)
    for (b, h, i), j in [((0, 0, 0), 6), ((0, 2, 4), 3), ((1, 1, 2), 5)]:
        block = oracle.philox((j // 4, 0, (b * 3 + h) * 5 + i, 0), key)
        assert whole[b, h, i, j] == block[j % 4]
    # The first word is 0.39905… of 2**32.
    for p, right in [(0.399, False), (0.4, True), (0, False), (1e-12, False), (1 - 2**-40, True)]:
        assert oracle.dropped((1,), 1, p, 0).item() is right


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_oracle_is_torchs_attention_with_that_mask(causal):
    """The unfused function of torch takes the mask of what is kept as an argument."""
    torch = pytest.importorskip("torch")
    function = getattr(torch.ops.aten, "_scaled_dot_product_attention_math", None)
    if function is None:
        pytest.skip("this torch has it no more")
    q, k, v = qkv((2, 3), 9, 13, 8, dtype=np.float64)
    kept = ~oracle.dropped((2, 3, 9), 13, P, SEED)
    tensors = (torch.tensor(a) for a in (q, k, v))
    right, _ = function(*tensors, None, P, causal, torch.tensor(kept))
    got = oracle.attention(q, k, v, P, SEED, is_causal=causal)
    np.testing.assert_allclose(got.astype(np.float64), right.numpy(), rtol=1e-12, atol=1e-12)


TILES = [(1, 1), (1, 200), (1, 1001), (16, 13), (17, 3), (33, 40), (40, 203), (97, 5)]


@looped("sizes", TILES, ids=str)
def test_sizes(device, kernel, sizes):
    check_dropout(*qkv((2, 3), *sizes, 8), device=device)


@quick
@looped_dtypes("dtype", DTYPES)
def test_dtypes(device, dtype):
    check_dropout(*qkv((2, 3), 17, 40, 8, 5, dtype), device=device)
    check_dropout(*qkv((2, 3), 17, 40, 8, 5, dtype), device=device, is_causal=True)


def test_half_precision_with_the_chosen_kernel(device):
    check_dropout(*qkv((2, 3), 33, 40, 8, dtype=float16), device=device)


PROBABILITIES = [1e-30, 1e-12, 0.01, 0.1, 0.5, 0.9, 0.9999, 1 - 2**-40, np.nextafter(1, 0)]


@looped("p", [*PROBABILITIES, np.float32(0.25), np.float64(0.75)], ids=repr)
def test_probabilities(device, p):
    """From nothing dropped to everything; kept probabilities are multiplied by 1 / (1 - p)."""
    check_dropout(*qkv((2, 3), 17, 40, 8), device=device, dropout_p=p)


def some(shape, seed=0):
    return draw(shape, seed=seed) > -0.3


ALONE = draw((17, 40), seed=5)
OPTIONS = {
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window": (3, 9)},
    "window and lower right": {"is_causal": "lower_right", "window": (11, None)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.8},
    "bool mask": {"attn_mask": ALONE > -0.3},
    "bool mask of keys": {"attn_mask": some((40,))},
    "float mask": {"attn_mask": np.where(ALONE > 1, -INF, ALONE).astype(np.float32)},
    "float mask of heads": {"attn_mask": draw((3, 1, 40))},
    "rows without a key": {"attn_mask": np.arange(17)[:, None] % 3 > np.zeros(40)},
    "everything": {"attn_mask": some((2, 1, 17, 40)), "is_causal": True, "window": (12, None),
                   "softcap": 2.0, "scale": 0.7},
}  # fmt: skip


@quick
@looped("options", OPTIONS.values(), ids=OPTIONS)
def test_options(device, options):
    check_dropout(*qkv((2, 3), 17, 40, 8), device=device, **options)


@looped("name", ["causal", "bool mask"])
def test_options_with_the_chosen_kernel(device, name):
    check_dropout(*qkv((2, 3), 17, 40, 8), device=device, **OPTIONS[name])


@quick
@looped("heads", [(4, 2), (6, 1), (3, 3)], ids=str)
def test_grouped_heads(device, heads):
    """The row is that of the query head, so that heads of a group drop different keys."""
    hq, hk = heads
    q, k, v = draw((2, hq, 17, 8)), draw((2, hk, 40, 8), seed=1), draw((2, hk, 40, 8), seed=2)
    for options in ({}, {"is_causal": True}, {"attn_mask": some((hq, 1, 40))}):
        check_dropout(q, k, v, device=device, enable_gqa=True, **options)
    same = check_dropout(np.repeat(q[:, :1], hq, axis=1), k[:, :1], v[:, :1], device=device)
    if hq > 1:
        assert (same[:, 0] != same[:, 1]).any()


LEADS = {  # of query, key, value
    "2-D": ((), (), ()),
    "3-D": ((3,), (3,), (3,)),
    "5-D": ((2, 1, 2), (2, 1, 2), (2, 1, 2)),
    "one key for every batch": ((3, 2), (1, 2), (1, 2)),
    "one query for every batch": ((1, 2), (3, 2), (3, 2)),
    "one query head": ((2, 1), (2, 4), (2, 4)),
    "value alone has batches": ((2,), (2,), (3, 2)),
    "all three differ": ((2, 1, 1), (1, 3, 1), (1, 1, 4)),
    "more than three that do not fold": ((2, 1, 3, 1, 2), (1, 2, 1, 3, 1), (2, 2, 1, 1, 2)),
    "7-D": ((2, 1, 2, 1, 2), (1, 2, 1, 2, 1), (1, 1, 2, 1, 1)),
}


@looped("lead", LEADS.values(), ids=LEADS)
def test_batch_dimensions(device, kernel, lead):
    """Rows are counted in the result's shape: a repeated query drops other keys each time."""
    q = draw((*lead[0], 17, 8))
    k, v = draw((*lead[1], 13, 8), seed=1), draw((*lead[2], 13, 8), seed=2)
    check_dropout(q, k, v, device=device)


@quick
def test_batch_dimensions_with_masks(device):
    """Masks with dimensions of their own; enough of them that a call may be made in parts."""
    q, k, v = draw((2, 1, 3, 2, 17, 8)), draw((1, 2, 1, 2, 13, 8)), draw((1, 2, 3, 1, 13, 8))
    for shape in [(2, 1, 1, 1, 17, 13), (1, 2, 1, 2, 1, 13), (3, 1, 17, 1)]:
        check_dropout(q, k, v, device=device, attn_mask=some(shape), is_causal=True)


def test_queries_too_far_apart_for_one_buffer(device):
    """Rows 2**30 elements apart: a call made in parts counts its rows on."""
    q, k, v = qkv((), 3, 40, 8, dtype=float16)
    buffer = np.empty((1 << 30) * 2 + 64, float16)
    far = np.lib.stride_tricks.as_strided(buffer, q.shape, (2 << 30, 2))
    far[...] = q
    arrays = (q, k, v)
    right, allowed = (f(*arrays, P, SEED) for f in (oracle.attention, oracle.tolerance))
    assert_close(sdpa(far, k, v, device=device, dropout_p=P, seed=SEED), right, allowed)


@quick
@looped("layout", [*LAYOUTS, *ODD], ids=lambda f: f.__name__)
def test_layouts(device, layout):
    """Any strides in; the place in memory does not matter to what is dropped."""
    check_dropout(*(layout(a) for a in qkv((2, 3), 17, 40, 8)), device=device)


@looped("layout", [np.array, *LAYOUTS[:-1]], ids=lambda f: f.__name__)
def test_out(device, layout):
    """Written and returned, whatever its strides."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    out = layout(np.full((2, 3, 17, 8), -1, np.float32))
    assert check_dropout(q, k, v, device=device, out=out) is out
    np.testing.assert_array_equal(out, sdpa(q, k, v, device=device, dropout_p=P, seed=SEED))


EMPTIES = {"B": ((0, 3), 5, 7, 8, 8), "L": ((2, 3), 0, 7, 8, 8), "Ev": ((2, 3), 5, 7, 8, 0),
           "S": ((2, 3), 5, 0, 8, 8), "E": ((2, 3), 5, 7, 0, 8)}  # fmt: skip


@quick
@looped("p", [P, 1.0], ids=str)
@looped("shape", EMPTIES.values(), ids=EMPTIES)
def test_empty_dimensions(device, shape, p):
    check_dropout(*qkv(*shape), device=device, dropout_p=p)


def test_no_dropout_is_no_dropout(device, kernel):
    """p = 0, or so small that no word is below it: the same bits, whatever the seed, lse too."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    right, right_lse = sdpa(q, k, v, device=device, is_causal=True, return_lse=True)
    for p in (0, 0.0, -0.0, np.float32(0), np.int64(0), 2**-34, 5e-324):
        for seed in (None, 0, SEED, 2**64 - 1):
            options = {"dropout_p": p, "seed": seed, "is_causal": True, "return_lse": True}
            result, lse = sdpa(q, k, v, device=device, **options)
            assert result.tobytes() == right.tobytes() and lse.tobytes() == right_lse.tobytes()


@looped("p", [1.0, 1, np.float32(1), np.int64(1)], ids=repr)
def test_everything_dropped(device, kernel, p):
    """p = 1: zeros whatever the values are, with a seed or without; the lse is as ever."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    assert not check_dropout(q, k, v, device=device, dropout_p=p).any()
    v[0, 0], v[1, 1, 5], v[1, 2, :, 3] = NAN, INF, -INF
    for options in ({}, {"is_causal": True}):
        allowed = reference.tolerance(*qkv((2, 3), 17, 40, 8), **options)[1]
        _, lse = sdpa(q, k, v, device=device, return_lse=True, **options)
        for seed in (None, 0, SEED):
            dropping = options | {"dropout_p": p, "seed": seed, "return_lse": True}
            result, same = sdpa(q, k, v, device=device, **dropping)
            assert (result == 0).all()
            assert_close(same, lse, 2 * allowed)


@quick
@looped_dtypes("dtype", DTYPES)
def test_everything_dropped_in_every_dtype(device, dtype):
    q, k, v = qkv((2, 3), 17, 40, 8, 5, dtype)
    v[0, 0] = NAN
    out = np.ones((2, 3, 17, 5), dtype)
    result = sdpa(q, k, v, device=device, dropout_p=1.0, out=out)
    assert result is out and (out.astype(np.float32) == 0).all()


def test_the_lse_has_all_keys_in_it(device, kernel):
    """Dropping comes after the softmax: the lse of any p and seed is that without dropout."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    options = {"return_lse": True, "is_causal": "lower_right"}
    _, right = sdpa(q, k, v, device=device, **options)
    allowed = reference.tolerance(q, k, v, is_causal="lower_right")[1]
    for p, seed in ((0.1, 1), (0.9, 2), (0.5, None), (1.0, 3), (np.nextafter(1, 0), 4)):
        _, lse = sdpa(q, k, v, device=device, dropout_p=p, seed=seed, **options)
        assert_close(lse, right, 2 * allowed)


@looped("garbage", [NAN, INF, -INF], ids=str)
def test_a_value_matters_where_it_is_kept(device, kernel, garbage):
    """Row by row: a dropped key's value may be anything, a kept one's shows in its column."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    v[0, 1, 20, 3] = garbage
    result = check_dropout(q, k, v, device=device)
    dropped = oracle.dropped((2, 3, 17), 40, P, SEED)[0, 1, :, 20]
    assert 0 < dropped.sum() < 17
    assert np.isfinite(result[0, 1, dropped]).all()
    assert not np.isfinite(result[0, 1, ~dropped, 3]).any()
    assert (~np.isfinite(result)).sum() == (~dropped).sum()


@quick
@looped("garbage", [NAN, INF], ids=str)
def test_an_excluded_key_does_not_matter(device, garbage):
    """Kept or dropped."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    seen = some((40,))
    right = check_dropout(q, k, v, device=device, attn_mask=seen)
    allowed = oracle.tolerance(q, k, v, P, SEED, attn_mask=seen)
    k[..., ~seen, :], v[..., ~seen, :] = garbage, garbage
    got = sdpa(q, k, v, device=device, attn_mask=seen, dropout_p=P, seed=SEED)
    assert_close(got, right, 2 * allowed)


@quick
def test_nan_in_a_query_stays_in_its_row(device):
    q, k, v = qkv((2, 3), 17, 40, 8)
    q[1, 2, 5, 0] = NAN
    result = check_dropout(q, k, v, device=device)
    assert np.isnan(result[1, 2, 5]).all() and np.isnan(result).sum() == 8


SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**53 + 1, 2**63, 2**64 - 1]
SCALARS = [np.uint64(2**64 - 1), np.int64(7), np.uint8(200), np.int32(2**31 - 1), np.int16(5)]


@looped("seed", [*SEEDS, *SCALARS], ids=repr)
def test_seeds(device, seed):
    """Integers from 0 to 2**64 - 1, NumPy's too; every bit counts."""
    check_dropout(*qkv((2, 3), 17, 40, 8), device=device, seed=seed)


def test_a_seed_fixes_the_result(device, kernel):
    """The same bits again; and any two seeds differ."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    results = {}
    for seed in SEEDS:
        results[seed] = sdpa(q, k, v, device=device, dropout_p=P, seed=seed).tobytes()
        assert sdpa(q, k, v, device=device, dropout_p=P, seed=seed).tobytes() == results[seed]
    assert len(set(results.values())) == len(SEEDS)


def test_without_a_seed_two_calls_differ(device):
    """Whatever Python's and NumPy's generators are set to: the operating system draws."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    results = set()
    for n in range(8):
        random.seed(0)
        np.random.seed(0)
        options = {} if n % 2 else {"seed": None}
        results.add(sdpa(q, k, v, device=device, dropout_p=P, **options).tobytes())
    assert len(results) == 8


def test_every_device_and_kernel_agree(monkeypatch):
    """Up to rounding."""
    q, k, v = qkv((2, 3), 33, 200, 8)
    arrays = (q, k, v)
    right, allowed = (f(*arrays, P, SEED) for f in (oracle.attention, oracle.tolerance))
    for device in clattn.devices():
        for name in (None, "reference"):
            force(monkeypatch, name)
            assert_close(sdpa(*arrays, device=device, dropout_p=P, seed=SEED), right, allowed)


def test_positional_arguments(device):
    """dropout_p is the fifth, as torch has it."""
    q, k, v = qkv((2, 3), 17, 40, 8)
    right = check_dropout(q, k, v, device=device, attn_mask=ALONE > -0.3)
    got = clattn.scaled_dot_product_attention(q, k, v, ALONE > -0.3, P, seed=SEED, device=device)
    np.testing.assert_array_equal(got, right)
