# SPDX-License-Identifier: MIT
"""What mods become: the text runs in NumPy (support/mod_text.py) and gives what the mod gives when
it is called with arrays of all positions."""

import copy
import gc
import math
import weakref

import clattn
import numpy as np
import pytest
from clattn.flex import explain
from clattn.flex.compile import Mods, trace_mods
from references.attention import bfloat16
from support.mod_text import Program

B, H, L, S = 2, 3, 7, 9
rng = np.random.default_rng(0)
POSITIONS = np.ogrid[0:B, 0:H, 0:L, 0:S]
b0, h0, q0, k0 = (n.astype(np.int32) for n in POSITIONS)
score0 = rng.standard_normal((B, H, L, S))

slopes = rng.standard_normal(H).astype(np.float32)
bias = rng.standard_normal((H, L, S))
documents = rng.integers(0, 3, (B, max(L, S)))
chosen = rng.random((L, S)) > 0.5
many = list(rng.standard_normal((7, H, S)))
n, x, big = 3, 0.75, 2**40


def lookup(*arguments):
    return clattn.lookup(*arguments)


def index(table, *keys):
    """`table[keys]`, whose other dimensions are behind those of the positions in NumPy."""
    if any(isinstance(key, np.ndarray) for key in keys):
        return Part(table, keys)
    return lookup(table, *keys)


def rest(table, key):
    return index(table, slice(None), key)


class Part:
    """A part of an array as symbols have it: of NumPy, by all indexes at once."""

    def __init__(self, table, keys):
        self.table, self.keys = table, list(keys)
        if ... in [key for key in keys if not isinstance(key, np.ndarray)]:
            self.keys[0:1] = [slice(None)] * (table.ndim - len(keys) + 1)
        self.keys += [slice(None)] * (table.ndim - len(self.keys))

    def __getitem__(self, more):
        more = list(more) if isinstance(more, tuple) else [more]
        keys = [more.pop(0) if isinstance(k, slice) and more else k for k in self.keys]
        if any(isinstance(k, slice) for k in keys):
            return Part(self.table, keys)
        return self.table[tuple(keys)]


def of_device(n, by_name=False):
    """`n.to(n.device)`, which is `n`; NumPy's arrays have no such method."""
    if isinstance(n, np.ndarray):
        return n
    return n.to(device=n.device) if by_name else n.to(n.device)


def run(mod, kind="score"):
    """The result of the traced mod at all positions."""
    mods = trace_mods(mod, None) if kind == "score" else trace_mods(None, mod)
    assert (mods.has_score, mods.has_mask) == (kind == "score", kind == "mask")
    score = (score0,) if kind == "score" else ()
    result = Program(mods).run(f"mod_{kind}", b0, h0, q0, k0, *score)
    return np.broadcast_to(result, score0.shape)


def expect(mod, kind="score"):
    """With wider positions than symbols are: NumPy refuses an int that an array cannot hold."""
    arguments = [n.astype(np.int64) for n in (b0, h0, q0, k0)]
    with np.errstate(all="ignore"):
        result = mod(score0, *arguments) if kind == "score" else mod(*arguments)
    return np.broadcast_to(result, score0.shape)


# ---- operators and functions ----

