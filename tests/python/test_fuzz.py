# SPDX-License-Identifier: MIT
"""Whole calls of every door: random right ones against the oracles, and random wrong ones.

Beside these, test_attention_properties.py, test_onnx_properties.py, test_kv_cache_properties.py and
test_diagonal.py draw calls of one operator each. docs/contributing.md has the command of the long
form. The short form runs the reference kernel, whose head sizes and options are data.
"""

import clattn
import numpy as np
import pytest
import references.directml as directml
from hypothesis import given
from hypothesis import strategies as st
from references.attention import DTYPES, bfloat16, float16, float32, float64
from references.diagonal import numbers
from support import directml_calls, dropout_calls, openvino_calls
from support.checks import check
from support.data import draw
from support.mod_text import Program
from support.mods import check_flex
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
    (dropout_calls.check if "dropout_p" in options else check)(*arrays, device=device, **options)


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
    openvino_calls.check(*arrays, device=device, **options)


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
    directml_calls.check(call, device=device)


DIAGONALS = st.one_of(st.integers(-25, 25), st.integers(-(2**70), 2**70))
SHAPES = st.lists(st.integers(0, 20), min_size=2, max_size=4)


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
    program = Program(clattn.flex.trace_mods(score_mod, mask_mod))
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


# ---- calls that are wrong ----

Q, MASK = draw((1, 2, 5, 8)), draw((5, 5))


def append(key, value, counts):
    cache = clattn.KVCache(1, 2, 9, 8)
    cache.append(key, value, counts)
    return cache.key, cache.value, cache.lengths


def attend(**options):
    cache = clattn.KVCache(1, 2, 9, 8)
    cache.append(Q, Q)
    return cache.attend(**options)


def change(n, indices):
    cache = clattn.KVCache(2, 1, 9, 8)
    cache.append(Q.reshape(2, 1, 5, 8), Q.reshape(2, 1, 5, 8))
    cache.reorder(indices)
    cache.truncate(n)
    return cache.key, cache.lengths


RIGHT = {
    clattn.scaled_dot_product_attention: {
        "query": Q, "key": Q, "value": Q, "attn_mask": MASK, "dropout_p": 0.0, "is_causal": True,
        "scale": 0.5, "enable_gqa": False, "window": (3, None), "softcap": 0.0, "seed": 1,
        "return_lse": True, "out": np.zeros_like(Q), "sinks": np.ones(2), "query_offset": 2,
        "return_weights": False},
    clattn.onnx.attention: {
        "Q": Q, "K": Q, "V": Q, "attn_mask": MASK, "past_key": None, "past_value": None,
        "nonpad_kv_seqlen": np.array([4]), "is_causal": 1, "kv_num_heads": None,
        "q_num_heads": None, "qk_matmul_output_mode": 1, "scale": 0.5, "softcap": 1.0,
        "softmax_precision": 1, "left_window_size": 2, "right_window_size": -1, "opset": 25,
        "pre_errata": False, "return_qk": True},
    clattn.openvino.scaled_dot_product_attention: {
        "query": Q, "key": Q, "value": Q, "attention_mask": MASK, "scale": np.ones((), "f4"),
        "causal": False},
    clattn.directml.multihead_attention: {
        "query": Q[0], "key": Q[0], "value": Q[0], "bias": np.ones(24, "f4"), "scale": 1.0,
        "mask": np.array([3, 3], np.int32), "mask_type": "key_sequence_length", "head_count": 2,
        "mask_filter_value": -1e4, "past_key": None, "past_value": None, "return_present": True},
    clattn.diagonal_matrix: {
        "input_or_shape": MASK, "value": 2, "begin": -1, "end": 2, "dtype": None,
        "out": np.zeros_like(MASK)},
    clattn.directml.diagonal_matrix1: {
        "input": MASK, "sizes": (1, 1, 5, 5), "dtype": "float32", "value": 1.0,
        "diagonal_fill_begin": -1, "diagonal_fill_end": 3},
    clattn.tril: {"input": MASK, "diagonal": 1},
    clattn.flex_attention: {
        "query": Q, "key": Q, "value": Q, "score_mod": None, "block_mask": None, "scale": 0.5,
        "enable_gqa": False, "mask_mod": None, "return_lse": True, "softcap": 0.0, "sinks": None,
        "query_offset": 0, "out": None},
    clattn.tensor: {"array": Q},
    clattn.merge_attention: {"parts": [(Q, Q[..., 0])] * 2},
    clattn.create_block_mask: {
        "mask_mod": lambda b, h, q, k: q >= k, "B": None, "H": 2, "Q_LEN": 5, "KV_LEN": 5,
        "BLOCK_SIZE": 16},
    clattn.KVCache: {
        "batch": 1, "num_kv_heads": 2, "capacity": 9, "head_size": 8, "v_head_size": None,
        "dtype": "float32"},
    append: {"key": Q, "value": Q, "counts": [3]},
    attend: {
        "query": Q, "attn_mask": MASK, "is_causal": True, "scale": 0.5, "window": (3, None),
        "softcap": 0.0, "return_lse": True, "out": np.zeros_like(Q)},
    change: {"n": [3, 2], "indices": [1, 0]},
}  # fmt: skip
WRONG = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, -(2**63) - 1, 2**70, 0.5, -0.0, 1e39, np.nan, np.inf, 1j,
    "", "lower_right", "float32", "cpu", "\0", "\ud800", b"cpu", (), (None, None), (3, -1), [2], {},
    ..., object(), np.float64(1), np.bool_(True), np.str_("x"), np.datetime64("2020"), len, int,
    np.zeros(()), np.zeros(0), np.zeros((0, 5, 8)), np.ones((2, 1, 5, 8), "f4"), np.ones((3, 3)),
    np.ones((1, 2, 5, 9), "f4"), np.ones((1, 3, 5, 8), "f4"), np.ones((1,) * 64, "f4"),
    np.full((1, 2, 5, 8), np.nan, "f4"), np.full((5, 5), -np.inf, "f4"), np.array([2**62]),
    np.array([-1], np.int32), np.ones((1, 2, 5, 8), ">f4"), np.ones((5, 5), bool),
    np.ones((5, 5), "c8"), np.array(["x"]), np.array([None]), np.zeros(3, [("a", "f4")]),
    np.ma.masked_array(np.ones(2), True), np.ones((1, 2, 5, 8), bfloat16), lambda *a: a[0],
    lambda *a: a[1] > a[2], np.broadcast_to(np.float32(1), (2**40, 5)), memoryview(b"abcdefgh"),
]  # fmt: skip


