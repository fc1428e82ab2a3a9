# SPDX-License-Identifier: MIT
"""Devices that nobody here has: every operator within their limits, on a real CPU.

The table is support/devices.py. The loader opencl_limits.c shows a row of it in the place of the
real device, and refuses what exceeds the row's limits.
"""

from functools import partial

import pytest
from conftest import DEVICES as REAL_DEVICES
from support.devices import DEVICES, UNUSABLE
from support.limits import Limited, build, real_platform
from support.variants import POCL

pytestmark = pytest.mark.cpus  # which can have the limits of any device

# The devices of each run, unlike in groups, memory and lanes; `-m rest` takes the others. A device
# builds its programs for ten seconds on PoCL. Where PoCL is not installed, two take a minute each.
SOME = ("the least", "VideoCore VI", "UHD 630", "Vega 64")
FEW = ("the least", "UHD 630")
# Its programs are those of the UHD 630 but for sizes, so it gets each kernel once.
BRIEFLY = "Vega 64"
# Work-groups and local memory that the kernels for GPUs need.
GROUP, LOCAL_BYTES = 64, 16 << 10
FAST = {"attention_tiled", "attention_tiled_scores", "attention_decode_gpu",
        "attention_decode_gpu_merge", "attention_tiled_backward"}  # fmt: skip
REFERENCE = {"attention_reference", "attention_backward"}
SLOW = {"attention_blocks", "attention_inputs", "diagonal_band"}
PAGES = {"pages_copy", "pages_quantize"}

CALLS = """
import warnings
import clattn
import support.limited_calls as calls

(device,) = clattn.devices()
"""
# A kernel that is left out would be a warning.
WITHOUT_WARNINGS = 'warnings.filterwarnings("error", category=RuntimeWarning, message=".*kernel")\n'


@pytest.fixture(scope="session")
def limits_library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("limits"))


@pytest.fixture
def limited(limits_library, tmp_path):
    """Makes a Limited whose files are this test's."""
    return partial(Limited, limits_library, real_platform(REAL_DEVICES), tmp_path)


def kernels_of(ran):
    return {name for name, _ in ran if not name.startswith("probe_")}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.rest) for n in DEVICES]
)
def test_every_operator(limited, name):
    """Right results; nothing that the device refuses; the kernels for GPUs where they fit."""
    if real_platform(REAL_DEVICES) != POCL and name not in FEW:
        pytest.skip("only with PoCL, which keeps programs for all of these devices")
    limits = DEVICES[name]
    on_device = limited(limits)
    has_float64 = "cl_khr_fp64" in limits.extensions.split()
    calls = f"call_every_operator(device, {has_float64})"
    expected = SLOW | PAGES | {"attention_reference"}
    if name == BRIEFLY:
        calls, expected = "call_each_kernel(device)", SLOW
    on_device.run(CALLS + WITHOUT_WARNINGS + f"calls.{calls}")
    refused, ran = on_device.told()
    assert not refused
    assert max(group for _, group in ran) <= limits.work_group
    fits = limits.work_group >= GROUP and limits.local_memory >= LOCAL_BYTES
    assert kernels_of(ran) == expected | (FAST if fits else REFERENCE)


# What built kernels allow -> the kernels of these that run then, in groups of that size. An M1 has
# room for 256, and tells of some kernels that they need too many registers for as many.
SMALLER = {
    "smaller tiles": {
        "attention_tiled": 64, "attention_tiled_scores": 64, "attention_decode_gpu": 64,
        "attention_decode_gpu_merge": 128, "attention_tiled_backward": 64,
        "attention_reference": 16, "attention_inputs": 16, "attention_blocks": 8,
        "diagonal_band": 32,
    },
    "no tiles": {"attention_tiled": 32, "attention_decode_gpu": 32, "attention_tiled_backward": 32},
    "smaller tiles of scores": {"attention_tiled_scores": 64},
    "no tiles of scores": {"attention_tiled_scores": 32},
    "one work-item": {"*": 1},
}  # fmt: skip


@pytest.mark.parametrize("case", SMALLER)
def test_kernels_that_allow_smaller_groups(limited, case):
    """They are planned again, and then the next variant is taken."""
    groups = SMALLER[case]
    on_device = limited(DEVICES["Apple M1"], groups=groups)
    on_device.run(CALLS + "calls.call_each_kernel(device)")
    refused, ran = on_device.told()
    assert not refused
    for name, group in ran:
        assert group <= groups.get(name, groups.get("*", 256)), name
    scores = FAST - {"attention_tiled_scores"} | {"attention_reference"}
    fast = {"smaller": FAST, "no tiles of scores": scores}
    fast = next((kernels for start, kernels in fast.items() if case.startswith(start)), REFERENCE)
    assert kernels_of(ran) == SLOW | fast


def test_kernels_that_take_too_much_local_memory(limited):
    """Compilers may take more than the text says. The next variant runs."""
    more = dict.fromkeys(FAST - {"attention_tiled_scores", "attention_decode_gpu_merge"}, 33000)
    on_device = limited(DEVICES["Apple M1"], local_memory=more)
    on_device.run(CALLS + "calls.call_each_kernel(device)")
    _, ran = on_device.told()
    assert kernels_of(ran) == SLOW | REFERENCE


