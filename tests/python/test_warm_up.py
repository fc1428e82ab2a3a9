# SPDX-License-Identifier: MIT
"""clattn.warm_up: its arguments and its progress. What it builds: attention/test_programs.py."""

import io
import sys

import clattn
import numpy as np
import pytest


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
        (TypeError, {"codes": "int8"}, r"codes must be a sequence such as .*, got 'int8'"),
        (TypeError, {"codes": [8]}, "codes must be made of str, got int"),
        (ValueError, {"codes": ["int5"]}, 'codes has \'int5\'; expected "int8", .* or "int4"'),
        (ValueError, {"codes": ["int8"]}, "codes has 'int8', but kinds has no cache; expected"),
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
