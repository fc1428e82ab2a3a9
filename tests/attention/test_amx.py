# SPDX-License-Identifier: MIT
"""attention/cpu.cl with AMX, which multiplies float16 as sums of two numbers of bfloat16.

The kernel contract and test_bfloat16_pairs.py test the variant too.
"""

import numpy as np
import pytest
from references.attention import bfloat16, float16
from support.faults import open_with
from support.helpers import check, draw, qkv, sdpa
from support.variants import force, forced, refusal_of


@pytest.fixture(autouse=True)
def amx(device, monkeypatch):
    """The variant, which is refused where the processor has no AMX."""
    force(monkeypatch, "amx")
    refusal = refusal_of(device, float16)
    if refusal:
        pytest.skip(refusal)


@pytest.mark.parametrize(
    ("dtype", "rows", "keys", "chosen"),
    [(float16, 129, 129, "amx"), (float16, 128, 129, "cpu"), (float16, 129, 128, "cpu"),
     (bfloat16, 17, 16, "amx"), (bfloat16, 16, 129, "-amx")],
    ids=str,
)  # fmt: skip
def test_which_calls_use_it(device, monkeypatch, dtype, rows, keys, chosen):
    """Splitting float16 has to pay, and matrices have to be full."""
    arrays = [draw((2, n, 64), dtype, seed) for seed, n in enumerate((rows, keys, keys))]
    results = {}
    for name in (None, "cpu", "-amx", "amx"):
        force(monkeypatch, name)
        results[name] = sdpa(*arrays, device=device, return_lse=True)[1].tobytes()
    assert results["cpu"] != results["amx"]
    assert results[None] == results[chosen]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_numbers_that_are_not_finite(device, bad, which):
    """An infinity has no second limb. A key whose score is -inf has no weight."""
    arrays = qkv((1, 2), 40, 75, 64, dtype=float16)
    arrays[which][:, :, 5, 3] = bad
    arrays[which][:, 1, 39, 17] = bad
    check(*arrays, device=device)
    check(*arrays, device=device, is_causal=True)
    check(*(np.abs(a) for a in arrays), device=device)


def test_every_payload_of_a_nan(device):
    """A NaN stays a NaN, whatever its bits."""
    for bits in (0x7FFF, 0xFFFF, 0x7C01, 0xFC01, 0x7E00):
        for which in range(3):
            arrays = qkv((1, 1), 20, 40, 32, dtype=float16)
            arrays[which].view(np.uint16)[0, 0, 7, 5] = bits
            assert np.isnan(sdpa(*arrays, device=device)).any(), f"{bits:#x} in {which}"


def test_float16_of_any_size(device):
    """Two limbs hold each float16, subnormal ones too."""
    q, k, v = qkv((1, 2), 40, 60, 64, dtype=float16)
    tiny = np.arange(1, 65).astype(np.uint16).view(np.float16)
    check(q, k, np.broadcast_to(tiny, v.shape), device=device)
    check(q, k, np.full_like(v, 65504), device=device)
    check(q * float16.type(100), k * float16.type(100), v, device=device, return_lse=True)


def test_a_compiler_that_refuses_it(device, faults_library, tmp_path):
    """Another kernel computes the calls, and the first call warns."""
    open_with(
        faults_library,
        device,
        """
        import pytest
        from references.attention import bfloat16
        from support.helpers import check, qkv
        device = listed[index]
        arrays = qkv((1, 2), 40, 70, 64, dtype=bfloat16)
        faults.faults_define(b"amx_start=goto")
        with pytest.warns(RuntimeWarning, match="'attention_cpu' does not build"):
            check(*arrays, device=device)
        check(*arrays, device=device)
        """,
        XDG_CACHE_HOME=tmp_path,
        POCL_CACHE_DIR=tmp_path,
        **forced(),
    )
