# SPDX-License-Identifier: MIT
"""What random calls are drawn from, with the settings of hypothesis.

Each run has the same few examples. CLATTN_FUZZ says how many new ones each test of random calls
tries instead. Examples that failed are kept in .hypothesis, and tried first the next time.
"""

import os

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from support.processes import ROOT

LONG = int(os.environ.get("CLATTN_FUZZ", 0))


def examples(count, share=1):
    """Settings for `count` examples; in a long run for a `share` of those that CLATTN_FUZZ says."""
    return settings(
        max_examples=max(1, int(LONG * share)) if LONG else count,
        deadline=None,
        derandomize=not LONG,  # the same cases in every run: red stays red
        database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis") if LONG else None,
        print_blob=bool(LONG),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


bounded = examples(40)
BOUNDS = st.one_of(st.none(), st.integers(0, 40), st.sampled_from([96, 2**31, 2**40]))


def shrink(draw_from, shape):
    """A shape that broadcasts to `shape`: some dimensions 1, some leading ones left out."""
    kept = [1 if draw_from(st.booleans()) else n for n in shape]
    return tuple(kept[draw_from(st.integers(0, len(kept))) :])


def relay(draw_from, array):
    """The same values, lying some other way."""
    kind = draw_from(st.sampled_from(["as is", "reversed", "transposed", "cut", "one off"]))
    if kind == "reversed":
        axis = draw_from(st.integers(0, array.ndim - 1))
        return np.flip(np.flip(array, axis).copy(), axis)
    if kind == "transposed":
        axes = draw_from(st.permutations(range(array.ndim)))
        return array.transpose(axes).copy().transpose(np.argsort(axes))
    if kind == "cut":
        big = np.zeros([n + 3 for n in array.shape], array.dtype)
        view = big[tuple(slice(2, 2 + n) for n in array.shape)]
        view[...] = array
        return view
    if kind == "one off":
        flat = np.zeros(array.size + 1, array.dtype)
        flat[1:] = array.ravel()
        return flat[1:].reshape(array.shape)
    return array
