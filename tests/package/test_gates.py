# SPDX-License-Identifier: MIT
"""What a run of the suite refuses: skips that hide something, tests that hang, warnings."""

import sys
import textwrap
import tomllib
from types import SimpleNamespace

import pytest
from support.processes import ROOT, run
from support.skips import ALLOWED, pattern_of
from support.variants import CPU_ONLY, INSTRUCTIONS, lacks

KNOWN = "Mesa's rusticl is not installed"


def suite(tmp_path, code, *options, ci="true"):
    """The exit status and the output of a run of pytest, as configured here, on a file."""
    (tmp_path / "test_tiny.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "support.skips",
               "-p", "no:cacheprovider", "-p", "no:hypothesispytest",  # a second to import
               *options, tmp_path / "test_tiny.py"]  # fmt: skip
    env = {"CI": ci, "PYTEST_ADDOPTS": None}
    done = run(list(map(str, command)), timeout=100, check_exit=False, env=env, cwd=tmp_path)
    return done.returncode, done.stdout + done.stderr


SKIPS = f'''
    import pytest

    @pytest.mark.parametrize("number", range(1))
    @pytest.mark.parametrize("device", ["cpu0-Intel", "cpu1-Portable"])
    def test_known(device, number):
        pytest.skip("{KNOWN}")

    def test_passes():
        pass
'''
UNKNOWN = f'''
    def test_another_reason():
        pytest.skip("the moon is full")

    def test_more_than_a_known_reason():
        pytest.skip("{KNOWN}, and the moon is full")

    def test_a_package():
        pytest.importorskip("no_such_package")
'''


def test_an_unknown_reason_fails_in_ci(tmp_path):
    status, said = suite(tmp_path, SKIPS + UNKNOWN)
    assert status == 1
    assert "3 failed, 1 passed, 2 skipped" in said
    assert "skipped in CI for a reason that skips.toml does not have: the moon is full" in said
    status, said = suite(tmp_path, SKIPS + UNKNOWN, ci=None)
    assert status == 0
    assert "1 passed, 5 skipped" in said


def test_a_file_without_its_package_fails_in_ci(tmp_path):
    code = f"{SKIPS}\n    pytest.importorskip('no_such_package')\n"
    status, said = suite(tmp_path, code)
    assert status != 0
    assert "could not import 'no_such_package'" in said
    assert suite(tmp_path, code, ci=None)[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_too_many_skips_fail_in_ci(tmp_path):
    """As many as are allowed for each device pass, where workers skip a part each."""
    most = ALLOWED[KNOWN]
    status, said = suite(tmp_path, SKIPS.replace("range(1)", f"range({most})"), "-n", 2)
    assert status == 0
    assert f"1 passed, {2 * most} skipped" in said
    status, said = suite(tmp_path, SKIPS.replace("range(1)", f"range({most + 1})"), "-n", 2)
    assert status == 1
    assert f"{most + 1} tests on cpu0-Intel are skipped, {most} are allowed" in said


def test_packages_and_programs_are_no_reasons():
    """.ci/run installs them."""
    for reason in ("could not import 'torch': No module named 'torch'",
                   "there is no C compiler", "Portable Computing Language is not installed",
                   "mpirun is not installed: apt-get install openmpi-bin"):  # fmt: skip
        assert pattern_of(reason) is None


# ---- instructions of the processor ----


@pytest.mark.cpus
@pytest.mark.parametrize("word", sorted(CPU_ONLY))
def test_what_the_processor_lists_has_to_run(device, word):
    """Only a flag that is missing is a reason, on a driver that is known."""
    needed = INSTRUCTIONS.get(word, set())
    assert lacks(device, word, needed | {"GenuineIntel"}) is None
    for flag in needed:
        reason = lacks(device, word, needed - {flag} | {"GenuineIntel"})
        assert flag in reason
        assert pattern_of(reason)


def test_kernels_for_cpus_are_for_cpus():
    gpu = SimpleNamespace(type="gpu", float_width=1)
    assert lacks(gpu, "decode_cpu", set()) == "decode_cpu is for CPUs"
    assert lacks(gpu, "tiled", set()) is None


# ---- hangs and warnings ----


def test_a_test_that_hangs_ends(tmp_path):
    """Also one that holds the lock of the interpreter; a worker is started again for the others."""
    code = """
        import ctypes

        def test_hangs():
            ctypes.PyDLL(None).sleep(60)

        def test_passes():
            pass
    """
    status, said = suite(tmp_path, code, "-n", 1, "-o", "faulthandler_timeout=2")
    assert status == 1
    assert "Timeout (0:00:02)!" in said
    assert "in test_hangs" in said
    assert "1 failed, 1 passed" in said


def test_the_limit_of_a_test():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    assert 60 < options["ini_options"]["faulthandler_timeout"] <= 600


def test_a_warning_is_an_error(tmp_path):
    code = """
        import warnings

        def test_warns():
            warnings.warn("soon gone", DeprecationWarning)

        def test_leaves_a_file_open():
            open(__file__)
    """
    status, said = suite(tmp_path, code)
    assert status == 1
    assert "DeprecationWarning: soon gone" in said
    assert "ResourceWarning: unclosed file" in said
    assert "2 failed" in said
