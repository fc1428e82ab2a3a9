# SPDX-License-Identifier: MIT
"""The unit that copies to local memory for one work-item: `cp.async.bulk` of the PTX ISA.

It copies bytes that lie in a row, and boxes of tensors (`cp.async.bulk.tensor`).

A map of 128 bytes in global memory describes a tensor and the box that is copied. What its bytes
mean is NVIDIA's secret: a function of the driver makes them. Here `Map` makes and reads bytes of
its own. A copy reads the map by another way than loads do, so a fence has to stand before it.

A box lies in local memory row by row. Where it is mixed, its rows have 128 bytes, and bits 4 … 6 of
an address change by bits 7 … 9. What lies outside the tensor is zeros. When the copy is done, it
takes its bytes from those that a barrier with phases expects.
"""

import struct
from dataclasses import dataclass

import numpy as np

from ptx.barriers import PHASE_BYTES, by_address
from ptx.memory import ALL_WARPS, WARP
from ptx.program import Refused
from ptx.warp import lanes_of

MAP_BYTES = 128
MAP_ALIGNMENT = 64
CHUNK = 16  # bytes
HALF = 2
MIXED_ROW = 128
FORMAT = "<8sQ3Q2Q3II"
MARK = b"a tensor"


@dataclass(frozen=True)
class Map:
    """A tensor of three dimensions of halves, the fastest first, and a box of it."""

    address: int
    shape: tuple[int, int, int]
    strides: tuple[int, int]  # bytes, of the second and the third dimension
    box: tuple[int, int, int]
    mixed: bool = True

    def encode(self):
        numbers = self.address, *self.shape, *self.strides, *self.box, self.mixed
        return struct.pack(FORMAT, MARK, *numbers).ljust(MAP_BYTES, b"\0")

    @staticmethod
    def decode(data):
        mark, address, *numbers = struct.unpack(FORMAT, data[: struct.calcsize(FORMAT)])
        if mark != MARK:
            raise Refused("these bytes are no map of a tensor")
        found = Map(address, tuple(numbers[:3]), tuple(numbers[3:5]), tuple(numbers[5:8]),
                    bool(numbers[8]))  # fmt: skip
        if address % CHUNK or any(stride % CHUNK for stride in found.strides):
            raise Refused("a tensor whose rows are not aligned to 16 bytes")
        if not all(1 <= n <= 256 for n in found.box) or found.box[0] * HALF % CHUNK:
            raise Refused(f"a box of {found.box}")
        if found.mixed and found.box[0] * HALF > MIXED_ROW:
            raise Refused(f"a mixed box with rows of {found.box[0] * HALF} bytes")
        return found


@dataclass
class BoxCopy:
    """A copy that runs. It ends when somebody waits for its barrier."""

    barrier: object
    lanes: np.ndarray
    copies: list
    known: np.ndarray
    size: int
    in_order = False

    def finish(self, shared):
        shared.land(self.copies, self.known)
        for _, _, offsets, _ in self.copies:
            shared.shown[shared.granules(offsets, CHUNK)] = ALL_WARPS
        self.barrier.complete(self.size, self.known)