SCORES = {
    "score": lambda s, b, h, q, k: s,
    "a number": lambda s, b, h, q, k: 2.5,
    "an int": lambda s, b, h, q, k: 2,
    "a position": lambda s, b, h, q, k: k,
    "alibi": lambda s, b, h, q, k: s + lookup(slopes, h) * (k - q),
    "numbers on both sides": lambda s, b, h, q, k: (2 - s) * 3 - 1.5 + (1 / (s + 0.25)) + (k + n),
    "true division": lambda s, b, h, q, k: q / (k + 1) + s / 3 + 1 / (h + 1),
    "floor division": lambda s, b, h, q, k: (q - k) // n + s // x + n // (k - 4) + big // (k + 1),
    "modulo": lambda s, b, h, q, k: (q - k) % n + s % x + n % (k - 4) + (q - big) % (k + 1),
    "negative divisor": lambda s, b, h, q, k: (q - k) // -n + (q - k) % -n + s % -x,
    "products": lambda s, b, h, q, k: s**0 + s**1 + s**2 + s**3 + s**4 + (q - k) ** 3,
    "powers": lambda s, b, h, q, k: abs(s) ** x + 2**k + (k + 1) ** q + (k + 1.0) ** (q - k),
    "power of a slope": lambda s, b, h, q, k: s + 2 ** (-(h + 1) / n) * (k - q),
    "unary": lambda s, b, h, q, k: -s + +q - abs(q - k) + ~k + abs(-s),
    "bits": lambda s, b, h, q, k: (q & 3) + (q | k) + (q ^ 5) + (1 << k) + (q * 64 >> b) + ~(q ^ k),
    "bits with a bool": lambda s, b, h, q, k: (q & (k > 2)) + (q | (k > 2)) + ((k > 2) ^ 4),
    "wide ints": lambda s, b, h, q, k: (k + big) % 7 + (big - q) // 9 - (big ^ k) % 5,
    "bools as ints": lambda s, b, h, q, k: (q > k) * 2 + (q > 2) * s - (k > 3) / 2 + (q > k) // 1,
    "bools": lambda s, b, h, q, k: ((q > k) + (k > 2)) * 3 + (q > k) * (k > 2) * s,
    "where": lambda s, b, h, q, k: np.where(q >= k, s, -np.inf),
    "where of ints": lambda s, b, h, q, k: np.where(k > n, q, h + 1) // 2 + np.where(k, 1, 2) + s,
    "where of numbers": lambda s, b, h, q, k: np.where(k > n, 1, 0.5) + np.where(s > 0, True, q),
    "where of bools": lambda s, b, h, q, k: np.where(np.where(k > n, q > 2, False), s, -s),
    "minimum": lambda s, b, h, q, k: np.minimum(s, x) + np.minimum(q, k) + np.minimum(n, q - k),
    "maximum": lambda s, b, h, q, k: np.maximum(s, k) + np.maximum(q, k) + np.maximum(big, k),
    "of bools": lambda s, b, h, q, k: np.minimum(q > 2, k > 2) + 2 * np.maximum(q > 2, k > 2) + s,
    "clip": lambda s, b, h, q, k: np.clip(q - k, -n, n) + np.clip(s, None, x) + np.clip(s, 0, None),
    "clip by name": lambda s, b, h, q, k: np.clip(q, a_min=0, a_max=n) + np.clip(s, min=x, max=1),
    "exp": lambda s, b, h, q, k: np.exp(s) + np.exp2(s) + np.exp2(-(h + 1)),
    "log": lambda s, b, h, q, k: np.log(abs(s)) + np.log2(k + 1) + np.sqrt(q),
    "trigonometry": lambda s, b, h, q, k: np.sin(s) + np.cos(q - k) + n * np.tanh(s / n),
    "floor": lambda s, b, h, q, k: np.floor(s) + np.floor(q) + np.floor(q / 2),
    "sign": lambda s, b, h, q, k: np.sign(s) + np.sign(q - k) + np.absolute(q - k),
    "square": lambda s, b, h, q, k: np.square(s) + np.negative(np.square(q)) + np.positive(k),
    "ufuncs": lambda s, b, h, q, k: np.add(s, 1) * np.subtract(q, k) / np.multiply(2.0, k + 1),
    "divisions": lambda s, b, h, q, k: np.divide(s, 3) + np.floor_divide(q, 2) + np.mod(k, 2),
    "power ufunc": lambda s, b, h, q, k: np.power(q, 2) + np.power(s**2, 0.5) + np.left_shift(1, k),
    "casts": lambda s, b, h, q, k: (s * 9).astype(np.int32) + (s * 9).astype(int) + q.astype("f8"),
    "cast to bool": lambda s, b, h, q, k: s + q.astype(bool) + (s > 0).astype(np.int64) * 2,
    "numbers of numpy": lambda s, b, h, q, k: np.float32(2) * s + np.int64(3) * k + s * np.array(4),
    "a bool of numpy": lambda s, b, h, q, k: np.where((q > k) & np.bool_(True), s, np.float64(1)),
    "to a device": lambda s, b, h, q, k: s + of_device(q) // 2 + of_device(k, True) // 2,
    "like": lambda s, b, h, q, k: np.zeros_like(s) + np.ones_like(q) + np.full_like(s, x) + 0 * k,
    "depends on b": lambda s, b, h, q, k: s + b * 3 + (b + 1) ** 2 * h,
    "two tables": lambda s, b, h, q, k: lookup(bias, h, q, k) + s * lookup(slopes, h),
    "from the end": lambda s, b, h, q, k: s * lookup(slopes, -1 - h) + lookup(bias, h, -1, k),
    "an index by a table": lambda s, b, h, q, k: s + lookup(slopes, lookup(documents, b, k)),
    "a wide index": lambda s, b, h, q, k: s + lookup(slopes, h.astype(np.int64)),
    "one of keys": lambda s, b, h, q, k: s * lookup(documents, 0, k) + k * k,
    "a list": lambda s, b, h, q, k: s * lookup([0.5, 2.0, 3.0], h) + lookup((1, 2, 3), -h),
    "lists": lambda s, b, h, q, k: s + lookup([[1, 2], [3, 4]], b, k % 2) + lookup([2**40, 3], b),
    "of a part": lambda s, b, h, q, k: s + index(bias, h)[q, k] + index(bias, h)[q][k],
    "by colons": lambda s, b, h, q, k: s + index(bias, ..., k)[h, q] + rest(bias, q)[h, k],
    "8 tables": lambda s, b, h, q, k: s + sum(lookup(t, h, k) for t in many) + lookup(slopes, h),
    "a bool table": lambda s, b, h, q, k: np.where(lookup(chosen, q, k), s, -np.inf),
}  # fmt: skip

MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < n),
    "prefix": lambda b, h, q, k: (k < n) | (q >= k),
    "documents": lambda b, h, q, k: lookup(documents, b, q) == lookup(documents, b, k),
    "dilated": lambda b, h, q, k: ((q - k) % 2 == 0) & (abs(q - k) <= 2 * n),
    "bool table": lambda b, h, q, k: lookup(chosen, q, k) & ~(k == 2),
    "not": lambda b, h, q, k: ~(q > k) ^ (h == 1),
    "equal bools": lambda b, h, q, k: ((q > k) == (k > 2)) | ((q > 1) != (k > 4)),
    "ordered bools": lambda b, h, q, k: ((q > k) < (k > 2)) | ((q > k) >= (h > 1)),
    "logical": lambda b, h, q, k: np.logical_and(q, k > 2) | np.logical_not(np.logical_or(q, h)),
    "logical xor": lambda b, h, q, k: np.logical_xor(q - k, k) & np.invert(q == 3),
    "comparisons": lambda b, h, q, k: np.less(q, k) | np.greater_equal(k, 8) | np.not_equal(q, 3),
    "compared": lambda b, h, q, k: np.equal(q, k) | np.greater(k, 7) | np.less_equal(q, 1.5),
    "with numbers": lambda b, h, q, k: (k > 1.5) & (k < 5) & (q <= big) & (q != -big),
    "of heads": lambda b, h, q, k: h == 1,
    "of the batch": lambda b, h, q, k: b == 1,
    "of keys": lambda b, h, q, k: k % 2 == 0,
    "true": lambda b, h, q, k: True,
    "false": lambda b, h, q, k: np.bool_(False),
    "and_masks": clattn.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < n),
    "or_masks": clattn.or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < n),
    "and_masks of one": clattn.and_masks(lambda b, h, q, k: q >= k),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_a_score_mod_as_numpy(name):
    np.testing.assert_allclose(run(SCORES[name]), expect(SCORES[name]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_as_numpy(name):
    np.testing.assert_array_equal(run(MASKS[name], "mask"), expect(MASKS[name], "mask"))


def test_both_in_one_text():
    """They share numbers, tables and the row."""
    score_mod = SCORES["two tables"]

    def mask_mod(b, h, q, k):
        return (lookup(slopes, h) > 0) | (q >= k)

    mods = trace_mods(score_mod, mask_mod)
    assert mods.has_score and mods.has_mask and len(mods.tables) == 2
    assert mods.text.count("load_real, R)(call, 0, 3") == 1, "slopes are read once for both"
    program = Program(mods)
    score = program.run("mod_score", b0, h0, q0, k0, score0)
    np.testing.assert_allclose(score, expect(score_mod), rtol=1e-12)
    np.testing.assert_array_equal(
        np.broadcast_to(program.run("mod_mask", b0, h0, q0, k0), score0.shape),
        expect(mask_mod, "mask"),
    )


DTYPES = ("bool", "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
          "uint8", "uint16", "uint32", "uint64")  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_every_dtype(dtype):
    table = np.array([0, 1, 1], bfloat16 if dtype == "bfloat16" else dtype)
    got = run(lambda s, b, h, q, k: s + lookup(table, h) * 2)
    np.testing.assert_allclose(got, score0 + table.astype(float)[h0] * 2)


@pytest.mark.parametrize("dims", range(1, 6))
def test_tables_of_every_rank(dims):
    table = rng.standard_normal((3,) * dims)
    mod = lambda s, b, h, q, k: s + lookup(table, *(h, q % 3, k % 3, b, 1)[:dims])  # noqa: E731
    np.testing.assert_allclose(run(mod), expect(mod))


# ---- indexes outside a table ----


def test_a_score_is_nan_where_an_index_is_outside():
    got = run(lambda s, b, h, q, k: np.where(k > 2, s + lookup(slopes, q - 4), 0.0))
    outside = (q0 - 4 < -H) | (q0 - 4 >= H)
    expected = np.where(k0 > 2, score0 + slopes[np.clip(q0 - 4, -H, H - 1)], 0)
    np.testing.assert_allclose(got, np.where(outside, np.nan, expected))


def test_a_mask_is_false_where_an_index_is_outside():
    got = run(lambda b, h, q, k: ~(lookup(slopes, k) > 100), "mask")
    np.testing.assert_array_equal(got, np.broadcast_to(k0 < H, got.shape))


def test_an_index_outside_spoils_only_the_function_that_reads_there():
    mods = trace_mods(
        lambda s, b, h, q, k: s + lookup(slopes, q), lambda b, h, q, k: lookup(slopes, k) < 100
    )
    program = Program(mods)
    score = program.run("mod_score", b0, h0, q0, k0, score0)
    mask = np.broadcast_to(program.run("mod_mask", b0, h0, q0, k0), score.shape)
    np.testing.assert_array_equal(np.isnan(score), np.broadcast_to(q0 >= H, score.shape))
    np.testing.assert_array_equal(mask, np.broadcast_to(k0 < H, score.shape))


@pytest.mark.parametrize("index", [5, -6, 2**31, -(2**31) - 1, 2**62], ids=str)
def test_huge_indexes(index):
    assert np.isnan(run(lambda s, b, h, q, k: s + lookup(slopes, h + index - h))).all()


# ---- structure ----


def bias_of(table, window, name="table"):
    def mod(score, b, h, q_idx, kv_idx):
        return np.where(q_idx - kv_idx < window, score + lookup(table, h), -1e9)

    return mod


def test_other_values_shapes_and_names_give_the_same_text():
    one = trace_mods(bias_of(slopes, 3), None)
    other = trace_mods(bias_of(np.ones(100, np.float32), 70000), None)
    assert one.text == other.text
    assert one.numbers == (3, -1e9) and other.numbers == (70000, -1e9)
    assert one.tables[0] is slopes
    assert isinstance(one, Mods)


@pytest.mark.parametrize(
    "changed",
    [
        bias_of(slopes, 3.5),
        bias_of(slopes, 2**31),
        bias_of(slopes.astype(np.float64), 3),
        lambda s, b, h, q, k: np.where(k - q < n, s + lookup(slopes, h), -1e9),
    ],
    ids=["a real", "a long", "another dtype", "another expression"],
)
def test_another_structure_gives_another_text(changed):
    assert trace_mods(changed, None).text != trace_mods(bias_of(slopes, 3), None).text


def test_what_is_not_used_is_not_in_the_text():
    def mod(score, b, h, q_idx, kv_idx):
        _ = np.exp(score * q_idx)
        return score + kv_idx

    assert trace_mods(mod, None).text == trace_mods(lambda s, b, h, q, k: s + k, None).text


def function_of(text, name):
    return text[text.index(name + "(") :].partition("\n}")[0]


def test_what_rows_have_in_common_is_computed_by_row():
    """A slope and its power are in the row; what depends on the key is not."""
    text = trace_mods(lambda s, b, h, q, k: s + np.exp(lookup(slopes, h)) * (k * 2 - q), None).text
    row, score = function_of(text, "start_mod_row"), function_of(text, "mod_score")
    assert "load_real, R" in row and "exp_real, R" in row and "number_int" in row
    assert "load" not in score and "exp" not in score
    assert "OP(int, K) k" in score and "OP(int, S) s" in score
    assert "(OP(int, S))row->q" in score


def test_equal_expressions_are_computed_once():
    def mod(score, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return np.tanh(score + distance) * np.tanh(score + (q_idx - kv_idx))

    text = trace_mods(mod, None).text
    assert text.count("tanh_real") == 1 and text.count(" - ") == 1


def test_numbers_are_no_structure():
    """Two equal numbers are two numbers, for they may differ in the next call."""
    mods = trace_mods(lambda s, b, h, q, k: s * x + q * x, None)
    assert mods.numbers == (x, x)


def test_a_copy_of_a_symbol_is_the_symbol():
    def mod(score, b, h, q_idx, kv_idx):
        assert copy.copy(score) is score and copy.deepcopy([q_idx])[0] is q_idx
        return score + q_idx

    assert trace_mods(mod, None).text == trace_mods(lambda s, b, h, q, k: s + q, None).text


def test_tables_of_torch_by_parts():
    torch = pytest.importorskip("torch")
    t_bias, spans = torch.from_numpy(bias), torch.tensor([[0, 5], [2, 7], [4, 9]])

    def inside(b, h, q, k):
        low, high = spans[h]
        return (k >= low) & (k < spans[h][1]) & (k < high)

    first, last = spans[h0].unbind(-1)
    inside_of = (k0 >= first.numpy()) & (k0 < last.numpy())
    np.testing.assert_array_equal(run(inside, "mask"), np.broadcast_to(inside_of, score0.shape))
    for mod in (
        lambda s, b, h, q, k: s + t_bias[h][q][k],
        lambda s, b, h, q, k: s + t_bias[h, ...][q, k] + 0 * t_bias[..., k][h, q],
        lambda s, b, h, q, k: s + torch.nn.functional.embedding(h, t_bias)[:, k][q],
        lambda s, b, h, q, k: s + clattn.tensor(bias)[h][q, k],
        lambda s, b, h, q, k: s + lookup(t_bias[h], q, k),
    ):
        np.testing.assert_allclose(run(mod), score0 + bias[h0, q0, k0], rtol=1e-12)
    products = np.einsum("hqs,hks->hqk", bias, np.resize(bias, (H, S, S)))
    wide = torch.from_numpy(np.resize(bias, (H, S, S)))
    got = run(lambda s, b, h, q, k: s + torch.dot(t_bias[h, q], wide[h, k]))
    np.testing.assert_allclose(got, score0 + products[h0, q0, k0], rtol=1e-12, atol=1e-12)


def dtypes_of(like):
    """The dtypes of score, q_idx, a comparison and a long, with a query."""
    found = []

    def mod(s, b, h, q, k):
        found.extend(x.dtype for x in (s, q, q > k, q + big))
        return s

    trace_mods(mod, None, like)
    return found


def test_symbols_have_the_dtypes_of_the_query():
    names = ["float32", "int32", "bool", "int64"]
    for dtype in (np.float16, np.float32):
        assert dtypes_of(np.ones(2, dtype)) == [np.dtype(name) for name in names]
    assert dtypes_of(np.ones(2))[0] == np.float64
    torch = pytest.importorskip("torch")
    for like in (None, torch.ones(2), torch.ones(2).half()):
        assert dtypes_of(like) == [getattr(torch, name) for name in names]
    assert dtypes_of(torch.ones(2).double())[0] == torch.float64


def test_ufuncs_of_scipy():
    special = pytest.importorskip("scipy.special")
    for name in ("erf", "erfc", "expit", "log_expit", "log1p", "expm1"):
        function = getattr(special, name)
        got = run(lambda s, b, h, q, k, f=function: f(s))
        np.testing.assert_allclose(got, function(score0), rtol=1e-12, err_msg=name)


def test_a_symbol_is_printed_as_its_type():
    def mod(score, b, h, q_idx, kv_idx):
        assert f"{score} {q_idx:>3}" == f"{score!r} {q_idx}" == "<symbol: real> <symbol: int>"
        return score

    assert trace_mods(mod, None).has_score


def test_data_are_read_at_the_time_of_the_trace():
    values = {"n": 1}

    def mod(score, b, h, q_idx, kv_idx):
        return score * values["n"]

    first = trace_mods(mod, None)
    values["n"] = 2
    assert (first.numbers, trace_mods(mod, None).numbers) == ((1.0,), (2.0,))


def test_a_trace_keeps_no_array():
    """Without the collector of cycles: a trace that it had to find would hold a device's memory."""
    table = np.ones(3)
    kept = weakref.ref(table)
    gc.disable()
    try:
        trace_mods(bias_of(table, 3), None)
        del table
        assert kept() is None
    finally:
        gc.enable()


# ---- Tensors ----


def test_a_tensor_is_a_table(device):
    table, pairs = clattn.tensor(slopes, device), clattn.tensor(documents, device)
    mods = trace_mods(lambda s, b, h, q, k: s + table[h] * pairs[b, k] + pairs[0, -1 - k], None)
    assert mods.tables[0] is table and mods.tables[1] is pairs and len(mods.tables) == 2
    mod = lambda s, b, h, q, k: s + slopes[h] * documents[b, k] + documents[0, -1 - k]  # noqa: E731
    np.testing.assert_allclose(run_text(mods), expect(mod), rtol=1e-6)
    by_lookup = trace_mods(lambda s, b, h, q, k: s + lookup(table, h), None)
    assert by_lookup.text == trace_mods(lambda s, b, h, q, k: s + table[h], None).text


def run_text(mods):
    return np.broadcast_to(Program(mods).run("mod_score", b0, h0, q0, k0, score0), score0.shape)


def test_a_tensor_without_dimensions_is_a_number(device):
    number = clattn.tensor(slopes, device)[1]
    mods = trace_mods(lambda s, b, h, q, k: number * s, None)
    assert (mods.numbers, mods.tables) == ((float(slopes[1]),), ())


def test_any_object_with_the_method_is_an_index_of_a_tensor(device):
    class Index:
        def __clattn_lookup__(self, table, index):
            return (table.shape, index)

    table, index = clattn.tensor(documents, device), Index()
    assert table[index] == ((2, 9), index)
    assert table[0, index] == ((2, 9), (0, index))


# ---- torch, JAX ----


def test_mods_of_torch_run_unchanged():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    t_slopes, t_bias = torch.from_numpy(slopes).double(), torch.from_numpy(bias)
    t_documents, half = torch.from_numpy(documents), torch.tensor(0.5, dtype=torch.float64)
    mods = [
        lambda s, b, h, q, k: s + t_slopes[h] * (k - q),
        lambda s, b, h, q, k: t_bias[h, q, k] * s + t_bias[h, 0, k] + t_slopes[h.long()],
        lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
        lambda s, b, h, q, k: torch.where(t_documents[b, q] == t_documents[b, k], s, half),
        lambda s, b, h, q, k: half * s + s * half + (half - k) + q / half + half / (k + 1),
        lambda s, b, h, q, k: half**k + (half < s) + (half * 4) // (k + 1) + (half * 9) % (k + 1),
        lambda s, b, h, q, k: 2**-q + s**2 + torch.pow(s, 2) + torch.pow(2, k),
        lambda s, b, h, q, k: torch.tanh(s / 20) * 20 + torch.exp2(-((h + 1) * 8.0 / 3)),
        lambda s, b, h, q, k: torch.clamp(q - k, min=-2, max=2) + s.clamp(min=0) + torch.abs(s),
        lambda s, b, h, q, k: torch.minimum(q, k) + torch.maximum(s, half) + torch.sqrt(k.double()),
        lambda s, b, h, q, k: (s * 9).to(torch.int32) + q.float() + (s > 0).to(torch.long),
        lambda s, b, h, q, k: torch.div(q, 3, rounding_mode="floor") + s + torch.remainder(q, 3),
        lambda s, b, h, q, k: s.masked_fill(q < k, -1e9) + torch.zeros_like(s) + s.abs(),
        lambda s, b, h, q, k: s.where(q < k, half) + half.where(q < k, s),
        lambda s, b, h, q, k: torch.relu(s) + F.relu(k - 3) + s.relu() + F.leaky_relu(s, 0.2),
        lambda s, b, h, q, k: F.gelu(s) + F.gelu(s, approximate="tanh") + F.silu(s) + F.elu(s),
        lambda s, b, h, q, k: torch.sigmoid(s) + s.sigmoid() + F.logsigmoid(s) + F.softplus(s),
        lambda s, b, h, q, k: F.softplus(s, 30.0, 10.0) + F.softplus(s, beta=2.0, threshold=1),
        lambda s, b, h, q, k: torch.erf(s) + s.erfc() + torch.log1p(s * s) + torch.expm1(s),
        lambda s, b, h, q, k: torch.rsqrt(s * s + 1) + torch.reciprocal(k + 1) + torch.atan2(s, k),
        lambda s, b, h, q, k: torch.ceil(s) + torch.round(s * 3) + torch.trunc(s * 3) + k.ceil(),
        lambda s, b, h, q, k: torch.fmod(s, 0.7) + torch.fmod(q - k, 3) + torch.hypot(s, s + 1),
        lambda s, b, h, q, k: torch.div(q - k, 3, rounding_mode="trunc") + s,
        lambda s, b, h, q, k: torch.div(s * 9, -2.0, rounding_mode="trunc"),
        lambda s, b, h, q, k: torch.nan_to_num(torch.where(k == 3, math.nan, s), nan=2.0),
        lambda s, b, h, q, k: torch.where(torch.isnan(s / (q - q)) | torch.isinf(s), 1.0, s),
        lambda s, b, h, q, k: torch.min(s, k) + torch.max(q, k) + s.max(half) + q.min(k),
        lambda s, b, h, q, k: torch.where(torch.isin(k, torch.tensor([1, 4, 5])), s, -s),
        lambda s, b, h, q, k: torch.where(q > k, s, torch.tensor(-1e9, dtype=s.dtype)),
        lambda s, b, h, q, k: s + torch.ones_like(q, dtype=torch.float32) / 3 + k.to(s.dtype),
        lambda s, b, h, q, k: torch.add(s, q).sub(k).mul(2).div(3).neg() + torch.floor(s),
    ]  # fmt: skip
    arguments = [torch.from_numpy(a) for a in (score0, b0, h0, q0, k0)]
    for n, mod in enumerate(mods):
        expected = np.broadcast_to(mod(*arguments).double().numpy(), score0.shape)
        np.testing.assert_allclose(run(mod), expected, rtol=1e-6, atol=1e-6, err_msg=f"mod {n}")
    masks = [
        lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(q - k > 3)),
        lambda b, h, q, k: torch.logical_or(q.eq(k), torch.bitwise_and(q > 2, torch.ge(k, 4))),
        lambda b, h, q, k: torch.bitwise_xor(q > k, torch.tensor(True)) | (q > k).bitwise_not(),
        lambda b, h, q, k: t_documents[b, q] == t_documents[b, k],
    ]  # fmt: skip
    for n, mod in enumerate(masks):
        expected = np.broadcast_to(mod(*arguments[1:]).numpy(), score0.shape)
        np.testing.assert_array_equal(run(mod, "mask"), expected, err_msg=f"mask {n}")


def test_torch_s_own_masks_run():
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")
    causal, near = MASKS["causal"], MASKS["window"]
    assert run(flex_attention.noop_mask, "mask").all()
    for combine, ours in (("and_masks", np.logical_and), ("or_masks", np.logical_or)):
        got = run(getattr(flex_attention, combine)(causal, near), "mask")
        np.testing.assert_array_equal(got, ours(expect(causal, "mask"), expect(near, "mask")))


def test_arrays_of_jax_by_lookup():
    jax = pytest.importorskip("jax")
    table, number = jax.numpy.asarray(slopes), jax.numpy.float32(2)
    got = run(lambda s, b, h, q, k: s + number * lookup(table, h) + number)
    np.testing.assert_allclose(got, score0 + 2 * slopes[h0] + 2, rtol=1e-6)


# ---- explain ----


def test_explain_prints_the_text_and_what_it_reads(capsys):
    explain(bias_of(slopes, 3))
    printed = capsys.readouterr().out
    assert printed.startswith(
        "/* score_mod\n * number 0: 3 (int)\n * number 1: -1000000000.0 (real)\n"
        " * table 0: float32, shape (3,) */\n"
    )
    assert printed.endswith(trace_mods(bias_of(slopes, 3), None).text)


def test_explain_tells_mods_apart(capsys):
    mask = MASKS["causal"]
    explain(mask)
    by_position = capsys.readouterr().out
    explain(mask_mod=mask)
    assert by_position == capsys.readouterr().out
    assert by_position.startswith("/* mask_mod */") and "mod_mask(" in by_position
    explain(score_mod=lambda *a: a[0], mask_mod=lambda *a: a[2] > a[3])
    assert capsys.readouterr().out.startswith("/* score_mod and mask_mod */")
