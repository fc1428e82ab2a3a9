# SPDX-License-Identifier: MIT
"""python -m clattn: the listing, and the demonstration on a small crop."""

import argparse
import io
import sys
import types

import clattn
import numpy as np
import pytest
from clattn._commands import common, listing
from clattn._commands.demo import measuring
from clattn._commands.main import main
from clattn._host.progress import open_bar
from support.processes import WHAT_TO_INSTALL, no_opencl, png_size, run, run_cli


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_listing_names_every_device():
    said = run_cli().stdout
    for device in clattn.devices():
        assert device.name in said
        assert device.platform in said
        assert str(device.compute_units) in said


def test_the_listing_says_which_device_was_chosen():
    """It changes with the choice, where there is one."""
    texts = {run_cli(env={"CLATTN_DEVICE": d.platform}).stdout for d in clattn.devices()}
    assert len(texts) == len({d.platform for d in clattn.devices()})


def test_why_a_device_is_the_default(monkeypatch, first_device):
    """The choice that counts is named, and CLATTN_DEVICE=cpu where a GPU came first by itself."""
    monkeypatch.delenv("CLATTN_DEVICE", raising=False)
    said = listing.why_default(first_device)
    assert said.startswith("by itself: "), said
    assert ("CLATTN_DEVICE=cpu" in said) == (first_device.type != "cpu"), said
    gpu = types.SimpleNamespace(type="gpu")
    with monkeypatch.context() as patch:
        patch.setattr(clattn, "devices", lambda: [gpu, first_device])
        assert (
            listing.why_default(gpu)
            == "by itself: the first GPU; CLATTN_DEVICE=cpu chooses the CPU"
        )
        assert listing.why_default(first_device) == "by clattn.set_default_device"
    with clattn.use_device(first_device):
        assert listing.why_default(first_device) == "by clattn.use_device"
    monkeypatch.setenv("CLATTN_DEVICE", "0")
    assert listing.why_default(first_device) == "by CLATTN_DEVICE=0"
    monkeypatch.setenv("CLATTN_DEVICE", "no such device")
    assert listing.why_default(first_device).startswith("by itself: ")


@pytest.mark.cpus
def test_cpu_is_a_word_for_clattn_device():
    assert "by CLATTN_DEVICE=cpu\n" in run_cli(env={"CLATTN_DEVICE": "cpu"}).stdout


def test_the_listing_without_opencl(tmp_path):
    """What to install, no traceback."""
    done = run_cli(env=no_opencl(tmp_path), check_exit=False)
    said = done.stdout + done.stderr
    assert any(word in said for word in WHAT_TO_INSTALL), said
    assert "Traceback" not in said


def test_a_driver_that_cannot_be_loaded_is_not_fatal(tmp_path):
    """An .icd file that names no library: as if there were no driver."""
    (tmp_path / "broken.icd").write_text("/nonexistent/libdriver.so\n")
    done = run_cli(env={"OCL_ICD_VENDORS": tmp_path}, check_exit=False)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode >= 0, "killed by a signal"


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"],
                                       ["demo", "--no-such-option"], ["warm-up", "--kinds", "x"],
                                       ["warm-up", "--head-sizes", "0"],
                                       ["demo", "--size", "9.5"]], ids=" ".join)  # fmt: skip
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "least", "above", "right", "wrong"),
    [
        (int, 7, False, "7", {"9.5": "a whole number of 7 or more", "6": "7 or more"}),
        (float, 0, True, "0.5", {"0": "a number above 0", "nan": "above 0", "inf": "above 0"}),
    ],
)
def test_numbers(kind, least, above, right, wrong):
    parse = common.number(kind, least, above=above)
    assert parse(right) == kind(right)
    for text, words in wrong.items():
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}'; expected .*{words}"):
            parse(text)


@pytest.mark.parametrize(("failure", "status", "words"), [
    (common.CommandError("no such picture", 2), 2, "no such picture"),
    (clattn.DeviceError("lost"), 1, "lost"),
    (MemoryError("64 GiB"), 1, "there is not enough memory: 64 GiB"),
    (MemoryError(), 1, "there is not enough memory"),
    (KeyboardInterrupt(), 130, "interrupted"),
])  # fmt: skip
def test_a_command_that_fails_ends_in_a_line(monkeypatch, capsys, failure, status, words):
    def fail(*args, **options):
        raise failure

    monkeypatch.setattr(clattn, "warm_up", fail)
    assert main(["warm-up", "--quiet"]) == status
    assert capsys.readouterr().err == f"clattn warm-up: {words}\n"


