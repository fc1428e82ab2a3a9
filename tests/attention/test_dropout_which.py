# SPDX-License-Identifier: MIT
"""Which probabilities dropout drops: exactly those of the definition, and statistics of them.

Values that are one in one place and zero elsewhere make each probability visible by itself.
"""

import math

import clattn
import numpy as np
import pytest
import references.dropout as oracle
from references.attention import DTYPES, attended, float32
from support.data import draw, sdpa
from support.variants import force

P, SEED = 0.3, 0xFEDC_BA98_7654_3210
COLUMNS = 8


def dropped(leading, keys, *, device, dropout_p=P, seed=SEED, scores=False, **options):
    """What clattn drops: bool (*leading, keys), True too where a key is not attended at all.

    Eight keys at a time: their values are one, each in a column of its own. Without `scores` all
    attended keys have the same probability.
    """
    dtype = options.pop("dtype", float32)
    query = draw((*leading, 8), dtype)
    key = draw((keys, 8), dtype, seed=1)
    if not scores:
        query = query * dtype.type(0)
    if options.get("enable_gqa"):
        key = np.broadcast_to(key, (2, keys, 8))
    found = np.empty((*leading, keys), bool)
    for start in range(0, keys, COLUMNS):
        columns = min(COLUMNS, keys - start)
        value = np.zeros((*key.shape[:-1], COLUMNS), dtype)
        value[..., range(start, start + columns), range(columns)] = 1
        got = sdpa(query, key, value, device=device, dropout_p=dropout_p, seed=seed, **options)
        found[..., start : start + columns] = got[..., :columns] == 0
    return found


SHAPES = [  # leading shape, keys
    ((1,), 1), ((1,), 1001), ((2, 3, 17), 13), ((33,), 200), ((2, 40), 41), ((3, 1, 16), 64),
    ((2, 1, 3, 2, 5), 7), ((130, 3), 5),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exactly_those_of_the_definition(device, kernel, shape):
    got = dropped(*shape, device=device)
    np.testing.assert_array_equal(got, oracle.dropped(*shape, P, SEED))


quick = pytest.mark.usefixtures("reference_kernel")
OPTIONS = {
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window": (7, 30)},
    "mask": {"attn_mask": draw((2, 17, 40)) > -0.5},
    "mask of keys": {"attn_mask": draw((40,)) > 0},
    "float mask": {"attn_mask": np.where(draw((17, 40)) > 0.5, -np.inf, 0).astype(np.float32)},
}


@quick
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_masks_do_not_shift_anything(device, options):
    """A block of keys that is skipped counts as any other; the rest is dropped as ever."""
    got = dropped((2, 17), 40, device=device, **options)
    right = oracle.dropped((2, 17), 40, P, SEED) | ~attended(17, 40, **options)
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("options", [{"window": (3, 2)}, {"is_causal": "lower_right"}], ids=str)
def test_whole_tiles_skipped_do_not_shift_anything(device, kernel, options):
    got = dropped((97,), 200, device=device, **options)
    right = oracle.dropped((97,), 200, P, SEED) | ~attended(97, 200, **options)
    np.testing.assert_array_equal(got, right)


@quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_drop_the_same(device, dtype):
    got = dropped((2, 3, 17), 40, device=device, dtype=dtype, scores=True, scale=0.1)
    np.testing.assert_array_equal(got, oracle.dropped((2, 3, 17), 40, P, SEED))


@pytest.mark.parametrize("leading", [(3, 4, 17), (2, 8, 1)], ids=str)
def test_grouped_heads_drop_by_query_head(device, kernel, leading):
    got = dropped(leading, 40, device=device, enable_gqa=True)
    np.testing.assert_array_equal(got, oracle.dropped(leading, 40, P, SEED))


@quick
def test_the_position_alone_decides(device):
    """More keys, rows or batches, other scores: what was dropped stays dropped, and so on."""
    right = dropped((17,), 40, device=device)
    np.testing.assert_array_equal(dropped((17,), 200, device=device)[:, :40], right)
    np.testing.assert_array_equal(dropped((17,), 37, device=device), right[:, :37])
    np.testing.assert_array_equal(dropped((40,), 40, device=device)[:17], right)
    np.testing.assert_array_equal(dropped((3, 17), 40, device=device)[0], right)
    np.testing.assert_array_equal(dropped((2, 3, 17), 40, device=device)[0, 0], right)
    np.testing.assert_array_equal(dropped((51,), 40, device=device).reshape(3, 17, 40)[0], right)
    for options in ({"scores": True}, {"scores": True, "scale": -0.2}, {"softcap": 0.5}):
        np.testing.assert_array_equal(dropped((17,), 40, device=device, **options), right)


@quick
def test_rows_are_counted_in_c_order(device):
    """However the leading dimensions are cut, row r of them all is row r."""
    right = dropped((120,), 9, device=device)
    for leading in [(1, 120), (2, 60), (2, 3, 20), (2, 3, 4, 5), (5, 4, 3, 2), (120, 1)]:
        got = dropped(leading, 9, device=device)
        np.testing.assert_array_equal(got.reshape(120, 9), right)


def test_every_device_and_kernel_drop_the_same(monkeypatch):
    right = oracle.dropped((2, 33), 200, P, SEED)
    for device in clattn.devices():
        for name in (None, "reference"):
            force(monkeypatch, name)
            np.testing.assert_array_equal(dropped((2, 33), 200, device=device), right)


@quick
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], ids=hex)
def test_seeds(device, seed):
    got = dropped((2, 3, 5), 13, device=device, seed=seed)
    np.testing.assert_array_equal(got, oracle.dropped((2, 3, 5), 13, P, seed))


