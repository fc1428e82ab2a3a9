# SPDX-License-Identifier: MIT
"""Random right calls of every door, against the oracles; test_fuzz_wrong.py has the wrong ones.

Beside these, test_attention_properties.py, test_onnx_properties.py, test_kv_cache_properties.py and
test_diagonal.py draw calls of one operator each. docs/contributing.md has the command of the long
form. The short form runs the reference kernel, whose head sizes and options are data.
"""

import clattn
import numpy as np
import pytest
import references.directml as directml
import references.onnx as onnx
from clattn.flex.compile import trace_mods
from hypothesis import given
from hypothesis import strategies as st
from references.attention import DTYPES, bfloat16, compute_dtype, float16, float32, float64
from references.diagonal import assert_same, numbers
from support import directml_calls, dropout_calls, openvino_calls
from support.checks import check_attention, native
from support.data import draw
from support.gradients import check_backward
from support.mod_text import Program
from support.mods import check_flex
from support.ragged import check_sequences, packed
from support.random_calls import BOUNDS, LONG, examples, relay, shrink
from support.variants import force

SIZES = st.integers(0, 40)
WIDTHS = st.sampled_from([0, 1, 3, 8, 24, 64])
SEEDS = st.integers(0, 1000)
SCALES = st.one_of(st.none(), st.floats(-2, 2, width=32))


@pytest.fixture(autouse=True)
def chosen_kernels(monkeypatch):
    """Those that clattn chooses, where there is time to build them."""
    if not LONG:
        force(monkeypatch, "reference")


def some(draw_from, **strategies):
    """Some of these options, each of its strategy."""
    return {name: draw_from(one) for name, one in strategies.items() if draw_from(st.booleans())}


def mask_of(draw_from, shape, seed):
    """A mask that broadcasts to `shape`, bool or of numbers; None for none."""
    kind = draw_from(st.sampled_from(["none", "bool", "f2", "f4", "f8"]))
    if kind == "none":
        return None
    mask = draw(shrink(draw_from, shape) or (1,), seed=seed)
    mask = mask > -0.5 if kind == "bool" else np.where(mask > 1, -np.inf, mask).astype(kind)
    return relay(draw_from, mask)


# ---- calls that are right ----


@st.composite
def attention_calls(draw_from):
    """Arguments of scaled_dot_product_attention, and whether weights are dropped."""
    dtype, seed = draw_from(st.sampled_from(DTYPES)), draw_from(SEEDS)
    B, Hk, group = (draw_from(st.integers(1, 3)) for _ in range(3))
    L, S, E, Ev = draw_from(SIZES), draw_from(SIZES), draw_from(WIDTHS), draw_from(WIDTHS)
    Hq = Hk * group
    arrays = [draw((B, Hq, L, E), dtype, seed)]
    for n, width in enumerate((E, Ev)):
        lead = draw_from(st.sampled_from([(B,), (1,), ()]))
        arrays.append(draw((*lead, Hk, S, width), dtype, seed + n + 1))
    options = {"enable_gqa": True}
    options |= some(draw_from, is_causal=st.sampled_from([True, "lower_right"]),
                    window=st.tuples(BOUNDS, BOUNDS), scale=SCALES)  # fmt: skip
    if (mask := mask_of(draw_from, (B, Hq, L, S), seed + 3)) is not None:
        options["attn_mask"] = mask
    if draw_from(st.booleans()) and L and S and Ev and E:
        options |= {"dropout_p": draw_from(st.floats(2**-32, 0.9)), "seed": draw_from(SEEDS)}
    else:
        options |= some(draw_from, softcap=st.floats(0.5, 30), return_weights=st.just(True))
        offsets = st.one_of(st.integers(-50, 50), st.just(np.arange(B) * 5 - 3))
        options |= some(draw_from, query_offset=offsets)
        if draw_from(st.booleans()):
            options["sinks"] = draw((Hq,), draw_from(st.sampled_from(DTYPES)), seed + 4)
    return [relay(draw_from, a) for a in arrays], options


@examples(30)
@given(call=attention_calls())
def test_attention(device, call):
    arrays, options = call
    (dropout_calls.check_dropout if "dropout_p" in options else check_attention)(
        *arrays, device=device, **options
    )


