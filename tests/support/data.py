# SPDX-License-Identifier: MIT
"""Arrays that tests compute with, and the call that most of them make."""

import functools
import math

import clattn
import numpy as np

# Bands that exclude keys at the start of a block, at its end, or at both.
BANDS = [
    {"is_causal": True}, {"is_causal": "lower_right"}, {"window": (5, 2)}, {"window": (0, None)},
    {"window": (None, 0)}, {"window": (40, 0)}, {"is_causal": True, "window": (3, 9)},
]  # fmt: skip
WINDOWS = [(0, 0), (1, 0), (0, 3), (15, 16), (None, 5), (600, 0), (1300, 900), (2**40, 2**40)]
MANY_BANDS = [*BANDS, *({"window": window} for window in WINDOWS)]


def draw(shape, dtype=np.float32, seed=0):
    """Standard normal numbers; the shape is part of the seed, so no two arrays start alike."""
    is_large = math.prod(shape) >= 1 << 18  # the cache would take too much memory
    numbers = normal.__wrapped__ if is_large else normal
    return numbers(tuple(shape), seed).astype(dtype)


@functools.lru_cache(maxsize=64)
def normal(shape, seed):
    """The numbers of `draw` in float64. Neighbouring tests often draw the same numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def qkv(lead=(2, 3), L=17, S=33, E=8, Ev=None, dtype=np.float32, seed=0):
    """Query, key and value with the same leading dimensions."""
    Ev = E if Ev is None else Ev
    shapes = ((*lead, L, E), (*lead, S, E), (*lead, S, Ev))
    return tuple(draw(shape, dtype, seed * 3 + n) for n, shape in enumerate(shapes))


def sdpa(*args, device, **options):
    return clattn.scaled_dot_product_attention(*args, device=device, **options)
