# SPDX-License-Identifier: MIT
"""What mods are refused for: TypeErrors that show the line and say what to write instead.

Each mod of a table is on the line of its name, so a message that shows the line has the name.
"""

import math
import re

import clattn
import numpy as np
import pytest
from clattn.flex import explain
from clattn.flex.compile import trace_mods
from support.loops import looped

lookup, where = clattn.lookup, np.where
slopes, table = np.ones(8, np.float32), np.ones((8, 8))
numbers, kept = [1.0, 2.0, 3.0], []

SCORES = {
    "if": (lambda s, b, h, q, k: s if q > k else -s, "np.where(condition, a, b) for if"),
    "and": (lambda s, b, h, q, k: where(q > k and k > 2, s, 0), "& | ~ for and, or, not"),
    "or": (lambda s, b, h, q, k: where(q > k or k > 2, s, 0), "& | ~ for and, or, not"),
    "not": (lambda s, b, h, q, k: where(not q > k, s, 0), "& | ~ for and, or, not"),
    "between": (lambda s, b, h, q, k: where(0 <= k < q, s, 0), "(a <= x) & (x < b)"),
    "max": (lambda s, b, h, q, k: s + max(q, k), "neither true nor false"),
    "in": (lambda s, b, h, q, k: s + (k in [1, 2]), "neither true nor false"),
    "float": (lambda s, b, h, q, k: s + float(k), "x.astype(np.float32) for float(x)"),
    "int": (lambda s, b, h, q, k: s + int(s), "x.astype(np.int32) for int(x)"),
    "math": (lambda s, b, h, q, k: s + math.exp(s), "np.exp for math.exp"),
    "math.floor": (lambda s, b, h, q, k: math.floor(s), "np.floor"),
    "range": (lambda s, b, h, q, k: sum(s for _ in range(k)), "nor count a loop"),
    "of a list": (lambda s, b, h, q, k: s + numbers[h], "clattn.lookup(array, index)"),
    "of an array": (lambda s, b, h, q, k: s + slopes[h], "clattn.lookup(array, index)"),
    "of a matrix": (lambda s, b, h, q, k: s + table[h, q], "clattn.lookup(array, index)"),
    "of a dict": (lambda s, b, h, q, k: s + {1: 2}[h], "clattn.lookup(array, index)"),
    "iteration": (lambda s, b, h, q, k: sum(s), "a single number"),
    "length": (lambda s, b, h, q, k: len(s), "a single number"),
    "an attribute": (lambda s, b, h, q, k: s.shape, "a symbol has no shape"),
    "a method": (lambda s, b, h, q, k: s.softmax(-1), "a symbol has no softmax"),
    "a ufunc": (lambda s, b, h, q, k: np.arctan(s), "nearest is np.arctan2; docs/"),
    "a reduction": (lambda s, b, h, q, k: np.add.reduce(s), "np.add.reduce of a symbol"),
    "a function": (lambda s, b, h, q, k: np.cumsum(s), "np.cumsum is not known; docs/"),
    "an array": (lambda s, b, h, q, k: np.array([s, k]), "a symbol is no array"),
    "an output": (lambda s, b, h, q, k: np.add(s, k, out=s), "np.add of a symbol takes no out"),
    "option": (lambda s, b, h, q, k: np.exp(s, dtype="f4"), "np.exp of a symbol takes no dtype"),
    "where of one": (lambda s, b, h, q, k: np.where(q > k), "np.where of a symbol is given 1"),
    "clip with out": (lambda s, b, h, q, k: np.clip(s, 0, 1, None), "clip of a symbol is given 4"),
    "clamp": (lambda s, b, h, q, k: s.clamp(0, 1, 2), "the method clamp of a symbol is given 3"),
    "alpha": (lambda s, b, h, q, k: s.add(1, alpha=2), "the method add of a symbol takes no alpha"),
    "a device": (lambda s, b, h, q, k: s.new_ones((), device="cuda"), "new_ones of a symbol takes"),
    "expected": (lambda s, b, h, q, k: s.where(q), "given 1 argument; expected (condition, y)"),
    "decimals": (lambda s, b, h, q, k: np.round(s, 2), "decimals is 2; expected 0"),
    "gelu": (lambda s, b, h, q, k: s.gelu(approximate="x"), "approximate is 'x'; expected \"none"),
    "max of one": (lambda s, b, h, q, k: s.max(), "the method max of a symbol is given 0 arg"),
    "isin": (lambda s, b, h, q, k: s + np.isin(k, np.arange(65)), "with 65 numbers; at most 64"),
    "isin of one": (lambda s, b, h, q, k: s + k.isin(3), "isin of a symbol in what is no array"),
    "round": (lambda s, b, h, q, k: round(s), "round of a symbol; write np.round(x)"),
    "divmod": (lambda s, b, h, q, k: divmod(q, 2), "divmod of a symbol; write x // y and x % y"),
    "divmod by": (lambda s, b, h, q, k: divmod(2, q), "divmod of a symbol"),
    "pow": (lambda s, b, h, q, k: pow(q, 2, 5), "three arguments; write x ** y % z"),
    "@": (lambda s, b, h, q, k: s @ s, "@ of a symbol, which is a single number; write x * y"),
    "[]": (lambda s, b, h, q, k: s[0], "with nothing to index"),
    "contains": (lambda s, b, h, q, k: 2 in s, "a single number, which contains nothing"),
    "called": (lambda s, b, h, q, k: s(2), "a symbol is a number, which cannot be called"),
    "type": (lambda s, b, h, q, k: q.type(np.float32), "a symbol has no type"),
    "index": (lambda s, b, h, q, k: s + q.index, "a symbol has no index"),
    "ragged": (lambda s, b, h, q, k: s + lookup([[1], [1, 2]], h), "reads a list: "),
    "of strings": (lambda s, b, h, q, k: s + lookup(["a"], h), "dtype <U1; expected one of"),
    "a set": (lambda s, b, h, q, k: s + lookup({1, 2}, h), "reads a set; expected an array"),
    "norm": (lambda s, b, h, q, k: h.embedding(table, max_norm=1), "max_norm is 1; expected None"),
    "a symbol": (lambda s, b, h, q, k: s + lookup(k, h), "reads a Symbol"),
    "no index": (lambda s, b, h, q, k: s + lookup(np.float32(1), h), "0 dimensions; expected 1"),
    "six": (lambda s, b, h, q, k: lookup(np.ones((1,) * 6), *[h] * 6), "6 dimensions; expected"),
    "one index": (lambda s, b, h, q, k: s + lookup(table, h), "1 dimensions is used as a number"),
    "two indexes": (lambda s, b, h, q, k: s + lookup(slopes, h, k), "2 indexes of an array of 1"),
    "a real": (lambda s, b, h, q, k: lookup(slopes, s), "an index is a real; expected an integer"),
    "a bool": (lambda s, b, h, q, k: lookup(slopes, q > k), "an index is a bool; expected an"),
    "a float": (lambda s, b, h, q, k: lookup(table, h, 1.0), "index is 1.0 (float); expected"),
    "True": (lambda s, b, h, q, k: lookup(table, h, True), "an index is True (bool); expected"),
    "a slice": (lambda s, b, h, q, k: lookup(table, h, slice(2)), "slice(None, 2, None) (slice)"),
    "...": (lambda s, b, h, q, k: lookup(table, ..., h, ...), "1 indexes of an array of 2"),
    "rest": (lambda s, b, h, q, k: lookup(table, ..., h), "of 1 dimensions is used as a number"),
    "rest + 1": (lambda s, b, h, q, k: lookup(table, h) + 1, "is used as a number; take an"),
    "1 - rest": (lambda s, b, h, q, k: 1 - lookup(table, h), "is used as a number; take an"),
    "rest of": (lambda s, b, h, q, k: lookup(table, lookup(table, h)), "is used as a number"),
    "one more": (lambda s, b, h, q, k: lookup(table, h)[k, k], "2 indexes of an array of 1 dim"),
    "exp of rest": (lambda s, b, h, q, k: np.exp(lookup(table, h)), "is used as a number"),
    "None": (lambda s, b, h, q, k: lookup(table, h, None), "an index is None (NoneType)"),
    "complex": (lambda s, b, h, q, k: lookup(np.ones(3, "c8"), h), "dtype complex64; expected"),
    "strings": (lambda s, b, h, q, k: lookup(np.array(["a"]), h), "dtype <U1; expected one of"),
    "1j": (lambda s, b, h, q, k: s * 1j, "1j (complex) in a mod; expected a number"),
    "text": (lambda s, b, h, q, k: s + "text", "'text' (str) in a mod; expected a number"),
    "nothing": (lambda s, b, h, q, k: where(q > k, s, None), "None (NoneType) in a mod"),
    "object": (lambda s, b, h, q, k: s + np.array(None), "None (NoneType) in a mod"),
    "whole": (lambda s, b, h, q, k: s + slopes, "an array of 1 dimensions is used as a number"),
    "left": (lambda s, b, h, q, k: table * s, "an array of 2 dimensions is used as a number"),
    "2**63": (lambda s, b, h, q, k: k + 2**63, "is out of the range of long"),
    "10**400": (lambda s, b, h, q, k: s * 10**400, "is out of the range of real"),
    "10**5000": (lambda s, b, h, q, k: s - 10**5000, "an int is out of the range of real"),
    "& of a real": (lambda s, b, h, q, k: s & 1, "& of a real; it takes bools and integers"),
    "brackets": (lambda s, b, h, q, k: where(s & k > 2, s, 0), "put comparisons in brackets"),
    "~ of a real": (lambda s, b, h, q, k: ~s, "~ of a real; it takes bools and integers"),
    "<< of a real": (lambda s, b, h, q, k: k << s, "<< of a real; it takes bools and integers"),
    "bool - bool": (lambda s, b, h, q, k: (q > k) - (k > 2), "a bool minus a bool; write a ^ b"),
    "- bool": (lambda s, b, h, q, k: -(q > k), "write ~x for not x"),
    "int8": (lambda s, b, h, q, k: q.astype(np.int8), "expected one of bool, int32, int64, float"),
    "astype None": (lambda s, b, h, q, k: q.astype(None), "a cast to None; expected one of bool"),
    "fields": (lambda s, b, h, q, k: q.astype("f4,,"), "a cast to f4,,; expected one of bool"),
    "to device": (lambda s, b, h, q, k: s.to("cuda"), "a cast to cuda; expected one of bool"),
    "size": (lambda s, b, h, q, k: s.new_ones((2, 2)), "size is (2, 2); expected ()"),
    "kept": (lambda s, b, h, q, k: s + kept[0], "a symbol of another call"),
    "kept alone": (lambda s, b, h, q, k: kept[0] * kept[0], "a symbol of another call"),
}  # fmt: skip

