# SPDX-License-Identifier: MIT
"""Print what OpenCL says of each device as JSON. Runs as a process: a driver may crash it."""

import ctypes as c
import json
import sys

LOADER = "libOpenCL.so.1"
ALL_DEVICES = 0xFFFFFFFF
TYPES = {4: "gpu", 2: "cpu", 8: "accelerator"}  # of several types the first, as in clattn
PLATFORM = {"platform": 0x0902, "platform version": 0x0901}
TEXTS = {
    "name": 0x102B,
    "vendor": 0x102C,
    "driver": 0x102D,
    "version": 0x102F,
    "OpenCL C": 0x103D,
    "extensions": 0x1030,
}
NUMBERS = {
    "compute units": 0x1002,
    "clock, MHz": 0x100C,
    "work-group": 0x1004,
    "memory": 0x101F,
    "largest buffer": 0x1010,
    "local memory": 0x1023,
    "cache": 0x101E,
    "address bits": 0x100D,
}
OF_EXTENSIONS = {
    "cl_nv_device_attribute_query": {"capability": (0x4000, 0x4001), "warp": (0x4003,)},
    "cl_amd_device_attribute_query": {"wavefront": (0x4043,)},
}


def _ask(function, handle, parameter):
    """Return the bytes of an answer; empty if the driver refuses the question."""
    size = c.c_size_t()
    if function(handle, parameter, c.c_size_t(0), None, c.byref(size)) or not size.value:
        return b""
    data = c.create_string_buffer(size.value)
    return b"" if function(handle, parameter, size, data, None) else data.raw


def _text(function, handle, parameter):
    return _ask(function, handle, parameter).rstrip(b"\0").decode(errors="replace").strip()


def _number(function, handle, parameter):
    return int.from_bytes(_ask(function, handle, parameter), sys.byteorder)


def _handles(function, *arguments):
    """Return the handles that an OpenCL function lists."""
    count = c.c_uint()
    if function(*arguments, 0, None, c.byref(count)) or not count.value:
        return []
    handles = (c.c_void_p * count.value)()
    return [] if function(*arguments, count, handles, None) else list(map(c.c_void_p, handles))


def is_named(facts, words):
    """Is it of a type, or has it a name or a platform that contains the words?"""
    kind = words.partition(":")[0].lower()
    return kind == facts["type"] or any(
        words.lower() in facts[name].lower() for name in ("name", "platform")
    )


def find_devices():
    """Return (handle, facts) of the devices of all platforms."""
    cl = c.CDLL(LOADER)
    devices = []
    for platform in _handles(cl.clGetPlatformIDs):
        info = cl.clGetPlatformInfo
        of_platform = {name: _text(info, platform, code) for name, code in PLATFORM.items()}
        for device in _handles(cl.clGetDeviceIDs, platform, c.c_ulong(ALL_DEVICES)):
            info = cl.clGetDeviceInfo
            bits = _number(info, device, 0x1000)
            facts = {"type": next((w for bit, w in TYPES.items() if bits & bit), "other")}
            facts |= {name: _text(info, device, code) for name, code in TEXTS.items()}
            facts |= {name: _number(info, device, code) for name, code in NUMBERS.items()}
            for extension, questions in OF_EXTENSIONS.items():
                if extension in facts["extensions"].split():
                    for name, codes in questions.items():
                        facts[name] = ".".join(str(_number(info, device, n)) for n in codes)
            devices.append((device, of_platform | facts))
    return devices


if __name__ == "__main__":
    try:
        print(json.dumps([facts for _, facts in find_devices()]))
    except OSError as error:
        sys.exit(f"no OpenCL loader could be opened: {error}")
