# SPDX-License-Identifier: MIT
"""Barriers that some warps of a group come to, and registers that warps give to others.

    mbarrier                       a barrier in local memory, with phases
    cp.async.mbarrier.arrive       arrives at one when copies are done
    bar.sync, bar.arrive           the 16 barriers of a group, by their numbers
    setmaxnreg                     takes registers from the group's, or gives them back

A warp that waits stands still, and the others go on. Copies that an arrival waits for are done as
late as possible: when all warps stand still, and one waits for the phase. If nobody can go on then,
the machine refuses the program. What a warp has done before it arrives is known to those that wait
for this arrival: memory.Clocks.
"""

from dataclasses import dataclass

import numpy as np

from ptx.memory import WARP
from ptx.program import Refused
from ptx.warp import lanes_of, warps_of

PHASE_BYTES = 8
MOST_REGISTERS = 256
LEAST_REGISTERS = 24
WARPS = 4  # that change their registers together
WAITS = "mbarrier.try_wait.parity.shared.b64"
REGISTERS = "setmaxnreg."


def is_wait(instruction):
    """True of instructions at which a warp may stand still, besides barriers of all warps."""
    return instruction.name == WAITS or instruction.name.startswith(REGISTERS)


def is_for_some(instruction):
    """True of instructions that order some warps of a group, and not all."""
    name = instruction.name
    named = name == "bar.sync" and instruction.operands != ["0"]
    return named or name == "bar.arrive" or "mbarrier" in name


@dataclass(eq=False)
class Phased:
    """An mbarrier: arrivals of a phase, and what those that have arrived know.

    A phase with `expected_bytes` also waits for copies of so many bytes (tensor_copies.py).
    """

    expected: int
    pending: int
    expected_bytes: int = 0
    ended: int = 0  # phases
    known: np.ndarray | None = None  # by who waits for this phase
    known_before: np.ndarray | None = None  # of the last phase that has ended

    def arrive(self, count, known):
        if count > self.pending:
            raise Refused(f"{count} arrivals at a barrier that awaits {self.pending}")
        self.pending -= count
        self.learn(known)

    def complete(self, size, known):
        """A copy of so many bytes is done."""
        self.expected_bytes -= size
        self.learn(known)

    def learn(self, known):
        if self.known is None:
            self.known = np.zeros_like(known)
        np.maximum(self.known, known, out=self.known)
        if self.pending == 0 and self.expected_bytes == 0:
            self.pending, self.ended = self.expected, self.ended + 1
            self.known_before, self.known = self.known, None


@dataclass
class Arrival:
    """An arrival of work-items that comes when all copies that they have begun are done."""

    barrier: Phased
    lanes: np.ndarray
    copies: list
    known: np.ndarray
    in_order = True  # arrivals of a work-item come one after the other

    def finish(self, shared):
        shared.land(self.copies, self.known)
        self.barrier.arrive(len(self.lanes), self.known)


@dataclass
class Named:
    """One of a group's numbered barriers, while warps come to it."""

    count: int
    arrived: int = 0
    known: np.ndarray | None = None


