# SPDX-License-Identifier: MIT
"""Products of groups of four warps: `wgmma` of the PTX ISA, as far as kernels use it.

A product runs until a warp waits for its set of products. Only then do the registers get its sums.
The machine refuses a product of bytes that no fence has shown to products. While a product runs,
the machine refuses a write to the local memory that the product reads, and a write to a register
that holds its left matrix. A sum is exact and then cut off, as on an H100, where it also loses what
is below 2^-25 of its largest term (Xie et al., MMA-Sim, 2025).

A matrix in local memory consists of panels. A row of a panel has 8 chunks of 16 bytes. Chunk c of
row r lies at place c ^ r % 8.
With lane 4 g + t of warp w in its group, register r of the sums is the element

    row 16 w + g + 8 (r // 2 % 2), column 8 (r // 4) + 2 t + r % 2
"""

import numpy as np

from ptx.memory import WARP
from ptx.program import Refused
from ptx.warp import A, G, T, doubles_of, lanes_of, numbers_of, vector, warps_of

WARPS = 4
LANES = WARPS * WARP
ROW = 128  # bytes
COLUMNS = 64  # numbers in them
STEP = 16  # of the columns of the left matrix
MIXED = 1  # how chunks are ordered: in rows of 128 bytes


class Panels:
    """What a descriptor says of a matrix in local memory."""

    def __init__(self, descriptor):
        descriptor = int(descriptor)
        self.start, self.apart, self.rows_apart = (
            (descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32)
        )
        if descriptor >> 62 != MIXED:
            raise Refused(f"the descriptor {descriptor:#x} has another order of chunks")

    def addresses(self, rows, columns):
        """Addresses of elements. The matrix has eight rows, and behind them the next."""
        offset = columns // COLUMNS * self.apart + columns % COLUMNS * 2
        place = self.start + rows // 8 * self.rows_apart + rows % 8 * ROW + offset
        return place ^ (place >> 7 & 7) << 4


def cut_off(sums):
    """Turns doubles into floats as the unit does: towards zero."""
    floats = sums.astype(np.float32)
    with np.errstate(invalid="ignore"):
        beyond = np.abs(floats.astype(np.float64)) > np.abs(sums)
    return np.where(beyond, np.nextafter(floats, np.float32(0)), floats)


class Product:
    """A product that runs, of one group."""

    def __init__(self, machine, first, registers, sums, adds):
        self.lanes = np.arange(first, first + LANES)
        self.warps = np.unique(self.lanes // WARP)
        self.registers, self.sums, self.adds = registers, sums, adds
        self.granules = []  # of local memory that it reads
        self.left = []  # registers of the left matrix, and their numbers

    def end(self):
        for register, before in self.left:
            if (register[self.lanes] != before).any():
                raise Refused("a register of a product's left matrix changes while it runs")
        warp, row = np.repeat(np.arange(WARPS), WARP), np.tile(G, WARPS)
        for r, register in enumerate(self.registers):
            column = 8 * (r // 4) + 2 * np.tile(T, WARPS) + r % 2
            sums = self.sums[16 * warp + row + 8 * (r // 2 % 2), column]
            before = register[self.lanes] if self.adds else np.float32(0)
            register[self.lanes] = cut_off(sums + before)


def read(machine, product, places, kind):
    """Numbers of local memory, in doubles. The product reads them until it ends."""
    shared = machine.memory["shared"]
    flat = places.ravel().astype(np.uint64)
    lanes = np.full(len(flat), product.lanes[0])
    bits = shared.read(flat, lanes, 2, 1).astype(np.uint16)
    product.granules.append(shared.begin_product(flat, product.warps))
    return doubles_of(bits, kind).reshape(places.shape)


def multiply(machine, instruction):
    parts = instruction.parts
    columns, kind = int(parts[4][4:-3]), parts[6]
    to, left, right, adds, *more = instruction.operands
    by_rows = left.startswith("{")
    if more != (["1", "1", "1"] if by_rows else ["1", "1", "0", "0"]):
        raise Refused("a product with other signs or layouts")
    registers = vector(machine, to, "f32", machine.target)
    fragments = vector(machine, left, "b32", machine.source) if by_rows else []
    left = None if by_rows else machine.source(left, "u64")
    right, adds = machine.source(right, "u64"), machine.source(adds, "pred")
    m, n, k = np.arange(WARPS * 16), np.arange(columns), np.arange(STEP)

    def one(values, lanes):
        values = np.unique(np.broadcast_to(values, machine.lanes)[lanes])
        if len(values) != 1:
            raise Refused("the lanes of a group have different operands")
        return values[0]

    def run(active):
        warps = warps_of(machine, active).reshape(-1, WARPS)
        if (warps.any(1) != warps.all(1)).any():
            raise Refused("some warps of a group do not multiply")
        for group in np.flatnonzero(warps.all(1)):
            product = Product(machine, group * LANES, registers, None, True)
            lanes = product.lanes
            product.adds = one(adds, lanes)
            panels = Panels(one(right, lanes))
            if by_rows:
                product.left = [(x, x[lanes].copy()) for x in fragments]
                of_warps = numbers_of(np.stack([x[lanes] for x in fragments]), kind)[:, A]
                a = of_warps.reshape(-1, STEP)
                b = read(machine, product, panels.addresses(k[:, None], n[None]), kind)
            else:
                own = Panels(one(left, lanes)).addresses(m[:, None], k[None])
                a = read(machine, product, own, kind)
                b = read(machine, product, panels.addresses(n[:, None], k[None]), kind).T
            product.sums = a @ b
            machine.memory["shared"].running.setdefault(group, [[]])[-1].append(product)

    return run


def end_set(machine, instruction):
    def run(active):
        for sets in of_groups(machine, active):
            sets.append([])

    return run


def wait(machine, instruction):
    left = int(instruction.operands[0])

    def run(active):
        shared = machine.memory["shared"]
        for sets in of_groups(machine, active):
            for _ in range(len(sets) - 1 - left):
                for product in sets.pop(0):
                    product.end()
                    for granules in product.granules:
                        shared.end_product(granules, product.warps)

    return run


def of_groups(machine, active):
    """The sets of products of the groups that execute."""
    warps_of(machine, active)
    groups = np.unique(lanes_of(machine, active) // LANES)
    return [machine.memory["shared"].running.setdefault(group, [[]]) for group in groups]


def show(machine, instruction):
    return lambda active: machine.memory["shared"].show(lanes_of(machine, active))


def order(machine, instruction):
    return lambda active: warps_of(machine, active)


MAKERS = {
    **{
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}": multiply
        for columns in (64, 128)
        for kind in ("f16", "bf16")
    },
    "wgmma.commit_group.sync.aligned": end_set,
    "wgmma.wait_group.sync.aligned": wait,
    "wgmma.fence.sync.aligned": order,
    "fence.proxy.async.shared::cta": show,
}
