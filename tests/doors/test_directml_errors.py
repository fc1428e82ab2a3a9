# SPDX-License-Identifier: MIT
"""clattn.directml: wrong arguments are refused by name, before any OpenCL call.

Each row breaks one rule. It replaces arguments of a call that is right; None leaves one out.
"""

import itertools
import re

import clattn
import numpy as np
import pytest
import references.directml as oracle
from references.directml import make
from support.data import draw
from support.refusals import (
    cases,
    check_without_opencl,
    of,
    refuse,
    refuse_without_opencl,
    wrong,
    wrong_arrays,
    wrong_shapes,
)

pytestmark = pytest.mark.usefixtures("reference_kernel")

NAN, INF = float("nan"), float("inf")
f16, f32, f64 = np.float16, np.float32, np.float64
B, L, S, H, E, EV, P = 2, 5, 7, 2, 8, 6, 3
T = P + S
LENGTH, END_START = "key_sequence_length", "key_sequence_end_start"
PACKED = "key_query_sequence_length_start_end"
TENSORS = {
    "query": (B, L, H * E),
    "key": (B, S, H * E),
    "value": (B, S, H * EV),
    "stacked_query_key": (B, L, H, 2, E),
    "stacked_key_value": (B, S, H, 2, E),
    "stacked_query_key_value": (B, L, H, 3, E),
    "bias": (2 * H * E + H * EV,),
    "relative_position_bias": (B, H, L, T),
    "past_key": (B, H, P, E),
    "past_value": (B, H, P, EV),
}
ROLES = {
    "query": ("query", "stacked_query_key", "stacked_query_key_value"),
    "key": ("key", "stacked_query_key", "stacked_key_value", "stacked_query_key_value"),
    "value": ("value", "stacked_key_value", "stacked_query_key_value"),
}


def correct():
    """Separate sources, a bias, a past of 3 and a relative position bias."""
    return make(B=B, L=L, S=S, H=H, E=E, Ev=EV, P=P, bias=True,
                relative_position_bias=draw((B, H, L, T), seed=6))  # fmt: skip


def f(name, *shape):
    return {name: of(f32, *shape)}


def only(**tensors):
    """Other sources, without the optional tensors whose shapes would have to follow."""
    nothing = dict.fromkeys(TENSORS)
    return nothing | {name: of(f32, *shape) for name, shape in tensors.items()}


def masked(mask_type, *numbers, shape=None):
    mask = np.array(numbers, np.int32)
    return {"mask": mask if shape is None else mask.reshape(shape), "mask_type": mask_type}


def zeros(mask_type, *shape):
    return {"mask": of(np.int32, *shape), "mask_type": mask_type}


def wrong_masks(mask_type, *shapes):
    return [(f"{mask_type} of {s}", ValueError, "mask", zeros(mask_type, *s)) for s in shapes]


QK, KV, QKV = "stacked_query_key", "stacked_key_value", "stacked_query_key_value"
RPB, FILTER, HEADS = "relative_position_bias", "mask_filter_value", "head_count"
# Good key lengths; what follows them in PACKED is wrong.
GOOD = (4, 10)
V16 = (B, L, 16)  # a value beside a stacked query and key

