# SPDX-License-Identifier: MIT
"""clattn.quantize and dequantize, and the codes of caches: bit for bit those of plain float32."""

import clattn
import ml_dtypes
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16
from references.codes import FLOAT8, float8_of, int8_of, kept, restored
from support.cache_pair import bits
from support.data import draw
from support.loops import looped
from support.refusals import cases, refuse, wrong_arrays

WORDS = ("int8", "float8_e4m3fn", "float8_e5m2")
f32 = np.float32


def vectors():
    """Float32 vectors of 37 numbers: of any size, with ties, without range, and not finite."""
    random = np.random.default_rng(3)
    sizes = np.concatenate((10.0 ** np.arange(-45, 39), [3.3e38, 1, 1, 1]))
    x = random.standard_normal((sizes.size, 37))
    with np.errstate(over="ignore", under="ignore"):
        x = (x / abs(x).max(-1, keepdims=True) * sizes[:, None]).astype(f32)
    x[-1], x[-2] = 0, np.where(x[-2] < 0, 1e-42, -1e-41)
    more = np.repeat(x[60:61], 7, 0)
    more[0] = np.arange(37) * 127 / 36 // 0.5 / 2  # halves: ties
    more[1, 5], more[2, 5], more[3, 5] = np.nan, np.inf, -np.inf
    more[4], more[5], more[6] = 5.5, -3, np.linspace(5, 6, 37)
    return np.concatenate((x, more))


def right_of(x, word):
    """Codes and scale of a vector."""
    if word == "int8":
        return int8_of(x)
    finite = x[np.isfinite(x)]
    most = f32(ml_dtypes.finfo(FLOAT8[word]).max)
    scale = abs(finite).max(initial=0) / most
    scale = scale if scale >= 2.0**-120 else f32(1)
    return float8_of(x, scale, word), scale


@looped("word", WORDS)
def test_codes_and_scales(word):
    x = vectors()
    values, scales = clattn.quantize(x, word)
    assert values.dtype.name == word and values.shape == x.shape
    assert scales.dtype == f32 and scales.shape == x.shape[:1]
    for row, code, scale in zip(x, values, scales, strict=True):
        codes, right = right_of(row, word)
        assert code.tobytes() == codes.tobytes() and bits(scale).tobytes() == bits(right).tobytes()
    back = clattn.dequantize(values, scales)
    assert back.dtype == f32
    finite = np.isfinite(x).all(-1)
    error, most = abs(back[finite] - x[finite]), abs(x[finite]).max(-1, keepdims=True)
    step = {"int8": 1 / 254, "float8_e4m3fn": 1 / 28, "float8_e5m2": 1 / 14}[word]
    none = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[word] * 2.0**-120
    assert (error <= np.maximum(most * f32(step * 1.001), none)).all()
    assert np.isnan(back[-6:-3]).any(-1)[0] and not np.isfinite(back[-6:-3]).all(-1).any()


