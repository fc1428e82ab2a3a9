# SPDX-License-Identifier: MIT
"""Opening a device: the probe's verdict is kept on disk, and only a good one."""

import pytest
from support.faults import open_with

pytestmark = pytest.mark.cpus  # opening a GPU tries capabilities too

# How many programs and kernels it takes until the device is known to be usable.
OPEN = """
device = listed[index]
assert device.usable, device.reason
print(faults.faults_builds(), faults.faults_kernels())
"""
CALL = """
from support.checks import check_attention
from support.data import qkv

check_attention(*qkv((1, 2), 17, 33, 8), device=device)
"""
WRONG = """
faults.faults_define(b"get_global_id=get_local_size")
device = listed[index]
assert not device.usable
print(device.reason)
"""


@pytest.fixture
def run_opening(device, faults_library, tmp_path):
    """Runs code in a new process with the cache of this test."""

    def run(code, **env):
        return open_with(faults_library, device, code, **{"XDG_CACHE_HOME": tmp_path} | env).stdout

    return run


def counted(said):
    """Programs and kernels, as OPEN prints them."""
    return tuple(map(int, said.split()))


def verdicts(folder):
    return sorted((folder / "clattn").glob("verdict-*"))


def test_a_later_process_opens_a_device_without_a_program(run_opening, tmp_path):
    assert counted(run_opening(OPEN)) == (1, 1)
    (verdict,) = verdicts(tmp_path)
    written = verdict.stat().st_mtime_ns
    for _ in range(2):
        assert counted(run_opening(OPEN + CALL)) == (0, 0)
    assert verdict.stat().st_mtime_ns == written


@pytest.mark.by_turns
def test_a_damaged_verdict_counts_as_none(run_opening, tmp_path):
    """The next process probes again and writes the verdict that was there, which is a good one."""
    run_opening(OPEN)
    (verdict,) = verdicts(tmp_path)
    good = verdict.read_bytes()
    for bad in (b"", good[:-1], good[:-1] + bytes([good[-1] ^ 2]), None):
        verdict.unlink()
        if bad is not None:
            verdict.write_bytes(bad)
        assert counted(run_opening(OPEN)) == (1, 1), bad
        assert verdict.read_bytes() == good, bad
    assert counted(run_opening(OPEN)) == (0, 0)


@pytest.mark.by_turns
def test_a_failure_is_not_kept(run_opening, tmp_path):
    """The next process probes again, and says why the device fails, or uses it."""
    for _ in range(2):
        assert "gives wrong results" in run_opening(WRONG)
    assert verdicts(tmp_path) == []
    assert counted(run_opening(OPEN)) == (1, 1)


def test_another_way_to_reach_memory_is_probed(run_opening, tmp_path):
    """A kernel that got the array itself says nothing about buffers."""
    for memory in ("copy", "host"):
        assert counted(run_opening(OPEN, CLATTN_MEMORY=memory)) == (1, 1)
        assert counted(run_opening(OPEN, CLATTN_MEMORY=memory)) == (0, 0)
    assert len(verdicts(tmp_path)) == 2


@pytest.mark.by_turns
def test_without_a_folder_for_the_cache_every_process_probes(run_opening, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    env = {"XDG_CACHE_HOME": blocked, "POCL_CACHE_DIR": tmp_path / "pocl"}
    for _ in range(2):
        assert counted(run_opening(OPEN, **env)) == (1, 1)


def test_a_binary_for_another_kind_of_processor_is_not_used(run_opening, device):
    """The device keeps its name when the variable chooses another kind of processor."""
    if device.type != "cpu":
        pytest.skip("the variable chooses the kind of a CPU")
    assert counted(run_opening(OPEN)) == (1, 1)
    for builds in (1, 0):
        said = run_opening(OPEN, CL_CONFIG_CPU_TARGET_ARCH="core-avx2")
        assert counted(said) == (builds, builds)
    assert counted(run_opening(OPEN)) == (0, 0)
