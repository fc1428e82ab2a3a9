# SPDX-License-Identifier: MIT
"""python -m clattn doctor and show_config: what they find, and what they advise."""

import subprocess
import sys
from types import SimpleNamespace

import clattn
import numpy as np
import pytest
from clattn._commands import doctor
from clattn._commands.main import main
from clattn._host import apart, drivers
from support.faults import COMPILER
from support.processes import copy_of_a_loader, no_opencl, run_cli, run_python
from support.variants import force


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
    assert "no driver is listed in" in advice and "intel-opencl-rt" in advice
    assert "which OCL_ICD_VENDORS names: unset it" in advice
    assert advice.count("pip install") == 1 and "python -m clattn doctor" not in advice


def test_doctor_finds_gpus_that_opencl_does_not_show(monkeypatch, tmp_path):
    """A node of Linux's graphics, with a device for GPUs or without, open or not."""
    monkeypatch.setattr(doctor, "_GRAPHICS", tmp_path)
    cpu, gpu = SimpleNamespace(type="cpu"), SimpleNamespace(type="gpu")
    assert doctor._find_gpus([cpu]) == []
    (tmp_path / "renderD128").touch()
    assert doctor._find_gpus([cpu, gpu]) == []
    assert "no driver of OpenCL shows it" in doctor._find_gpus([cpu])[0]
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "which you may not open: join the group" in doctor._find_gpus([cpu])[0]


def test_doctor_names_drivers_that_do_not_open(tmp_path):
    """Also files that cannot be read, such as a link to one that is gone."""
    (tmp_path / "broken.icd").write_text("/nonexistent/libdriver.so\n")
    (tmp_path / "folder.icd").mkdir()
    (tmp_path / "link.icd").symlink_to("/nowhere/x.icd")
    (tmp_path / "strange.icd").write_bytes(b"/opt/\xff/libd.so\n")
    env = {"OCL_ICD_VENDORS": tmp_path, "OCL_ICD_FILENAMES": None}
    done = run_cli("doctor", env=env, check_exit=False)
    assert (done.returncode, done.stderr) == (1, "")
    said = " ".join(done.stdout.split())
    for words in (f"install the driver /nonexistent/libdriver.so again, or remove {tmp_path}",
                  "link.icd cannot be read: No such file or directory",
                  f"remove {tmp_path}/folder.icd, which cannot be read: it is no file",
                  r"strange.icd /opt/\udcff/libd.so: "):  # fmt: skip
        assert words in said


@pytest.mark.parametrize(("code", "said"), [
    ("import time; time.sleep(60)", "hangs for 0.5 seconds"),
    ("raise SystemExit(3)", "ends the process with status 3"),
    ("import os; os.abort()", "ends the process with signal 6"),
    ("", ""),
])  # fmt: skip
def test_a_driver_that_hangs_or_ends_the_process(monkeypatch, code, said):
    monkeypatch.setattr(doctor, "_OPEN", code)
    monkeypatch.setattr(apart, "SECONDS", 0.5 if said.startswith("hangs") else 60)
    assert doctor._open_apart("libdriver.so") == said


DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int
platforms(unsigned room, void *found, unsigned *count)
{
    (void)room, (void)found, (void)count;
    fputs("the driver says why\\n", stderr);
    return HOW;
}

void *
clGetExtensionFunctionAddress(const char *name)
{
    (void)name;
    return (void *)platforms;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
@pytest.mark.parametrize(("how", "said"), [
    ("(abort(), 0)", "ends the process with signal 6: the driver says why"),
    ("(_exit(1), 0)", "the driver says why"),
    ("(sleep(1000), 0)", "hangs for 2 seconds"),
])  # fmt: skip
def test_a_driver_that_does_not_survive_being_listed(tmp_path, how, said):
    """The page goes on to its end, and names the driver."""
    library = tmp_path / "driver.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", f"-DHOW={how}", "-o", library, "-x", "c", "-"],
                   input=DRIVER, text=True, check=True)  # fmt: skip
    (tmp_path / "none.icd").write_text("\n")
    (tmp_path / "other.icd").write_text("libc.so.6\n")
    (tmp_path / "tried.icd").write_text(f"{library}\n")
    done = run_python(
        """
        import sys
        from clattn._commands.main import main
        from clattn._host import apart
        apart.SECONDS = 2 if "sleep" in sys.argv[1] else apart.SECONDS
        print(main(["doctor"]))
        """,
        how,
        env={"OCL_ICD_VENDORS": tmp_path, "OCL_ICD_FILENAMES": None},
    )
    page, advice = done.stdout.split("\nTo do\n")
    assert "    none.icd               names no library\n" in page
    assert "libc.so.6: it is no driver of OpenCL\n" in page
    assert f"{library}: {said}\n" in page
    assert f"the devices cannot be listed ({said}): a driver does that\n" in advice
    assert f"or remove {tmp_path}/tried.icd\n" in advice
    assert advice.endswith("1\n")


def test_no_process_is_started_where_it_would_be_this_program(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/game")
    monkeypatch.setattr(doctor.subprocess, "run", None)
    assert doctor._open_apart("libdriver.so") == ""


@pytest.mark.parametrize(("has_files", "names", "advised"), [
    (True, None, True), (True, "/opt/libd.so", False), (False, None, False),
])  # fmt: skip
def test_advice_fits_the_system(monkeypatch, tmp_path, has_files, names, advised):
    """Windows and macOS have no .icd files, and a variable may name the drivers themselves."""
    for name in ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    if names:
        monkeypatch.setenv("OCL_ICD_FILENAMES", names)
    monkeypatch.setattr(drivers, "HAS_ICD_FILES", has_files)
    monkeypatch.setattr(drivers, "SYSTEM_VENDORS", str(tmp_path))
    monkeypatch.setattr(drivers, "loaders_in_use", list)
    lines, advice = doctor._drivers_found()
    assert bool(advice) == advised
    assert (("drivers listed in", str(tmp_path)) in lines) == has_files
    assert any(text.startswith("/opt/libd.so: ") for _, text in lines) == bool(names)


@pytest.mark.skipif(sys.platform == "win32", reason="rights of folders")
def test_a_cache_folder_that_others_may_write_to(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "clattn").mkdir()
    assert doctor._cache()[1] == []
    (tmp_path / "clattn").chmod(0o777)
    [advice] = doctor._cache()[1]
    assert "chmod go-w" in advice and str(tmp_path / "clattn") in advice


@pytest.mark.cpus
def test_a_kernel_that_is_forced_and_refuses(capsys, monkeypatch):
    """The calls are shown, and what to do says why."""
    force(monkeypatch, "mma")
    assert main(["doctor"]) == 1
    said, advice = capsys.readouterr().out.split("\nTo do\n")
    assert 'refused: CLATTN_KERNEL is "mma"' in said
    assert 'refuses a plain call: CLATTN_KERNEL is "mma"' in advice


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
