"""The limits of a device, measured by kernels that only compute or only read."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clattn import Device, _core
from clattn._commands.bench.peers import first_line
from clattn._commands.bench.rows import Row, pairs_in

READ_BYTES = 512 << 20  # of the largest array that is read
LEAST_SECONDS = 0.02  # of a measurement
CALLS = 2  # per measurement; the shorter one counts
MOST_STEPS, MOST_PASSES = 1 << 30, 1024
TILE = 1 << 18  # elements that a work-group reads
GROUP = 64  # work-items of a work-group on a GPU
CHAINS = 12  # of limit_fma, as in limits.cl
LEAST_LANES = 2  # of a vector of OpenCL
SOURCE = Path(__file__).with_name("limits.cl")

_Sums = np.ndarray[Any, np.dtype[np.float32]]


class Kernels:
    """The kernels of limits.cl on one device, launched by pyopencl.

    clattn has opened the device before, so pyopencl's loader finds the same drivers, also those
    from pip.
    """

    def __init__(self, device: Device) -> None:
        import pyopencl

        self._cl: Any = pyopencl
        self.device = _find(pyopencl, device)
        self._context = self._cl.Context([self.device])
        timed = self._cl.command_queue_properties.PROFILING_ENABLE
        self._queue = self._cl.CommandQueue(self._context, properties=timed)
        self._built: dict[tuple[str, bool], Any] = {}
        self._input: Any = None  # the array that limit_read reads; large rows enlarge it
        is_cpu = device.type == "cpu"
        width = self.device.native_vector_width_float
        self._vector = 16 if not is_cpu else 64 if width >= 16 else 32 if width >= 8 else 16
        # Bytes of a chain of multiply-adds. Chains of 16 make NVIDIA's GPUs a fifth slower.
        self._chain = self._vector if is_cpu else 8
        self._local = 1 if is_cpu else min(GROUP, self.device.max_work_group_size)
        # A GPU gets as many work-groups as its registers hold, so that every unit is busy.
        self._groups = (4 if is_cpu else 16) * self.device.max_compute_units

    def fma(self, dtype: str, steps: int) -> tuple[float, float, _Sums]:
        """Return the seconds and FLOP of `steps` multiply-adds a chain, and the final means.

        A multiply-add counts as two. A chain x = x / 2 + 1 ends near 2.
        """
        lanes = max(self._chain // np.dtype(dtype).itemsize, LEAST_LANES)
        kernel = self._build("limit_fma", dtype == "float64", lanes)
        scalars = (np.int64(steps), np.float32(0.5), np.float32(1))
        seconds, sums = self._launch(kernel, self._groups, scalars)
        return seconds, 2.0 * len(sums) * CHAINS * lanes * steps, sums

    def exp(self, steps: int) -> tuple[float, float, _Sums]:
        """Return the seconds and count of `steps` exponentials a chain, and the final means.

        A chain x = 2 ** -x ends near 0.6412.
        """
        kernel = self._build("limit_exp", False, self._vector // 4)
        seconds, sums = self._launch(kernel, self._groups, (np.int64(steps),))
        return seconds, float(len(sums) * CHAINS * self._vector // 4 * steps), sums

    @property
    def rows_of_vector(self) -> int:
        """The query rows that a vector holds; a work-item of a GPU has its own."""
        return self._vector // 4 if self._local == 1 else 1

    def read(self, size: int, passes: int) -> tuple[float, float, _Sums]:
        """Return the seconds and bytes of reading an array `passes` times, and partial sums.

        The array has about `size` bytes, in whole tiles: a small one stays in a cache.
        """
        kernel = self._build("limit_read", False, self._vector // 4)
        most = min(READ_BYTES, self.device.max_mem_alloc_size, self.device.global_mem_size // 4)
        count = max(min(round(size / (4 * TILE)), most // (4 * TILE)), 1) * TILE
        if self._input is None or self._input.size < 4 * count:
            ones = np.ones(count, np.float32)  # pages of zeros might all be one page
            flags = self._cl.mem_flags.READ_ONLY | self._cl.mem_flags.COPY_HOST_PTR
            self._input = self._cl.Buffer(self._context, flags, hostbuf=ones)
        arguments = (self._input, np.int64(count), np.int64(TILE))
        seconds, sums = self._launch(kernel, count // TILE * passes, arguments)
        return seconds, float(4 * count * passes), sums

    def _build(self, name: str, is_double: bool, lanes: int) -> Any:
        if (name, is_double) not in self._built:
            options = [f"-DREAL64={int(is_double)}", f"-DLANES={lanes}", f"-DLOCAL={self._local}"]
            program = self._cl.Program(self._context, SOURCE.read_text(encoding="utf-8"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pyopencl warns of each line of a compiler
                program.build(["-cl-std=CL1.2", *options], cache_dir=False)
            self._built[name, is_double] = getattr(program, name)
        return self._built[name, is_double]

    def _launch(self, kernel: Any, groups: int, arguments: tuple[Any, ...]) -> tuple[float, _Sums]:
        """Return the seconds on the device, and the result of each work-item."""
        cl = self._cl
        sums = np.empty(groups * self._local, np.float32)
        output = cl.Buffer(self._context, cl.mem_flags.WRITE_ONLY, sums.nbytes)
        event = kernel(self._queue, sums.shape, (self._local,), output, *arguments)
        event.wait()
        cl.enqueue_copy(self._queue, sums, output)
        return max(event.profile.end - event.profile.start, 1) * 1e-9, sums


def _find(cl: Any, device: Device) -> Any:
    """Return pyopencl's device: of several equal devices, the one with the same number."""
    wanted = (device.platform.strip(), device.name.strip())
    equals = [d for d in _core.all_devices() if (d.platform.strip(), d.name.strip()) == wanted]
    listed = [(p.name.strip(), d) for p in cl.get_platforms() for d in p.get_devices()]
    found = [d for platform, d in listed if (platform, d.name.strip()) == wanted]
    if len(found) != len(equals):
        raise LookupError(f"pyopencl lists {len(found)} of these devices, clattn {len(equals)}")
    return found[equals.index(device)]


