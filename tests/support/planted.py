# SPDX-License-Identifier: MIT
"""A plugin of pytest that puts the loader FAULTS_LIBRARY, of opencl_faults.c, before the real one.

tools/plant_faults.py runs tests with it. At its end a run prints in how many programs the fault is.
"""

import ctypes
import os

import clattn._host.drivers as drivers

LIBRARY = os.environ["FAULTS_LIBRARY"]
discover = drivers.discover


def instead():
    preload, _, cache, memory = discover()
    return preload, (LIBRARY.encode(),), cache, memory


drivers.discover = instead


def pytest_terminal_summary(terminalreporter):
    planted = ctypes.CDLL(LIBRARY).faults_planted()
    terminalreporter.write_line(f"planted in {planted} programs")
