# SPDX-License-Identifier: MIT
"""The machine's memory, which watches all accesses.

It refuses accesses out of bounds or misaligned, reads of local memory that nobody has written or
that an asynchronous copy has not reached yet, and races. A race is two warps at the same two bytes,
one of them writing, without a barrier between; in global memory also a group at bytes that another
group has written. A read of global memory before another warp of the group writes it is not
noticed.
"""

import numpy as np

from ptx.program import SHARED_START, Refused

GRANULE = 2  # bytes that are watched together: no kernel writes single bytes
WARP = 32
BUFFER_BITS = 40  # a buffer's number begins at this bit of an address
LOCAL_WINDOW = 1 << 56  # where generic addresses of a work-item's own memory begin
ALL_WARPS = np.uint32(2**32 - 1)
ATOMIC = -2  # in place of the warp that wrote
FILLING = 0x64  # large numbers in all types


def padded(size):
    return np.full(-(-size // 16) * 16 + 16, FILLING, np.uint8)


class Memory:
    """Bytes from address `base` on. A subclass says what programs may do with them."""

    def __init__(self, name, size, base=0):
        self.name = name
        self.size = size
        self.base = base
        self.start = base % 16  # in `bytes`, so that they are aligned as addresses are
        self.bytes = padded(size + self.start)
        self.views = {}

    def rows(self, size, count):
        """Returns all bytes as rows of `count` numbers of `size` bytes."""
        key = (size, count)
        if key not in self.views:
            self.views[key] = self.bytes[: len(self.bytes) // (size * count) * size * count].view(
                f"u{size}").reshape(-1, count)  # fmt: skip
        return self.views[key]

    def offsets(self, addresses, width):
        """Returns offsets from the first byte of `bytes`. Addresses must exist and be aligned."""
        misaligned = addresses & np.uint64(width - 1) != 0
        if misaligned.any():
            raise Refused(f"misaligned: {bad(addresses, misaligned)}, {width} bytes")
        offsets = addresses - np.uint64(self.base)
        outside = offsets > self.size - width if self.size >= width else offsets >= 0
        if outside.any():
            raise Refused(
                f"out of bounds: {width} bytes at {bad(offsets.view(np.int64), outside)} of "
                f"{self.size} of {self.name}"
            )
        return offsets.view(np.int64) + self.start

    def read(self, addresses, lanes, size, count):
        offsets = self.offsets(addresses, size * count)
        self.will_read(offsets, lanes, size * count)
        return self.rows(size, count)[offsets // (size * count)]

    def write(self, addresses, lanes, size, values):
        """Writes `values`, rows of numbers of `size` bytes."""
        width = size * values.shape[1]
        offsets = self.offsets(addresses, width)
        self.will_write(offsets, lanes, width)
        self.rows(size, values.shape[1])[offsets // width] = values

    def will_read(self, offsets, lanes, width):
        pass

    def will_write(self, offsets, lanes, width):
        raise Refused(f"writing to {self.name}")


def bad(values, where):
    return hex(int(values[where][0]))


class Private(Memory):
    """Memory of each work-item."""

    def __init__(self, lanes, size):
        self.stride = -(-size // 16) * 16
        super().__init__("a work-item's own memory", size)
        self.bytes = padded(self.stride * lanes)

    def read(self, addresses, lanes, size, count):
        offsets = self.offsets(addresses, size * count) + lanes * self.stride
        return self.rows(size, count)[offsets // (size * count)]

    def write(self, addresses, lanes, size, values):
        width = size * values.shape[1]
        offsets = self.offsets(addresses, width) + lanes * self.stride
        self.rows(size, values.shape[1])[offsets // width] = values


class Clock:
    """Counts barriers, over all groups of a launch. Barriers are those of all warps."""

    def __init__(self):
        self.now = 1
        self.group_start = 1
        self.start_fences()

    def begin_group(self):
        self.now += 1
        self.group_start = self.now
        self.start_fences()

    def start_fences(self):
        self.fenced = None  # times whose writes a fence of the group has ordered: (first, end)
        self.met = []  # such times of other groups, by numbers that this group has updated
        self.fences = []  # of this group: (when, what it had met)

    def fence(self):
        """A fence orders writes before the last barrier."""
        self.fenced = self.group_start, self.now
        self.fences.append((self.now, list(self.met)))

    def is_foreign(self, written):
        """Returns whether other groups have written at some time, unknown to this one."""
        foreign = (written < self.group_start) & (written > 0)
        if foreign.any():
            for when, met in self.fences:
                for first, end in met if when < self.now else ():
                    foreign &= ~((written >= first) & (written < end))
        return foreign

    def pass_all(self):
        """All warps pass a barrier."""
        self.now += 1

    def of(self, warps):
        """Returns the time at which warps do what they do now."""
        return self.now

    def is_unknown(self, warps, when, who):
        """Returns whether warps do not know yet what other warps did at some time."""
        return (when == self.now) & (who != warps)

    def unknown_to(self, warps, read_at):
        """Returns the same of reads: [warp that has read, place …], and who would write there."""
        return read_at == self.now

    def knows(self, warp, when, who):
        """Returns whether a warp has done something itself."""
        return who == warp


class Clocks(Clock):
    """The same where barriers are of some warps.

    Each warp counts its own releases, and knows how far others had come at those that it knows of.
    """

    def __init__(self, warps):
        super().__init__()
        self.own = np.ones(warps, np.int32)
        self.known = np.zeros((warps, warps), np.int32)  # [warp, other]

    def begin_group(self):
        super().begin_group()
        self.own[...] = self.now
        self.known[...] = self.now - 1

    def pass_all(self):
        self.known[...] = self.own
        super().pass_all()
        self.own[...] = self.now

    def release(self, warps):
        """Returns what these warps know, with all that they have done until now."""
        known = self.known[warps].max(0)
        known[warps] = self.own[warps]
        self.now += 1
        self.own[warps] = self.now
        return known

    def acquire(self, warp, known):
        np.maximum(self.known[warp], known, out=self.known[warp])

    def of(self, warps):
        return self.now if warps is ATOMIC else self.own[warps]

    def is_unknown(self, warps, when, who):
        # Nobody knows of an atomic update without a barrier of all.
        if warps is ATOMIC:
            return (when >= self.group_start) & (who != ATOMIC)
        return (when > self.known[warps, who]) & (who != warps)

    def unknown_to(self, warps, read_at):
        return read_at > self.known.T[:, warps, None]

    def knows(self, warp, when, who):
        return (who == warp) | (when <= self.known[warp, who])


class Watched(Memory):
    """Bytes that remember when they were written, and by which warp."""

    def __init__(self, name, size, clock, base=0):
        super().__init__(name, size, base)
        self.clock = clock
        self.fenced = {}  # place of a number: what groups had fenced before they updated it
        self.written = np.zeros(len(self.bytes) // GRANULE, np.int32)
        self.writer = np.zeros(len(self.bytes) // GRANULE, np.int32)

    def granules(self, offsets, width):
        return offsets[:, None] // GRANULE + np.arange(max(width // GRANULE, 1))

    def race(self, granules, where, what):
        at = int(granules[where][0]) * GRANULE - self.start
        raise Refused(f"a race: {what} byte {at} of {self.name}")

    def check_writers(self, granules, warps, doing):
        written, writer = self.written[granules], self.writer[granules]
        others = self.clock.is_unknown(warps, written, writer)
        atomic = (writer == ATOMIC) & (warps is ATOMIC)
        others |= self.clock.is_foreign(written) & ~atomic
        if others.any():
            self.race(granules, others, f"another warp or group has written before this {doing}s")

    def mark(self, granules, warps):
        self.written[granules] = self.clock.of(warps)
        self.writer[granules] = warps
        if (self.writer[granules] != warps).any():
            self.race(granules, self.writer[granules] != warps, "two warps write at once")

    def update(self, addresses, lanes, function, values):
        """Updates 4 bytes atomically, one work-item after the other. Returns the old ones."""
        offsets = self.offsets(addresses, 4)
        self.will_write(offsets, lanes, 4, ATOMIC)
        numbers = self.rows(4, 1)[:, 0].view(values.dtype)
        before = np.empty_like(values)
        for n, place in enumerate(offsets // 4):
            fenced = self.fenced.setdefault(int(place), [])
            self.clock.met += fenced
            fenced += [self.clock.fenced] if self.clock.fenced else []
            before[n] = numbers[place]
            numbers[place] = function(numbers[place], values[n])
        return before


class Buffer(Watched):
    """Global memory. It is watched from the first write on."""

    def __init__(self, number, contents, address, clock):
        base = (number + 1 << BUFFER_BITS) + address % 256
        super().__init__(f"buffer {number}", len(contents), clock, base)
        self.bytes[self.start : self.start + self.size] = contents
        self.changed = False

    def contents(self):
        return self.bytes[self.start : self.start + self.size]

    def will_read(self, offsets, lanes, width):
        if self.changed:
            warps = (lanes // WARP)[:, None]
            self.check_writers(self.granules(offsets, width), warps, "read")

    def will_write(self, offsets, lanes, width, by=None):
        self.changed = True
        granules = self.granules(offsets, width)
        warps = (lanes // WARP)[:, None] if by is None else by
        self.check_writers(granules, warps, "write")
        self.mark(granules, warps)


class Several:
    """Memories behind one kind of address. A subclass says which accesses go to which memory."""

    def read(self, addresses, lanes, size, count):
        values = np.empty((len(lanes), count), f"u{size}")
        for memory, where, places in self.parts(addresses):
            values[where] = memory.read(places, lanes[where], size, count)
        return values

    def write(self, addresses, lanes, size, values):
        for memory, where, places in self.parts(addresses):
            memory.write(places, lanes[where], size, values[where])

    def update(self, addresses, lanes, function, values):
        before = np.empty_like(values)
        for memory, where, places in self.parts(addresses):
            before[where] = memory.update(places, lanes[where], function, values[where])
        return before


class Global(Several):
    """All buffers."""

    def __init__(self, buffers):
        self.buffers = buffers

    def parts(self, addresses):
        numbers = addresses >> np.uint64(BUFFER_BITS)
        first = numbers[0]
        for number in [first] if (numbers == first).all() else np.unique(numbers):
            where = numbers == number
            if not 0 < number <= len(self.buffers):
                raise Refused(f"no buffer is at {bad(addresses, where)}")
            yield self.buffers[int(number) - 1], where, addresses[where]


class Generic(Several):
    """Global memory, and at its window a work-item's own."""

    def __init__(self, buffers, own):
        self.buffers = buffers
        self.own = own

    def parts(self, addresses):
        own = addresses >= np.uint64(LOCAL_WINDOW)
        for memory, where, base in ((self.buffers, ~own, 0), (self.own, own, LOCAL_WINDOW)):
            if where.any():
                yield memory, where, addresses[where] - np.uint64(base)


class Shared(Watched):
    """Local memory of a group, and the asynchronous copies to it."""

    def __init__(self, end, lanes, clock):
        super().__init__("local memory", end - SHARED_START, clock, SHARED_START)
        self.lanes = lanes
        self.flying = np.zeros(len(self.written), bool)
        self.read_at = np.zeros((-(-lanes // WARP), len(self.written)), np.int32)  # by each warp

    def begin_group(self):
        self.bytes[...] = FILLING
        self.written[...] = 0
        self.flying[...] = False
        self.copies = []  # (lanes, numbers of their sets, offsets, bytes)
        self.sets = np.zeros(self.lanes, np.int64)  # that each lane has ended
        # The warps whose products of groups may read it: a bit of each.
        self.shown = np.zeros(len(self.written), np.uint32)
        self.products = np.zeros(len(self.written), np.int32)  # that read
        self.running = {}  # group of warps: its sets of products

    def check_flying(self, granules, doing):
        if self.flying[granules].any():
            self.race(granules, self.flying[granules], f"a copy is on its way when this {doing}s")

    def will_read(self, offsets, lanes, width):
        granules = self.granules(offsets, width)
        warps = lanes // WARP
        self.check_flying(granules, "read")
        never = self.written[granules] == 0
        if never.any():
            at = int(granules[never][0]) * GRANULE
            raise Refused(f"byte {at} of local memory is read and was never written")
        self.check_writers(granules, warps[:, None], "read")
        self.read_at[warps[:, None], granules] = self.clock.of(warps[:, None])

    def will_write(self, offsets, lanes, width, by=None):
        granules = self.granules(offsets, width)
        warps = lanes // WARP
        self.check_flying(granules, "write")
        if self.products[granules].any():
            self.race(granules, self.products[granules] > 0, "a product reads when this writes")
        self.shown[granules] = 0
        self.check_writers(granules, warps[:, None] if by is None else by, "write")
        read = self.clock.unknown_to(warps, self.read_at[:, granules])
        read[warps, np.arange(len(warps))] = False
        if read.any():
            self.race(granules, read.any(0), "another warp has read before this writes")
        self.mark(granules, warps[:, None] if by is None else by)

    def copy(self, addresses, lanes, contents):
        """Begins to copy 16 bytes for each lane."""
        offsets = self.offsets(addresses, 16)
        self.will_write(offsets, lanes, 16)
        self.flying[self.granules(offsets, 16)] = True
        self.copies.append((lanes, self.sets[lanes], offsets, contents))

    def show(self, lanes):
        """Shows bytes to later products: to all, what these warps have written, and to their own,
        what they know to be written.
        """
        for warp in np.unique(lanes // WARP):
            own = (self.writer == warp) & ~self.flying
            known = self.clock.knows(warp, self.written, self.writer) & ~self.flying
            self.shown[known] |= np.uint32(1 << warp)
            self.shown[own] = ALL_WARPS

    def begin_product(self, addresses, warps):
        """A product of these warps begins to read 2 bytes at each address.

        Returns what end_product takes.
        """
        granules = self.granules(self.offsets(addresses, 2), 2)
        if isinstance(self.clock, Clocks):
            for warp in warps:
                self.check_writers(granules, np.full(granules.shape, warp), "read")
        needed = np.uint32(sum(1 << int(warp) for warp in warps))
        hidden = self.shown[granules] & needed != needed
        if hidden.any():
            at = int(granules[hidden][0]) * GRANULE
            raise Refused(f"byte {at} of local memory was not shown to products after its writing")
        np.add.at(self.products, granules, 1)
        return granules

    def end_product(self, granules, warps):
        np.add.at(self.products, granules, -1)
        for warp in warps:
            self.read_at[warp, granules] = self.clock.of(warp)

    def end_set(self, lanes):
        self.sets[lanes] += 1

    def take_copies(self, lanes):
        """Returns the copies of some lanes. They end when `land` is called."""
        taken, staying = [], []
        for of, sets, offsets, contents in self.copies:
            chosen = np.isin(of, lanes)
            for parts, where in ((taken, chosen), (staying, ~chosen)):
                if where.any():
                    parts.append((of[where], sets[where], offsets[where], contents[where]))
        self.copies = staying
        return taken

    def land(self, parts, known):
        """Ends copies at the time that those who wait for them know of."""
        for of, _, offsets, contents in parts:
            granules, warps = self.granules(offsets, 16), (of // WARP)[:, None]
            self.flying[granules] = False
            self.written[granules] = known[warps]
            self.writer[granules] = warps
            self.rows(2, 8)[offsets // 16] = contents

    def wait(self, lanes, left):
        """Completes all but the last `left` sets of copies of each lane."""
        waits = np.zeros(self.lanes, bool)
        waits[lanes] = True
        staying = []
        for of, sets, offsets, contents in self.copies:
            arrives = waits[of] & (sets < self.sets[of] - left)
            granules = self.granules(offsets[arrives], 16)
            self.flying[granules] = False
            self.mark(granules, (of[arrives] // WARP)[:, None])
            self.rows(2, 8)[offsets[arrives] // 16] = contents[arrives]
            stays = ~arrives
            if stays.any():
                staying.append((of[stays], sets[stays], offsets[stays], contents[stays]))
        self.copies = staying
