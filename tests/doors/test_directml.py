# SPDX-License-Identifier: MIT
"""clattn.directml.multihead_attention without masks: sources, bias, past and present, ranks.

Masks are in test_directml_masks.py. On every device, against the float64 reference.
"""

import itertools

import clattn
import numpy as np
import pytest
import references.directml as oracle
from references.attention import float16, float32
from references.directml import FLOATS, SOURCES, make
from support.checks import assert_close
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

each_source = looped("source", SOURCES)


def test_the_oracle_by_hand():
    """One query of 1, keys 0 and log 3 (weights 1/4 and 3/4), values 4 and 8."""
    key, value = np.array([[[0], [np.log(3)]]], "f4"), np.array([[[4], [8]]], "f4")
    call = {"query": np.ones((1, 1, 1), "f4"), "key": key, "value": value, "scale": 1}
    call["head_count"] = 1

    def answer(**more):
        return oracle.attention(call | more).ravel().tolist()

    assert answer() == pytest.approx([7])
    # bias: query 1 + 0, key 0 and log 3 both + 5 (no matter), values 4 and 8 both + 2
    assert answer(bias=np.array([0, 5, 2], "f4")) == pytest.approx([9])
    assert answer(bias=np.array([-1, 0, 0], "f4")) == pytest.approx([6])
    added = np.array([[[[np.log(3), 0]]]], "f4")
    assert answer(relative_position_bias=added) == pytest.approx([6])
    past = np.full((1, 1, 1, 1), np.log(4), "f4")
    more = {"past_key": past, "past_value": np.full((1, 1, 1, 1), 16, "f4")}
    assert answer(**more) == pytest.approx([(16 * 4 + 4 + 3 * 8) / 8])
    present = oracle.present(call | more | {"bias": np.array([0, 5, 2], "f4")})
    assert present[0].ravel().tolist() == pytest.approx([np.log(4), 5, 5 + np.log(3)])
    assert present[1].ravel().tolist() == [16, 6, 10]
    padded = {"mask": np.array([[1, 0]], "i4"), "mask_type": "boolean"}
    assert answer(**padded) == [4]
    assert answer(**padded, mask_filter_value=-np.log(3)) == pytest.approx([6])
    assert answer(mask=np.zeros((1, 2), "i4"), mask_type="boolean") == pytest.approx([7])


def test_the_oracle_stacks_as_numpy_does():
    """Heads are outer, then which of the three, then the head size."""
    stacked = draw((2, 5, 3, 3, 4))
    call = {"stacked_query_key_value": stacked, "scale": 0.4, "head_count": 3}
    q, k, v = (stacked[:, :, :, n].reshape(2, 5, 12) for n in range(3))
    apart = {"query": q, "key": k, "value": v, "scale": 0.4, "head_count": 3}
    np.testing.assert_array_equal(oracle.attention(call), oracle.attention(apart))


@each_source
@HALF_AND_SINGLE
@looped("bias", [False, True], ids=["no bias", "bias"])
@looped("past", [None, 3], ids=["no past", "past"])
@pytest.mark.usefixtures("reference_kernel")
def test_sources(device, source, dtype, bias, past):
    call = make(source, dtype=dtype, bias=bias, P=past)
    check_alone(call, device=device)
    check_directml(call, device=device)


@each_source
def test_sources_with_the_chosen_kernel(device, source):
    for call in make(source, L=17, S=13), make(source, L=17, S=13, bias=True, P=24):
        check_alone(call, device=device)
        check_directml(call, device=device)


def test_half_precision_with_the_chosen_kernel(device):
    check_alone(make(L=17, S=13, dtype=float16), device=device)
    check_directml(
        make("stacked_query_key_value", L=33, dtype=float16, bias=True, P=7), device=device
    )


SHAPES = [  # L, S, P
    (1, 1, None), (1, 199, 1), (1, 0, 13), (32, 13, None), (17, 1, 199), (31, 40, None),
    (40, 13, 0),
]  # fmt: skip


