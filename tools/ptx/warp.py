# SPDX-License-Identifier: MIT
"""Instructions of PTX that the lanes of a warp execute together, and copies.

Fragments are laid out as in the PTX ISA. A register of a lane has two halves. With lane 4 g + t,
half `h` of register `r` is the element

    A (16 x 16)  row g + 8 (r % 2), column 2 t + h + 8 (r / 2)
    B (16 x 8)   row 2 t + h + 8 r, column g
    C (16 x 8)   register r, a float: row g + 8 (r / 2), column 2 t + r % 2
"""

import numpy as np

from ptx.memory import WARP
from ptx.program import Refused

LANE = np.arange(WARP)
G, T = LANE // 4, LANE % 4


def places(rows, columns, numbers, place):
    """Returns the index in [register][lane][half] of each element of a matrix."""
    result = np.full((rows, columns), -1)
    for n in range(numbers):
        row, column, index = place(n)
        result[row, column] = index
    assert (result >= 0).all()
    return result


def place_in_a(n):
    r, h = n // 2, n % 2
    return G + 8 * (r % 2), 2 * T + h + 8 * (r // 2), (r * WARP + LANE) * 2 + h


def place_in_b(n):
    r, h = n // 2, n % 2
    return 2 * T + h + 8 * r, G, (r * WARP + LANE) * 2 + h


def place_in_c(r):
    return G + 8 * (r // 2), 2 * T + r % 2, r * WARP + LANE


A = places(16, 16, 8, place_in_a)
B = places(16, 8, 4, place_in_b)
C = places(16, 8, 4, place_in_c)
FROM_C = np.argsort(C.ravel())  # for each register and lane where its number is in C


def warps_of(machine, active, named=None):
    """Returns the warps that execute a .sync instruction, in all lanes that its mask names."""
    lanes = np.ones(machine.lanes, bool) if active is True else active
    executing = lanes.reshape(-1, WARP)
    warps = executing.any(1)
    named = np.ones(WARP, bool) if named is None else named
    if (executing[warps] != named).any():
        warp = np.flatnonzero(warps & (executing != named).any(1))[0]
        raise Refused(
            f"lanes {np.flatnonzero(executing[warp])} of warp {warp} execute it, not "
            f"{np.flatnonzero(named)}"
        )
    return warps


def lanes_of(machine, active):
    return machine.executing_lanes if active is machine.executing else np.flatnonzero(active)


def members(text):
    return int(text, 0) >> LANE & 1 == 1


def vector(machine, text, kind, get):
    return [get(n, kind) for n in text.strip("{}").replace(",", " ").split()]


def shuffle(machine, instruction):
    """Exchanges registers between lanes whose numbers differ in some bits, in one segment."""
    to, x, by, clamp, mask = instruction.operands
    if int(clamp, 0) != WARP - 1 or "|" in to:
        raise Refused("a shuffle of parts of a warp")
    to, x, by = (machine.target(to, "b32"), machine.source(x, "b32"), machine.source(by, "u32"))
    named = members(mask)

    def run(active):
        warps_of(machine, active, named)
        lane = machine.all_lanes % WARP ^ by
        outside = lane >= WARP
        lane = np.where(outside, machine.all_lanes % WARP, lane)
        if not named[lane[lanes_of(machine, active)]].all():
            raise Refused("a lane that the mask does not name is read")
        values = x[machine.all_lanes // WARP * WARP + lane]
        np.copyto(to, values, where=active)

    return run


def vote_any(machine, instruction):
    to, x, mask = instruction.operands
    to, x = machine.target(to, "pred"), machine.source(x, "pred")
    named = members(mask)

    def run(active):
        warps_of(machine, active, named)
        voting = x if active is True else x & active
        any_lane = np.repeat(voting.reshape(-1, WARP).any(1), WARP)
        np.copyto(to, any_lane, where=active)

    return run


def load_matrices(machine, instruction):
    """Loads four matrices of 8 x 8. Lanes 8 n … 8 n + 7 pass the rows of matrix n."""
    to, address = instruction.operands
    to = vector(machine, to, "b32", machine.target)
    address = machine.address(address)
    transposed = ".trans" in instruction.name

    def run(active):
        warps_of(machine, active)
        lanes = lanes_of(machine, active)
        places = address()[lanes]
        banks = np.sort((places // np.uint64(16) % np.uint64(8)).reshape(-1, 8), 1)
        machine.bank_conflicts += int((banks[:, 1:] == banks[:, :-1]).any(1).sum())
        rows = machine.memory["shared"].read(places, lanes, 2, 8).reshape(-1, 4, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32)
        for n, register in enumerate(to):
            register[lanes] = words[:, n].ravel()

    return run


def numbers_of(fragments, kind):
    """Turns words in [registers][lanes] into doubles in [warps][register, lane, half]."""
    bits = fragments.reshape(len(fragments), -1, WARP).swapaxes(0, 1)
    return doubles_of(np.ascontiguousarray(bits).view(np.uint16).reshape(len(bits), -1), kind)


def doubles_of(halves, kind):
    """Turns the bits of half types into doubles."""
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def multiply_matrices(machine, instruction):
    kind = instruction.parts[7]  # of A and B
    to, a, b, c = instruction.operands
    to = vector(machine, to, "f32", machine.target)
    a, b = (vector(machine, x, "b32", machine.source) for x in (a, b))
    c = vector(machine, c, "f32", machine.source)

    def run(active):
        warps_of(machine, active)
        left = numbers_of(np.stack(a), kind)[:, A]
        right = numbers_of(np.stack(b), kind)[:, B]
        added = np.stack(c).reshape(4, -1, WARP).swapaxes(0, 1).reshape(-1, 4 * WARP)[:, C]
        sums = (left @ right + added).astype(np.float32).reshape(-1, 16 * 8)[:, FROM_C]
        for n, register in enumerate(to):
            values = sums[:, n * WARP : (n + 1) * WARP].ravel()
            np.copyto(register, values, where=active)

    return run


def copy(machine, instruction):
    """Copies 16 bytes, or writes zeros where the size is 0."""
    to, source, width, *size = instruction.operands
    if width != "16":
        raise Refused(f"a copy of {width} bytes")
    to, source = machine.address(to), machine.address(source)
    size = machine.source(size[0], "u32") if size else np.uint32(16)

    def run(active):
        lanes = lanes_of(machine, active)
        sizes = np.broadcast_to(size, machine.lanes)[lanes]
        reads = sizes == 16
        if (sizes[~reads] != 0).any():
            raise Refused("a copy of a part of 16 bytes")
        contents = np.zeros((len(lanes), 8), np.uint16)
        if reads.any():
            readers = lanes[reads]
            contents[reads] = machine.memory["global"].read(source()[readers], readers, 2, 8)
        machine.memory["shared"].copy(to()[lanes], lanes, contents)

    return run


def end_copies(machine, instruction):
    return lambda active: machine.memory["shared"].end_set(lanes_of(machine, active))


def wait_for_copies(machine, instruction):
    left = int(instruction.operands[0])
    return lambda active: machine.memory["shared"].wait(lanes_of(machine, active), left)


MAKERS = {
    "shfl.sync.bfly.b32": shuffle,
    "vote.sync.any.pred": vote_any,
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": load_matrices,
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": load_matrices,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": multiply_matrices,
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": multiply_matrices,
    "cp.async.cg.shared.global": copy,
    "cp.async.commit_group": end_copies,
    "cp.async.wait_group": wait_for_copies,
}
