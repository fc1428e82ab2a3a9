# SPDX-License-Identifier: MIT
"""attention/cpu.cl with AMX, which multiplies matrices of bfloat16.

The kernel contract and test_bfloat16_pairs.py test the variant too.
"""

import pytest
from references.attention import bfloat16
from support.data import draw, sdpa
from support.faults import open_with
from support.launches import chosen
from support.variants import force_or_skip, forced


@pytest.fixture(autouse=True)
def amx(device, monkeypatch):
    """The variant, where the processor has AMX."""
    force_or_skip(monkeypatch, device, "amx")


@pytest.mark.parametrize(("rows", "uses"), [(17, True), (16, False)])
def test_which_calls_use_it(device, rows, uses):
    """Matrices have to be full."""
    arrays = [draw((2, n, 64), bfloat16, seed) for seed, n in enumerate((rows, 129, 129))]
    assert (chosen(None, sdpa, *arrays, device=device) == "amx") == uses
    assert chosen("-amx", sdpa, *arrays, device=device) != "amx"
    assert chosen("amx", sdpa, *arrays, device=device) == "amx"


def test_a_compiler_that_refuses_it(device, faults_library, tmp_path):
    """Another kernel computes the calls, and the first call warns."""
    open_with(
        faults_library,
        device,
        """
        import pytest
        from references.attention import bfloat16
        from support.checks import check_attention
        from support.data import qkv
        device = listed[index]
        arrays = qkv((1, 2), 40, 70, 64, dtype=bfloat16)
        faults.faults_define(b"amx_start=goto")
        with pytest.warns(RuntimeWarning, match="'attention_cpu' does not build"):
            check_attention(*arrays, device=device)
        check_attention(*arrays, device=device)
        """,
        XDG_CACHE_HOME=tmp_path,
        POCL_CACHE_DIR=tmp_path,
        **forced(),
    )
