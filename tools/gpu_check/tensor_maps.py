# SPDX-License-Identifier: MIT
"""Maps of tensors for the unit that copies them. NVIDIA's driver makes them on the host."""

import ctypes as c

import numpy as np

from gpu_check.opencl import Error

LIBRARIES = (
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
)
BYTES = 128
HALF = 2
UINT16 = 1  # copies bits, so that it does for float16 and bfloat16
NO_INTERLEAVE, MIXED_128, PROMOTE_256, ZEROS = 0, 3, 3, 0
NOT_INITIALIZED, NO_CONTEXT = 3, 201


def load():
    reasons = []
    for name in LIBRARIES:
        try:
            return c.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise Error(f"there is no libcuda: {'; '.join(reasons)}")


def initialize(cuda):
    return cuda.cuInit(0)


def make_context(cuda):
    """Make the context of CUDA's first device current, which libraries of a process share."""
    device, context = c.c_int(), c.c_void_p()
    return (
        cuda.cuDeviceGet(c.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(c.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )


class Maker:
    """Makes maps by libcuda. `needed` says what that took, beside the call itself."""

    def __init__(self):
        self.cuda, self.needed = load(), []

    def make(self, address, shape, box):
        """Return the map of a contiguous array of 16-bit numbers, (third, second, first dimension).

        A box has as many dimensions, the fastest of 64 numbers or fewer.
        """
        first_last = shape[::-1]
        strides = np.cumprod(first_last[:-1], dtype=np.uint64) * HALF
        room = c.create_string_buffer(BYTES + 64)
        at = -(-c.addressof(room) // 64) * 64
        numbers = (
            (c.c_uint64 * 3)(*first_last), (c.c_uint64 * 2)(*map(int, strides)),
            (c.c_uint32 * 3)(*box[::-1]), (c.c_uint32 * 3)(1, 1, 1),
        )  # fmt: skip
        arguments = (c.c_void_p(at), UINT16, c.c_uint32(3), c.c_void_p(address), *numbers,
                     NO_INTERLEAVE, MIXED_128, PROMOTE_256, ZEROS)  # fmt: skip
        steps = {NOT_INITIALIZED: ("cuInit", initialize), NO_CONTEXT: ("a context", make_context)}
        while status := self.cuda.cuTensorMapEncodeTiled(*arguments):
            name, step = steps.pop(status, (None, None))
            if name is None or step(self.cuda):
                raise Error(f"cuTensorMapEncodeTiled: error {status}, after {self.needed}")
            self.needed.append(name)
        return c.string_at(at, BYTES)