@looped("given", DTYPES, ids=str)
@looped("word", WORDS)
@looped("axis", [0, 1, -1])
@looped("group", [None, 1, 5, 32, 2**40])
def test_axes_and_groups(given, word, axis, group):
    x = draw((6, 40, 37), given)
    values, scales = clattn.quantize(x, word, axis, group)
    assert values.shape == x.shape
    moved, codes = (np.moveaxis(a, axis, -1) for a in (x.astype(f32), values))
    length = moved.shape[-1]
    found = scales[..., None] if group is None else np.moveaxis(scales, axis, -1)
    step = length if group is None else min(group, length)
    assert found.shape == (*moved.shape[:-1], -(-length // step))
    assert values.shape == x.shape
    for at in ((0, 0), (1, 2), (5, 5)):
        for n, scale in enumerate(found[at]):
            part = slice(n * step, (n + 1) * step)
            right, of = right_of(moved[at][part], word)
            assert codes[at][part].tobytes() == right.tobytes() and scale == of
    back = clattn.dequantize(values, scales, given, axis=axis, group=group)
    assert back.dtype == given and back.shape == x.shape
    factors = found.repeat(step, -1)[..., :length]
    np.testing.assert_array_equal(
        np.moveaxis(back, axis, -1), (codes.astype(f32) * factors).astype(given)
    )


@looped("word", WORDS)
def test_zeros(word):
    for shape in ((3, 8), (3, 0), (0, 8)):
        values, scales = clattn.quantize(np.zeros(shape, f32), word)
        assert not values.astype(f32).any() and (scales == 1).all() and scales.shape == shape[:1]
        assert not clattn.dequantize(values, scales).any()


def test_float8_saturates():
    """Beside a scale that is given, as caches have it. quantize itself makes 448 of the largest."""
    for word, most in (("float8_e4m3fn", 448), ("float8_e5m2", 57344)):
        values, scales = clattn.quantize(np.array([1e6, np.nan, np.inf, -np.inf, 2], f32), word)
        assert values.astype(f32)[0] == most and scales == f32(1e6) / f32(most)
        assert np.isnan(values.astype(f32)[1])
        infinite = values.astype(f32)[2:4]
        assert np.isnan(infinite).all() if "e4" in word else (infinite == [np.inf, -np.inf]).all()


def test_arrays_of_every_kind(device):
    x = draw((4, 8))
    right = [a.tobytes() for a in clattn.quantize(x, "int8")]
    for given in (clattn.tensor(x, device), x.astype(">f4"), x[::-1].copy()[::-1], memoryview(x)):
        assert [a.tobytes() for a in clattn.quantize(given, np.int8)] == right
    assert clattn.dequantize(*clattn.quantize(x, ml_dtypes.float8_e5m2), bfloat16).dtype == bfloat16
    codes = np.arange(-4, 4, dtype=np.int8)
    np.testing.assert_array_equal(clattn.dequantize(codes, f32(0.5)), codes / 2)


# ---- kernels round as the host does ----


def cached(device, x, word, given=f32, **scales):
    """What a cache of one head keeps of vectors: (codes, scales, offsets) without its pages."""
    cache = clattn.PagedKVCache(1, len(x), 1, x.shape[1], dtype=word, device=device, **scales)
    rows = x[:, None].astype(given)
    cache.append(cache.open()[0], rows, rows)
    parts = cache.value, cache.value_scale, cache.value_offset
    return [np.array(part)[0, 0] for part in parts if part is not None and part.ndim > 1]


def test_a_cache_has_the_codes_of_quantize(device):
    x = vectors()
    found = cached(device, x, "int8")
    for part, right in zip(found, clattn.quantize(x, "int8"), strict=True):
        assert bits(part).tobytes() == bits(right).tobytes()


@looped("word", (*WORDS, "int4"))
@looped("scale", [1.0, 0.37, 3e-5, 2e30])
def test_codes_of_any_numbers(device, word, scale):
    """Numbers of every size and subnormal ones, ties, infinities, NaN."""
    if word in ("int8", "int4") and scale != 1:
        return
    x = vectors()
    options = {"value_scale": scale} if "float8" in word else {}
    right = [part for part in kept(x, word, scale) if part is not None]
    for part, expected in zip(cached(device, x, word, **options), right, strict=True):
        np.testing.assert_array_equal(bits(part), bits(expected))


@looped("word", FLOAT8)
def test_every_tie_of_float8(device, word):
    """All codes, what lies half-way between neighbours, and the floats beside it."""
    codes = np.arange(256, dtype=np.uint8).view(FLOAT8[word]).astype(f32)
    numbers = np.unique(codes[np.isfinite(codes)])
    half = (numbers[1:] + numbers[:-1]) / 2
    most = numbers.max()
    some = [codes, half, np.nextafter(half, f32(np.inf)), np.nextafter(half, f32(-np.inf)),
            most * f32([1, 1.0357, 1.05, 1.0715, 1.072, 1.125, 2, 1e30])]  # fmt: skip
    x = np.concatenate((*some, -some[-1]))[None]
    right = float8_of(x, f32(1), word)
    assert cached(device, x, word)[0].tobytes() == right.tobytes()


def test_codes_of_float64(device):
    """Finite numbers stay finite, and tiny ones become zero."""
    x = np.array([[1e300, -1e200, 1.0, 0, 5], [1e-300, 2e-42, -1e-39, 0, 0],
                  [np.inf, 1, 1, 1, 1], [1, 2, 3, 4, 1 + 1e-9]])  # fmt: skip
    for word in (*WORDS, "int4"):
        right = [part for part in kept(x, word, 1.0) if part is not None]
        found = cached(device, x, word, np.float64)
        for part, expected in zip(found, right, strict=True):
            np.testing.assert_array_equal(bits(part), bits(expected))
    values, scales = clattn.quantize(x, "int8")
    codes, right, _ = kept(x, "int8")
    assert values.tobytes() == codes.tobytes() and bits(scales).tobytes() == bits(right).tobytes()


@looped("size", [1, 8, 31, 32, 33, 80, 256])
def test_head_sizes(device, size):
    for word in (*WORDS, "int4"):
        x = draw((5, size))
        right = [part for part in kept(x, word, 1.0) if part is not None]
        for part, expected in zip(cached(device, x, word), right, strict=True):
            assert part.tobytes() == expected.tobytes()


# ---- what went wrong elsewhere ----


def test_int4_errors(device):
    """Constant groups come back exactly; others to half a step; small groups stay finite."""
    random = np.random.default_rng(1)
    x = np.stack((np.full(48, 5.25, f32), random.uniform(5, 6, 48).astype(f32),
                  random.uniform(-1, 1, 48).astype(f32) * f32(6e4), np.full(48, -1e-6, f32),
                  random.uniform(0, 1e-30, 48).astype(f32), np.linspace(0, 1e-40, 48, dtype=f32),
                  np.linspace(-3.4e38, 3.4e38, 48, dtype=f32)))  # fmt: skip
    for given in (f32, np.float16):
        rows = x if given == f32 else x[:4]
        narrow = rows.astype(given).astype(f32)
        codes, scales, offsets = cached(device, rows, "int4", given)
        back = restored(codes, scales, offsets, "int4", 48)
        assert np.isfinite(back).all() and (scales > 0).all()
        assert (back[[0, 3]] == narrow[[0, 3]]).all()
        ranges = np.stack([np.ptp(narrow[:, part] / 2, axis=1) for part in
                           (slice(32), slice(32, 48))], axis=1)  # fmt: skip
        allowed = (ranges / 15 * f32(1.001))[:, np.arange(48) // 32]
        assert (abs(back / 2 - narrow / 2) * 2 <= np.maximum(allowed, 1e-30)).all()


def test_small_numbers_use_all_codes(device):
    codes, scales = cached(device, (np.arange(1, 9) * f32(0.01))[None], "int8")
    assert codes.max() == 127 and scales == f32(0.08) / f32(127)


def test_given_scales_of_heads(device):
    """A scale for each head of float8; without one it is 1."""
    x = draw((3, 2, 8)) * f32(700)
    for scale, heads in ((1.0, (1, 1)), (2.5, (2.5, 2.5)), ([0.5, 8], (0.5, 8)),
                         (clattn.tensor(np.float32([3, 4]), device), (3, 4))):  # fmt: skip
        cache = clattn.PagedKVCache(1, 3, 2, 8, dtype="float8_e4m3fn", device=device,
                                    key_scale=scale)  # fmt: skip
        cache.append(cache.open()[0], x, x)
        assert np.array(cache.key_scale).tolist() == [f32(s) for s in heads]
        right = [float8_of(x[:, h], f32(heads[h]), "float8_e4m3fn") for h in range(2)]
        assert np.array(cache.key)[0].tobytes() == np.stack(right).tobytes()


# ---- wrong arguments ----

X, CODES = draw((4, 6)), np.ones((4, 6), np.int8)
SCALES = np.ones(4, f32)
REFUSED = [
    *wrong_arrays("array", (4, 6), {"float16", "bfloat16", "float32", "float64"}),
    *[(f"dtype is {dtype!r}", TypeError, "dtype", {"dtype": dtype})
      for dtype in ("int4", "uint8", None, f32, "x", 3)],
    *[(f"axis is {axis!r}", ValueError, "axis", {"axis": axis}) for axis in (2, -3, 2**70)],
    *[(f"axis is {axis!r}", TypeError, "axis", {"axis": axis}) for axis in (0.0, None, "0")],
    *[(f"group is {group!r}", ValueError, "group", {"group": group}) for group in (0, -1)],
    *[(f"group is {group!r}", TypeError, "group", {"group": group}) for group in (2.0, "2")],
    ("no dimension", ValueError, "axis", {"array": f32(1)[()] * np.ones((), f32)}),
]  # fmt: skip
BACK = [
    *wrong_arrays("scales", (4,), {"float16", "bfloat16", "float32", "float64"}),
    *[(f"values of {dtype}", TypeError, "values", {"values": np.ones((4, 6), dtype)})
      for dtype in ("u1", "i2", "f4")],
    *[(f"scales of {shape}", ValueError, "scales", {"scales": np.ones(shape, f32)})
      for shape in ((6,), (3,), (4, 6, 1), (2, 6), (4, 0))],
    ("dtype is int", TypeError, "dtype", {"dtype": np.int8}),
    ("groups of unknown size", ValueError, "group", {"scales": np.ones((4, 4), f32)}),
    ("a wrong group", ValueError, "group", {"scales": np.ones((4, 4), f32), "group": 3}),
    ("axis of other scales", ValueError, "scales", {"axis": 0}),
]  # fmt: skip


@cases(REFUSED)
def test_wrong_arguments(row):
    refuse(clattn.quantize, row, {"array": X, "dtype": "int8"})


@cases(BACK)
def test_wrong_codes(row):
    refuse(clattn.dequantize, row, {"values": CODES, "scales": SCALES})


def test_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ModuleNotFoundError, match="ml_dtypes"):
        clattn.quantize(X, "float8_e5m2")
    assert clattn.quantize(X, "int8")[0].dtype == np.int8