SCORE_RESULTS = {
    "no result": (lambda s, b, h, q, k: None, "the function returns None; expected a number"),
    "pair": (lambda s, b, h, q, k: (s, q), "the function returns a tuple; expected a number"),
    "list": (lambda s, b, h, q, k: [s], "the function returns a list"),
    "array": (lambda s, b, h, q, k: slopes, "the function returns a ndarray"),
    "str": (lambda s, b, h, q, k: "s", "the function returns a str"),
    "iterator": (lambda s, b, h, q, k: (yield s), "the function returns a generator"),
    "comparison": (lambda s, b, h, q, k: q > k, "returns a bool; expected a number: write np"),
    "truth": (lambda s, b, h, q, k: True, "returns a bool; expected a number: write np.where"),
    "old symbol": (lambda s, b, h, q, k: kept[0], "returns a symbol of another call"),
}  # fmt: skip

MASK_RESULTS = {
    "no mask": (lambda b, h, q, k: None, "the function returns None; expected a bool"),
    "pair": (lambda b, h, q, k: (q > k, k > 2), "the function returns a tuple; expected a bool"),
    "integer": (lambda b, h, q, k: q & k, "a number (int); expected a bool: write a comp"),
    "long": (lambda b, h, q, k: q.long(), "returns a number (long); expected a bool"),
    "real": (lambda b, h, q, k: q / 2, "returns a number (real); expected a bool"),
    "one": (lambda b, h, q, k: 1, "returns a number (int); expected a bool"),
}  # fmt: skip


