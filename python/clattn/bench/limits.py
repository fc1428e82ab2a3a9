"""What a device can do at most, measured by kernels that do nothing else."""

import math
from collections.abc import Callable

import numpy as np

import clattn
from clattn import Device, Tensor, _core
from clattn._measuring import shortest
from clattn.bench.rows import Array, Row

READ_BYTES = 512 << 20  # far more than caches hold
LEAST_SECONDS = 0.02  # of a measurement
MOST_PASSES = 1024
CALLS = 2


class Limits:
    """The best that was seen of one device so far; 0: not measured."""

    def __init__(
        self, device: Device, measure_product: Callable[[str], float] | None = None
    ) -> None:
        self._device = device
        self._measure_product = measure_product
        self._steps = {False: 1 << 12, True: 1 << 12}
        self._array: Array | Tensor | None = None
        self._passes = 1
        self.fma = {"float32": 0.0, "float64": 0.0}  # FLOP/s
        self.read = 0.0  # bytes/s
        self.product: dict[str, float] = {}  # FLOP/s of another library's product, by dtype

    def measure(self, row: Row) -> float:
        """Return how much the device can do a second of what limits a row, at present.

        0 where nothing can tell: products of matrices are measured by another library.
        """
        if row.limit == "read":
            rate = self._measure_read()
            self.read = max(self.read, rate)
        elif row.limit == "product":
            rate = self._measure_product(row.dtype) if self._measure_product else 0.0
            if rate:
                self.product[row.dtype] = max(self.product.get(row.dtype, 0.0), rate)
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
        if self._array is None:
            most = min(READ_BYTES, device.max_allocation, device.memory // 4)
            # Not zeros, whose pages would all be one and the same.
            ones = np.ones(most // 4, np.float32)
            # A device that does not read the host's memory reads its own.
            self._array = clattn.tensor(ones, device) if device.memory_mode == "copy" else ones
        array = self._array

        def run(passes: int) -> float:
            return shortest(lambda: _core.peak_read(array, passes, device), 0, CALLS)

        seconds = run(self._passes)
        while seconds < LEAST_SECONDS and self._passes < MOST_PASSES:
            self._passes *= 4
            seconds = run(self._passes)
        return _rate(array.nbytes * self._passes, seconds, lambda: run(0))


def _rate(work: float, seconds: float, time_empty: Callable[[], float]) -> float:
    """Work per second, without what a call takes that does none of it."""
    return work / max(seconds - time_empty(), math.ulp(1.0))
