# SPDX-License-Identifier: MIT
"""The masks of clattn.directml.multihead_attention: all types, shapes, and what padding does.

Padding adds mask_filter_value to a score; it excludes nothing.
"""

import itertools

import numpy as np
import pytest
import references.directml as oracle
from references.attention import float16
from references.directml import SOURCES, make
from support.data import draw
from support.directml_calls import (
    HALF_AND_SINGLE,
    check_alone,
    check_directml,
    compare,
    run,
)
from support.layouts import LAYOUTS, ODD
from support.loops import looped

pytestmark = pytest.mark.tensors

LENGTH, END_START = "key_sequence_length", "key_sequence_end_start"
PACKED = "key_query_sequence_length_start_end"
B, H, L, P, T = 2, 3, 5, 3, 10  # of most calls here; S = T - P
INT_MIN, INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max

quick = pytest.mark.usefixtures("reference_kernel")


def int32(*numbers, shape=None):
    array = np.array(numbers, np.int32)
    return array if shape is None else array.reshape(shape)


def flags(shape, seed=0):
    """Zeros and ones, about half each; a row of three or more keys keeps at least one."""
    keep = draw(shape, seed=seed) > 0
    if shape[-1] > 2:
        keep[..., shape[-1] // 3] = True
    return keep.astype(np.int32)


def packed(lengths, batch, length, total):
    """Key lengths, query starts and their end, key starts and their end, without gaps."""
    queries, keys = np.arange(batch + 1) * length, np.arange(batch + 1) * total
    return np.concatenate([lengths, queries, keys]).astype(np.int32)


def masked(mask, mask_type, **sizes):
    return make(**{"B": B, "H": H, "L": L, "S": T - P, "P": P} | sizes, mask=mask,
                mask_type=mask_type)  # fmt: skip


def test_the_oracle_by_hand():
    """Which of four keys are padded, of two batches."""
    cases = [
        ("boolean", int32(1, 0, 2, 1, 0, 0, 1, -1, shape=(2, 4)), ["0100", "1100"]),
        (LENGTH, int32(0, 3), ["1111", "0001"]),
        (LENGTH, int32(4, 1, shape=(1, 2)), ["0000", "0111"]),
        (END_START, int32(3, 4, 1, 0, shape=(2, 2)), ["1001", "0000"]),
        (END_START, int32(1, 2, 3, 2), ["1111", "1111"]),
        (PACKED, int32(2, 4, 0, 1, 2, 0, 2, 6), ["0011", "0000"]),
    ]
    for kind, mask, right in cases:
        padded = oracle.padding({"mask": mask, "mask_type": kind}, 2, 1, 4)
        padded = np.broadcast_to(padded, (2, 1, 1, 4))[:, 0, 0]
        assert ["".join(str(int(p)) for p in row) for row in padded] == right, kind


BOOLEAN = [(B, T), (1, B, T), (B, L, T)]
BOOLEAN += itertools.product(*((1, n) for n in (B, H, L, T)))
BOOLEAN += [(1, *shape) for shape in BOOLEAN[3:]]


@quick
@HALF_AND_SINGLE
def test_boolean_shapes(device, dtype):
    """Ranks 2 to 5: 35 shapes."""
    for shape in BOOLEAN:
        check_directml(masked(flags(shape), "boolean", dtype=dtype), device=device)


@quick
def test_boolean_shapes_that_could_be_read_two_ways(device):
    """One batch, or as many batches as queries: rank 2 is (B, T), rank 3 (B, L, T) or (1, B, T)."""
    for shape in [(1, T), (1, 1, T), (1, L, T)]:
        check_directml(masked(flags(shape), "boolean", B=1), device=device)
    for shape in [(L, T), (1, L, T), (L, L, T)]:
        check_directml(masked(flags(shape), "boolean", B=L), device=device)
    for shape in [(1, T), (1, 1, T)]:
        check_directml(masked(flags(shape), "boolean", B=1, L=1), device=device)
    check_directml(masked(flags((T, T)), "boolean", B=T, L=T), device=device)


@quick
def test_anything_but_zero_attends(device):
    """Also a number whose low bits are all 0."""
    numbers = int32(1, 2, -1, 255, 256, 65536, 1 << 24, INT_MIN, INT_MAX, 0)
    for shape in [(B, T), (B, L, T), (1, H, 1, T), (1, B, H, L, T)]:
        mask = np.broadcast_to(numbers, shape).copy()
        right = run(masked((mask != 0).astype(np.int32), "boolean"), device=device).output
        got = check_directml(masked(mask, "boolean"), device=device)
        np.testing.assert_array_equal(got, right)


@quick
@HALF_AND_SINGLE
def test_key_sequence_length(device, dtype):
    """Every pair of lengths from 0 to T, which counts the past; (B,), (1, B), more leading 1s."""
    for first in range(T + 1):
        second = T - first if first % 2 else first
        call = masked(int32(first, second), LENGTH, dtype=dtype)
        check_directml(call, device=device)
    for rank in range(1, 6):
        shape = (1,) * (rank - 1) + (B,)
        check_directml(masked(int32(7, 2, shape=shape), LENGTH, dtype=dtype), device=device)
    check_directml(masked(int32(7), LENGTH, B=1), device=device)
    check_directml(masked(int32(7, shape=(1, 1)), LENGTH, B=1), device=device)


@quick
@HALF_AND_SINGLE
def test_key_sequence_end_start(device, dtype):
    """Ends, then starts, in every order from 0 to T; (2, B) and (2·B,), leading 1s."""
    for end, start in itertools.product((0, 1, 4, 9, T), repeat=2):
        mask = int32(end, T - end, start, 0)
        check_directml(masked(mask, END_START, dtype=dtype), device=device)
    for shape in [(2, B), (2 * B,), (1, 2 * B), (1, 2, B), (1, 1, 1, 2, B), (1, 1, 1, 1, 2 * B)]:
        check_directml(
            masked(int32(8, 9, 1, 4, shape=shape), END_START, dtype=dtype), device=device
        )
    for shape in [(2, 1), (2,), (1, 2)]:
        check_directml(masked(int32(8, 3, shape=shape), END_START, B=1), device=device)


PACKS = [  # B key lengths; query starts and the last end (at most B·L); key starts and end (B·T)
    (10, 10, 0, 5, 10, 0, 10, 20),
    (7, 2, 0, 5, 10, 0, 10, 20),
    (7, 2, 0, 4, 5, 0, 7, 9),
    (7, 2, 0, 0, 0, 0, 0, 0),
    (0, 1, 3, 3, 3, 20, 20, 20),
    (1, 0, 0, 10, 10, 1, 1, 20),
    (0, 0, 10, 10, 10, 0, 0, 1),
]


@quick
@HALF_AND_SINGLE
def test_packed_lengths(device, dtype):
    """Only the key lengths mask; the running totals do not matter."""
    for numbers in PACKS:
        call = masked(int32(*numbers), PACKED, dtype=dtype)
        got = check_directml(call, device=device)
        alone = masked(int32(*numbers[:2]), LENGTH, dtype=dtype)
        np.testing.assert_array_equal(got, run(alone, device=device).output)
    for rank in range(1, 6):
        shape = (1,) * (rank - 1) + (3 * B + 2,)
        check_directml(masked(int32(*PACKS[2], shape=shape), PACKED, dtype=dtype), device=device)
    check_directml(masked(int32(4, 0, 5, 0, 10), PACKED, B=1), device=device)


@looped("source", SOURCES)
@quick
def test_masks_with_every_source(device, source):
    """With bias, a past and a relative position bias before the mask."""
    S = 5 if source in ("stacked_query_key", "stacked_query_key_value") else 7
    total = S + 3
    masks = {
        "boolean": flags((2, 5, total)),
        LENGTH: int32(total - 1, 4),
        END_START: int32(total, 6, 2, 1),
        PACKED: packed([6, total], 2, 5, total),
    }
    for kind, mask in masks.items():
        added = draw((1, 2, 5, total), seed=7)
        check_directml(make(source, P=3, bias=True, mask=mask, mask_type=kind), device=device)
        check_directml(make(source, P=3, bias=True, relative_position_bias=added, mask=mask,
                   mask_type=kind), device=device)  # fmt: skip


@looped("sizes", [(1, 200, 0), (15, 13, 0), (33, 40, 160), (40, 1, 12)], ids=str)
def test_masks_with_the_chosen_kernel(device, sizes):
    """Tiles and rests, lengths on both sides of their edges; present outputs with one kind."""

    def alone(**masked):
        check_alone(make(L=L, S=S, P=P, **masked), device=device)

    L, S, P = sizes
    T = S + P
    for ends in ((T, 1), (T // 2, T - 1), (16, 33), (0, 64)):
        ends = np.minimum(ends, T)
        alone(mask=int32(*ends), mask_type=LENGTH)
        starts = np.minimum((3, 32), ends)
        mask = np.stack([ends, starts]).astype(np.int32)
        alone(mask=mask, mask_type=END_START)
    alone(mask=flags((2, T)), mask_type="boolean")
    check_directml(make(L=L, S=S, P=P, mask=flags((2, L, T)), mask_type="boolean"), device=device)


def test_half_precision_masks_with_the_chosen_kernel(device):
    for kind, mask in ((LENGTH, int32(100, 200)), ("boolean", flags((2, 200)))):
        check_alone(make(L=33, S=200, dtype=float16, mask=mask, mask_type=kind), device=device)


ALL_PADDED = {
    "boolean": np.zeros((B, T), np.int32),
    LENGTH: int32(0, 0),
    END_START: int32(0, 3, 0, 8, shape=(2, 2)),
    PACKED: int32(0, 0, 0, 0, 0, 0, 0, 0),
}


@quick
@HALF_AND_SINGLE
@looped("kind", ALL_PADDED)
def test_rows_padded_throughout_are_the_softmax_of_their_own_scores(device, kind, dtype):
    """All scores of such a row are shifted alike, which changes only their rounding."""
    call = masked(ALL_PADDED[kind], kind, dtype=dtype)
    got = check_directml(call, device=device)
    plain = {n: a for n, a in call.items() if n not in ("mask", "mask_type")}
    right, allowed = oracle.attention(plain), oracle.tolerance(call)
    assert (np.abs(got.astype(np.float64) - right) <= allowed).all()
    # The tolerance that the filter value asks for is far from letting a mean or zeros pass.
    mean = oracle.attention(plain | {"scale": 0})
    assert min(np.abs(right).max(), np.abs(mean - right).max()) > 10 * allowed.max()


def test_some_rows_padded_throughout_beside_others(device, kernel):
    """Whole batches, rows and heads are padded; every row counts by itself."""
    keep = flags((B, H, L, T))
    keep[0, 1], keep[1, 0, 2:4], keep[1, 2, :, :9] = 0, 0, 0
    check_directml(masked(keep, "boolean"), device=device)
    check_directml(masked(int32(0, 6), LENGTH), device=device)


FILTERS = [-10000.0, -1e5, -65504, -1000, -5, -0.5, 0, 0.0, 3, 2.5, 200.0, 1e4, np.float32(-7.25),
           np.int64(-30)]  # fmt: skip


@quick
@HALF_AND_SINGLE
@looped("value", FILTERS, ids=repr)
def test_filter_values(device, value, dtype):
    """The value is added in float32, also for float16 tensors: negative, zero, positive, large."""
    masks = {"boolean": flags((B, L, T)), LENGTH: int32(0, 6), END_START: int32(0, 7, 0, 2),
             PACKED: packed([4, T], B, L, T)}  # fmt: skip
    for kind, mask in masks.items():
        check_directml(masked(mask, kind, dtype=dtype, mask_filter_value=value), device=device)


@quick
@HALF_AND_SINGLE
def test_a_filter_value_at_the_end_of_float32(device, dtype):
    """Such a value is finite, so allowed; beside other keys, padded keys have no weight left."""
    for value in (-3e38, float(np.finfo(np.float32).min)):
        call = masked(int32(4, 9), LENGTH, dtype=dtype, mask_filter_value=value)
        got = check_directml(call, device=device)
        compare(call | {"mask_filter_value": -10000.0}, got, device=device)


def test_the_default_filter_value(device):
    call = make(L=17, S=13, mask=flags((2, 13)), mask_type="boolean")
    right = run(call | {"mask_filter_value": -10000.0}, device=device).output
    np.testing.assert_array_equal(run(call, device=device).output, right)
    check_alone(call | {"mask": np.zeros((2, 13), np.int32)}, device=device)


@quick
@looped("place", ["key", "value"])
def test_padding_does_not_exclude(device, place):
    """A padded key is attended with a shifted score, so its NaN stays visible."""
    call = masked(int32(T, 6), LENGTH)
    call[place][1, T - P - 1, 2] = np.nan  # the last key of the second batch; first head
    result = check_directml(call, device=device)
    assert np.isnan(result).sum() == (L * 8 if place == "key" else L)
    assert np.isnan(result[1, :, 2]).all()


@quick
def test_minus_infinity_excludes_before_padding(device):
    """A key at -inf in the relative position bias stays out, padded or not."""
    added = draw((1, 1, L, T), seed=7)
    added[..., 1::3] = -np.inf
    for mask in (int32(4, 9), int32(0, 0)):
        call = masked(mask, LENGTH, relative_position_bias=added)
        right, allowed = oracle.attention(call), oracle.tolerance(call)
        call["value"][:, (4 - P) :: 3] = np.nan  # keys 4, 7, …
        call["past_value"][:, :, 1] = np.nan
        result = run(call, device=device).output
        assert (np.abs(result - right) <= allowed).all()


@quick
@looped("layout", [*LAYOUTS, *ODD], ids=lambda f: f.__name__)
def test_layouts(device, layout):
    """Masks have any strides, and odd layouts too."""
    masks = {"boolean": (flags((B, L, T)), flags((B, T)), flags((1, H, 1, T))),
             END_START: (int32(8, 9, 1, 4, shape=(2, B)),),
             LENGTH: (int32(8, 9, shape=(1, 1, B)),),
             PACKED: (int32(*PACKS[2], shape=(1, 1, 8)),)}  # fmt: skip
    for kind, given in masks.items():
        for mask in given:
            if layout.__name__ == "transposed" and mask.ndim < 3:
                laid = np.asfortranarray(mask)
            else:
                laid = layout(mask)
            check_directml(masked(laid, kind), device=device)


@quick
def test_zero_strides(device):
    for shape in [(B, T), (B, L, T), (B, H, L, T)]:
        for axis in range(len(shape)):
            first = tuple(slice(0, 1) if n == axis else slice(None) for n in range(len(shape)))
            mask = np.broadcast_to(flags(shape)[first], shape)
            check_directml(masked(mask, "boolean"), device=device)
    check_directml(masked(np.broadcast_to(np.int32(4), (1, B)), LENGTH), device=device)


EMPTIES = {  # sizes, then a mask of each type
    "no batch": ({"B": 0}, np.zeros((0, 7), "i4"), int32(), int32(), int32(0, 0)),
    "no queries": ({"L": 0}, flags((2, 7)), int32(3, 7), int32(3, 7, 0, 2),
                   packed([3, 7], 2, 0, 7)),
    "no keys": ({"S": 0}, flags((2, 0)), int32(0, 0), int32(0, 0, 0, 0), packed([0, 0], 2, 5, 0)),
    "only a past": ({"S": 0, "P": 3}, flags((2, 3)), int32(1, 3), int32(1, 3, 0, 2),
                    packed([1, 3], 2, 5, 3)),
    "no head size": ({"E": 0}, flags((2, 7)), int32(3, 7), int32(3, 7, 0, 2),
                     packed([3, 7], 2, 5, 7)),
}  # fmt: skip


@quick
@looped("name", EMPTIES)
def test_empty_dimensions(device, name):
    sizes, *masks = EMPTIES[name]
    for kind, mask in zip(("boolean", LENGTH, END_START, PACKED), masks, strict=True):
        check_directml(make(**sizes, mask=mask, mask_type=kind), device=device)
