# SPDX-License-Identifier: MIT
"""python -m clattn: the listing, and the demonstration on a small crop."""

import io
import sys

import clattn
import numpy as np
import pytest
from clattn._commands.demo import measuring
from clattn._commands.main import main
from support.helpers import (
    WHAT_TO_INSTALL,
    copy_of_a_loader,
    no_opencl,
    png_size,
    run,
    run_cli,
    run_python,
)


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
                                       ["warm-up", "--head-sizes", "0"]], ids=" ".join)  # fmt: skip
def test_wrong_arguments(arguments):
    done = run_cli(*arguments, check_exit=False)
    assert done.returncode not in (0, 1)
    assert "usage" in done.stderr.lower()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", ["CLATTN_MEMORY", "CLATTN_TUNING", "CLATTN_DEVICE"])
def test_wrong_words_in_the_environment(variable):
    """A line, no traceback."""
    done = run_cli(env={variable: "nonsense"}, check_exit=False)
    assert done.returncode != 0
    assert variable in done.stderr and "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_variable_that_hides_drivers_is_named(tmp_path):
    done = run_cli(env=no_opencl(tmp_path), check_exit=False)
    assert "the loader looks where OCL_ICD_VENDORS says: " in done.stderr


def test_doctor(tmp_path):
    """Every device, what it computes, and nothing to do."""
    done = run_cli("doctor", env={"XDG_CACHE_HOME": tmp_path})
    said = done.stdout
    for device in clattn.devices():
        assert said.count(device.name) >= 2 and device.platform in said
    assert said.count("right, error ") == len(clattn.devices())
    assert said.endswith("To do\n  nothing\n")
    assert f"folder                   {tmp_path}/clattn" in said


def test_doctor_without_opencl(tmp_path):
    """The folder that holds no driver, and what to install."""
    done = run_cli("doctor", env=no_opencl(tmp_path), check_exit=False)
    assert (done.returncode, done.stderr) == (1, "")
    _, advice = done.stdout.split("\nTo do\n")
    assert "no driver is listed in" in advice and "clattn[cpu]" in advice


def test_doctor_names_a_driver_that_does_not_open(tmp_path):
    (tmp_path / "broken.icd").write_text("/nonexistent/libdriver.so\n")
    env = {"OCL_ICD_VENDORS": tmp_path, "OCL_ICD_FILENAMES": None}
    done = run_cli("doctor", env=env, check_exit=False)
    assert done.returncode == 1
    assert (
        f"install the driver /nonexistent/libdriver.so again, or remove {tmp_path}" in done.stdout
    )


def test_doctor_names_the_loaders(tmp_path):
    """In a process that has opened two."""
    loaders = [copy_of_a_loader(tmp_path, f"lib{n}.so") for n in range(2)]
    done = run_python(
        """
        import ctypes, sys
        from clattn._commands.main import main
        for loader in sys.argv[1:]:
            ctypes.CDLL(loader)
        main(["doctor"])
        """,
        *loaders,
    )
    said, advice = done.stdout.split("\nTo do\n")
    assert f"  loader                   {loaders[0]}\n" in said
    assert f"  another loader           {loaders[1]}\n" in said
    assert "several loaders are open" in advice


def test_doctor_finds_wrong_results(monkeypatch, capsys):
    def attend(query, key, value, device):
        return np.zeros_like(query)

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", attend)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.count("WRONG, error ") == said.count("computes wrongly") == len(clattn.devices())


def test_show_config(capsys):
    clattn.show_config()
    said = capsys.readouterr().out
    for words in (
        clattn.__version__,
        "Environment",
        "Kernel cache",
        *(d.name for d in clattn.devices()),
    ):
        assert words in said
    assert "To do" not in said


def test_a_reader_that_leaves_early():
    command = f"{sys.executable} -m clattn bench --list | true; exit ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", command], timeout=60, check_exit=False, env=None, cwd=None)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_help():
    assert "demo" in run_cli("--help").stdout
    assert "--output" in run_cli("demo", "--help").stdout
    assert "--kinds" in run_cli("warm-up", "--help").stdout


SMALL = ["--size", "32"]  # NumPy need not do 16,384 pixels


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


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


def test_warm_up_on_an_unknown_device():
    done = run_cli("warm-up", "--device", "no such device", check_exit=False)
    assert done.returncode == 2
    assert "no such device" in done.stderr and "Traceback" not in done.stderr
