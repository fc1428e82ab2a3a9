# SPDX-License-Identifier: MIT
"""tools/machine_code: kernels with PTX assemble for NVIDIA GPUs, and spill no registers."""

import sys

import pytest
from machine_code import command as machine_code
from machine_code import common, nvidia, table

SPILLS = """
__kernel __attribute__((reqd_work_group_size(1024, 1, 1))) void
spills(__global float *x)
{
    float sums[300];
#pragma unroll
    for (int n = 0; n < 300; n++) {
        sums[n] = x[n];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
    for (int n = 0; n < 300; n++) {
        x[300 - n] = sums[n] * x[n + 7];
    }
}
"""

STACK = """
__kernel void
stack(__global float *x, int count)
{
    float sums[256];
    for (int n = 0; n < 256; n++) {
        sums[n] = x[n] * x[n + 256];
    }
    for (int n = 0; n < count; n++) {
        x[n] += sums[n & 255];
    }
}
"""


@pytest.fixture(scope="module")
def programs():
    found, missing = nvidia.find_programs()
    if missing:
        pytest.skip("not found: " + ", ".join(missing))
    return found


def test_kernels_do_not_spill(programs, capsys, monkeypatch):
    """Some rows of the list. Products, loads of matrices and copies are counted too."""
    rows = [row for row in table.NVIDIA if row[0] == "attention/mma.cl"]
    monkeypatch.setattr(sys, "argv", ["machine_code", "--for", "nvidia"])
    monkeypatch.setattr(table, "NVIDIA", rows[::9])
    assert machine_code.main() == 0, capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in n.strip("|").split("|")] for n in lines if "sm_" in n]
    assert len(rows) == sum(len(row.devices) for row in table.NVIDIA)
    for _, macros, _, registers, spilled, _, local, _, _, _, hmma, hgmma, ldsm, ldgsts in rows:
        defines = dict(macro.split("=") for macro in macros.split())
        size, tiles, keys = (int(defines[name]) for name in ("HEAD_E", "MT", "STRIP"))
        if grouped := defines.get("TOGETHER") == "4":
            # of a block: one for each 16 elements; for each 16 keys, one for 128 or 64 columns
            columns = 128 if size % 128 == 0 else 64
            assert int(hgmma) == 2 * (size // 16 + keys // 16 * (size // columns))
            assert (int(hmma), int(ldsm)) == (0, 0)
        most = (192 if grouped else 96 if defines.get("QUERIES") == "2" else 48) << 10
        assert (int(registers) <= 255, int(spilled), int(local) <= most) == (True, 0, True)
        if grouped:
            continue
        # of 16 keys: two for each 16 elements, two for each 16 columns, one for the sum
        assert int(hmma) == keys // 16 * tiles * (4 * size // 16 + 1)
        assert int(ldsm) == (2 * keys // 16 + tiles) * size // 16
        assert (int(ldgsts) > 0) == ("ALIGNED" in defines)


def test_results_stay_in_registers(programs, capsys, monkeypatch):
    """Of attention_tiled with halves: libclc converts by so much code that little is inlined."""
    rows = [row for row in table.NVIDIA if row[0] == "attention/tiled.cl"]
    monkeypatch.setattr(sys, "argv", ["machine_code", "--for", "nvidia"])
    monkeypatch.setattr(table, "NVIDIA", [row for row in rows if "DTYPE=1" in row[1]])
    assert machine_code.main() == 0, capsys.readouterr()
    assert capsys.readouterr().out.count("| attention_tiled |") == 2


def test_the_limit_of_reading_reads_16_bytes_at_once(programs, tmp_path):
    ptx = tmp_path / "limits.ptx"
    kernel = common.ROOT / "python/clattn/_commands/bench/limits.cl"
    nvidia.to_ptx(programs, kernel, ["-DLANES=4", "-DLOCAL=64"], ptx)
    assert ptx.read_text().count("ld.global.v4.f32") == 8


def test_keys_and_values_are_loaded_by_16_bytes(programs, tmp_path):
    """Of attention_decode_mma: four keys and four values of a lane, before the loop and in it."""
    ptx = tmp_path / "decode.ptx"
    kernel = common.ROOT / "kernels/attention/decode_mma.cl"
    nvidia.to_ptx(programs, kernel, table.with_macros(kernel, ["-DHEAD_E=64"]), ptx)
    assert ptx.read_text().count("ld.global.v4.u32") == 16


@pytest.mark.parametrize(("text", "status"), [(SPILLS, 1), (STACK, 1), ("an error", 1), (None, 2)])
def test_faults_are_told(programs, tmp_path, monkeypatch, capsys, text, status):
    """A kernel spills, has an array on its stack or does not compile, or there is no compiler."""
    kernel = tmp_path / "spills.cl"
    kernel.write_text(text or SPILLS)
    monkeypatch.setattr(sys, "argv", ["machine_code", "--for", "nvidia", str(kernel)])
    if text is None:
        monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
        monkeypatch.setattr(nvidia, "installed", lambda *places: None)
    assert machine_code.main() == status
    if text is None:
        assert "ptxas (pip install nvidia-cuda-nvcc-cu12)" in capsys.readouterr().err