def is_small(value):
    return isinstance(value, np.ndarray) and value.nbytes < 1 << 20


def copied(value):
    """An argument laid out anew: the same numbers, in rows."""
    return np.array(value, order="C", subok=True) if is_small(value) else value


def contents(answer):
    """What an answer holds, to be compared."""
    if isinstance(answer, tuple):
        return [contents(one) for one in answer]
    if isinstance(answer, clattn.Tensor):
        answer = answer.numpy()
    if isinstance(answer, np.ndarray):
        return answer.shape, answer.dtype, answer.tobytes()
    if isinstance(answer, clattn.BlockMask):
        return answer.shape, answer.BLOCK_SIZE, contents(answer.to_dense())
    return answer if isinstance(answer, int) else type(answer)


def answer_of(function, arguments, device):
    """The contents of the answer, or the kind of error. `out` stays as it is."""
    if "out" in arguments:
        arguments = arguments | {"out": copied(arguments["out"])}
    with clattn.use_device(device):
        try:
            return contents(function(**arguments))
        except (TypeError, ValueError, MemoryError) as error:
            return type(error)


@examples(350)
@given(function=st.sampled_from(list(RIGHT)), data=st.data())
def test_wrong_arguments(device, function, data):
    """Up to three arguments are something else: an answer, or an error of the documented kinds.

    The call with copies of its arrays gives the same, and no input changes.
    """
    arguments = dict(RIGHT[function])
    names = data.draw(st.lists(st.sampled_from(list(arguments)), min_size=1, max_size=3))
    for name in names:
        arguments[name] = data.draw(st.sampled_from(WRONG))
    copies = {name: copied(value) for name, value in arguments.items()}
    before = [contents(value) for value in copies.values() if is_small(value)]
    answer = answer_of(function, arguments, device)
    if not {"dropout_p", "seed"} <= set(names):  # which may be random
        assert answer_of(function, arguments if LONG else copies, device) == answer
    assert [contents(value) for value in copies.values() if is_small(value)] == before


def test_right_arguments(device):
    """What the wrong calls are made of is accepted."""
    for function, arguments in RIGHT.items():
        if function is not clattn.directml.diagonal_matrix1:  # takes an input or sizes
            assert not isinstance(answer_of(function, arguments, device), type) or (
                function is clattn.KVCache
            )