class Limits:
    """The highest rates of one device so far; 0: not measured."""

    def __init__(self, device: Device, product: Callable[[str], float] | None = None) -> None:
        self._product = product
        self._kernels: Kernels | None = None
        self._counts: dict[str, int] = {}
        self.missing = ""  # why there are no kernels, or what has failed
        self.fma = {"float32": 0.0, "float64": 0.0}  # FLOP/s
        self.exp = 0.0  # exponentials/s, float32
        self.read: dict[int, float] = {}  # bytes/s of an array of so many bytes
        self.product: dict[str, float] = {}  # FLOP/s of another library's product, by dtype
        try:
            self._kernels = Kernels(device)
        except ImportError as error:
            self.missing = f"{error.name or error} is not installed"
        except Exception as error:  # of a loader or a driver
            self.missing = first_line(error)

    def measure(self, row: Row) -> float:
        """Measure the limit of a row; return it in FLOP/s or bytes/s.

        0: not known. Another library measures products of matrices. After a failure, which
        `missing` tells, there are no more limits: the rows themselves are still measured.
        """
        try:
            if row.limit == "product":
                return self._multiply(row.dtype)
            if self._kernels is None:
                return 0.0
            if row.trains:
                return self._multiply_add(row, self._kernels)
            seconds = self._compute(row, self._kernels)
            if row.limit == "read":
                seconds = max(seconds, self._read(row, self._kernels))
            return row.work / seconds
        except Exception as error:  # of pyopencl, a driver or torch
            self.missing = first_line(error)
            self._kernels = self._product = None
            return 0.0

    def _multiply(self, dtype: str) -> float:
        """Return the rate of another library's matrix product."""
        rate = self._product(dtype) if self._product else 0.0
        if rate:
            self.product[dtype] = max(self.product.get(dtype, 0.0), rate)
        return rate

    def _multiply_add(self, row: Row, kernels: Kernels) -> float:
        """Return the rate of multiply-adds."""
        dtype = "float64" if row.dtype == "float64" else "float32"
        launch = functools.partial(kernels.fma, dtype)
        self.fma[dtype] = max(self.fma[dtype], self._measure(dtype, launch, 1 << 12, MOST_STEPS))
        return self.fma[dtype]

    def _compute(self, row: Row, kernels: Kernels) -> float:
        """Return the seconds of the row's multiply-adds and of float32's exponentials."""
        rate = self._multiply_add(row, kernels)
        if row.dtype == "float64":
            return row.flop / rate
        self.exp = max(self.exp, self._measure("exp", kernels.exp, 1 << 10, MOST_STEPS))
        flop = 4 * row.shape[-1]  # of a pair
        whole = row.limit == "scores"
        pairs = pairs_in(row, kernels.rows_of_vector) if whole else row.flop / flop
        return pairs * (flop / rate + 1 / self.exp)

    def _read(self, row: Row, kernels: Kernels) -> float:
        """Return the seconds of reading the row's keys and values once."""
        size = row.bytes_read
        launch = functools.partial(kernels.read, size)
        rate = self._measure(f"read {size}", launch, 1, MOST_PASSES)
        self.read[size] = max(self.read.get(size, 0.0), rate)
        return size / self.read[size]

    def _measure(
        self, key: str, launch: Callable[[int], tuple[float, float, _Sums]], first: int, most: int
    ) -> float:
        """Return the work per second of a launch that takes at least LEAST_SECONDS."""
        while True:
            count = self._counts.setdefault(key, first)
            seconds, work, _ = min((launch(count) for _ in range(CALLS)), key=lambda run: run[0])
            if seconds >= LEAST_SECONDS or count >= most:
                return work / seconds
            self._counts[key] = count * 4
