# SPDX-License-Identifier: MIT
"""tools/machine_code for GPUs of Intel and AMD. tests/ptx has the tests for NVIDIA."""

import sys

import pytest
from machine_code import amd, intel, nvidia, table
from machine_code import command as machine_code

FINE = "__kernel void fine(__global float *x) { x[get_global_id(0)] *= 2; }"
ARRAY = """
__kernel void
array(__global int *x, int count)
{
    int sums[400];
    for (int n = 0; n < 400; n++) {
        sums[n] = x[7 * n];
    }
    for (int n = 0; n < count; n++) {
        sums[x[n]] += sums[x[n + 300]];
    }
    x[get_global_id(0)] = sums[x[count]];
}
"""


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["machine_code", *map(str, arguments)])
    return machine_code.main()


@pytest.mark.parametrize("vendor", ["intel", "amd"])
@pytest.mark.parametrize(("text", "status"), [(FINE, 0), (ARRAY, 1), ("an error", 1)])
def test_faults_are_told(tmp_path, monkeypatch, capsys, vendor, text, status):
    """A kernel has an array that does not fit registers, or does not compile."""
    _, missing = machine_code.COMPILERS[vendor].find_programs()
    if missing:
        pytest.skip("not found: " + ", ".join(missing))
    kernel = tmp_path / "kernel.cl"
    kernel.write_text(text)
    assert run(monkeypatch, "--for", vendor, kernel) == status
    said = capsys.readouterr()
    devices = machine_code.COMPILERS[vendor].DEVICES
    assert said.out.count("BAD") == (len(devices) if text == ARRAY else 0)
    assert ("kernel.cl" in said.err) == (text == "an error")


def test_compilers_that_are_missing(monkeypatch, capsys):
    """They are named. Without any compiler the exit status is 2."""
    for compiler in (nvidia, intel, amd):
        monkeypatch.setattr(compiler, "find_programs", lambda: ((), ["a compiler"]))
    assert run(monkeypatch) == 2
    said = capsys.readouterr().err
    for name in ("nvidia", "intel", "amd"):
        assert f"no {name}, not found: a compiler" in said
    monkeypatch.setattr(amd, "find_programs", lambda: ((), []))
    monkeypatch.setattr(amd, "compile_row", lambda *_: [{"scratch": 0, "waves": 1}])
    monkeypatch.setattr(table, "AMD", [table.Row("attention/tiled.cl", ("DTYPE=3",), ("gfx906",))])
    assert run(monkeypatch) == 1  # one wave
    assert "| attention_tiled | DTYPE=3 | gfx906 |" in capsys.readouterr().out


def test_tokens_of_a_binary():
    """Of ocloc's disassembler: scratch memory in two slots and for arrays, and SIMD."""
    text = (
        "4 Token 18\n\t4 Size 16\n\tHex 0 0 0 0 0 4 0 0 \n"
        "4 Token 55\n\t4 Size 16\n\tHex 0 0 0 0 0 8 0 0 \n"
        "4 Token 38\n\t4 Size 28\n\tHex 40 0 0 0 30 0 0 0 8 0 0 0 10 0 0 0 1 0 0 0 \n"
        "4 Token 23\n\t4 Size 140\n\tHex 0 0 0 0 0 0 0 0 0 0 0 0 8 0 0 0 \n"
        "4 Token 17\n\t4 Size 40\n\tHex 1 0 0 0 2 0 0 0 \n"
    )
    assert intel.read(text) == {"scratch": 0x400 + 0x800 + 0x10, "lanes": 8}


def test_rows_of_a_short_run():
    """The tightest devices, each kernel, all head sizes of attention_tiled."""
    short = [row for row in (*table.INTEL, *table.AMD) if table.is_short(row)]
    assert {row.devices[0] for row in short} == {"skl", "pvc", "gfx906"}
    assert len({row.file for row in short}) == len({row.file for row in table.AMD}) == 8
    for file in ("attention/tiled.cl", "attention/tiled_scores.cl"):
        assert sum(row.file == file for row in short) == 3 * len(table.HEADS)
    assert len(set(table.INTEL)) == len(table.INTEL) > 3 * len(short) / 2