def refused(score_mod=None, mask_mod=None):
    """The message of the TypeError."""
    with pytest.raises(TypeError) as caught:
        trace_mods(score_mod, mask_mod)
    return str(caught.value)


@pytest.fixture(autouse=True)
def old_symbol():
    """A symbol that a mod has kept from an earlier call."""
    trace_mods(lambda s, b, h, q, k: kept.append(s) or s, None)
    yield
    kept.clear()


def check_message(message, role, name, words):
    # Python 3.14 adds words
    assert re.match(rf"(cannot use .* as a dict key \()?{role}: ", message)
    assert words in message
    place, line = message.splitlines()[1:]
    assert re.fullmatch(rf'  File "{re.escape(__file__)}", line \d+, in <lambda>', place)
    assert line.startswith(f'    "{name}": (lambda')


@looped("name", SCORES)
def test_wrong_uses_of_symbols(name):
    mod, words = SCORES[name]
    check_message(refused(mod), "score_mod", name, words)


@looped("name", SCORE_RESULTS)
def test_wrong_results_of_a_score_mod(name):
    mod, words = SCORE_RESULTS[name]
    check_message(refused(mod), "score_mod", name, words)


@looped("name", MASK_RESULTS)
def test_wrong_results_of_a_mask_mod(name):
    mod, words = MASK_RESULTS[name]
    check_message(refused(None, mod), "mask_mod", name, words)


