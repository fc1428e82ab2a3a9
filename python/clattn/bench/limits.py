"""What a device can do at most, measured by kernels that do nothing else."""

import math
from collections.abc import Callable

import numpy as np

from clattn import Device, _core
from clattn._measuring import shortest
from clattn.bench.rows import Row

READ_BYTES = 512 << 20  # far more than caches hold
LEAST_SECONDS = 0.02  # of a measurement
CALLS = 2


class Limits:
    """The best that was seen of one device so far; 0: not measured."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps = {False: 1 << 12, True: 1 << 12}
        self._array = np.empty(0, np.float32)
        self.fma = {"float32": 0.0, "float64": 0.0}  # FLOP/s
        self.read = 0.0  # bytes/s

    def measure(self, row: Row) -> float:
        """Return how much the device can do a second of what limits a row, at present."""
        if row.limit == "read":
            rate = self._measure_read()
            self.read = max(self.read, rate)
        else:
            dtype = "float64" if row.dtype == "float64" else "float32"
            rate = self._measure_fma(dtype == "float64")
            self.fma[dtype] = max(self.fma[dtype], rate)
        return rate

    def _measure_fma(self, float64: bool) -> float:
        device = self._device

        def run(steps: int) -> float:
            return shortest(lambda: _core.peak_fma(float64, steps, device), 0, CALLS)

        seconds = run(self._steps[float64])
        while seconds < LEAST_SECONDS and self._steps[float64] < 1 << 30:
            self._steps[float64] *= 4
            seconds = run(self._steps[float64])
        flop = _core.peak_fma(float64, 1, device)[0] * self._steps[float64]
        return _rate(flop, seconds, lambda: run(0))

    def _measure_read(self) -> float:
        device = self._device
        if not self._array.size:
            most = min(READ_BYTES, device.max_allocation, device.memory // 4)
            # Not zeros, whose pages would all be one and the same.
            self._array = np.ones(most // 4, np.float32)

        def run(passes: int) -> float:
            return shortest(lambda: _core.peak_read(self._array, passes, device), 0, CALLS)

        return _rate(self._array.nbytes, run(1), lambda: run(0))


def _rate(work: float, seconds: float, time_empty: Callable[[], float]) -> float:
    """Work per second, without what a call takes that does none of it."""
    return work / max(seconds - time_empty(), math.ulp(1.0))
