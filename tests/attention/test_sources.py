# SPDX-License-Identifier: MIT
"""varlen_attn with each dtype of keys, in each layout, with each option.

The reference kernel runs, for which all but dtypes and mods are data. test_ragged.py and
test_bytes.py run the other kernels with some of these calls. test_paged_attend.py and
test_kv_cache_codes.py test the caches.
"""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, float32
from support.coded import CODES, call, coded
from support.data import draw
from support.loops import looped
from support.ragged import check_results, packed, run
from support.variants import force

LENGTHS = [1, 9, 0, 3, 2], [30, 12, 5, 0, 1]
SLOPES = np.array(
    [0.5, -0.25, 0.125, -1], float32
)  # powers of two: products with positions are exact


def alibi(score, b, h, q_idx, kv_idx):
    return score + clattn.lookup(SLOPES, h) * (kv_idx - q_idx) + 0.25 * b


def odd(b, h, q_idx, kv_idx):
    return (kv_idx + q_idx + b) % 3 != 0


def bias_of(b, rows, keys):
    """Return the float mask (Hq, rows, keys) that equals the mods for sequence b."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    bias = SLOPES[:, None, None] * (j - i) + 0.25 * b
    return np.where((i + j + b) % 3 != 0, bias, -np.inf).astype(float32)


SOURCES = {
    "packed": {},
    "heads first": {"page_size": 4, "page_layout": "HND"},
    "heads third": {"page_size": 3, "page_layout": "NHD"},
    "a page for each key": {"page_size": 1, "page_layout": "HND"},
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": "lower_right"},
    "window": {"window_size": (6, 1)},
    "both": {"window_size": (2, 4), "is_causal": True},
    "capped": {"softcap": 2.0, "scale": 0.7},
    "sinks": {"sinks": draw((4,), float32, 9), "window_size": (-1, 0)},
    "mods": {"score_mod": alibi, "mask_mod": odd, "is_causal": "lower_right"},
}


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    force(monkeypatch, "reference")


def check_each(given, results, options):
    """Compare a call's results with float64 attention of each sequence."""
    known = {name: value for name, value in options.items() if not name.endswith("_mod")}
    bias = bias_of if "score_mod" in options else None
    check_results(given, *results, False, bias=bias, **known)


@looped("dtype", DTYPES, ids=str)
@looped("source", SOURCES)
@looped("options", OPTIONS)
def test_floats(device, dtype, source, options):
    given = packed(*LENGTHS, Ev=24, dtype=dtype)
    check_each(given, run(given, device, **SOURCES[source], **OPTIONS[options]), OPTIONS[options])


@looped("code", CODES)
@looped("scales", ["one", "of heads", "of keys"])
@looped("source", SOURCES)
@looped("options", OPTIONS)
def test_codes(device, code, scales, source, options):
    bits, numbers, factors = coded(*LENGTHS, CODES[code], scales, Ev=24)
    results = call(bits, factors, device, **SOURCES[source], **OPTIONS[options])
    check_each(numbers, results, OPTIONS[options])