# ---- the line ----


def test_the_line_is_that_of_the_user_s_function_that_runs():
    def half(x):
        if x > 0:  # of half
            return x / 2
        return x

    def mod(score, b, h, q_idx, kv_idx):
        return half(score)

    assert "in half\n    if x > 0:  # of half" in refused(mod)


def test_the_line_of_a_kept_symbol_is_that_which_uses_it():
    def mod(score, b, h, q_idx, kv_idx):
        old = kept[0]
        return old * old  # used

    assert refused(mod).endswith("in mod\n    return old * old  # used")


def test_a_function_with_decorators_is_shown_by_its_own_line():
    def same(function):
        return function

    @same
    def mod(score, b, h, q_idx, kv_idx):
        score + kv_idx

    assert refused(mod).endswith("in mod\n    def mod(score, b, h, q_idx, kv_idx):")


def test_mods_without_source():
    """Of exec and of the prompt: there is a place, and no line."""
    names = {}
    exec("def mod(score, b, h, q_idx, kv_idx):\n    return -score if b else score", names)
    assert refused(names["mod"]).endswith('File "<string>", line 2, in mod')


class Mod:
    def __call__(self, score, b, h, q_idx, kv_idx):
        return None


def test_mods_that_are_objects():
    assert refused(Mod()).endswith("def __call__(self, score, b, h, q_idx, kv_idx):")
    assert "returns None" in refused(Mod().__call__)


# ---- limits ----


def test_more_than_a_thousand_operations():
    def long(count):
        def mod(score, b, h, q_idx, kv_idx):
            for _ in range(count):
                score = score * 2
            return score

        return mod

    assert len(trace_mods(long(1000), None).numbers) == 1000
    assert "more than 1000 operations" in refused(long(1001))


def sum_of(arrays):
    return lambda s, b, h, q, k: s + sum(lookup(a, h) for a in arrays)


def test_more_than_four_tables():
    """Those of one dtype and shape share an argument."""
    arrays = [np.ones(n) for n in (3, 4, 5, 6, 7)]
    assert "more than 4 captured arrays, and other dtypes or shapes" in refused(sum_of(arrays))
    arrays[4] = arrays[0]
    assert len(trace_mods(sum_of(arrays), None).tables) == 4
    arrays[4] = arrays[0] + 1
    assert len(trace_mods(sum_of(arrays), None).tables) == 4
    deep = [np.ones((1, 1, 1, 1, 3)) for _ in range(5)]
    assert "more than 4" in refused(
        lambda s, b, h, q, k: sum(lookup(a, 0, 0, 0, 0, h) for a in deep)
    )


def test_both_mods_share_four_tables():
    arrays = [np.ones(n) for n in (3, 4, 5, 6, 7)]
    message = refused(
        lambda s, b, h, q, k: s + sum(lookup(a, h) for a in arrays[:3]),
        lambda b, h, q, k: sum(lookup(a, h) for a in arrays[3:]) > 0,
    )
    assert message.startswith("score_mod: more than 4 captured arrays")


