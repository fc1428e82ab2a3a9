# SPDX-License-Identifier: MIT
"""A plugin of pytest: a line of JSON for each thing that happens, written as it happens.

A driver may end the process or never return; what was written before says how far it got.
"""

import json
import os
from pathlib import Path

LOG = "CLATTN_SUITE_LOG"
LINES = 12  # of what a failure says


def _write(**what):
    with Path(os.environ[LOG]).open("a") as file:
        file.write(json.dumps(what) + "\n")


def _is_worker():
    return "PYTEST_XDIST_WORKER" in os.environ


def _says(report):
    return "\n".join(str(report.longrepr).splitlines()[-LINES:])


def pytest_collectreport(report):
    if report.failed and not _is_worker():
        _write(kind="unread", test=report.nodeid, says=_says(report))


def pytest_runtest_logstart(nodeid):
    if not _is_worker():
        _write(kind="start", test=nodeid)


def pytest_runtest_logreport(report):
    if _is_worker():
        return
    if report.failed:
        _write(kind="failed", test=report.nodeid, when=report.when, says=_says(report))
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "as expected"
        _write(kind="skipped", test=report.nodeid, says=reason)
    elif report.when == "teardown":
        _write(kind="done", test=report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if not _is_worker():
        _write(kind="end", status=int(exitstatus))
