# SPDX-License-Identifier: MIT
"""Plans with numbers of the tuner: right results, for the problems of their class alone."""

import numpy as np
import pytest
import support.tuning as tuning
from clattn import _core
from references.attention import float16, float32
from support.helpers import draw, sdpa
from support.masks import masked
from support.variants import each, force, takes_cpu_kernels


@pytest.fixture(autouse=True)
def untuned(device):
    """Nothing is tuned before a test, nor after it."""
    tuning.clear(device)
    yield
    tuning.clear(device)


# Each value that is a macro of a kernel for CPUs, and one of other kinds.
SETTINGS = {
    "cpu": ["NV=1 MR=12 TILES=1", "NV=3 MR=8 CHUNKS=6", "NV=4 MR=6 ITEMS=8",
                    "NV=2 MR=6 CHUNKS=2 TILES=2"],
    "pairs": ["NV=3 MR=8", "NV=1 MR=6 CHUNKS=4", "NV=1 MR=12"],
    "amx": ["CHUNKS=2 TILES=2", "CHUNKS=12 ITEMS=8"],
    "decode_cpu": ["RT=1 BN=32 KIB=64 ITEMS=16", "RT=2 BN=256 KIB=1024"],
    "tiled": ["TILING=3 EC=32 KC=8", "TILING=7", "TILING=9 EC=16"],
    "mma": ["MT=1 BN=32 CHUNK=16 STAGES=2 WARPS=8", "MT=2 BN=64 CHUNK=64 STAGES=2 QUERIES=2",
                    "TOGETHER=4 WARPS=4 BN=64 STAGES=2"],
    "decode_gpu": ["SPLITS=400", "SPLITS=25"],
    "decode_mma": ["SPLITS=200"],
}  # fmt: skip


def parse(text):
    return {name: int(value) for name, value in (word.split("=") for word in text.split())}


@pytest.mark.full
@each(SETTINGS, "setting")
def test_right_results(device, variant, setting):
    """Both shapes of a variant, with a mask where that is no program of its own; the same bits."""
    tuning.tune_all(device, np.dtype(variant.dtype).name, variant.kernel, parse(setting))
    for shape in variant.shapes:
        arrays = variant.arrays(shape)
        variant.check(*arrays, device=device)
        first, again = (variant.call(*arrays, device=device)[0] for _ in range(2))
        assert first.tobytes() == again.tobytes()
        if variant.cpu_only:
            L, S = variant.shapes[shape][3:]
            mask = masked(draw((L, S)) > -0.7, "float", dtype=variant.mask_dtype)
            variant.check(*arrays, device=device, attn_mask=mask, is_causal="lower_right")


@pytest.mark.full
@each({"cpu": ["NV=2 MR=6", "NV=3 MR=8"], "pairs": ["NV=2 MR=6"]}, "setting")
def test_columns_that_chunks_do_not_divide(device, variant, setting):
    """Tiles of an item lie side by side in memory, and each is summed a few columns at a time."""
    dtype = float16 if variant.kernel == "cpu" else variant.dtype  # packed: tiles share keys
    tuning.tune_all(device, np.dtype(dtype).name, variant.kernel, parse(setting))
    for Ev in (20, 49, 128):
        variant.check(*variant.arrays((4, 4, 4, 200, 90), dtype, 64, Ev), device=device)


def bits(device, E=64, Ev=None, L=200, dtype=float32):
    q, k, v = draw((2, L, E), dtype), draw((2, 300, E), dtype, 1), draw((2, 300, Ev or E), dtype, 2)
    return sdpa(q, k, v, device=device).tobytes()


PROBLEMS = {
    "many": {},
    "smaller head": {"E": 50},
    "one wide": {"E": 32, "Ev": 65},
    "few": {"L": 20},
    "decode": {"L": 3},
    "float16": {"dtype": np.float16},
    "largest": {"E": 256},
    "no class": {"E": 257},
}