@pytest.mark.parametrize("command", ["demo", "bench", "tune", "warm-up"])
@pytest.mark.parametrize("words", ["no such device", ""])
def test_a_device_that_there_is_not(command, words, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    assert main([command, "--device", words]) == 2
    assert f"clattn {command}: device '{words}' names no OpenCL device" in capsys.readouterr().err


def test_an_exception_below_a_bar_is_the_only_one(monkeypatch):
    """Where no bar can be drawn, nothing else is said to have happened before."""
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setitem(sys.modules, "rich.progress", None)
        with pytest.raises(OSError, match="disk full") as caught, open_bar(1, stream):
            raise OSError("disk full")
        assert caught.value.__context__ is None


VARIABLES = ("DEVICE", "KERNEL", "LOCAL_MEMORY", "MAX_SECONDS", "MEMORY", "TRIALS", "TUNING")


@pytest.mark.parametrize("variable", [f"CLATTN_{word}" for word in VARIABLES])
@pytest.mark.parametrize("command", [(), ("bench", "--rows", "tiny")], ids=["list", "bench"])
def test_wrong_words_in_the_environment(variable, command):
    """A line, no traceback."""
    if command:
        pytest.importorskip("matplotlib")
        pytest.importorskip("rich")
    done = run_cli(*command, env={variable: "nonsense"}, check_exit=False)
    assert done.returncode in (1, 2)
    assert variable in done.stderr and "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_variable_that_hides_drivers_is_named(tmp_path):
    done = run_cli(env=no_opencl(tmp_path), check_exit=False)
    assert "the loader looks where OCL_ICD_VENDORS says: " in done.stderr


def test_a_reader_that_leaves_early():
    command = f"{sys.executable} -m clattn bench --list | true; exit ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", command], timeout=60, check_exit=False, env=None, cwd=None)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_help():
    assert "demo" in run_cli("--help").stdout
    assert "--output" in run_cli("demo", "--help").stdout
    assert "--kinds" in run_cli("warm-up", "--help").stdout


SMALL = ["--size", "32"]  # NumPy need not do 16,384 pixels


@pytest.mark.by_turns
def test_demo(device, tmp_path):
    """On matplotlib's photograph, on each device: a picture of three side by side, and figures."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "demo.png"
    said = run_cli(
        "demo", "--output", picture, *SMALL, env={"CLATTN_DEVICE": device.platform}, cwd=tmp_path
    ).stdout
    width, height = png_size(picture)
    assert width > 1.5 * height
    assert device.name in said
    for word in ("psnr", "error", "numpy", "memory"):
        assert word in said.lower(), said


@pytest.mark.parametrize("is_installed", [True, False])
def test_demo_on_a_terminal(is_installed, tmp_path, monkeypatch):
    """A bar below the figures, if rich is installed."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    if not is_installed:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(measuring, "shortest", lambda call: 1.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["demo", "--output", str(tmp_path / "demo.png"), *SMALL]) == 0
    said = sys.stdout.getvalue()
    assert "PSNR" in said and "NumPy float32" in said
    assert ("75%" in said) == is_installed


def test_demo_on_an_image_of_ones_own(tmp_path):
    """A colour photograph in a PNG file; nothing but the output is written."""
    image = pytest.importorskip("matplotlib.image")
    ramp = np.linspace(0, 1, 40)
    colours = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], 0.5), axis=-1)
    image.imsave(tmp_path / "mine.png", colours)
    run_cli("demo", tmp_path / "mine.png", "--output", tmp_path / "out.png", *SMALL, cwd=tmp_path)
    png_size(tmp_path / "out.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.png", "out.png"]


def test_demo_without_its_image(tmp_path):
    done = run_cli("demo", tmp_path / "none.png", "--output", tmp_path / "o.png", check_exit=False)
    assert done.returncode > 0
    assert "none.png" in done.stderr
    assert "Traceback" not in done.stderr


def test_warm_up(device, tmp_path):
    """Progress in lines, one line in the end, and programs where a later call finds them."""
    options = ("--dtypes", "float32", "--kinds", "decode", "--head-sizes", "64")
    where = ("--device", device.platform)
    env = {"XDG_CACHE_HOME": tmp_path}
    done = run_cli("warm-up", *options, *where, env=env)
    assert "float32, head size 64, decode" in done.stderr
    assert str(tmp_path) in done.stdout and len(done.stdout.splitlines()) == 1
    kept = sorted(p.name for p in (tmp_path / "clattn").glob("*.bin"))
    assert any(name.startswith("verdict") for name in kept)
    again = run_cli("warm-up", *options, *where, "--quiet", env=env)
    assert again.stderr == ""
    assert sorted(p.name for p in (tmp_path / "clattn").glob("*.bin")) == kept


def test_warm_up_without_the_package_for_bfloat16(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main(["warm-up", "--dtypes", "bfloat16", "--quiet"]) == 1
    assert "pip install ml_dtypes" in capsys.readouterr().err