@quick
def test_the_threshold_is_exact(device):
    """A word is dropped if it is below p * 2**32, rounded: p is not cut to float32 on the way."""
    words = oracle.words((4,), COLUMNS, SEED)
    some = [(i, j) for i in range(4) for j in range(COLUMNS) if words[i, j] % 2]
    assert len(some) > 5
    for i, j in some:
        word = int(words[i, j])
        for steps, right in [(0, False), (1, True), (0.4, False), (0.6, True), (-1, False)]:
            p = (word + steps) / 2**32
            got = dropped((4,), COLUMNS, device=device, dropout_p=p)
            assert got[i, j] == right, (i, j, steps)
            np.testing.assert_array_equal(got, oracle.dropped((4,), COLUMNS, p, SEED))


@quick
@pytest.mark.parametrize("p", [2**-30, 1 - 2**-31, 1 - 2**-40, float(np.nextafter(1, 0))], ids=repr)
def test_the_ends_of_the_range(device, p):
    """2**32, one past the largest word, drops everything; it is not taken for 0."""
    got = dropped((3, 17), 40, device=device, dropout_p=p)
    np.testing.assert_array_equal(got, oracle.dropped((3, 17), 40, p, SEED))
    assert got.all() if p > 0.5 else not got.any()


def five_sigma(p, count):
    return 5 * math.sqrt(p * (1 - p) / count)


@quick
@pytest.mark.parametrize("p", [0.02, 0.1, 0.25, 0.5, 0.9], ids=str)
def test_the_rate(device, p):
    """Overall, and within each of the four words of a block."""
    found = dropped((4, 40), 200, device=device, dropout_p=p)
    assert abs(found.mean() - p) < five_sigma(p, found.size)
    for word in range(4):
        part = found[..., word::4]
        assert abs(part.mean() - p) < five_sigma(p, part.size)
    for axis, rest in ((0, 40 * 200), (1, 4 * 200), (2, 4 * 40)):
        others = tuple(n for n in range(3) if n != axis)
        if rest * p * (1 - p) < 10:  # too few for the normal distribution
            continue
        assert np.abs(found.mean(axis=others) - p).max() < five_sigma(p, rest)


@quick
def test_neighbours_are_not_correlated(device):
    """Keys, rows, heads and seeds beside one another; as signs, whose mean product is near 0."""

    def signs(seed):
        found = dropped((4, 40), 200, device=device, dropout_p=0.5, seed=seed)
        return np.where(found, 1.0, -1.0)

    x = signs(SEED)
    pairs = {f"keys {n} apart": (x[..., n:], x[..., :-n]) for n in (1, 2, 3, 4, 5, 8, 16, 64)}
    pairs |= {f"rows {n} apart": (x[:, n:], x[:, :-n]) for n in (1, 2, 3, 4, 16)}
    pairs |= {f"heads {n} apart": (x[n:], x[:-n]) for n in (1, 2, 3)}
    for seed in (SEED + 1, SEED - 1, SEED ^ (1 << 32), SEED ^ (1 << 63), SEED >> 32, 0):
        pairs[f"seed {seed:#x}"] = (x, signs(seed))
    pairs["rows and keys"] = (x[:, 1:, 1:], x[:, :-1, :-1])
    pairs["a row's keys as the next seed's"] = (x[..., 4:], signs(SEED + 1)[..., :-4])
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 5 / math.sqrt(a.size), name


@quick
@pytest.mark.parametrize("p", [0.1, 0.5], ids=str)
def test_the_mean_over_seeds_is_the_result_without_dropout(device, p):
    """Within five of its standard deviations, that of a sum of independent draws."""
    query, key, value = draw((2, 5, 8)), draw((2, 13, 8), seed=1), draw((2, 13, 8), seed=2)
    count = 400
    results = [
        sdpa(query, key, value, device=device, dropout_p=p, seed=seed).astype(np.float64)
        for seed in range(count)
    ]
    right = sdpa(query, key, value, device=device).astype(np.float64)
    scores = np.matmul(query, key.swapaxes(-1, -2)) / math.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    variance = p / (1 - p) * np.matmul(weights**2, value.astype(np.float64) ** 2)
    sigma = np.sqrt(variance / count)
    assert (np.abs(np.mean(results, axis=0) - right) < 5 * sigma).all()
    spread = np.std(results, axis=0) / np.sqrt(variance)
    assert 0.9 < spread.mean() < 1.1, "the variance of a result is that of its draws"