@pytest.mark.parametrize(
    ("one", "found"),
    [
        (("float32", 64, "many"), ("many", "smaller head")),
        (("float32", 80, "many"), ("one wide",)),
        (("float32", 64, "few"), ("few",)),
        (("float16", 64, "many"), ("float16",)),
        (("float32", 256, "many"), ("largest",)),
    ],
    ids=str,
)
def test_a_class_is_a_dtype_a_head_size_and_a_range_of_rows(device, monkeypatch, one, found):
    """Blocks of other sizes give other bits; problems of other classes keep theirs."""
    if not takes_cpu_kernels(device):
        pytest.skip("the knob is of attention_cpu")
    force(monkeypatch, "cpu")
    before = {name: bits(device, **options) for name, options in PROBLEMS.items()}
    _core.tune(device, *one, "cpu", {"CHUNKS": 2})
    after = {name: bits(device, **options) for name, options in PROBLEMS.items()}
    assert tuple(name for name in PROBLEMS if after[name] != before[name]) == found
    _core.tune(device, *one, "cpu", {})
    assert {name: bits(device, **options) for name, options in PROBLEMS.items()} == before


def test_a_threshold_moves_the_choice_of_variants(device):
    """Only for the rows between the rule's number and the tuner's."""
    if not takes_cpu_kernels(device):
        pytest.skip("the threshold is one of CPUs")

    def of_rows(L):  # 4 query heads share the keys of one, in enough batches for all cores
        arrays = draw((64, 4, L, 64)), draw((64, 1, 90, 64), seed=1), draw((64, 1, 90, 64), seed=2)
        return sdpa(*arrays, device=device, enable_gqa=True).tobytes()

    before = {4 * L: of_rows(L) for L in range(1, 9)}
    for rows, changed in ((8, [8, 12]), (12, [12]), (24, [16, 20]), (32, [16, 20, 24, 28])):
        _core.tune(device, "float32", 64, "threshold", "decode_cpu", {"ROWS": rows})
        assert [n for n in before if of_rows(n // 4) != before[n]] == changed


def test_what_is_set_is_what_is_listed(device):
    one = ("bfloat16", 96, "decode")
    _core.tune(device, *one, "decode_cpu", {"KIB": 64, "RT": 2})
    _core.tune(device, *one, "cpu", {"NV": 4})
    _core.tune(device, "float64", 256, "few", "cpu", {"ITEMS": 8})
    found = [(*entry[:4], sorted(entry[4].items())) for entry in _core.tuned(device)]
    assert sorted(found) == [
        (*one, "cpu", [("NV", 4)]),
        (*one, "decode_cpu", [("KIB", 64), ("RT", 2)]),
        ("float64", 256, "few", "cpu", [("ITEMS", 8)]),
    ]
    _core.tune(device, *one, "decode_cpu", {"RT": 1})
    assert (*one, "decode_cpu", {"RT": 1}) in _core.tuned(device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "no class int8, 64, many"),
        ({"head_size": 65}, "no class float32, 65, many"),
        ({"rows": "some"}, "no class float32, 64, some"),
        ({"variant": "fast"}, "no variant 'fast'"),
        ({"variant": "reference"}, "no variant 'reference'"),
        ({"knobs": {"XX": 1}}, "cpu has no knob XX with the value 1"),
        ({"knobs": {"NV": 5}}, "cpu has no knob NV with the value 5"),
        ({"knobs": {"NV": 0}}, "cpu has no knob NV with the value 0"),
    ],
    ids=str,
)
def test_what_is_refused(device, change, message):
    good = {"dtype": "float32", "head_size": 64, "rows": "many", "variant": "cpu", "knobs": {}}
    with pytest.raises(ValueError, match=message):
        _core.tune(device, *(good | change).values())
    assert _core.tuned(device) == []
    for knobs in ({"NV": 1.5}, {1: 1}, None):
        with pytest.raises(TypeError):
            _core.tune(device, *(good | {"knobs": knobs}).values())
    with pytest.raises(TypeError, match=r"clattn\.Device"):
        _core.tuned("cpu")
