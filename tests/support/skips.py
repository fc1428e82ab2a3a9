# SPDX-License-Identifier: MIT
"""A plugin of pytest for CI: tests are skipped there only for the reasons of tests/skips.toml.

.ci/run sets the environment variable CI, and installs all that tests need. Then a test fails that
is skipped for another reason, such as a package that is missing, and a run fails that skips more
tests for a reason than the file allows. Elsewhere tests are skipped as they say.
"""

import os
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

IN_CI = bool(os.environ.get("CI"))
FILE = Path(__file__).resolve().parents[1] / "skips.toml"
ALLOWED = tomllib.loads(FILE.read_text(encoding="utf-8"))

SKIPPED = Counter()  # by the pattern of the reason, and the device


def pattern_of(reason):
    """The pattern of tests/skips.toml that a reason has. None: it is not there."""
    return next((pattern for pattern in ALLOWED if re.fullmatch(pattern, reason)), None)


def reason_of(report):
    """Why a test or a file is skipped; None if it is not, or is expected to fail."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    return report.longrepr[2].removeprefix("Skipped: ")


def refuse(report):
    reason = reason_of(report)
    if IN_CI and reason is not None and pattern_of(reason) is None:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI for a reason that {FILE.name} does not have: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return refuse((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return refuse((yield))


def pytest_runtest_logreport(report):
    reason = reason_of(report)
    if reason is not None:
        device = re.search(r"[\[-]((?:cpu|gpu|accelerator)\d+-\w+)", report.nodeid)
        SKIPPED[pattern_of(reason), device and device[1]] += 1


def too_many(config):
    """What to say where a run skips more tests than the file allows. With `-m` more tests run."""
    if not IN_CI or config.option.markexpr:
        return []
    return [
        f"{number} tests on {device or 'no device'} are skipped, {ALLOWED[pattern]} are allowed: "
        f"{pattern!r} in {FILE.name}"
        for (pattern, device), number in SKIPPED.items()
        if pattern in ALLOWED and number > ALLOWED[pattern]
    ]


def pytest_sessionfinish(session):
    if session.exitstatus == pytest.ExitCode.OK and too_many(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for line in too_many(terminalreporter.config):
        terminalreporter.write_line(line, red=True)