@looped("shape", SHAPES, ids=str)
def test_shapes(device, kernel, shape):
    L, S, P = shape
    check_directml(make(L=L, S=S, P=P), device=device)


@pytest.mark.usefixtures("reference_kernel")
@looped("sizes", [(8, 5), (1, 1), (5, 8), (3, 16)], ids=str)
@looped("heads", [1, 2, 5])
def test_head_sizes(device, heads, sizes):
    E, Ev = sizes
    for source in ("separate", "stacked_query_key"):
        check_directml(make(source, H=heads, E=E, Ev=Ev, P=2, bias=True), device=device)


def test_heads_and_stacks_lie_as_said(device):
    """A stacked tensor, views of it and copies of the views give the same numbers."""
    call = make("stacked_query_key_value", L=17, H=3, P=24, bias=True)
    stacked = call.pop("stacked_query_key_value")
    right = check_directml(call | {"stacked_query_key_value": stacked}, device=device)
    q, k, v = (stacked[:, :, :, n].reshape(2, 17, 24) for n in range(3))
    others = [
        {"query": q, "key": k, "value": v},
        {"stacked_query_key": stacked[:, :, :, :2], "value": v},
        {"query": q, "stacked_key_value": stacked[:, :, :, 1:]},
        {"stacked_query_key_value": np.ascontiguousarray(stacked[..., ::-1])[..., ::-1]},
    ]
    for other in others:
        got = check_directml(call | other, device=device)
        assert (np.abs(got - right) <= 2 * oracle.tolerance(call | other)).all()


@pytest.mark.usefixtures("reference_kernel")
def test_bias_goes_to_what_is_new_alone(device):
    """The bias of query, key and value alone; then a large bias, which must not reach the past."""
    size = 2 * 8
    for part in range(3):
        call = make(P=3)
        call["bias"] = np.zeros(3 * size, np.float32)
        call["bias"][part * size : (part + 1) * size] = draw((size,), seed=9)
        check_directml(call, device=device)
    call = make(P=3, bias=True)
    call["bias"] *= 100
    answer = run(call, device=device, return_present=True)
    np.testing.assert_array_equal(answer.present_key[:, :, :3], call["past_key"])
    np.testing.assert_array_equal(answer.present_value[:, :, :3], call["past_value"])
    assert np.abs(answer.present_value[:, :, 3:]).max() > 100


@HALF_AND_SINGLE
@pytest.mark.usefixtures("reference_kernel")
def test_present_is_rounded_once(device, dtype):
    """A sum between two numbers of the type is rounded to the nearer one, a tie to the even one."""
    call = make(L=40, S=200, dtype=dtype, bias=True)
    few = np.arange(-8, 8, dtype=dtype)
    call["key"] = np.resize(few * 0.5, call["key"].shape).astype(dtype)
    call["bias"] = np.resize(few * 2.0**10 * (2.0**13 if dtype == float32 else 1), 48).astype(dtype)
    answer = run(call, device=device, return_present=True)
    for got, right in zip(answer[1:], oracle.present(call), strict=True):
        assert got.tobytes() == right.tobytes()


def test_present_is_what_the_next_call_takes(device):
    """Three calls that hand the cache on give the result of one call with all keys."""
    whole = make(L=1, S=29, B=2)
    cuts, past = (0, 13, 14, 29), {}
    for start, end in itertools.pairwise(cuts):
        new = {name: whole[name][:, start:end] for name in ("key", "value")}
        answer = run(whole | new | past, device=device, return_present=True)
        past = {"past_key": answer.present_key, "past_value": answer.present_value}
    assert past["past_key"].shape == (2, 2, 29, 8)
    compare(whole, answer.output, device=device)


