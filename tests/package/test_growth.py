# SPDX-License-Identifier: MIT
"""benchmarks/growth.py: time and memory by S, in processes of their own."""

import json
import sys
from types import SimpleNamespace

import pytest
from support.processes import png_size, run

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import growth


def test_a_device_without_others(first_device, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(growth, "peer_classes", list)
    file, picture = tmp_path / "growth.json", tmp_path / "growth.png"
    words = ["256", "--device", first_device.platform, "--json", str(file), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["growth.py", *words])
    assert growth.main() == 0
    [curve] = json.loads(file.read_text())["scaling"]
    assert curve["ended"] == ""
    assert [cost["S"] for cost in curve["costs"]] == [128, 256]
    for cost in curve["costs"]:
        assert cost["seconds"] > 0
        assert cost["error"] <= cost["allowed"]
        assert cost["memory"] >= 0
    assert curve["label"] in capsys.readouterr().out
    png_size(picture)
    growth.save_chart(picture, [128], [growth.Growth("device", "no memory", {
        128: growth.Cost(1.0, 0, 0.0, 1.0)})])  # fmt: skip
    png_size(picture)


def test_both_passes(first_device, capsys, monkeypatch):
    """Gradients are compared where what is right fits into memory."""
    monkeypatch.setattr(growth, "find_peers", lambda trains: [])
    words = ["128", "--train", "--device", first_device.platform]
    monkeypatch.setattr(sys, "argv", ["growth.py", *words])
    assert growth.main() == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "both passes" in said and " 128 " in said
    cost = growth.measure_one("device", first_device.platform, 128, True)
    assert 0 < cost.error <= cost.allowed
    monkeypatch.setattr(growth, "MOST_CHECKED", 64)
    cost = growth.measure_one("device", first_device.platform, 128, True)
    assert cost.error is cost.allowed is None


@pytest.mark.parametrize(
    ("limit", "word"), [("MOST_SECONDS", "more than 0 s"), ("MOST_MEMORY", "memory")]
)
def test_it_ends_where_a_call_would_take_too_much(monkeypatch, limit, word):
    cost = json.dumps({"seconds": 1.0, "memory": 1 << 20, "error": 0.0, "allowed": 1.0})
    done = SimpleNamespace(returncode=0, stdout=cost + "\n", stderr="")
    monkeypatch.setattr(growth.subprocess, "run", lambda *args, **options: done)
    monkeypatch.setattr(growth, limit, 1e-9)
    limited = growth.Growth("peer", "fake")
    for size in (128, 256, 512):
        growth.measure_next(limited, size)
    assert list(limited.costs) == [128]
    assert "S = 256" in limited.ended and word in limited.ended


def test_a_process_that_fails_is_named():
    words = [sys.executable, growth.__file__, "--one", "device", "no such device", "128"]
    done = run(words, timeout=60, check_exit=False, env=None, cwd=None)
    assert done.returncode != 0 and "no such device" in done.stderr


def test_what_is_wrong():
    fine, wrong = growth.Cost(1.0, None, 0.5, 1.0), growth.Cost(1.0, None, float("nan"), 1.0)
    assert growth.Growth("device", "cpu", {128: fine, 256: wrong}).wrong() == [256]
    assert growth.Growth("peer", "torch", {128: wrong}).wrong() == []
    not_compared = growth.Cost(1.0, None, None, None)
    assert growth.Growth("device", "cpu", {128: not_compared}).wrong() == []