def read_map(machine, address, lane):
    if address % MAP_ALIGNMENT:
        raise Refused(f"a map at {address:#x}, which is no multiple of {MAP_ALIGNMENT}")
    if (address, lane // WARP) not in machine.fenced_maps:
        raise Refused("no fence of this warp stands between the map's writing and the copy")
    places = np.uint64(address) + np.arange(0, MAP_BYTES, CHUNK, dtype=np.uint64)
    lanes = np.full(len(places), lane)
    return Map.decode(machine.memory["generic"].read(places, lanes, 4, 4).tobytes())


def read_box(machine, tensor, start, lane):
    """Returns the halves of a box, [third][second][first dimension]."""
    at = np.meshgrid(*(s + np.arange(n) for s, n in zip(start, tensor.box, strict=True)),
                     indexing="ij")  # fmt: skip
    x, y, z = (index.transpose(2, 1, 0) for index in at)
    inside = np.ones(x.shape, bool)
    for index, size in zip((x, y, z), tensor.shape, strict=True):
        inside &= (index >= 0) & (index < size)
    halves = np.zeros(x.shape, np.uint16)
    places = tensor.address + HALF * x + tensor.strides[0] * y + tensor.strides[1] * z
    places = places[inside].astype(np.uint64)
    if len(places):
        lanes = np.full(len(places), lane)
        halves[inside] = machine.memory["global"].read(places, lanes, HALF, 1)[:, 0]
    return halves


def copy_box(machine, instruction):
    to, source, barrier = instruction.operands
    to, barrier = machine.address(to), machine.address(barrier)
    tensor, *start = (
        source.strip("[]").replace("{", "").replace("}", "").replace(" ", "").split(",")
    )
    tensor = machine.address(f"[{tensor}]")
    start = [machine.source(x, "s32") for x in start]
    if len(start) != 3:
        raise Refused("a tensor that has not three dimensions")

    def run(active):
        for place, lanes in by_address(machine, active, barrier):
            for lane in lanes:
                begin = [int(np.broadcast_to(x, machine.lanes)[lane]) for x in start]
                begin_copy(machine, int(lane), int(to()[lane]), int(tensor()[lane]), begin, place)

    return run


def begin_copy(machine, lane, to, tensor, start, barrier):
    tensor = read_map(machine, tensor, lane)
    if to % MIXED_ROW:
        raise Refused(f"a box goes to {to:#x}, which is no multiple of {MIXED_ROW}")
    contents = read_box(machine, tensor, start, lane).reshape(-1, CHUNK // HALF)
    places = to + CHUNK * np.arange(len(contents))
    if tensor.mixed:
        places ^= (places >> 7 & 7) << 4
    send(machine, lane, places, contents, barrier)


def send(machine, lane, places, contents, barrier):
    """Begins to write 16 bytes at each place, for a barrier."""
    shared = machine.memory["shared"]
    lanes = np.full(len(places), lane)
    offsets = shared.offsets(places.astype(np.uint64), CHUNK)
    shared.will_write(offsets, lanes, CHUNK)
    shared.flying[shared.granules(offsets, CHUNK)] = True
    known = machine.clock.release(np.array([lane // WARP]))
    phased = machine.barriers.at(barrier, np.array([lane]))
    at = shared.offsets(np.full(1, barrier, np.uint64), PHASE_BYTES)
    if not (shared.shown[shared.granules(at, PHASE_BYTES)] >> np.uint32(lane // WARP) & 1).all():
        raise Refused("the barrier's start was not shown to copies")
    parts = [(lanes, shared.sets[lanes], offsets, contents)]
    machine.barriers.arrivals.append(
        BoxCopy(phased, np.array([lane]), parts, known, contents.nbytes)
    )


def copy_row(machine, instruction):
    to, source, size, barrier = instruction.operands
    to, source, barrier = map(machine.address, (to, source, barrier))
    size = machine.source(size, "u32")

    def run(active):
        for place, lanes in by_address(machine, active, barrier):
            for lane in lanes:
                count, rest = divmod(int(np.broadcast_to(size, machine.lanes)[lane]), CHUNK)
                if rest:
                    raise Refused(f"a copy of {count * CHUNK + rest} bytes")
                steps = CHUNK * np.arange(count, dtype=np.uint64)
                reader = np.full(count, lane)
                contents = machine.memory["global"].read(source()[lane] + steps, reader, HALF, 8)
                send(machine, int(lane), (to()[lane] + steps).astype(np.int64), contents, place)

    return run


def show_map(machine, instruction):
    """A fence: copies of these warps see what has been written to a map."""
    address, size = instruction.operands
    if size != str(MAP_BYTES):
        raise Refused(f"a fence of {size} bytes")
    address = machine.address(address)

    def run(active):
        for lane in lanes_of(machine, active):
            machine.fenced_maps.add((int(address()[lane]), int(lane) // WARP))

    return run


def expect(machine, instruction):
    """Expects bytes of copies, and arrives."""
    _, address, size = instruction.operands
    address, size = machine.address(address), machine.source(size, "u32")

    def run(active):
        for place, lanes in by_address(machine, active, address):
            barrier = machine.barriers.at(place, lanes)
            barrier.expected_bytes += int(np.broadcast_to(size, machine.lanes)[lanes].sum())
            barrier.arrive(len(lanes), machine.clock.release(np.unique(lanes // WARP)))

    return run


MAKERS = {
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": copy_row,
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes": copy_box,
    "fence.proxy.tensormap::generic.acquire.gpu": show_map,
    "mbarrier.arrive.expect_tx.shared.b64": expect,
}