ROWS = [  # (what is wrong, exception, pattern in the message, changed arguments)
    # Shapes of the sources.
    *wrong_shapes("query", f32, (L, H * E), (1, 1, 1, B, L, H * E), (2, B, L, H * E),
                  (2, 1, B, L, H * E), (0, B, L, H * E), (B, L, H, E)),
    ("query does not divide", ValueError, "query|head_count", f("query", B, L, H * E + 1)),
    *wrong_shapes("key", f32, (S, H * E), (1, 1, 1, B, S, H * E), (1, 3, B, S, H * E),
                  (3, S, H * E), (1, S, H * E), (B, S, H * E + H)),
    *wrong_shapes("value", f32, (S, H * EV), (2, B, S, H * EV), (1, S, H * EV), (B, S + 1, H * EV)),
    ("value does not divide", ValueError, "value|head_count", f("value", B, S, H * EV + 1)),
    ("query and key has rank 4", ValueError, QK, only(**{QK: (B, L, H * 2, E), "value": V16})),
    ("query and key has rank 6", ValueError, QK,
     only(**{QK: (1, B, L, H, 2, E), "value": V16})),
    ("query and key stacks three", ValueError, QK, only(**{QK: (B, L, H, 3, E), "value": V16})),
    ("query and key stacks outside", ValueError, f"{QK}|{HEADS}",
     only(**{QK: (B, L, 3, 2, E), "value": V16})),
    ("stacked, value has other keys", ValueError, "value",
     only(**{QK: (B, L, H, 2, E), "value": (B, S, 16)})),
    ("stacked, value has another batch", ValueError, "value",
     only(**{QK: (B, L, H, 2, E), "value": (1, L, 16)})),
    ("key and value has rank 3", ValueError, KV, only(**{"query": (B, L, 16), KV: (B, S, 32)})),
    ("key and value stacks one", ValueError, KV, only(**{"query": V16, KV: (B, S, H, 1, E)})),
    ("key and value has other heads", ValueError, f"{KV}|{HEADS}",
     only(**{"query": (B, L, 24), KV: (B, S, 3, 2, E)})),
    ("key and value has another E", ValueError, f"{KV}|query",
     only(**{"query": (B, L, 16), KV: (B, S, H, 2, E + 1)})),
    ("key and value has another batch", ValueError, f"{KV}|query",
     only(**{"query": (B, L, 16), KV: (3, S, H, 2, E)})),
    ("all three has rank 4", ValueError, QKV, only(**{QKV: (B, L, H * 3, E)})),
    ("all three stacks two", ValueError, QKV, only(**{QKV: (B, L, H, 2, E)})),
    ("all three has other heads", ValueError, f"{QKV}|{HEADS}", only(**{QKV: (B, L, 4, 3, E)})),
    ("all three stacks before heads", ValueError, QKV, only(**{QKV: (B, L, 3, H, E)})),
    # Bias, relative position bias, past.
    ("bias has rank 0", ValueError, "bias", {"bias": of(f32)}),
    *wrong_shapes("bias", f32, (1, 1, 1, 1, 1, 44), (2, 44), (43,), (48,), (1,), (44, 1)),
    *wrong_shapes(RPB, f32, (H, L, T), (1, 1, B, H, L, T), (2, B, H, L, T), (B, H, L, S),
                  (B, H, T, L), (B, 3, L, T), (3, 1, L, T), (B, H, 0, T)),
    ("past_key alone", ValueError, "past_value", {"past_value": None, RPB: None}),
    ("past_value alone", ValueError, "past_key", {"past_key": None, RPB: None}),
    *wrong_shapes("past_key", f32, (B, P, H * E), (1, 1, B, H, P, E), (2, B, H, P, E), (1, H, P, E),
                  (B, 1, P, E), (B, H, P, E + 1), (B, P, H, E)),
    *wrong_shapes("past_value", f32, (B, P, H * EV), (3, B, H, P, EV)),
    ("past_value has another length", ValueError, "past_value|past_key",
     f("past_value", B, H, P + 1, EV)),
    *wrong_shapes("past_value", f32, (B, H, P, E), (3, H, P, EV)),
    # Masks: type and tensor.
    ("a mask without a type", ValueError, "mask", {"mask": of(np.int32, B, T)}),
    ("a mask with 'none'", ValueError, "mask", zeros("none", B, T)),
    *((f"no mask with {kind}", ValueError, "mask", {"mask_type": kind})
      for kind in ("boolean", LENGTH, END_START, PACKED)),
    ("an unknown type", ValueError, "mask_type", zeros("bool", B, T)),
    ("an empty type", ValueError, "mask_type", zeros("", B, T)),
    ("a type in capitals", ValueError, "mask_type", zeros("BOOLEAN", B, T)),
    ("mask_type is None", TypeError, "mask_type", zeros(None, B, T)),
    ("mask_type is a number", TypeError, "mask_type", zeros(1, B, T)),
    *wrong_arrays("mask", (B, T), ["int32"], None, {"mask_type": "boolean"}),
    ("lengths are int64", TypeError, "mask", {"mask": of(np.int64, B), "mask_type": LENGTH}),
    # Masks: shapes.
    ("boolean of rank 0", ValueError, "mask", zeros("boolean")),
    *wrong_masks("boolean", (T,), (1, 1, B, H, L, T), (B, S), (L, T), (3, L, T), (B, L + 1, T),
                 (B, T, L), (B, 3, L, T), (3, 1, 1, T), (B, H, L, T - 1), (2, B, H, L, T)),
    ("lengths of rank 0", ValueError, "mask", zeros(LENGTH)),
    *wrong_masks(LENGTH, (1, 1, 1, 1, 1, B), (1,), (3,), (B, 1), (3, B), (B, T)),
    *wrong_masks(END_START, (B,), (3, B), (2, 2, B), (6,)),
    *wrong_masks(PACKED, (3 * B + 1,), (3 * B + 3,), (2, 3 * B + 2), (3, B)),
    # Masks: numbers.
    ("negative length", ValueError, "mask", masked(LENGTH, -1, 4)),
    ("length beyond T", ValueError, "mask", masked(LENGTH, 4, T + 1)),
    ("length of INT_MIN", ValueError, "mask", masked(LENGTH, 4, -(2**31))),
    ("length of INT_MAX", ValueError, "mask", masked(LENGTH, 2**31 - 1, 4)),
    ("negative end", ValueError, "mask", masked(END_START, 4, -1, 0, 0)),
    ("end beyond T", ValueError, "mask", masked(END_START, T + 1, 4, 0, 0)),
    ("negative start", ValueError, "mask", masked(END_START, 4, 4, -1, 0)),
    ("start beyond T", ValueError, "mask", masked(END_START, 4, 4, 0, T + 1, shape=(2, 2))),
    ("packed, negative length", ValueError, "mask", masked(PACKED, 4, -1, 0, 5, 10, 0, 10, 20)),
    ("packed, length beyond T", ValueError, "mask", masked(PACKED, T + 1, 1, 0, 5, 10, 0, 10, 20)),
    ("packed, negative query start", ValueError, "mask",
     masked(PACKED, *GOOD, -1, 5, 10, 0, 10, 20)),
    ("packed, query starts decrease", ValueError, "mask",
     masked(PACKED, *GOOD, 5, 4, 10, 0, 10, 20)),
    ("packed, query end decreases", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 4, 0, 10, 20)),
    ("packed, too many queries", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 11, 0, 10, 20)),
    ("packed, negative key start", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 10, -2, 10, 20)),
    ("packed, key starts decrease", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 10, 3, 2, 20)),
    ("packed, key end decreases", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 10, 0, 10, 9)),
    ("packed, too many keys", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 10, 0, 10, 21)),
    ("packed, INT_MAX keys", ValueError, "mask", masked(PACKED, *GOOD, 0, 5, 10, 0, 0, 2**31 - 1)),
    # Numbers.
    *wrong("scale", TypeError, "1", [1.0], 1j, None),
    *wrong("scale", ValueError, NAN, INF, -INF, 1e39, 10**400),
    *wrong(FILTER, TypeError, "1", [1.0], 1j, None),
    *wrong(FILTER, ValueError, NAN, INF, -INF, 1e39, 10**400),
    *wrong(HEADS, TypeError, 2.0, "2", None, [2]),
    *wrong(HEADS, ValueError, 0, -2, 3, 2**31, 2**32 + 2, 2**64 + 2),
    ("device is a float", TypeError, "device", {"device": 7.5}),
    ("an unknown argument", TypeError, "attn_mask", {"attn_mask": None}),
]  # fmt: skip