@looped("extra", [1, 2])
@pytest.mark.usefixtures("reference_kernel")
def test_leading_ones(device, extra):
    """Each tensor alone has rank 3 to 5; the output has the rank of the query."""
    ones = (1,) * extra
    call = make(bias=True, P=3, relative_position_bias=draw((2, 2, 5, 10), seed=8))
    names = [n for n in FLOATS if n in call and n != "bias"]
    for name in names:
        if call[name].ndim + extra <= 5:
            given = call | {name: call[name].reshape(*ones, *call[name].shape)}
            rank = 3 + extra if name == "query" else 3
            assert check_directml(given, device=device).ndim == rank
    every = {n: call[n].reshape((1,) * (5 - call[n].ndim) + call[n].shape) for n in names}
    for bias_rank in range(1, 6):
        bias = call["bias"].reshape((1,) * (bias_rank - 1) + call["bias"].shape)
        assert check_directml(call | every | {"bias": bias}, device=device).ndim == 5
    stacked = make("stacked_query_key", bias=True, P=1)
    stacked["value"] = stacked["value"].reshape(*ones, *stacked["value"].shape)
    assert check_directml(stacked, device=device).ndim == 3


RELATIVE = [(2, 2, 5, 10), (1, 2, 5, 10), (2, 1, 5, 10), (1, 1, 5, 10), (1, 1, 1, 10), (1, 2, 5, 1),
            (2, 2, 1, 1), (1, 1, 1, 1), (1, 2, 2, 5, 10), (1, 1, 2, 5, 10),
            (1, 2, 1, 1, 10)]  # fmt: skip


@HALF_AND_SINGLE
@pytest.mark.usefixtures("reference_kernel")
def test_relative_position_bias(device, dtype):
    """Broadcasts to (B, H, L, T), T with the past; rank 5 with a leading 1."""
    for shape in RELATIVE:
        added = draw(shape, dtype, 7)
        check_directml(make(P=3, dtype=dtype, relative_position_bias=added), device=device)
        check_directml(
            make(P=3, dtype=dtype, bias=True, relative_position_bias=added), device=device
        )


def test_relative_position_bias_with_the_chosen_kernel(device):
    added = draw((1, 2, 33, 200), seed=7)
    check_alone(make(L=33, S=200, relative_position_bias=added), device=device)
    check_directml(make(L=33, S=187, P=13, relative_position_bias=added, bias=True), device=device)


@looped("garbage", [np.nan, np.inf], ids=str)
@pytest.mark.usefixtures("reference_kernel")
def test_minus_infinity_in_the_relative_position_bias_excludes(device, garbage):
    """A key at -inf may hold anything; a row without any key is zero."""
    added = draw((1, 1, 5, 10), seed=7)
    added[..., [2, 7]] = -np.inf
    added[..., 4, :] = -np.inf
    call = make(P=3, relative_position_bias=added)
    right, allowed = oracle.attention(call), oracle.tolerance(call)
    call["key"][:, 4] = call["value"][:, 4] = garbage  # key 7, behind a past of 3
    call["past_key"][:, :, 2] = call["past_value"][:, :, 2] = garbage
    result = run(call, device=device).output
    assert (np.abs(result - right) <= allowed).all()
    assert not result[:, 4].any()


@pytest.mark.usefixtures("reference_kernel")
def test_nan_stays_visible(device):
    """A NaN in a query shows in its row, in a value in its column, in a key in its whole head."""
    call = make(H=2, P=3)
    call["query"][0, 3, 2] = np.nan
    result = check_directml(call, device=device)
    assert np.isnan(result).sum() == 8 and np.isnan(result[0, 3, :8]).all()
    call = make(H=2, P=3)
    call["past_value"][1, 1, 2, 5] = np.nan
    result = check_directml(call, device=device)
    assert np.isnan(result).sum() == 5 and np.isnan(result[1, :, 8 + 5]).all()
    call = make(H=2, P=3)
    call["key"][1, 6, 3] = np.nan
    assert np.isnan(check_directml(call, device=device)).sum() == 5 * 8


SCALES = [0.3, 0, 1, -0.7, 5.0, np.float32(0.5), np.float64(0.25), np.int64(2)]


