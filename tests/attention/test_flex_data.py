# SPDX-License-Identifier: MIT
"""What mods capture is data, read at the time of the call. Indexes outside a table.

That other values need no other program, test_programs.py shows.
"""

import clattn
import numpy as np
import pytest
from references.attention import float32
from support.data import draw, qkv
from support.loops import looped
from support.mods import call, check_flex, check_outside, lookup, where
from support.sizes import SMALL, WIDE
from support.tensors import same_bits
from support.variants import force, takes_cpu_kernels

ARRAYS = qkv((2, 3), 9, 37, SMALL)


@pytest.fixture(autouse=True)
def reference_kernel(request, monkeypatch):
    """What the host does with the data of a call depends on no kernel."""
    if "kernel_name" not in request.fixturenames:
        force(monkeypatch, "reference")


def mod_of(table, factor, shift, most):
    def mod(score, b, h, q_idx, kv_idx):
        return score * factor + lookup(table, h, (q_idx + kv_idx + shift) % most)

    return mod


# ---- what is captured ----


def test_a_table_is_read_at_the_time_of_the_call(device):
    table = draw((3, 7))
    mod = mod_of(table, 0.5, 1, 7)
    first = check_flex(*ARRAYS, device=device, score_mod=mod)
    table *= 3
    second = check_flex(*ARRAYS, device=device, score_mod=mod)
    assert (first != second).any()


def test_a_table_of_a_tensor_lives_as_long_as_the_call(device):
    table = draw((3, 7))
    right = call(*ARRAYS, device=device, score_mod=mod_of(table, 0.5, 1, 7))
    tensors = [clattn.tensor(a, device) for a in ARRAYS]
    captured = [clattn.tensor(table, device)]
    got = call(*tensors, device=device, score_mod=mod_of(captured[0], 0.5, 1, 7))
    captured.clear()
    for _ in range(3):  # its memory may have another owner now
        clattn.tensor(np.full((3, 7), np.nan, float32), device)
    same_bits(got, right)


def test_a_closure_is_read_at_the_time_of_the_call(device):
    numbers, table = [1.0], draw((3, 7))

    def mod(*place):
        return mod_of(table, numbers[0], 1, 7)(*place)

    for numbers[0] in (1.0, -2.0, 0.25):
        check_flex(*ARRAYS, device=device, score_mod=mod)


@pytest.mark.by_turns
@looped("sign", [1, -1])
def test_numbers_beyond_float32(device, sign):
    """A finite number stays finite, in a table and elsewhere. Infinity stays infinity."""
    most = sign * float(np.finfo(float32).max)
    for number, kept in ((sign * 1e300, most), (most, most), (sign * np.inf, sign * np.inf)):
        mods = (
            lambda s, b, h, q, k, number=number: where(k == 0, number, 0.0),
            lambda s, b, h, q, k, number=number: where(k == 0, lookup(np.array([number]), 0), 0.0),
        )
        for mod in mods:
            one = [a[:, :, :1] if n else a for n, a in enumerate(ARRAYS)]
            lse = call(*one, device=device, score_mod=mod, return_lse=True)[1]
            np.testing.assert_array_equal(lse, np.nan if kept == np.inf else kept)
        wide = [a.astype(np.float64) for a in one]
        got = call(*wide, device=device, score_mod=mods[0], return_lse=True)[1]
        np.testing.assert_array_equal(got, np.nan if number == np.inf else number)


# ---- indexes outside a table ----


OUTSIDE = {
    "inside": ((45, 50), 0, 1, 1),
    "negative, inside": ((45, 50), -1, -1, -1),
    "behind the end": ((30, 40), 0, 1, 1),
    "before the start": ((30, 40), -10, -1, -1),
    "both": ((12, 15), -20, 3, 1),
    "far": ((30, 40), 2**31 - 20, 1, 1),
    "far below": ((30, 40), -(2**31) + 20, -1, -1),
    "beyond 32 bits": ((30, 40), 0, 2**32, 2**32),
    "farthest": ((30, 40), 2**63 - 1, 0, 0),
    "lowest": ((30, 40), -(2**63), 0, 0),
    "one element": ((1, 1), 0, 1, 1),
    "empty": ((0, 0), 0, 0, 0),
    "empty, last": ((0, 5), -1, 0, 0),
}