def wrong_tensors(name):
    """Rows in which the tensor is no tensor of the call's type."""
    base = {} if name in correct() else {
        QK: only(value=V16), KV: only(query=(B, L, 16)), QKV: only(),
    }[name]  # fmt: skip
    yield from wrong_arrays(name, TENSORS[name], ["float32", "float16"], None, base)
    if name != QKV:  # without another tensor beside it any float type is right
        # Of two sources of different float types the message may name either.
        source = any(name in names for names in ROLES.values())
        pattern = "query|key|value" if source else name
        other = base | {name: of(np.float16, *TENSORS[name])}
        yield (f"{name} is of another float type", TypeError, pattern, other)


ROWS += [row for name in TENSORS for row in wrong_tensors(name)]


def assert_it_still_works(device):
    call = correct()
    got = clattn.directml.multihead_attention(**call, device=device).output
    assert (np.abs(got - oracle.attention(call)) <= oracle.tolerance(call)).all()


@cases(ROWS)
def test_wrong_arguments(device, row):
    """The exception of the row; afterwards the correct call works."""
    refuse(clattn.directml.multihead_attention, row, correct())
    assert_it_still_works(device)


def wrong_sources():
    """Yields every wrong set of source tensors: (names, the tensors that take each role)."""
    names = [n for n in TENSORS if n in {n for role in ROLES.values() for n in role}]
    for count in range(len(names) + 1):
        for given in itertools.combinations(names, count):
            takers = {role: [n for n in ROLES[role] if n in given] for role in ROLES}
            if any(len(found) != 1 for found in takers.values()):
                yield given, takers


