# SPDX-License-Identifier: MIT
"""A small binding of OpenCL for the check's own kernels: needs the loader and no package."""

import ctypes as c
import time
from pathlib import Path

from embed_kernels import program as joined  # a file and all that it includes

from gpu_check import opencl_info
from gpu_check.running import ROOT

PROBES = Path(__file__).resolve().parent.relative_to(ROOT) / "probes"
BINARY_SIZES, BINARIES, BUILD_LOG = 0x1165, 0x1166, 0x1183
READ_WRITE, HOST_MEMORY = 1, 1 | 16
PROFILING, OUT_OF_ORDER = 2, 1
START, END = 0x1282, 0x1283
NAMES = {
    -4: "CL_MEM_OBJECT_ALLOCATION_FAILURE", -5: "CL_OUT_OF_RESOURCES", -6: "CL_OUT_OF_HOST_MEMORY",
    -11: "CL_BUILD_PROGRAM_FAILURE", -36: "CL_INVALID_COMMAND_QUEUE", -42: "CL_INVALID_BINARY",
    -43: "CL_INVALID_BUILD_OPTIONS", -46: "CL_INVALID_KERNEL_NAME", -51: "CL_INVALID_ARG_SIZE",
    -52: "CL_INVALID_KERNEL_ARGS", -54: "CL_INVALID_WORK_GROUP_SIZE", -61: "CL_INVALID_BUFFER_SIZE",
    -9999: "an illegal read or write",
}  # fmt: skip


class Error(Exception):
    """A call of OpenCL failed."""


def source_of(name):
    """Return the text of a file in the folder of probes, without includes."""
    return joined(ROOT, str(PROBES / name))


