# SPDX-License-Identifier: MIT
"""Signals that come while a call runs."""

import contextlib
import signal
import time

import pytest


class InterruptedCall(Exception):
    """What the handler of the signal raises."""


@contextlib.contextmanager
def alarm(seconds, handler):
    """Calls the handler after so many seconds, wherever the main thread is then."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(call, seconds=0.1):
    """Interrupts a call after so many seconds. Returns how much longer the call took."""

    def handler(number, frame):
        raise InterruptedCall

    start = time.perf_counter()
    with alarm(seconds, handler), pytest.raises(InterruptedCall):
        call()
    return time.perf_counter() - start - seconds