def test_recursion():
    def mod(score, b, h, q_idx, kv_idx):
        return mod(score, b, h, q_idx, kv_idx) + 1

    assert "score_mod: the function calls itself without end" in refused(mod)


def test_recursion_that_a_symbol_should_end():
    def mod(score, b, h, q_idx, kv_idx):
        return score if q_idx == 0 else mod(score, b, h, q_idx - 1, kv_idx)

    assert "neither true nor false" in refused(mod)


# ---- what is no mod ----


@looped("mod", [lambda s, b, h, q: s, lambda: 0, lambda s, b, h, q, k, m: s])
def test_other_parameters(mod):
    message = refused(mod)
    assert "takes other parameters; expected (score, b, h, q_idx, kv_idx)" in message
    assert "lambda" in message
    assert "expected (b, h, q_idx, kv_idx)" in refused(None, lambda s, b, h, q, k: q > k)
    assert "Is it a mask_mod?" in refused(lambda b, h, q, k: q >= k)


@looped("mod", [3, "causal", np.ones(3), [], object()])
def test_no_function(mod):
    words = f"is of type {type(mod).__name__}; expected a function of "
    assert refused(mod) == f"score_mod {words}(score, b, h, q_idx, kv_idx)"
    assert refused(None, mod) == f"mask_mod {words}(b, h, q_idx, kv_idx)"


