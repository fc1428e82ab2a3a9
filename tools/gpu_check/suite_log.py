# SPDX-License-Identifier: MIT
"""A plugin of pytest: writes a line of JSON for each event, at once.

A driver may crash the process or never return; the lines show how far the suite came.
"""

import json
import os
from pathlib import Path

LOG = "CLATTN_SUITE_LOG"
LINES = 12  # of a failure's text


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist: the first process writes
        config.pluginmanager.register(Log())


def _write(**what):
    with Path(os.environ[LOG]).open("a") as file:
        file.write(json.dumps(what) + "\n")


def _says(report):
    return "\n".join(str(report.longrepr).splitlines()[-LINES:])


class Log:
    """The hooks of the process that sees all tests."""

    def pytest_collectreport(self, report):
        if report.failed:
            _write(kind="unread", test=report.nodeid, says=_says(report))

    def pytest_runtest_logstart(self, nodeid):
        _write(kind="start", test=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            _write(kind="failed", test=report.nodeid, when=report.when, says=_says(report))
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "as expected"
            _write(kind="skipped", test=report.nodeid, says=reason)
        elif report.when == "teardown":
            _write(kind="done", test=report.nodeid)

    def pytest_sessionfinish(self, exitstatus):
        _write(kind="end", status=int(exitstatus))