@examples(15)
@given(call=attention_calls(), data=st.data())
def test_gradients(device, call, data):
    """Of the same calls, for a random gradient of the result and perhaps of the log-sum-exp."""
    (q, k, v), options = call
    options.pop("return_weights", None)
    if "attn_mask" in options and options["attn_mask"].dtype != bool:
        options["attn_mask"] = np.maximum(options["attn_mask"], -9)  # infinities: test_backward.py
    G = relay(data.draw, draw((*q.shape[:-1], v.shape[-1]), q.dtype, 9))
    if data.draw(st.booleans()):
        options["grad_lse"] = draw(q.shape[:-1], compute_dtype(q.dtype), 8)
    check_backward(G, q, k, v, device=device, **options)


@st.composite
def packed_calls(draw_from):
    """Sequences for varlen_attn, and options."""
    lengths = draw_from(st.lists(st.tuples(st.integers(0, 20), SIZES), max_size=6))
    Hk, group = draw_from(st.integers(1, 3)), draw_from(st.integers(1, 3))
    given = packed([r for r, _ in lengths], [s for _, s in lengths], Hk * group, Hk,
                   draw_from(st.sampled_from([1, 3, 8, 24])),
                   draw_from(st.sampled_from([1, 8, 40])), draw_from(st.sampled_from(DTYPES)),
                   draw_from(st.integers(0, 3)), draw_from(SEEDS))  # fmt: skip
    options = some(draw_from, is_causal=st.sampled_from([True, "lower_right"]), scale=SCALES,
                   window_size=st.tuples(*[st.integers(-1, 30)] * 2), softcap=st.floats(0.5, 30),
                   page_size=st.integers(1, 9),
                   sinks=st.just(draw((Hk * group,), np.float32, 4)))  # fmt: skip
    return given, options


@examples(20)
@given(call=packed_calls())
def test_packed_sequences(device, call):
    given, options = call
    check_sequences(given, device, **options)