def test_types_that_the_device_lacks(limited):
    """No program has a double where the device has none.

    The trials of variants run in other processes, which find the same device.
    """
    on_device = limited(DEVICES["Apple M1"], LIMITS_NAMES="1", CLATTN_TRIALS=None)
    on_device.run(CALLS + WITHOUT_WARNINGS + "calls.call_few(device)")
    assert on_device.told()[0] == []
    assert on_device.processes() > 1


def test_a_device_without_float64(limited):
    """What computes in it is refused by name; what only reads such numbers is right."""
    on_device = limited(DEVICES["Mali-G78"])
    said = on_device.run(
        CALLS
        + """
assert not device.float64
calls.refuse_float64(device)
calls.convert_float64(device)
clattn.show_config()
"""
    ).stdout
    assert on_device.told()[0] == []
    [dtypes] = [line for line in said.splitlines() if line.split()[:1] == ["dtypes"]]
    assert dtypes.split()[1:] == ["float32,", "float16,", "bfloat16"]


@pytest.mark.parametrize("reason", UNUSABLE)
def test_devices_that_cannot_be_used(limited, reason):
    """They are passed over, and the reason names what they lack."""
    on_device = limited(UNUSABLE[reason])
    on_device.run(f"""
        import clattn
        (device,) = clattn._core.all_devices()
        assert not device.usable
        assert {reason!r} in device.reason, device.reason
        refusals = {{device.name: "cannot be used: ", None: "no OpenCL device is usable: "}}
        for words, said in refusals.items():
            try:
                clattn.diagonal_matrix((2, 2), 1, 0, 1, device=words)
            except clattn.DeviceError as error:
                assert said in str(error) and {reason!r} in str(error), str(error)
            else:
                raise AssertionError(words)
    """)
    assert on_device.told()[1] == {}, "no kernel ran"


# ---- the loader itself ----

OPENED = """
import ctypes as c

cl = c.CDLL("libOpenCL.so.1")
made = "Context", "CommandQueue", "ProgramWithSource", "Kernel", "Buffer"
for name in made:
    getattr(cl, "clCreate" + name).restype = c.c_void_p
platform, device, status = c.c_void_p(), c.c_void_p(), c.c_int()
assert cl.clGetPlatformIDs(1, c.byref(platform), None) == 0
assert cl.clGetDeviceIDs(platform, c.c_uint64(0xFFFFFFFF), 1, c.byref(device), None) == 0

def create(what, *arguments):
    made = getattr(cl, "clCreate" + what)(*arguments, c.byref(status))
    return made and c.c_void_p(made)

context = create("Context", None, 1, c.byref(device), None, None)
queue = create("CommandQueue", context, device, c.c_uint64(0))
text = c.c_char_p(b"kernel void one(global int *a) { local int b[2048]; b[get_local_id(0)] = a[1];"
                  b"barrier(CLK_LOCAL_MEM_FENCE); *a = b[a[2]]; }"
                  b"kernel void two(global int *a) { *a = 1; }")
program = create("ProgramWithSource", context, 1, c.byref(text), None)
assert cl.clBuildProgram(program, 1, c.byref(device), b"-cl-std=CL1.2", None, None) == 0
one, two = (create("Kernel", program, name) for name in (b"one", b"two"))
"""
REFUSALS = """
def launch(kernel, items):
    size = c.byref(c.c_size_t(items))
    return cl.clEnqueueNDRangeKernel(queue, kernel, 1, None, size, size, 0, None, None)

assert cl.clBuildProgram(program, 1, c.byref(device), b"-cl-std=CL3.0", None, None) == -43
assert create("Buffer", context, c.c_uint64(1), c.c_size_t(2 << 20), None) is None
assert status.value == -61
assert create("CommandQueue", context, device, c.c_uint64(1 << 31)) is None and status.value == -35
buffer = create("Buffer", context, c.c_uint64(1), c.c_size_t(1 << 20), None)
for kernel in one, two:
    assert cl.clSetKernelArg(kernel, 0, c.c_size_t(8), c.byref(buffer)) == 0
assert cl.clSetKernelArg(two, 1, c.c_size_t(1020), c.create_string_buffer(1020)) == -51
assert launch(one, 1) == -5 and launch(two, 2) == -54 and launch(two, 1) == 0
assert cl.clFinish(queue) == 0
"""


def test_what_the_loader_refuses(limited):
    """Else the tests above would show nothing."""
    on_device = limited(DEVICES["the least"])
    on_device.run(OPENED + REFUSALS)
    refused, ran = on_device.told()
    assert refused == [
        "-cl-std=CL3.0",
        "a buffer of 2097152 bytes",
        "properties 0x80000000 of a queue",
        "1028 bytes of arguments",
        "8192 bytes of local memory",
        "a group of 2 work-items; most are 1",
    ]
    assert ran == {("two", 1): 1}


def test_a_function_that_the_device_lacks(limited):
    """A driver of OpenCL 1.2 may crash in it, so the loader ends the process."""
    code = OPENED + "cl.clSetKernelArgSVMPointer(two, None, None)"
    done = limited(DEVICES["the least"]).run(code, check_exit=False)
    assert done.returncode < 0, done.stderr
    assert "clSetKernelArgSVMPointer was called" in done.stderr
