# SPDX-License-Identifier: MIT
"""The oracle of numbers that a cache keeps as codes, vector by vector, in plain float32.

A function takes the numbers of a vector and gives (codes, scales, offsets) as a cache keeps them.
"""

import ml_dtypes
import numpy as np

f32 = np.float32
FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
WORDS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")
GROUP = 32
SMALLEST = f32(2.0**-120)  # a smaller scale is none


def as_floats(x):
    """Float32: a finite float64 stays finite, and what float32 keeps as subnormal is 0."""
    if x.dtype != np.float64:
        return x.astype(f32)
    with np.errstate(over="ignore", under="ignore"):
        most = np.finfo(f32).max
        narrow = np.where(np.isfinite(x), np.clip(x, -most, most), x).astype(f32)
    return np.where(np.abs(x) < np.finfo(f32).tiny, np.copysign(f32(0), narrow), narrow)


def int8_of(x):
    scale = np.abs(x).max() / f32(127)
    if not np.isfinite(x).all():
        return np.zeros(x.size, np.int8), f32(np.nan)
    if scale < SMALLEST:
        return np.zeros(x.size, np.int8), f32(1)
    return np.rint(x / scale).astype(np.int8), scale


def float8_of(x, scale, word):
    """Finite numbers saturate. ml_dtypes rounds, and has infinities and NaN as they are."""
    most = f32(ml_dtypes.finfo(FLOAT8[word]).max)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = x / scale
        scaled = np.where(np.isfinite(x), np.clip(scaled, -most, most), scaled)
        return scaled.astype(FLOAT8[word]).view(np.uint8)


def int4_of(x):
    """Codes 0 … 15 of one group, its scale and its offset."""
    if not np.isfinite(x).all():
        return np.zeros(x.size, np.uint8), f32(np.nan), f32(0)
    low, high = x.min() + f32(0), x.max()
    scale = (high / 2 - low / 2) / f32(7.5)
    if scale < SMALLEST:
        return np.zeros(x.size, np.uint8), f32(1), low
    return np.rint((x / 2 - low / 2) / (scale / 2)).clip(0, 15).astype(np.uint8), scale, low


def kept(x, word, scale=None):
    """(codes, scales, offsets) of vectors (…, size); None for what a word lacks."""
    x = as_floats(x)
    lead, size = x.shape[:-1], x.shape[-1]
    if word in FLOAT8:
        return float8_of(x, f32(scale), word), None, None
    codes = np.zeros((*lead, size if word == "int8" else -(-size // 2)), np.int8)
    codes = codes if word == "int8" else codes.view(np.uint8)
    groups = -(-size // GROUP)
    scales = np.zeros(lead if word == "int8" else (*lead, groups), f32)
    offsets = None if word == "int8" else np.zeros((*lead, groups), f32)
    for at in np.ndindex(lead):
        if word == "int8":
            codes[at], scales[at] = int8_of(x[at])
            continue
        for g in range(groups):
            found, scales[*at, g], offsets[*at, g] = int4_of(x[at][g * GROUP : (g + 1) * GROUP])
            found = np.append(found, np.zeros(found.size % 2, np.uint8))
            first = g * GROUP // 2
            codes[at][first : first + found.size // 2] = found[::2] | found[1::2] << 4
    return codes, scales, offsets


def restored(codes, scales, offsets, word, size, scale=None):
    """The float32 numbers that codes stand for."""
    if word in FLOAT8:
        return codes.view(FLOAT8[word]).astype(f32) * f32(scale)
    if word == "int8":
        return codes * scales[..., None]
    pairs = np.stack((codes & 15, codes >> 4), -1)
    numbers = pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])[..., :size]
    group = np.arange(size) // GROUP
    with np.errstate(over="ignore", invalid="ignore"):
        wide = numbers * scales[..., group].astype(np.float64) + offsets[..., group]
        return wide.astype(f32)


def exact(x, word, scale=None):
    """The float64 numbers that the codes of vectors stand for."""
    codes, *factors = kept(x, word, scale)
    wide = [None if factor is None else factor.astype(np.float64) for factor in factors]
    return restored(codes, *wide, word, x.shape[-1], scale)