class Barriers:
    """What a group's warps wait for, besides the barrier of all."""

    def __init__(self, machine):
        self.machine = machine
        self.phased = {}  # by their addresses
        self.named = {}  # by their numbers
        self.arrivals = []  # that are to come
        self.registers = np.full(machine.lanes // WARP, machine.program.registers_at_entry)
        self.pool = 0  # registers that nobody has

    def at(self, address, lanes):
        """The mbarrier at an address. Its start has to be known to the warps of these lanes."""
        if address not in self.phased:
            raise Refused(f"no barrier has been started at {address}")
        shared = self.machine.memory["shared"]
        places = np.full(len(lanes), address, np.uint64)
        granules = shared.granules(shared.offsets(places, PHASE_BYTES), PHASE_BYTES)
        shared.check_writers(granules, (lanes // WARP)[:, None], "use")
        return self.phased[address]

    def go_on(self):
        """Let warps go on whose waits are over. False if there is none."""
        return self.release() or (self.finish_copies() and self.release())

    def release(self):
        """Let warps go on whose waits are over, together those that one arrival lets go on."""
        machine, moved = self.machine, False
        for _ in range(2):  # the last warp that comes to a barrier ends the waits of those before
            for warp in machine.waiting_warps():
                place = int(machine.waits_at[warp * WARP])
                may_go_on = machine.waits.get(place)
                if may_go_on is not None and may_go_on(warp):
                    machine.resume(warp, place)
                    moved = True
        return moved

    def finish_copies(self):
        """Finish the copies for which a warp waits, and those before of the same work-items."""
        awaited = self.awaited()
        lanes = [a.lanes for a in self.arrivals if a.barrier in awaited]
        if not lanes:
            return False
        last = max(n for n, a in enumerate(self.arrivals) if a.barrier in awaited)
        staying = []
        for n, arrival in enumerate(self.arrivals):
            behind = n <= last and np.isin(arrival.lanes, np.concatenate(lanes)).any()
            if behind if arrival.in_order else arrival.barrier in awaited:
                arrival.finish(self.machine.memory["shared"])
            else:
                staying.append(arrival)
        self.arrivals = staying
        return True

    def end_group(self):
        if not all(arrival.in_order for arrival in self.arrivals):
            raise Refused("the group ends while boxes are copied to its local memory")

    def awaited(self):
        """Return the barriers with phases for which warps wait."""
        found = []
        for warp in self.machine.waiting_warps():
            may_go_on = self.machine.waits.get(int(self.machine.waits_at[warp * WARP]))
            if hasattr(may_go_on, "barrier"):
                found.append(may_go_on.barrier(warp))
        return found


def one_of_warp(machine, values, warp):
    """The number that all lanes of a warp have."""
    own = np.broadcast_to(values, machine.lanes)[warp * WARP : (warp + 1) * WARP]
    if (own != own[0]).any():
        raise Refused("the lanes of a warp have different operands")
    return int(own[0])


def by_address(machine, active, address):
    lanes = lanes_of(machine, active)
    places = address()[lanes]
    for place in np.unique(places):
        yield int(place), lanes[places == place]


def start(machine, instruction):
    address, count = machine.address(instruction.operands[0]), instruction.operands[1]
    count = machine.source(count, "u32")

    def run(active):
        for place, lanes in by_address(machine, active, address):
            if len(lanes) != 1:
                raise Refused("several work-items start a barrier")
            machine.memory["shared"].write(
                np.full(1, place, np.uint64), lanes, 8, np.zeros((1, 1), np.uint64)
            )
            expected = int(np.broadcast_to(count, machine.lanes)[lanes[0]])
            machine.barriers.phased[place] = Phased(expected, expected)

    return run


def arrive(machine, instruction):
    address = machine.address(instruction.operands[1])

    def run(active):
        for place, lanes in by_address(machine, active, address):
            barrier = machine.barriers.at(place, lanes)
            barrier.arrive(len(lanes), machine.clock.release(np.unique(lanes // WARP)))

    return run


def arrive_copied(machine, instruction):
    address = machine.address(instruction.operands[0])

    def run(active):
        for place, lanes in by_address(machine, active, address):
            barrier = machine.barriers.at(place, lanes)
            copies = machine.memory["shared"].take_copies(lanes)
            known = machine.clock.release(np.unique(lanes // WARP))
            machine.barriers.arrivals.append(Arrival(barrier, lanes, copies, known))

    return run


def wait_for_phase(machine, instruction):
    to, address, parity = instruction.operands
    to, address = machine.target(to, "pred"), machine.address(address)
    parity = machine.source(parity, "u32")

    def barrier_of(warp):
        lanes = np.arange(warp * WARP, (warp + 1) * WARP)
        return machine.barriers.at(one_of_warp(machine, address(), warp), lanes)

    def may_go_on(warp):
        barrier = barrier_of(warp)
        if barrier.ended % 2 == one_of_warp(machine, parity, warp):
            return False
        if barrier.known_before is not None:
            machine.clock.acquire(warp, barrier.known_before)
        to[warp * WARP : (warp + 1) * WARP] = True
        return True

    may_go_on.barrier = barrier_of
    return may_go_on


def come(machine, instruction):
    """Return a function of a warp that comes to a numbered barrier."""
    number, count = instruction.operands
    number, count = machine.source(number, "u32"), int(count)
    if count % WARP:
        raise Refused(f"{count} work-items are no whole warps")

    def run(warp):
        n = one_of_warp(machine, number, warp)
        if n > 15:
            raise Refused(f"there is no barrier {n}")
        barrier = machine.barriers.named.setdefault(n, Named(count))
        if barrier.count != count:
            raise Refused(f"barrier {n} waits for {barrier.count} work-items, not {count}")
        known = machine.clock.release(np.array([warp]))
        barrier.known = known if barrier.known is None else np.maximum(barrier.known, known)
        barrier.arrived += WARP
        if barrier.arrived == count:
            del machine.barriers.named[n]
        return barrier

    return run


def arrive_by_number(machine, instruction):
    come_to = come(machine, instruction)

    def run(active):
        for warp in np.flatnonzero(warps_of(machine, active)):
            come_to(int(warp))

    return run


def wait_by_number(machine, instruction):
    come_to, barriers = come(machine, instruction), {}

    def may_go_on(warp):
        barrier = barriers.get(warp)
        if barrier is None:
            barrier = barriers[warp] = come_to(warp)
        if barrier.arrived < barrier.count:
            return False
        machine.clock.acquire(warp, barrier.known)
        del barriers[warp]
        return True

    machine.at_start.append(barriers.clear)
    return may_go_on


def change_registers(machine, instruction):
    """Take registers, if the group has as many, or give some back. Four warps do so together."""
    count = int(instruction.operands[0])
    more = instruction.parts[1] == "inc"
    if instruction.parts[1:] != ["inc" if more else "dec", "sync", "aligned", "u32"]:
        raise Refused(f"the instruction {instruction.name} is not known here")
    if not LEAST_REGISTERS <= count <= MOST_REGISTERS or count % 8:
        raise Refused(f"{count} registers: a multiple of 8 from {LEAST_REGISTERS} on is needed")
    if not machine.program.registers_at_entry:
        raise Refused("nothing says how many registers a work-item begins with")

    def may_go_on(warp):
        barriers = machine.barriers
        together = np.arange(WARPS) + warp // WARPS * WARPS
        standing = machine.waits_at[together * WARP] == machine.waits_at[warp * WARP]
        before = barriers.registers[together]
        if before[0] == count or not (standing & machine.is_waiting(together)).all():
            return before[0] == count
        if (before > count if more else before < count).any():
            raise Refused(f"{count} registers, where warps have {before}")
        wanted = int((count - before).sum()) * WARP
        if wanted > barriers.pool:
            return False
        barriers.pool -= wanted
        barriers.registers[together] = count
        return True

    return may_go_on


MAKERS = {
    "mbarrier.init.shared.b64": start,
    "mbarrier.arrive.shared.b64": arrive,
    "cp.async.mbarrier.arrive.noinc.shared.b64": arrive_copied,
    "bar.arrive": arrive_by_number,
}


def compiled_wait(machine, instruction):
    """Return a function of a warp, which is true if the warp need not wait any more."""
    if instruction.guard is not None:
        raise Refused("a wait under a condition")
    if instruction.name == WAITS:
        return wait_for_phase(machine, instruction)
    if instruction.name == "bar.sync":
        return wait_by_number(machine, instruction)
    return change_registers(machine, instruction)
