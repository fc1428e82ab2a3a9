# SPDX-License-Identifier: MIT
"""Where OpenCL is looked for: loaders, drivers that pip installed, the folder of .icd files."""

import os
from importlib import metadata
from pathlib import Path

import clattn._drivers as drivers
import pytest
from helpers import run_python


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """No OCL_ICD_ variable and a cache folder of its own; whatever is set is undone."""
    for name in list(os.environ):
        if name.startswith("OCL_ICD_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("CLATTN_MEMORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    os.environ.pop("OCL_ICD_VENDORS", None)


needs_wheel = pytest.mark.skipif(
    not any(d.metadata["Name"] == "intel-opencl-rt" for d in metadata.distributions()),
    reason="intel-opencl-rt is not installed",
)


@needs_wheel
def test_the_drivers_of_pip_and_of_the_system_share_a_folder(environment, monkeypatch):
    system = environment / "system"
    system.mkdir()
    (system / "b.icd").write_text("libb.so\n")
    (system / "a.icd").write_text("/opt/liba.so\n")
    (system / "empty.icd").write_text("\n")
    monkeypatch.setattr(drivers, "_SYSTEM_VENDORS", system)
    drivers.discover()
    folder = Path(os.environ["OCL_ICD_VENDORS"])
    named = [icd.read_text().strip() for icd in sorted(folder.glob("*.icd"))]
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


@needs_wheel
def test_a_cache_folder_that_cannot_be_made_is_replaced(environment, monkeypatch):
    blocked = environment / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    drivers.discover()
    assert list(Path(os.environ["OCL_ICD_VENDORS"]).glob("*.icd"))


@pytest.mark.parametrize("base", [None, "", "relative"])
def test_the_cache_folder_without_a_usable_xdg_variable(environment, monkeypatch, base):
    monkeypatch.setenv("HOME", str(environment))
    if base is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert drivers.cache_folder() == environment / ".cache" / "clattn"


def test_an_unknown_memory_mode_is_refused(environment, monkeypatch):
    monkeypatch.setenv("CLATTN_MEMORY", "shared")
    with pytest.raises(ValueError, match="CLATTN_MEMORY"):
        drivers.discover()


@needs_wheel
def test_the_loader_of_pip_serves_where_the_system_has_none():
    said = run_python(
        """
        import clattn, clattn._drivers as drivers
        from helpers import check, qkv
        drivers._SYSTEM_LOADER = "libno-such-loader.so.1"
        wheel = drivers._wheel_libraries()
        discover = drivers.discover
        drivers.discover = lambda: (discover()[0], (drivers._SYSTEM_LOADER,
                                    str(wheel / "libOpenCL.so.1")), *discover()[2:])
        check(*qkv(), device=clattn.devices()[0])
        print(clattn.devices()[0].platform)
        """,
        env={"OCL_ICD_VENDORS": None, "OCL_ICD_FILENAMES": None},
    ).stdout
    assert "Intel" in said