@looped("scale", SCALES, ids=repr)
def test_scale(device, scale):
    """The scale multiplies the scores for every head size; it has no default."""
    check_directml(make(L=17, S=13, scale=scale), device=device)


EMPTIES = {
    "no batch": {"B": 0}, "no queries": {"L": 0}, "no keys": {"S": 0}, "no past": {"P": 0},
    "only a past": {"S": 0, "P": 3}, "neither": {"S": 0, "P": 0}, "no value columns": {"Ev": 0},
    "no head size": {"E": 0}, "no head size, past": {"E": 0, "P": 3, "bias": True},
    "nothing": {"B": 0, "L": 0, "S": 0, "E": 0, "Ev": 0},
}  # fmt: skip


@looped("sizes", EMPTIES.values(), ids=EMPTIES)
@pytest.mark.usefixtures("reference_kernel")
def test_empty_dimensions(device, sizes):
    """Results are empty, zeros without keys, or the mean of the values without a head size."""
    result = check_directml(make(**sizes), device=device)
    if sizes.get("S") == 0 and not sizes.get("P"):
        assert not result.any()
    stacked = {"stacked_query_key": ("B", "L", "P", "Ev", "E"),
               "stacked_query_key_value": ("B", "L", "P", "E")}  # fmt: skip
    for source, allowed in stacked.items():
        if set(sizes) <= set(allowed):
            check_directml(make(source, **sizes), device=device)


@looped("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("reference_kernel")
def test_layouts(device, layout):
    """All tensors lie in the same unusual layout."""
    added = draw((1, 2, 5, 10), seed=7)
    for source in SOURCES:
        S = 5 if source in ("stacked_query_key", "stacked_query_key_value") else 7
        call = make(source, P=3, bias=True, relative_position_bias=added[..., : S + 3])
        for name in FLOATS:
            if name in call and not (layout.__name__ in ("transposed", "columns_first",
                                     "negative_rows") and call[name].ndim < 3):  # fmt: skip
                call[name] = layout(call[name])
        check_directml(call, device=device)


@pytest.mark.usefixtures("reference_kernel")
def test_zero_strides(device):
    """Each tensor repeats one batch, one head or one number; then all of them do."""
    call = make(P=3, bias=True)
    one = {
        "query": np.broadcast_to(call["query"][:1, :1], call["query"].shape),
        "key": np.broadcast_to(call["key"][..., :1], call["key"].shape),
        "value": np.broadcast_to(call["value"][:1], call["value"].shape),
        "bias": np.broadcast_to(call["bias"][:1], call["bias"].shape),
        "past_key": np.broadcast_to(call["past_key"][:1, :1], call["past_key"].shape),
        "relative_position_bias": np.broadcast_to(np.float32(0.5), (2, 2, 5, 10)),
    }
    for name in one:
        check_directml(call | {name: one[name]}, device=device)
    check_directml(call | one, device=device)


@looped("layout", ODD, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("reference_kernel")
def test_odd_layouts(device, layout):
    call = make(P=3, bias=True, relative_position_bias=draw((1, 2, 5, 10), seed=7))
    for name in FLOATS:
        if name in call:
            check_directml(call | {name: layout(call[name])}, device=device)


def test_the_output_is_a_named_tuple(device):
    call = make()
    answer = run(call, device=device, return_present=True)
    assert isinstance(answer, tuple)
    assert type(answer).__name__ == "MultiheadAttentionOutput"
    assert answer._fields == ("output", "present_key", "present_value")
    output, key, value = answer
    assert output is answer.output and key is answer.present_key and value is answer.present_value
    for array, given in zip(answer, ("query", "key", "value"), strict=True):
        assert not np.shares_memory(array, call[given])
    named = {n: a for n, a in call.items() if n not in ("query", "key", "value")}
    tensors = (call[n] for n in ("query", "key", "value"))
    again = clattn.directml.multihead_attention(*tensors, **named, device=device)
    np.testing.assert_array_equal(again.output, output)
    assert_close(again.output, *oracle.judged(call))
