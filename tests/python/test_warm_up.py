# SPDX-License-Identifier: MIT
"""clattn.warm_up: later calls of the kinds that it was asked for build nothing."""

import io
import sys
import textwrap

import clattn
import numpy as np
import pytest
from support.faults import open_with

START = """
from support.helpers import sdpa, qkv
device = listed[index]

def builds(action):
    "How many programs it takes."
    before = faults.faults_builds()
    action()
    return faults.faults_builds() - before

def prefill(dtype="f4", **options):
    for heads, rows, keys in [(2, 17, 33), (1, 100, 100), (3, 300, 70), (64, 512, 512)]:
        sdpa(*qkv((1, heads), rows, keys, 64, dtype=dtype), device=device, **options)

def decode(**options):
    for query_heads, heads in [(4, 4), (4, 2), (6, 2), (8, 2), (8, 1)]:
        for keys in 40, 9000:
            q = qkv((1, query_heads), 1, 1, 64)[0]
            k, v = qkv((1, heads), 1, keys, 64)[1:]
            sdpa(q, k, v, enable_gqa=True, device=device, **options)
"""


def test_calls_of_the_default_kinds_build_nothing(device, faults_library):
    """Calls of another kind do: the count itself sees builds."""
    code = """
        assert builds(lambda: clattn.warm_up(device=device, head_sizes=[64])) > 2
        assert builds(prefill) == 0
        assert builds(lambda: prefill(is_causal=True)) == 0
        assert builds(lambda: prefill(window=(9, 0), is_causal=True, scale=0.3)) == 0
        assert builds(decode) == 0
        assert builds(lambda: clattn.warm_up(device=device, head_sizes=[64])) == 0
        other = {"dtype": "f2"} if device.type == "cpu" else {}  # head sizes are data there
        assert builds(lambda: sdpa(*qkv((1, 2), 17, 33, 24, **other), device=device)) == 1
    """
    open_with(faults_library, device, START + textwrap.dedent(code))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_calls_of_half_types_build_nothing(device, faults_library, dtype):
    """Few rows of bfloat16 use vectors, many rows AMX."""
    code = f"""
        import ml_dtypes
        clattn.warm_up(["{dtype}"], ["prefill"], head_sizes=[64], device=device)
        assert builds(lambda: prefill("{dtype}")) == 0
        assert builds(lambda: prefill("{dtype}", is_causal=True)) == 0
    """
    open_with(faults_library, device, START + textwrap.dedent(code))


def test_calls_of_other_kinds_build_nothing(device, faults_library):
    """A cache, masks that are shared by all heads; keys that are far from each other."""
    code = """
        clattn.warm_up(kinds=["cache", "masked", "prefill"], head_sizes=[64], device=device)

        def cached():
            cache = clattn.KVCache(2, 4, 6000, 64, device=device)
            for n in 5000, 1, 1:
                q, k, v = qkv((2, 4), n, n, 64)
                cache.append(k, v)
                cache.attend(np.repeat(q[:, :, -1:], 2, axis=1))

        assert builds(cached) == 0
        for mask in np.ones((1, 33), bool), np.ones((1, 33), "f4"):
            assert builds(lambda: sdpa(*qkv((1, 2), 17, 33, 64), mask, device=device)) == 0
        q, k, v = qkv((1, 16), 256, 1, 64)
        assert builds(lambda: sdpa(q, np.zeros((1, 16, 9000, 64), "f4"),
                                   np.zeros((1, 16, 9000, 64), "f4"), device=device)) == 0
    """
    open_with(faults_library, device, START + textwrap.dedent(code))


def test_the_answer_is_a_time(device):
    """In seconds; nothing to do is done at once."""
    seconds = clattn.warm_up((), device=device)
    assert isinstance(seconds, float) and 0 <= seconds < 1
    assert clattn.warm_up(["float32"], (), device=device) < 1


@pytest.mark.parametrize("dtype", ["float16", np.float64])
def test_dtypes(device, dtype):
    if dtype is np.float64 and not device.float64:
        pytest.skip("the device does not compute in float64")
    assert clattn.warm_up([dtype], ["decode"], device, head_sizes=[64]) > 0


def test_progress_in_lines(device, capfd):
    """Where the standard error stream is no terminal; none is shown unless asked for."""
    clattn.warm_up(["float32", "float32"], ["decode"], device, head_sizes=[64], progress=True)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == "   0 of 5  float32, head size 64, decode\n"
    clattn.warm_up(["float32"], ["decode"], device, head_sizes=[64])
    assert capfd.readouterr() == ("", "")


def test_progress_on_a_terminal(device, monkeypatch):
    """A bar of rich, or lines where it is not installed."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def shown():
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        clattn.warm_up(["float32"], ["decode"], device, head_sizes=[64], progress=True)
        return terminal.getvalue()

    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    bar = shown()
    assert "float32, head size 64, decode" in bar and "%" in bar
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert shown() == "   0 of 5  float32, head size 64, decode\n"


@pytest.mark.parametrize(
    ("error", "wrong", "words"),
    [
        (TypeError, {"dtypes": "float32"}, r"dtypes .*\['float32'\], got 'float32'"),
        (TypeError, {"dtypes": ["int8"]}, "dtypes.* int8; expected float16, bfloat16, float32"),
        (TypeError, {"dtypes": 7}, "dtypes must be a sequence .*, got int"),
        (TypeError, {"kinds": "decode"}, r"kinds .*\['decode'\], got 'decode'"),
        (TypeError, {"kinds": [1]}, "kinds must be made of str, got int"),
        (ValueError, {"kinds": ["decoding"]}, "kinds has 'decoding'; expected \"prefill\", .* or"),
        (TypeError, {"head_sizes": 64}, "head_sizes must be a sequence .*, got int"),
        (
            TypeError,
            {"head_sizes": [64.0]},
            "an element of head_sizes must be an integer, got float",
        ),
        (ValueError, {"head_sizes": [0]}, "an element of head_sizes is 0; expected 1 or more"),
        (TypeError, {"progress": 1}, "progress must be a bool, got int"),
        (ValueError, {"device": "no such device"}, "device 'no such device'"),
        (TypeError, {"device": 7.5}, "device"),
    ],
)
def test_wrong_arguments(error, wrong, words):
    with pytest.raises(error, match=words):
        clattn.warm_up(**wrong)
