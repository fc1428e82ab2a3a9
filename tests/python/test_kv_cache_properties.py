# SPDX-License-Identifier: MIT
"""Random sequences of KVCache's calls, against the plain model.

Sizes are fixed and kinds of mask few: each combination is a program to build. Lengths, counts and
rows are data.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_pair import HQ, B, E, Pair
from support.data import draw
from support.random_calls import bounded

CAPACITY = 24
BOUNDS = st.one_of(st.none(), st.integers(0, CAPACITY), st.just(2**40))
EVERY = st.tuples(*[st.integers(0, CAPACITY)] * B)
CALLS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9), st.one_of(st.none(), EVERY)),
    st.tuples(st.just("append"), st.just(1), st.none()),
    st.tuples(st.just("attend"), st.integers(0, CAPACITY + 3), st.integers(0, 9999)),
    st.tuples(st.just("truncate"), st.one_of(st.integers(0, CAPACITY), EVERY)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("reorder"), st.tuples(*[st.integers(0, B - 1)] * B)),
)


def append(both, n, counts):
    """Counts above n, and what does not fit, are refused."""
    wanted = (n,) * B if counts is None else counts
    if max(wanted) <= n and both.model.fits(wanted):
        both.append(n, counts)
        return
    with pytest.raises(ValueError, match=r"counts|capacity|key"):
        both.cache.append(*both.tokens(n), counts)


def truncate(both, n):
    """To more than there is: refused."""
    limits = both.model.lengths if isinstance(n, tuple) else [both.model.length]
    wanted = n if isinstance(n, tuple) else (n,)
    if all(m <= limit for m, limit in zip(wanted, limits, strict=True)):
        both.truncate(n)
        return
    with pytest.raises(ValueError, match=r"\bn\b"):
        both.cache.truncate(n)


def attend(both, rows, options):
    given = dict(options)
    shape = given.pop("mask")
    if shape is not None:
        kind, kept = shape
        full = (B, HQ, rows, both.model.length)
        size = [1 if one else n for one, n in zip(kept, full, strict=True)]
        mask = draw(size, seed=both.seed)
        given["attn_mask"] = mask > -0.5 if kind == "bool" else np.where(mask > 1, -np.inf, mask)
        given["attn_mask"] = given["attn_mask"].astype(bool if kind == "bool" else np.float32)
    both.attend(rows, **given)


@st.composite
def options(draw_from):
    made = {"is_causal": draw_from(st.booleans()), "mask": None}
    kind = draw_from(st.sampled_from(["none", "none", "bool", "float"]))
    if kind != "none":
        made["mask"] = kind, draw_from(st.tuples(*[st.booleans()] * 4))
    if draw_from(st.booleans()):
        made["window"] = draw_from(BOUNDS), draw_from(BOUNDS)
    if draw_from(st.booleans()):
        made["scale"] = draw_from(st.floats(-1, 1, width=32))
    return made


@bounded
@given(
    calls=st.lists(CALLS, min_size=3, max_size=9),
    choices=st.lists(options(), min_size=3, max_size=3),
)
def test_random_calls(device, calls, choices):
    """After each the lengths, at the end the contents and an answer."""
    both = Pair(device, capacity=CAPACITY, EV=E)
    for name, *arguments in calls:
        if name == "append":
            append(both, *arguments)
        elif name == "truncate":
            truncate(both, *arguments)
        elif name in ("reset", "reorder"):
            getattr(both, name)(*arguments)
        else:
            rows, which = arguments
            attend(both, rows, choices[which % len(choices)])
        both.lengths_agree()
    both.contents_agree()
    attend(both, 2, choices[0])


@bounded
@given(counts=st.lists(EVERY, min_size=1, max_size=6), rows=st.integers(1, 9))
def test_a_batch_is_its_sequences(device, counts, rows):
    """Sequences of unequal progress answer as each in a cache of its own does."""
    together = Pair(device, capacity=CAPACITY * 6, EV=E)
    alone = [Pair(device, B=1, capacity=CAPACITY * 6, EV=E) for _ in range(B)]
    for taken in counts:
        key, value = together.tokens(CAPACITY)
        together.cache.append(key, value, taken)
        for b, count in enumerate(taken):
            last = slice(CAPACITY - count, None)
            alone[b].cache.append(key[b : b + 1, :, last], value[b : b + 1, :, last])
    query = together.queries(rows)
    got = together.cache.attend(query)
    for b, single in enumerate(alone):
        assert single.cache.length == together.cache.lengths[b]
        right = single.cache.attend(query[b : b + 1])
        np.testing.assert_allclose(got[b : b + 1], right, rtol=0, atol=2e-6)