class Context:
    """A device with a queue that takes times."""

    def __init__(self, words):
        found = [(h, facts) for h, facts in opencl_info.find_devices()
                 if opencl_info.is_named(facts, words)]  # fmt: skip
        if not found:
            raise Error(f"no OpenCL device is {words!r}")
        self.words = words
        self.handle, self.facts = found[0]
        self.cl = c.CDLL(opencl_info.LOADER)
        self.context = self.make("clCreateContext", None, 1, c.byref(self.handle), None, None)
        self.queue = self.make_queue(PROFILING)

    @property
    def is_gpu(self):
        return self.facts["type"] == "gpu"

    @property
    def has_matrix_units(self):
        return float(self.facts.get("capability", 0)) >= 8

    def call(self, name, *arguments):
        status = getattr(self.cl, name)(*arguments)
        if status:
            raise Error(f"{name}: {NAMES.get(status, f'error {status}')}")

    def make(self, name, *arguments):
        """Call a function that returns a handle, and its status behind the last argument."""
        status = c.c_int()
        function = getattr(self.cl, name)
        function.restype = c.c_void_p
        handle = function(*arguments, c.byref(status))
        if status.value:
            raise Error(f"{name}: {NAMES.get(status.value, f'error {status.value}')}")
        return c.c_void_p(handle)

    def make_queue(self, properties=0):
        return self.make("clCreateCommandQueue", self.context, self.handle, c.c_ulong(properties))

    # --- programs ---------------------------------------------------------------------

    def build(self, text, options=""):
        """Build a program from its source; the Error has the compiler's log."""
        data = text.encode()
        program = self.make("clCreateProgramWithSource", self.context, 1,
                            c.byref(c.c_char_p(data)), c.byref(c.c_size_t(len(data))))  # fmt: skip
        standard = "" if "-cl-std" in options else "-cl-std=CL1.2 "
        return self._built(program, standard + options)

    def load(self, binary, options=""):
        """Make a program of a binary, which on NVIDIA's GPUs is PTX."""
        pointer = c.cast(c.c_char_p(binary), c.c_void_p)
        program = self.make("clCreateProgramWithBinary", self.context, 1, c.byref(self.handle),
                            c.byref(c.c_size_t(len(binary))), c.byref(pointer),
                            c.byref(c.c_int()))  # fmt: skip
        return self._built(program, options)

    def _built(self, program, options):
        start = time.monotonic()
        status = self.cl.clBuildProgram(
            program, 1, c.byref(self.handle), options.encode(), None, None
        )
        built = Program(self, program, time.monotonic() - start)
        if status:
            raise Error(f"{NAMES.get(status, f'error {status}')}: {built.log().strip()}")
        return built

    # --- buffers and launches ---------------------------------------------------------

    def buffer(self, contents, flags=READ_WRITE):
        """Return a buffer with these bytes, or of that size."""
        size = contents if isinstance(contents, int) else len(contents)
        made = self.make("clCreateBuffer", self.context, c.c_ulong(flags), c.c_size_t(size), None)
        if not isinstance(contents, int):
            self.write(made, contents)
        return made

    def write(self, buffer, data, *, at=0, queue=None):
        self.call("clEnqueueWriteBuffer", queue or self.queue, buffer, 1, c.c_size_t(at),
                  c.c_size_t(len(data)), data, 0, None, None)  # fmt: skip

    def read(self, buffer, size, *, at=0, into=None):
        into = into or c.create_string_buffer(size)
        self.call("clEnqueueReadBuffer", self.queue, buffer, 1, c.c_size_t(at), c.c_size_t(size),
                  into, 0, None, None)  # fmt: skip
        return into.raw if hasattr(into, "raw") else into

    def map(self, buffer, size):
        """Return the address of a buffer's memory on the host."""
        return self.make("clEnqueueMapBuffer", self.queue, buffer, 1, c.c_ulong(3), c.c_size_t(0),
                         c.c_size_t(size), 0, None, None)  # fmt: skip

    def release(self, *buffers):
        for buffer in buffers:
            self.call("clReleaseMemObject", buffer)

    def finish(self, queue=None):
        self.call("clFinish", queue or self.queue)

    def launch(self, kernel, size, local, *arguments, queue=None, event=None):
        """Enqueue a kernel; arguments are buffers and ctypes numbers, None keeps what was set."""
        for index, argument in enumerate(arguments):
            if isinstance(argument, LocalMemory):
                self.call("clSetKernelArg", kernel, index, c.c_size_t(argument.size), None)
            elif argument is not None:
                self.call("clSetKernelArg", kernel, index, c.c_size_t(c.sizeof(argument)),
                          c.byref(argument))  # fmt: skip
        self.call("clEnqueueNDRangeKernel", queue or self.queue, kernel, 1, None,
                  c.byref(c.c_size_t(size)), c.byref(c.c_size_t(local)), 0, None,
                  event)  # fmt: skip

    def run(self, kernel, size, local, *arguments):
        self.launch(kernel, size, local, *arguments)
        self.finish()

    def seconds(self, kernel, size, local, *arguments):
        """Return the time of one launch, by the device's clock."""
        event, times = c.c_void_p(), [c.c_uint64(), c.c_uint64()]
        self.launch(kernel, size, local, *arguments, event=c.byref(event))
        self.finish()
        for number, what in zip(times, (START, END), strict=True):
            self.call("clGetEventProfilingInfo", event, what, c.c_size_t(8), c.byref(number), None)
        self.call("clReleaseEvent", event)
        return (times[1].value - times[0].value) * 1e-9


class LocalMemory:
    """A kernel's argument: bytes of local memory."""

    def __init__(self, size):
        self.size = size


class Program:
    """A built program, and the seconds that building took."""

    def __init__(self, context, handle, seconds):
        self.context, self.handle, self.seconds = context, handle, seconds

    def kernel(self, name):
        return self.context.make("clCreateKernel", self.handle, name.encode())

    def log(self):
        cl, size = self.context.cl, c.c_size_t()
        asked = self.handle, self.context.handle, BUILD_LOG
        cl.clGetProgramBuildInfo(*asked, c.c_size_t(0), None, c.byref(size))
        text = c.create_string_buffer(size.value + 1)
        cl.clGetProgramBuildInfo(*asked, size, text, None)
        return text.value.decode(errors="replace")

    def binary(self):
        """Return the program's binary; empty if there is none."""
        call, size = self.context.call, c.c_size_t()
        call("clGetProgramInfo", self.handle, BINARY_SIZES, c.c_size_t(8), c.byref(size), None)
        data = c.create_string_buffer(max(size.value, 1))
        pointer = c.cast(data, c.c_void_p)
        call("clGetProgramInfo", self.handle, BINARIES, c.c_size_t(8), c.byref(pointer), None)
        return data.raw[: size.value]

    def ptx(self):
        """Return the binary's text if it is PTX, else ""."""
        text = self.binary().rstrip(b"\0").decode(errors="replace")
        return text if ".version" in text and ".entry" in text else ""
