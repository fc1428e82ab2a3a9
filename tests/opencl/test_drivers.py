# SPDX-License-Identifier: MIT
"""Where OpenCL is looked for: loaders, drivers that pip installed, the folder of .icd files."""

import importlib.util
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import clattn._host.drivers as drivers
import pytest
from clattn._host import files
from support.processes import copy_of_a_loader, run_python

find_loader_of_pyopencl = drivers._installed_loader_of_pyopencl


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """No OCL_ICD_ variable, no driver of the system, folders for the cache and temporary files."""
    for name in list(os.environ):
        if name.startswith(("OCL_ICD_", drivers._MARK)):
            monkeypatch.delenv(name)
    monkeypatch.delenv("CLATTN_MEMORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(drivers, "loaders_in_use", list)
    monkeypatch.setattr(drivers, "_installed_loader_of_pyopencl", lambda: None)
    (tmp_path / "system").mkdir()
    monkeypatch.setattr(drivers, "SYSTEM_VENDORS", str(tmp_path / "system"))
    yield tmp_path
    for name in list(os.environ):
        if name.startswith(("OCL_ICD_", drivers._MARK)):
            del os.environ[name]


@pytest.fixture
def wheel(environment, monkeypatch):
    """A package intel-opencl-rt, as far as looking for it goes."""
    monkeypatch.setattr(drivers, "_wheel_libraries", lambda: str(environment / "wheel"))
    return environment / "wheel"


@pytest.fixture
def no_cache(wheel, environment, monkeypatch):
    """A file where the cache folder should be."""
    (environment / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(environment / "file"))


def discover_folder():
    """The folder that discover() points the loader to."""
    os.environ.pop("OCL_ICD_VENDORS", None)
    drivers.discover()
    return Path(os.environ["OCL_ICD_VENDORS"])


def named_in(folder):
    """What the loader finds in a folder."""
    return [os.fsdecode(icd.read_bytes()).strip() for icd in sorted(folder.glob("*.icd"))]


needs_wheel = pytest.mark.skipif(
    not any(d.metadata["Name"] == "intel-opencl-rt" for d in metadata.distributions()),
    reason="intel-opencl-rt is not installed",
)


@needs_wheel
def test_the_drivers_of_pip_and_of_the_system_share_a_folder(environment):
    system = environment / "system"
    (system / "b.icd").write_text("libb.so\n")
    (system / "a.icd").write_text("/opt/liba.so\n")
    (system / "empty.icd").write_text("\n")
    drivers.discover()
    folder = Path(os.environ["OCL_ICD_VENDORS"])
    named = named_in(folder)
    assert Path(named[0]).name == "libintelocl.so"
    assert Path(named[0]).is_file()
    assert named[1:] == ["/opt/liba.so", "libb.so"]
    del os.environ["OCL_ICD_VENDORS"]
    drivers.discover()
    assert Path(os.environ["OCL_ICD_VENDORS"]) == folder, "one folder for one content"
    assert [p for p in folder.parent.iterdir() if p.name.startswith("vendors-")] == [folder]


@pytest.mark.parametrize("name", ["OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"])
def test_a_user_who_points_the_loader_somewhere_is_left_alone(environment, monkeypatch, name):
    monkeypatch.setenv(name, "/somewhere")
    drivers.discover()
    assert {k: v for k, v in os.environ.items() if k.startswith("OCL_ICD_")} == {name: "/somewhere"}


@pytest.mark.parametrize("theirs", ["another", None])
def test_what_clattn_has_set_is_no_choice_of_the_user(wheel, environment, monkeypatch, theirs):
    """A child process inherits it, and may be of another environment."""
    folder = discover_folder()
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in the child
    monkeypatch.setattr(drivers, "_wheel_libraries", lambda: theirs)
    drivers.discover()
    if theirs is None:
        assert "OCL_ICD_VENDORS" not in os.environ
    else:
        assert named_in(Path(os.environ["OCL_ICD_VENDORS"])) == ["another/libintelocl.so"]
    monkeypatch.setenv("OCL_ICD_VENDORS", str(folder) + "/.")  # now it is one
    drivers.discover()
    assert os.environ["OCL_ICD_VENDORS"] == str(folder) + "/."


def test_a_second_thread_changes_no_variable(wheel, monkeypatch):
    """While the first one is in the loader, which reads them without the interpreter's lock."""
    drivers.discover()
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", MappingProxyType(os.environ))
        drivers.discover()


def test_other_variables_of_the_loader_do_not_hide_the_driver_of_pip(wheel, monkeypatch):
    monkeypatch.setenv("OCL_ICD_DEBUG", "7")
    monkeypatch.setenv("OCL_ICD_ENABLE_TRACE", "True")
    assert named_in(discover_folder()) == [str(wheel / "libintelocl.so")]


@pytest.mark.parametrize("damage", ["deleted", "emptied", "directed elsewhere", "added to"])
def test_a_damaged_folder_is_mended(wheel, damage):
    folder = discover_folder()
    (icd,) = folder.glob("*.icd")
    if damage == "deleted":
        icd.unlink()
    elif damage == "added to":
        (folder / "zz.icd").write_text("libstrange.so\n")
    else:
        icd.write_text("" if damage == "emptied" else "libstrange.so\n")
    assert discover_folder() == folder
    assert named_in(folder) == [str(wheel / "libintelocl.so")]
    assert len(list(folder.iterdir())) == 1, "nothing temporary is left"


def test_a_folder_that_another_process_makes_first_is_used(wheel, environment, monkeypatch):
    """Losing the race leaves nothing behind."""
    folder = discover_folder()
    (icd,) = folder.glob("*.icd")
    content = icd.read_bytes()
    icd.unlink()
    mkstemp = tempfile.mkstemp

    def lose_the_race(*args, **kwargs):
        icd.write_bytes(content)
        return mkstemp(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkstemp", lose_the_race)
    assert discover_folder() == folder
    assert list(folder.iterdir()) == [icd] and icd.read_bytes() == content
    assert list(folder.parent.iterdir()) == [folder]


def test_processes_without_a_cache_folder_share_a_temporary_one(no_cache, wheel, environment):
    folder = discover_folder()
    assert folder.parent == environment / "tmp"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert discover_folder() == folder
    assert named_in(folder) == [str(wheel / "libintelocl.so")]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("squat", ["link", "writable by others"])
def test_a_temporary_folder_that_others_control_is_not_used(no_cache, wheel, environment, squat):
    shared = discover_folder()
    if squat == "link":
        shared.rename(environment / "elsewhere")
        shared.symlink_to(environment / "elsewhere")
    else:
        shared.chmod(0o777)
    folder = discover_folder()
    assert folder != shared
    assert named_in(folder) == [str(wheel / "libintelocl.so")]


def refuse(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_driver_of_pip_and_no_litter(wheel, environment, monkeypatch):
    monkeypatch.setattr(os, "replace", refuse)
    drivers.discover()
    assert "OCL_ICD_VENDORS" not in os.environ
    assert os.environ["OCL_ICD_FILENAMES"] == str(wheel / "libintelocl.so")
    assert not [p for p in environment.rglob("*") if p.is_file()]
    folders = set(environment.rglob("*"))
    del os.environ["OCL_ICD_FILENAMES"]
    drivers.discover()
    assert set(environment.rglob("*")) == folders


def test_no_folder_for_temporary_files(no_cache, wheel, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    drivers.discover()
    assert os.environ["OCL_ICD_FILENAMES"] == str(wheel / "libintelocl.so")


def test_icd_files_that_the_loader_skips_are_skipped(wheel, environment):
    system = environment / "system"
    (system / "a.icd").symlink_to("/nowhere/a.icd")
    (system / "b.icd").mkdir()
    os.mkfifo(system / "c.icd")
    (system / "d.icd").write_bytes(b"/opt/\xff/libd.so\n")
    (system / "e.icd").write_text("libe.so\n")
    (system / "f.icd.old").write_text("libf.so\n")
    folder = discover_folder()
    assert named_in(folder) == [str(wheel / "libintelocl.so"), "/opt/\udcff/libd.so", "libe.so"]


def test_an_icd_file_that_cannot_be_read_is_skipped(wheel, environment, monkeypatch):
    """By a stand-in: to root, every file is readable."""
    system = environment / "system"
    (system / "a.icd").write_text("liba.so\n")
    (system / "b.icd").write_text("libb.so\n")

    def open_others(file, *args):
        return refuse() if file == str(system / "a.icd") else open(file, *args)

    monkeypatch.setattr(files, "open", open_others, raising=False)
    assert named_in(discover_folder()) == [str(wheel / "libintelocl.so"), "libb.so"]


def test_paths_are_bytes_and_need_not_be_text(wheel, environment, monkeypatch):
    strange = environment / "\udcff"
    monkeypatch.setenv("XDG_CACHE_HOME", str(strange))
    monkeypatch.setattr(drivers, "_wheel_libraries", lambda: str(strange / "wheel"))
    preload, candidates, cache, memory = drivers.discover()
    root = os.fsencode(environment) + b"/\xff/"
    assert preload[0] == root + b"wheel/libintlc.so.5"
    assert candidates == (b"libOpenCL.so.1", root + b"wheel/libOpenCL.so.1")
    assert cache == root + b"clattn"
    assert memory == ""
    (icd,) = Path(os.environ["OCL_ICD_VENDORS"]).glob("*.icd")
    assert icd.read_bytes() == root + b"wheel/libintelocl.so\n"


def test_devices_are_found_where_the_cache_folder_is_not_text(environment):
    code = "import clattn; print(len(clattn.devices()))"
    strange = run_python(code, env={"XDG_CACHE_HOME": environment / "\udcff"}).stdout
    assert strange == run_python(code).stdout


def test_a_user_without_a_home_has_no_cache_folder(wheel, environment, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)
    assert files.cache_folder() is None
    assert drivers.discover()[2] is None
    folder = Path(os.environ["OCL_ICD_VENDORS"])
    assert folder.parent == environment / "tmp"
    assert named_in(folder) == [str(wheel / "libintelocl.so")]


def test_a_cache_folder_that_others_may_write_to_is_not_used(environment, monkeypatch):
    """What lies there is executed. A folder of root is as good as one's own."""
    folder = environment / "cache" / "clattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    assert files.cache_folder() == str(folder), "it need not exist"
    folder.mkdir(parents=True)
    for mode, used in ((0o700, True), (0o755, True), (0o775, False), (0o702, False)):
        folder.chmod(mode)
        assert files.cache_folder() == (str(folder) if used else None), oct(mode)
    folder.chmod(0o700)
    monkeypatch.setattr("os.geteuid", lambda: 2**31 - 2)
    assert files.cache_folder() == (str(folder) if folder.stat().st_uid == 0 else None)
    folder.rmdir()
    for wrong in (folder.touch, lambda: folder.symlink_to("nowhere")):
        wrong()
        assert files.cache_folder() is None
        folder.unlink()


@pytest.mark.parametrize("base", [None, "", "relative"])
def test_the_cache_folder_without_a_usable_xdg_variable(environment, monkeypatch, base):
    monkeypatch.setenv("HOME", str(environment))
    if base is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert files.cache_folder() == str(environment / ".cache" / "clattn")


def test_an_unknown_memory_mode_is_refused(environment, monkeypatch):
    monkeypatch.setenv("CLATTN_MEMORY", "shared")
    with pytest.raises(ValueError, match="CLATTN_MEMORY"):
        drivers.discover()


@needs_wheel
def test_the_loader_of_pip_serves_where_the_system_has_none():
    said = run_python(
        """
        import os, clattn, clattn._host.drivers as drivers
        from support.checks import check_attention
        from support.data import qkv
        wheel = os.fsencode(drivers._wheel_libraries())
        discover = drivers.discover
        drivers.discover = lambda: (discover()[0], (b"libno-such-loader.so.1",
                                    wheel + b"/libOpenCL.so.1"), *discover()[2:])
        check_attention(*qkv(), device=clattn.devices()[0])
        print(clattn.devices()[0].platform)
        """,
        env={"OCL_ICD_VENDORS": None, "OCL_ICD_FILENAMES": None},
    ).stdout
    assert "Intel" in said


@needs_wheel
@pytest.mark.parametrize("used", [False, True])
def test_a_loader_that_was_used_before_is_not_relied_on(used):
    """Another package may have listed the platforms before the wheel's driver was named."""
    said = run_python(
        """
        import ctypes, sys
        if sys.argv[1] == "True":
            loader = ctypes.CDLL("libOpenCL.so.1")
            loader.clGetPlatformIDs(0, None, ctypes.byref(ctypes.c_uint()))
        import clattn
        print(clattn.devices()[0].platform)
        """,
        used,
        env={"OCL_ICD_VENDORS": None, "OCL_ICD_FILENAMES": None},
    ).stdout
    assert "Intel" in said


def test_the_loader_of_pyopencls_wheel_comes_before_the_systems(environment, monkeypatch):
    """Nobody has imported pyopencl. The user may choose another loader, or drivers for one."""
    monkeypatch.setattr(drivers, "_installed_loader_of_pyopencl", find_loader_of_pyopencl)
    monkeypatch.setattr(drivers, "_wheel_libraries", lambda: None)
    theirs = environment / "pyopencl" / ".libs" / "libOpenCL-0a1b2c3d.so.1.0.0"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    others = environment / "others"
    others.mkdir()
    monkeypatch.setattr(sys, "path", ["/nowhere", str(environment)])
    monkeypatch.setenv("PYOPENCL_HOME", "restored afterwards")
    monkeypatch.delenv("PYOPENCL_HOME")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{others}")
    assert drivers.discover()[1] == (os.fsencode(theirs), b"libOpenCL.so.1")
    assert os.environ["PYOPENCL_HOME"] == str(environment / "pyopencl")
    (others / "libOpenCL.so.1").touch()
    assert drivers.discover()[1] == (b"libOpenCL.so.1",)
    (others / "libOpenCL.so.1").unlink()
    monkeypatch.setenv("OCL_ICD_FILENAMES", "/somewhere")
    assert drivers.discover()[1] == (b"libOpenCL.so.1",)
    monkeypatch.delenv("OCL_ICD_FILENAMES")
    theirs.unlink()
    assert drivers.discover()[1] == (b"libOpenCL.so.1",)


@pytest.mark.parametrize("name", ["libOpenCL.so.1", "libOpenCL-0a1b2c3d.so.1.0.0", "libanother.so"])
@pytest.mark.parametrize("chosen", [False, True], ids=["found", "chosen"])
def test_a_loader_that_is_open_is_used_under_any_name(tmp_path, name, chosen):
    """One in a process. Also one that a library brings, which is a link, or in a strange folder."""
    (tmp_path / "\udcff").mkdir()
    loader = copy_of_a_loader(tmp_path / "\udcff", name)
    (tmp_path / "link.so").symlink_to(loader)
    variables = {} if chosen else {"OCL_ICD_VENDORS": None, "OCL_ICD_FILENAMES": None}
    run_python(
        """
        import ctypes, os, sys
        ctypes.CDLL(sys.argv[1])
        import clattn, clattn._host.drivers as drivers
        from support.checks import check_attention
        from support.data import qkv
        assert clattn._core.loader() is None
        assert drivers.loaders_in_use() == [os.fsencode(sys.argv[1])]
        check_attention(*qkv(), device=clattn.devices()[0])
        assert drivers.loaders_in_use() == [os.fsencode(sys.argv[1])] == [clattn._core.loader()]
        """,
        tmp_path / "link.so",
        env=variables,
    )


@pytest.mark.parametrize(
    ("system", "loaders", "variables"),
    [
        (
            "win32",
            ["OpenCL.dll", "{bin}/OpenCL.dll"],
            {"OCL_ICD_FILENAMES": "{bin}/intelocl64.dll"},
        ),
        ("darwin", ["/System/Library/Frameworks/OpenCL.framework/OpenCL"], {}),
    ],
)
def test_loaders_of_other_systems(environment, monkeypatch, system, loaders, variables):
    """The module as it is there, with the names of Intel's package for Windows."""
    info = environment / "intel_opencl_rt-2026.2.0.dist-info"
    info.mkdir()
    (environment / "Library/bin").mkdir(parents=True)
    (info / "RECORD").write_text("Library/bin/intelocl64.dll,,\n")
    monkeypatch.setattr(sys, "path", [str(environment)])
    monkeypatch.setattr(sys, "platform", system)
    spec = importlib.util.spec_from_file_location("drivers_elsewhere", drivers.__file__)
    elsewhere = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    monkeypatch.setattr(elsewhere, "loaders_in_use", list)
    _, candidates, cache, _ = elsewhere.discover()
    folder = os.path.realpath(environment / "Library/bin")
    assert [os.fsdecode(c) for c in candidates] == [text.format(bin=folder) for text in loaders]
    found = {name: os.environ[name] for name in os.environ if name.startswith("OCL_ICD_")}
    assert found == {name: text.format(bin=folder) for name, text in variables.items()}
    assert cache == os.fsencode(environment / "clattn")
