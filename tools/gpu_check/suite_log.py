# SPDX-License-Identifier: MIT
"""A plugin of pytest: writes a line of JSON for each event, at once.

A driver may crash the process or never return; the lines show how far the suite came, and a later
run leaves out the tests that have ended. A device's fault stays with its process, and a test may
hang: both end the worker, and pytest-xdist starts another one. Tests of variants that are left out
on this device do not run.
"""

import faulthandler
import json
import os
from pathlib import Path

LOG = "CLATTN_SUITE_LOG"
HAD = "CLATTN_SUITE_HAD"  # a file with the tests that ended in earlier runs
LINES = 12  # of a failure's text
HANGS = 120  # seconds of a test until it is taken to hang
# Errors after which a device goes on: its compiler refused a program.
REFUSED = "CL_BUILD_PROGRAM_FAILURE", "CL_INVALID_KERNEL_NAME"
FAULT = 70  # exit status of a worker after a fault


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker())
    else:
        config.pluginmanager.register(Log())


def pytest_collection_modifyitems(config, items):
    words = os.environ.get("CLATTN_KERNEL", "").split(",")
    wrong = {word[1:] for word in words if word.startswith("-")}
    had = set(json.loads(Path(os.environ[HAD]).read_text())) if HAD in os.environ else set()
    out = [item for item in items if item.nodeid in had or _variant_of(item) in wrong]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def _variant_of(item):
    """Return the variant that a test is for, or None."""
    row = item.callspec.params.get("variant") if hasattr(item, "callspec") else None
    return row[0].kernel if row else None


def _write(**what):
    with Path(os.environ[LOG]).open("a") as file:
        file.write(json.dumps(what) + "\n")


def _says(report):
    return "\n".join(str(report.longrepr).splitlines()[-LINES:])


class Worker:
    """The hooks of a worker of pytest-xdist."""

    def pytest_runtest_logstart(self, nodeid):
        faulthandler.dump_traceback_later(HANGS, exit=True)

    def pytest_runtest_logfinish(self, nodeid):
        faulthandler.cancel_dump_traceback_later()

    def pytest_exception_interact(self, node, call, report):
        is_fault = call.excinfo.typename == "DeviceError" and report.when == "call"
        if is_fault and not any(word in str(call.excinfo.value) for word in REFUSED):
            _write(kind="failed", test=node.nodeid, when=report.when, says=_says(report))
            os._exit(FAULT)


class Log:
    """The hooks of the process that sees all tests."""

    def pytest_sessionstart(self):
        _write(kind="begin")

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