@pytest.mark.full
@pytest.mark.parametrize("kernel_name", ["reference", "cpu", "decode_cpu"])
def test_indexes_outside(device, monkeypatch, kernel_name):
    """A score is NaN, a mask False, also if np.where takes the other branch."""
    if not takes_cpu_kernels(device) and kernel_name != "reference":
        pytest.skip(f"{kernel_name} is for CPUs")
    force(monkeypatch, kernel_name)
    with np.errstate(over="ignore"):
        for case in OUTSIDE.values():
            check_outside(*case, device=device, E=WIDE)


@pytest.mark.by_turns
def test_captured_indexes_outside(device):
    """Numbers in the place of symbols."""
    table = draw((3, 7))
    for index in (2, -3, 3, -4, 2**31 - 1, -(2**31)):

        def mod(score, b, h, q_idx, kv_idx, index=index):
            return score + lookup(table, index, kv_idx % 7)

        result = call(*ARRAYS, device=device, score_mod=mod)
        assert np.isnan(result).all() == (not -3 <= index < 3)
        assert np.isfinite(result).all() == (-3 <= index < 3)


# ---- refusals of a call; tests/python/test_flex_errors.py has those of tracing ----


def refused(exception, words, *arrays, **options):
    with pytest.raises(exception, match=words):
        call(*arrays, **options)


def test_a_mod_is_called_once(device):
    """Its side effects happen once for each call, and so do those of a block mask's."""
    calls = []

    def mod(score, b, h, q_idx, kv_idx):
        calls.append(score)
        return score * 1.5 + lookup(np.ones((3, 7)), h, kv_idx % 7)

    for count in (1, 2):
        call(*ARRAYS, device=device, score_mod=mod)
        assert len(calls) == count
    with pytest.raises(TypeError, match="a symbol of another call"):
        calls[0] * 2


def test_a_mod_that_fails_leaves_nothing(device):
    """Nor does it harm the next call."""

    def mod(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else -score

    tensors = [clattn.tensor(a, device) for a in ARRAYS]
    for arrays in (ARRAYS, tensors):
        refused(TypeError, r"np\.where\(condition, a, b\) for if", *arrays, score_mod=mod,
                device=device)  # fmt: skip
        call(*arrays, device=device, score_mod=mod_of(draw((3, 7)), 1.5, 2, 7))


def test_a_table_of_another_device(device):
    others = [other for other in clattn.devices() if other != device]
    if not others:
        pytest.skip("there is one device")
    mod = mod_of(clattn.tensor(draw((3, 7)), others[0]), 1.5, 2, 7)
    refused(ValueError, "score_mod", *ARRAYS, score_mod=mod, device=device)
    tensors = [clattn.tensor(a, device) for a in ARRAYS]
    refused(ValueError, "score_mod", *tensors, score_mod=mod, device=None)


def test_tables_that_are_too_large(device):
    """A table of a few bytes that says it is a large one is refused before it is read."""
    few = np.zeros(16)
    for shape, strides in (((3, 2**31 + 1), (0, 8)), ((2**16, 2**16), (-(2**19), 8))):
        table = np.lib.stride_tricks.as_strided(few, shape, strides)
        refused(ValueError, "a table of score_mod or mask_mod has shape", *ARRAYS,
                score_mod=mod_of(table, 1.5, 2, 7), device=device)  # fmt: skip


WRONG = {
    "score_mod": (TypeError, 3, "score_mod is of type int; expected a function"),
    "mask_mod": (TypeError, draw((9, 37)) > 0, "mask_mod is of type ndarray; expected a function"),
    "scale": (TypeError, "1", "scale"),
    "softcap": (ValueError, -1.0, "softcap"),
    "enable_gqa": (TypeError, 2, "enable_gqa"),
    "return_lse": (TypeError, None, "return_lse"),
    "out": (ValueError, np.zeros((2, 3, 9, 7), float32), "out"),
    "query": (ValueError, draw((2, 3, 9, 7)), "query|key"),
    "key": (TypeError, draw((2, 3, 37, SMALL), np.float64), "key"),
    "value": (ValueError, draw((2, 3, 36, SMALL)), "value"),
    "device": ((TypeError, ValueError), "no such device", "device"),
}


@looped("name", WRONG)
def test_wrong_arguments(device, name):
    exception, wrong, words = WRONG[name]
    arguments = dict(zip(("query", "key", "value"), ARRAYS, strict=True)) | {
        "score_mod": mod_of(draw((3, 7)), 1.5, 2, 7),
        "device": device,
    }
    with pytest.raises(exception, match=words):
        clattn.flex_attention(**arguments | {name: wrong})