def refuse_sources(given, takers):
    """The ValueError names all tensors that collide in a role, or a role that is missing."""
    call = make() | only(**{name: TENSORS[name] for name in given})
    with pytest.raises(ValueError, match=r"query|key|value") as caught:
        clattn.directml.multihead_attention(**call)
    assert caught.type is ValueError
    said = set(re.findall(r"\w+", str(caught.value)))
    collide = [set(found) for found in takers.values() if len(found) > 1]
    missing = [{role} for role, found in takers.items() if not found]
    assert any(names <= said for names in collide + missing), (given, str(caught.value))


def test_wrong_sources(device):
    """Of 64 sets, 60 are wrong, the empty one and the full one among them."""
    cases = list(wrong_sources())
    assert len(cases) == 60
    for given, takers in cases:
        refuse_sources(given, takers)
    assert_it_still_works(device)


def refuse_missing_arguments():
    """scale and head_count have no defaults; only the first three arguments are positional."""
    for name in ("scale", "head_count"):
        call = correct()
        del call[name]
        with pytest.raises(TypeError, match=name):
            clattn.directml.multihead_attention(**call)
    call = correct()
    query, key, value = (call.pop(name) for name in ("query", "key", "value"))
    with pytest.raises(TypeError):
        clattn.directml.multihead_attention(query, key, value, None, **call)
    with pytest.raises(TypeError, match="query"):
        clattn.directml.multihead_attention(query, key, value, query=query, **call)


def test_missing_arguments(device):
    refuse_missing_arguments()
    assert_it_still_works(device)


def refuse_all():
    """Run by test_arguments_are_checked_before_opencl in a process that has no driver."""

    def wrong():
        for row in ROWS:
            refuse(clattn.directml.multihead_attention, row, correct())
        for given, takers in wrong_sources():
            refuse_sources(given, takers)
        refuse_missing_arguments()

    refuse_without_opencl(lambda: clattn.directml.multihead_attention(**correct()), wrong)


def test_arguments_are_checked_before_opencl(tmp_path):
    check_without_opencl("doors.test_directml_errors", tmp_path)