@st.composite
def openvino_inputs(draw_from):
    """Arguments of openvino.scaled_dot_product_attention."""
    dtype, seed = draw_from(st.sampled_from([float16, bfloat16, float32])), draw_from(SEEDS)
    lead = tuple(draw_from(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    L, S, E, Ev = draw_from(SIZES), draw_from(SIZES), draw_from(WIDTHS), draw_from(WIDTHS)
    shapes = ((L, E), (S, E), (S, Ev))
    arrays = [draw((*lead, *shape), dtype, seed + n) for n, shape in enumerate(shapes)]
    options = some(draw_from, causal=st.booleans())
    mask = draw((L, S), dtype, seed + 3)
    kind = draw_from(st.sampled_from(["none", "bool", "number", "matrix"]))
    if kind != "none" and not options.get("causal"):
        zero = np.zeros((), dtype)
        arrays.append({"bool": mask > -0.5, "number": zero, "matrix": mask}[kind])
    if len(arrays) == 4 and draw_from(st.booleans()):
        options["scale"] = np.full((), 0.25, dtype)
    return [relay(draw_from, a) if a.ndim else a for a in arrays], options


@examples(15)
@given(call=openvino_inputs())
def test_openvino(device, call):
    arrays, options = call
    openvino_calls.check_openvino(*arrays, device=device, **options)


@st.composite
def directml_inputs(draw_from):
    """Arguments of directml.multihead_attention."""
    positive = st.integers(1, 20)
    source = draw_from(st.sampled_from(directml.SOURCES))
    made = directml.make(
        source, B=draw_from(st.integers(1, 3)), L=draw_from(positive), S=draw_from(positive),
        H=draw_from(st.integers(1, 3)), E=8, Ev=draw_from(st.sampled_from([8, 24])),
        P=draw_from(st.one_of(st.none(), positive)), bias=draw_from(st.booleans()),
        dtype=draw_from(st.sampled_from([float16, float32])), seed=draw_from(SEEDS))  # fmt: skip
    made["scale"] = draw_from(st.floats(-2, 2, width=32))
    B, _, L, _ = (query := directml.sources(made)[0]).shape
    T = directml.present(made)[0].shape[2]
    kind = draw_from(st.sampled_from(["none", "boolean", "key_sequence_length",
                                      "key_sequence_end_start"]))  # fmt: skip
    lengths = st.lists(st.integers(0, T), min_size=B, max_size=B)
    if kind == "boolean":
        made["mask"] = (draw((B, L, T)) > -0.5).astype(np.int32)
    elif kind == "key_sequence_length":
        made["mask"] = np.array(draw_from(lengths), np.int32)
    elif kind == "key_sequence_end_start":
        made["mask"] = np.array([draw_from(lengths), draw_from(lengths)], np.int32)
    if draw_from(st.booleans()):
        shape = (B, made["head_count"], L, T)
        made["relative_position_bias"] = draw(shape, query.dtype, 5)
    return made | {"mask_type": kind}


@examples(15)
@given(call=directml_inputs())
def test_directml(device, call):
    directml_calls.check_directml(call, device=device)


DIAGONALS = st.one_of(st.integers(-25, 25), st.integers(-(2**70), 2**70))
SHAPES = st.lists(st.integers(0, 20), min_size=2, max_size=4)


@pytest.mark.by_turns
@examples(40)
@given(shape=SHAPES, diagonal=DIAGONALS, data=st.data())
def test_triangles(device, shape, diagonal, data):
    """As NumPy's tril and triu, bit by bit."""
    dtype = data.draw(st.sampled_from([float64, np.dtype(bool)]))
    a = relay(data.draw, numbers(tuple(shape), dtype, data.draw(SEEDS)))
    t = np.arange(shape[-1]) - np.arange(shape[-2])[:, None]
    near = max(-99, min(99, diagonal))
    with clattn.use_device(device):
        got = clattn.tril(a, diagonal), clattn.triu(a, diagonal)
    for kept, one in zip((t <= near, t >= near), got, strict=True):
        right = np.where(kept, a.view(f"u{a.itemsize}"), 0)
        np.testing.assert_array_equal(one.view(right.dtype), right)


@st.composite
def scatter_calls(draw_from):
    """Arrays and options of onnx.tensor_scatter."""
    shape = tuple(draw_from(st.lists(st.integers(0, 9), min_size=2, max_size=4)))
    axis = draw_from(st.integers(1, len(shape) - 1))
    rows = draw_from(st.integers(0, shape[axis]))
    mode = draw_from(st.sampled_from(["linear", "circular"]))
    kind = draw_from(st.sampled_from(["i4", "i8"]))
    most = shape[axis] - rows if mode == "linear" else np.iinfo(kind).max
    places = st.lists(st.integers(0, most), min_size=shape[0], max_size=shape[0])
    dtype = draw_from(st.sampled_from([np.dtype(bool), bfloat16, float32, float64]))
    sizes = shape, (*shape[:axis], rows, *shape[axis + 1 :])
    arrays = [relay(draw_from, numbers(size, dtype, n)) for n, size in enumerate(sizes)]
    if draw_from(st.booleans()):
        arrays.append(relay(draw_from, np.array(draw_from(places), kind)))
    return arrays, {"axis": axis - draw_from(st.sampled_from([0, len(shape)])), "mode": mode}


@examples(40)
@given(call=scatter_calls())
def test_rows_into_a_cache(device, call):
    """Bit by bit."""
    arrays, options = call
    got = clattn.onnx.tensor_scatter(*arrays, device=device, **options)
    assert_same(got, onnx.tensor_scatter(*map(native, arrays), **options))


# ---- expressions of flex_attention ----

TABLES = [draw((3, 7), np.float64, 1), np.arange(-5, 9), draw((5,), seed=2) > 0]


def leaves(kind, s, b, h, q, k):
    """The symbols and numbers that expressions of a kind are made of."""
    if kind == "real":
        return [s, 0.75, -2.0]
    return [b, h, q, k, 3, -2] if kind == "int" else [q >= k, True, h == 1]


# Integers stay below 2**31, and no number of Python's is divided by zero.
BINARY = {
    "real": [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, np.minimum, np.maximum],
    "int": [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x % 97 * (y % 97),
            lambda x, y: x // (y % 7 + 1), lambda x, y: x % (y % 5 - 7), lambda x, y: x & y,
            lambda x, y: x ^ y, np.minimum, np.maximum],
    "bool": [lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y],
}  # fmt: skip
UNARY = {
    "real": [abs, np.tanh, np.sin, lambda x: -x, np.floor],
    "int": [abs, lambda x: -x, lambda x: x % 97],
    "bool": [lambda x: x ^ True],
}


def trees(kind):
    """Expressions as (operation, operands) or the number of a leaf."""
    other = {"real": "int", "int": "bool", "bool": "int"}[kind]
    leaf = st.tuples(st.just("leaf"), st.integers(0, 5))

    def more(inner):
        shallow = st.tuples(st.just("leaf"), st.integers(0, 5))
        return st.one_of(
            st.tuples(st.just("unary"), st.integers(0, 9), inner),
            st.tuples(st.just("binary"), st.integers(0, 9), inner, inner),
            st.tuples(st.just("where"), shallow, inner, inner),
            st.tuples(st.just(other), shallow, inner),
            st.tuples(st.just("table"), shallow, inner),
        )

    return st.recursive(leaf, more, max_leaves=12)


def evaluated(tree, kind, row):
    """The value of an expression, of symbols or of arrays."""
    name, *rest = tree
    if name == "leaf":
        found = leaves(kind, *row)
        return found[rest[0] % len(found)]
    if name in ("unary", "binary"):
        operations = (UNARY if name == "unary" else BINARY)[kind]
        return operations[rest[0] % len(operations)](*(evaluated(t, kind, row) for t in rest[1:]))
    if name == "where":
        condition = evaluated(rest[0], "bool", row)
        return np.where(condition, *(evaluated(t, kind, row) for t in rest[1:]))
    first, second = evaluated(rest[0], "int", row), evaluated(rest[1], kind, row)
    _, _, h, q, k = row
    if kind == "real":
        place = h % 3, (first + k) % 7
        table = first % 3 - 1.5 if name == "int" else clattn.lookup(TABLES[0], *place)
        return second * table
    if kind == "int":
        return second + clattn.lookup(TABLES[1], (first + k) % 14 - 14)
    return second ^ (first % 5 == 2 if name == "int" else clattn.lookup(TABLES[2], (q + first) % 5))


def mods(tree, mask):
    """A score_mod and a mask_mod of two expressions. A number alone is none of a mask."""

    def score_mod(*row):
        return evaluated(tree, "real", row) * 0.125 + row[0]

    def mask_mod(b, h, q, k):
        return (q >= k - 3) | evaluated(mask, "bool", (0.5, b, h, q, k))

    return score_mod, mask_mod


PLACES = [n.astype(np.int64) for n in np.ogrid[0:2, 0:3, 0:7, 0:9]]
SCORES = np.random.default_rng(0).standard_normal((2, 3, 7, 9))


@examples(60)
@given(tree=trees("real"), mask=trees("bool"))
def test_expressions_of_mods(tree, mask):
    """The text that becomes a kernel, run in NumPy, gives what the mod gives for arrays."""
    score_mod, mask_mod = mods(tree, mask)
    program = Program(trace_mods(score_mod, mask_mod))
    with np.errstate(all="ignore"):
        narrow = [n.astype(np.int32) for n in PLACES]
        got = program.run("mod_score", *narrow, SCORES)
        np.testing.assert_allclose(
            *np.broadcast_arrays(got, score_mod(SCORES, *PLACES)), rtol=1e-9, atol=1e-9
        )
        got = program.run("mod_mask", *narrow)
        np.testing.assert_array_equal(*np.broadcast_arrays(got, mask_mod(*PLACES)))


@examples(1, share=1 / 500)
@given(tree=trees("real"), mask=trees("bool"), seed=SEEDS)
def test_expressions_in_a_kernel(device, tree, mask, seed):
    """Each is a program of its own, so there are few."""
    arrays = [draw((2, 3, n, 8), np.float32, seed + n) for n in (7, 9, 9)]
    score_mod, mask_mod = mods(tree, mask)
    check_flex(*arrays, device=device, score_mod=score_mod, mask_mod=mask_mod)