def test_exceptions_of_the_mod_s_own_pass_through():
    def raiser(error):
        def mod(score, b, h, q_idx, kv_idx):
            raise error

        return mod

    for error in (ValueError("a"), KeyError("b"), TypeError("c"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            trace_mods(raiser(error), None)
        assert caught.value is error


def test_after_an_error_the_next_mod_works():
    assert refused(lambda s, b, h, q, k: s if q else k)
    assert trace_mods(lambda s, b, h, q, k: s + k, None).has_score


# ---- Tensors, torch ----


def test_wrong_indexes_of_a_tensor(device):
    t = clattn.tensor(table, device)
    for index, words in {
        "one": (lambda h: t[h], "an array of 1 dimensions is used as a number"),
        "slice": (lambda h: t[h, :2], "expected an integer for each dimension"),
        "real": (lambda h: t[h / 2, 0], "an index is a real"),
        "deep": (lambda h: t[[h]], "a Tensor is indexed with integers"),
    }.values():
        with pytest.raises(TypeError, match=re.escape(words)):
            trace_mods(lambda s, b, h, q, k, index=index: s + index(h), None)
    with pytest.raises(TypeError, match="is used as a number"):
        trace_mods(lambda s, b, h, q, k: s + t, None)


def test_unknown_functions_of_torch():
    torch = pytest.importorskip("torch")
    t = torch.ones(8)
    assert "torch.logit is not known; the nearest is torch.log" in refused(
        lambda s, b, h, q, k: torch.logit(s)
    )
    assert "torch.stack is not known" in refused(lambda s, b, h, q, k: torch.stack([s, k]))
    assert "torch.add_ is not known" in refused(lambda s, b, h, q, k: t.add_(s))
    assert "torch.add of a symbol takes no alpha" in refused(
        lambda s, b, h, q, k: torch.add(s, k, alpha=2)
    )
    assert "rounding_mode is 'up'" in refused(
        lambda s, b, h, q, k: torch.div(s, k, rounding_mode="up")
    )
    assert "is used as a number" in refused(lambda s, b, h, q, k: t * s)
    assert "dtype torch.complex64" in refused(
        lambda s, b, h, q, k: s + torch.ones(3).to(torch.complex64)[h]
    )
    for wrong in (lambda h: h, lambda h: torch.ones(3, 4)[h], lambda h: torch.ones(3, 3, 3)[h]):
        mod = lambda s, b, h, q, k, of=wrong: torch.dot(torch.ones(3, 3)[h], of(h))  # noqa: E731
        assert "torch.dot takes two rows of arrays, of one length" in refused(mod)
    for mod in (
        lambda s, b, h, q, k: torch.ones(3, 3)[h] + s,
        lambda s, b, h, q, k: torch.exp(torch.ones(3, 3)[h]),
        lambda s, b, h, q, k: torch.where(q > k, s, torch.ones(3, 3)[h]),
    ):
        assert "array of 1 dimensions is used as a number" in refused(mod)


@pytest.mark.parametrize("shape", [(), (8,)], ids=str)
def test_tensors_that_require_gradients(shape):
    """They are read where torch computes no gradients."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.full(shape, 0.5))

    def mod(score, b, h, q_idx, kv_idx):
        return score * (weight[h] if shape else weight)  # weighed

    with pytest.raises(ValueError, match="requires gradients") as caught:
        trace_mods(mod, None)
    message = str(caught.value)
    assert message.startswith(f"score_mod: a captured tensor of shape {shape} requires gradients")
    assert "torch.no_grad()" in message and message.endswith("# weighed")
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            mods = trace_mods(mod, None)
        assert [np.asarray(table).tolist() for table in mods.tables] == [[0.5] * 8] * len(shape)
        assert mods.numbers == (() if shape else (0.5,))
    trace_mods(lambda s, b, h, q, k: s * (weight.detach()[h] if shape else weight.detach()), None)


def test_an_array_of_jax_indexed_by_a_symbol():
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(8)
    message = refused(lambda s, b, h, q, k: s + array[h])
    assert message.startswith("score_mod: an array is indexed by a symbol; write clattn.lookup")


@pytest.mark.parametrize("on_device", [False, True])
def test_tables_of_numbers_that_int64_does_not_hold(on_device):
    most = np.array([[3, 2**63 - 1], [0, 1]], np.uint64)
    for table, element in ((most, None), (most[:0], None), (most + np.uint64(1), 2**63)):
        held = clattn.tensor(table) if on_device else table
        mod = lambda s, b, h, q, k, held=held: s + lookup(held, h, k)  # noqa: E731
        if element is None:
            assert len(trace_mods(mod, None).tables) == 1
            continue
        with pytest.raises(ValueError, match=f"score_mod: .* uint64 has the element {element}; "):
            trace_mods(mod, None)


# ---- and_masks, or_masks, explain ----


@pytest.mark.parametrize("combine", ["and_masks", "or_masks"])
def test_masks_of_no_masks(combine):
    with pytest.raises(TypeError, match=f"{combine} is given no mask_mod"):
        getattr(clattn, combine)()
    with pytest.raises(TypeError, match=f"{combine} is given an object of type int; expected func"):
        getattr(clattn, combine)(lambda b, h, q, k: q > k, 3)
    with pytest.raises(TypeError, match=f"{combine}: a function takes other .*\n.*\n.*q, k: q > k"):
        getattr(clattn, combine)(lambda b, q, k: q > k)


@looped("combine", ["and_masks", "or_masks"])
@looped("name", MASK_RESULTS)
def test_masks_of_wrong_masks(combine, name):
    """The message shows the function of the user's that is wrong."""
    wrong, words = MASK_RESULTS[name]
    mod = getattr(clattn, combine)(lambda b, h, q, k: q > k, wrong)
    check_message(refused(None, mod), "mask_mod", name, words)
    in_a_score = refused(lambda s, b, h, q, k: where(mod(b, h, q, k), s, 0))
    check_message(in_a_score, "mask_mod", name, words)


def test_after_and_masks_the_message_is_the_score_mod_s_again():
    causal = clattn.and_masks(lambda b, h, q, k: q >= k)
    message = refused(lambda s, b, h, q, k: where(causal(b, h, q, k), s, 0) & 1)
    assert message.startswith("score_mod: & of a real")


@looped("arguments", [({1, 2}, 0), (slopes,), (3, 0)], ids=repr)
def test_lookups_without_symbols(arguments):
    with pytest.raises(TypeError, match="expected an array and an integer for each of its dim"):
        lookup(*arguments)


def test_explain_of_no_mod():
    with pytest.raises(TypeError, match="explain is given no mod"):
        explain()
    with pytest.raises(TypeError, match="mod is of type int; expected a function"):
        explain(3)
    for mod in (lambda x: x, lambda *x: x[0]):
        with pytest.raises(TypeError, match="or say which by keyword"):
            explain(mod)
    with pytest.raises(TypeError, match="expected one way"):
        explain(lambda b, h, q, k: q > k, mask_mod=lambda b, h, q, k: q > k)
