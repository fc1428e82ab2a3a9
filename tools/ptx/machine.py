# SPDX-License-Identifier: MIT
"""Executes a kernel's PTX as the PTX ISA defines it, and refuses what the ISA leaves undefined.

All work-items of a group execute at once, as vectors. Where they part at a branch, those that have
longer to go continue first, so that they meet again. Groups come one after the other. The machine
refuses a barrier that only some work-items come to, and any instruction that it does not know.
memory.py says what memory refuses. The files:

    program.py      reads the text
    arithmetic.py   instructions of one work-item
    warp.py         instructions of a warp: matrices, shuffles, copies
    groups.py       products of groups of warps
    barriers.py     barriers of some warps of a group
    tensor_copies.py  the unit that copies boxes of tensors
    memory.py       memory
"""

import math
import struct

import numpy as np

import ptx.arithmetic as ptx_arithmetic
import ptx.barriers as ptx_barriers
import ptx.groups as ptx_groups
import ptx.memory as ptx_memory
import ptx.tensor_copies as ptx_tensor_copies
import ptx.warp as ptx_warp
from ptx.memory import WARP
from ptx.program import SHARED_START, Refused, parse

WAITING = 1 << 29  # in place of the number of a work-item's block: at a barrier
ENDED = 1 << 30
# Bytes that a kernel may declare: those that capability 9.0 gives a group. NVIDIA's driver takes so
# many, although its devices report 48 KiB.
MOST_SHARED = 227 << 10
MOST_BLOCKS = 1 << 21  # of a group, until it is taken to run for ever

JUMPS = ("bra", "ret", "bar")
SPECIAL = {"%tid.y": 0, "%tid.z": 0, "%ctaid.y": 0, "%ctaid.z": 0, "%ntid.y": 1, "%ntid.z": 1,
           "%nctaid.y": 1, "%nctaid.z": 1}  # fmt: skip


def order_groups(machine, instruction):
    """A fence between groups: it orders what they do before and after atomic updates."""
    return lambda active: machine.clock.fence()


MAKERS = {
    **ptx_warp.MAKERS,
    **ptx_groups.MAKERS,
    **ptx_barriers.MAKERS,
    **ptx_tensor_copies.MAKERS,
    "fence.acq_rel.gpu": order_groups,
}


def is_jump(instruction):
    """True of an instruction that ends a block."""
    is_named = instruction.parts[0] in JUMPS and instruction.name != "bar.arrive"
    return is_named or ptx_barriers.is_wait(instruction)


def ordered(after, start):
    """Blocks, each before those that may come after it, but for loops.

    All of a loop stands before what comes after it: a weak topological order, after Bourdoncle.
    Executing the first block that work-items are at lets them meet again after a branch.
    """
    numbers, stack = dict.fromkeys(after, 0), []
    count = 0

    def visit(block, parts):
        nonlocal count
        stack.append(block)
        count += 1
        numbers[block] = head = count
        is_loop = False
        for other in after[block]:
            number = numbers[other] or visit(other, parts)
            if number <= head:
                head, is_loop = number, True
        if head == numbers[block]:
            numbers[block] = math.inf
            while (last := stack.pop()) != block:
                numbers[last] = 0
            inner = []
            for other in after[block] if is_loop else []:
                if not numbers[other]:
                    visit(other, inner)
            parts.append([block, *reversed(inner)])
        return head

    def flat(part):
        return [part[0], *(block for inner in part[1:] for block in flat(inner))]

    parts = []
    visit(start, parts)
    return [block for part in reversed(parts) for block in flat(part)]


class ReadOnly(ptx_memory.Memory):
    def __init__(self, name, contents):
        super().__init__(name, len(contents))
        self.bytes[: self.size] = np.frombuffer(bytes(contents), np.uint8)


class Machine:
    """A kernel, for groups of `work_items`."""

    def __init__(self, text, name, work_items):
        self.program = program = parse(text, name)
        if program.sizes["shared"] - SHARED_START > MOST_SHARED:
            raise Refused(f"more than {MOST_SHARED} bytes of local memory")
        self.work_items = work_items
        self.lanes = -(-work_items // WARP) * WARP
        self.all_lanes = np.arange(self.lanes)
        self.registers = {}
        self.special = {
            **{n: np.full(self.lanes, x, np.uint32) for n, x in SPECIAL.items()},
            "%tid.x": np.arange(self.lanes, dtype=np.uint32),
            "%laneid": np.arange(self.lanes, dtype=np.uint32) % WARP,
            "%ntid.x": np.full(self.lanes, work_items, np.uint32),
            "%ctaid.x": np.zeros(self.lanes, np.uint32),
            "%nctaid.x": np.zeros(self.lanes, np.uint32),
            "%clock": np.zeros(self.lanes, np.uint32),  # counts blocks of instructions
        }
        self.memory = {"const": ReadOnly("constants", program.constants)}
        self.waits = {}  # of some warps: functions of a warp, by their places in the code
        self.votes = {}  # of barriers: the register of the answer, and that of the votes
        self.at_start = []  # functions, of each group
        self.clock = self.make_clock()
        self.barriers = ptx_barriers.Barriers(self)
        self.blocks = self.make_blocks()
        self.bank_conflicts = 0  # matrices that are loaded, two rows of which share banks

    def make_clock(self):
        """Return how accesses are ordered: by barriers of all warps, or of some."""
        if any(map(ptx_barriers.is_for_some, self.program.code)):
            return ptx_memory.Clocks(self.lanes // WARP)
        return ptx_memory.Clock()

    # --- operands ---------------------------------------------------------------------

    def register(self, name):
        """Returns the bits of a register in all lanes."""
        if name not in self.registers:
            kind = self.program.register(name)
            if kind is None:
                raise Refused(f"there is no register {name}")
            dtype = np.dtype(bool) if kind == "pred" else np.dtype(f"u{int(kind[1:]) // 8}")
            self.registers[name] = np.zeros(self.lanes, dtype)
        return self.registers[name]

    def target(self, name, kind):
        """Returns the numbers of a register, for writing."""
        bits, dtype = self.register(name), ptx_arithmetic.TYPES[kind]
        same_size = bits.dtype.itemsize == dtype.itemsize
        if not same_size or (bits.dtype.kind == "b") != (dtype.kind == "b"):
            raise Refused(f"{name} is no register of {kind}")
        return bits.view(dtype)

    def source(self, text, kind):
        """Returns numbers in all lanes, or one number."""
        dtype = ptx_arithmetic.TYPES[kind]
        if text in self.special:
            return self.special[text].view(dtype)
        if self.program.register(text):
            bits = self.register(text)
            if bits.dtype.kind == "b" or bits.dtype.itemsize == dtype.itemsize:
                return self.target(text, kind)
            return bits.view(dtype)[:: bits.dtype.itemsize // dtype.itemsize]
        if text in self.program.symbols:
            return dtype.type(self.program.symbols[text][1])
        if text.startswith(("0f", "0d")):
            return dtype.type(struct.unpack(f"!{text[1]}", bytes.fromhex(text[2:]))[0])
        try:
            number = int(text, 0)
        except ValueError:
            raise Refused(f"the operand {text} is not known here") from None
        if kind == "pred":
            return np.bool_(number != 0)
        bits = np.array([number % (1 << 8 * dtype.itemsize)], f"u{dtype.itemsize}")
        return bits.view(dtype)[0]

    def address(self, text):
        """Returns a function that computes the addresses of an operand in brackets, in 64 bits."""
        base, _, offset = text.strip("[]").replace(" ", "").partition("+")
        kind = self.program.register(base)
        offset = np.uint64(int(offset or "0") % 2**64)
        place = self.source(base, f"u{kind[1:]}" if kind else "u64")
        if place.ndim == 0:
            place = np.full(self.lanes, place)
        return lambda: place.astype(np.uint64) + offset

    def window(self, space):
        windows = {"local": ptx_memory.LOCAL_WINDOW, "global": 0}
        if space not in windows:
            raise Refused(f"generic addresses of {space} memory")
        return windows[space]

    # --- code -------------------------------------------------------------------------

    def make_blocks(self):
        """Makes the blocks in the order of execution: first instruction, functions, end."""
        code = self.program.code
        starts = {0, *self.program.labels.values()}
        starts |= {n + 1 for n, i in enumerate(code) if is_jump(i)}
        starts = sorted(n for n in starts if n < len(code))
        ends = dict(zip(starts, [*starts[1:], len(code)], strict=True))
        after = {start: self.after(end - 1) for start, end in ends.items()}
        self.rank = {start: n for n, start in enumerate(ordered(after, 0))}
        return [self.make_block(start, ends[start]) for start in self.rank]

    def after(self, n):
        """Returns the blocks that may execute after an instruction."""
        instruction = self.program.code[n]
        name = instruction.parts[0]
        target = [self.program.labels[instruction.operands[0]]] if name == "bra" else []
        return target if name in ("bra", "ret") and instruction.guard is None else [n + 1, *target]

    def make_block(self, start, end):
        steps, jump = [], (self.to_next, end)
        for n in range(start, end):
            instruction = self.program.code[n]
            try:
                if is_jump(instruction):
                    jump = self.make_jump(instruction, n)
                else:
                    steps.append(self.make_step(instruction))
            except Refused as refused:
                raise Refused(f"line {instruction.line}: {instruction.text}: {refused}") from None
        return start, steps, *jump

    def make_step(self, instruction):
        make = MAKERS.get(instruction.name)
        if make is not None:
            step = make(self, instruction)
        elif instruction.parts[0] in ("ld", "st", "atom"):
            step = self.make_memory(instruction)
        else:
            step = ptx_arithmetic.compiled(self, instruction)
        if step is None:
            raise ptx_arithmetic.unknown(instruction)
        if instruction.guard is None:
            return step
        guard, negated = self.register(instruction.guard), instruction.negated

        def guarded(active):
            chosen = (guard != negated) & active
            if chosen.any():
                step(True if chosen.all() else chosen)

        return guarded

    def make_memory(self, instruction):
        name, *parts = instruction.parts
        if parts[-1] not in ptx_arithmetic.TYPES:
            return None
        # Each load is made anyway, so a volatile one is like others.
        *rest, kind = (part for part in parts if name != "ld" or part != "volatile")
        named = rest and rest[0] in ("param", "const", "shared", "local", "global")
        space = rest.pop(0) if named else "generic"
        if name == "atom":
            return self.make_atomic(instruction, space, rest, kind)
        numbers, address = instruction.operands[:: 1 if name == "ld" else -1]
        if rest not in ([], ["v2"], ["v4"]):
            raise ptx_arithmetic.unknown(instruction)
        names = numbers.strip("{}").replace(",", " ").split()
        address = self.address(address)
        make = self.make_load if name == "ld" else self.make_store
        return make(space, names, address, kind)

    def make_load(self, space, names, address, kind):
        dtype = ptx_arithmetic.TYPES[kind]
        targets = [self.register(n) for n in names]
        # A wider register gets the number, with its sign.
        kind = "i" if dtype.kind == "i" else "u"
        wide = [t.view(f"{kind}{t.itemsize}") for t in targets]

        def run(active):
            lanes = ptx_warp.lanes_of(self, active)
            values = (
                self.memory[space]
                .read(address()[lanes], lanes, dtype.itemsize, len(names))
                .view(f"{kind}{dtype.itemsize}")
            )
            for n, target in enumerate(wide):
                target[lanes] = values[:, n]

        return run

    def make_store(self, space, names, address, kind):
        size = ptx_arithmetic.TYPES[kind].itemsize
        sources = [np.broadcast_to(self.source(n, kind), self.lanes) for n in names]

        def run(active):
            lanes = ptx_warp.lanes_of(self, active)
            values = np.stack([x[lanes] for x in sources], 1).view(f"u{size}")
            self.memory[space].write(address()[lanes], lanes, size, values)

        return run

    def make_atomic(self, instruction, space, rest, kind):
        functions = {
            "or": np.bitwise_or,
            "max": np.maximum,
            "inc": lambda x, last: 0 if x >= last else x + 1,
        }
        if len(rest) != 1 or rest[0] not in functions or kind[1:] != "32":
            raise ptx_arithmetic.unknown(instruction)
        to, address, value = instruction.operands
        to, value = self.target(to, kind), self.source(value, kind)
        address, function = self.address(address), functions[rest[0]]

        def run(active):
            lanes = ptx_warp.lanes_of(self, active)
            values = np.broadcast_to(value, self.lanes)[lanes]
            to[lanes] = self.memory[space].update(address()[lanes], lanes, function, values)

        return run

    def make_jump(self, instruction, n):
        """Returns a function of the active lanes and its argument, which moves these lanes."""
        name = instruction.parts[0]
        if ptx_barriers.is_wait(instruction) or (
            instruction.name == "bar.sync" and instruction.operands != ["0"]
        ):
            self.waits[n] = ptx_barriers.compiled_wait(self, instruction)
            return self.to_wait, n
        if name == "bar":
            self.add_barrier(instruction, n)
            return self.to_barrier, n
        if name == "ret" and instruction.guard is None:
            return self.to_next, ENDED
        if name != "bra":
            raise ptx_arithmetic.unknown(instruction)
        place = self.program.labels[instruction.operands[0]]
        if instruction.guard is None:
            return self.to_next, place
        guard = self.register(instruction.guard)
        return self.to_either, (guard, instruction.negated, self.rank[place], self.rank[n + 1])

    def add_barrier(self, instruction, n):
        *operands, last = instruction.operands
        if instruction.name == "bar.red.or.pred" and operands[1:] == ["0"]:
            self.votes[n] = self.target(operands[0], "pred"), self.source(last, "pred")
        elif instruction.name != "bar.sync" or instruction.operands != ["0"]:
            raise ptx_arithmetic.unknown(instruction)

    def to_next(self, active, place):
        self.at[active] = self.rank.get(place, ENDED)

    def to_either(self, active, argument):
        condition, negated, *ranks = argument
        self.at[active] = np.where(condition[active] != negated, *ranks)

    def to_barrier(self, active, n):
        ptx_warp.warps_of(self, active if self.exist.all() else active | ~self.exist)
        self.at[active] = WAITING
        self.waits_at[active] = n

    def to_wait(self, active, n):
        """Let warps wait. Those go on that need not, or for which others wait no more."""
        ptx_warp.warps_of(self, active)
        self.at[active] = WAITING
        self.waits_at[active] = n
        self.barriers.release()

    def is_waiting(self, warps):
        return self.at[warps * WARP] == WAITING

    def waiting_warps(self):
        return [warp for warp in range(self.lanes // WARP) if self.is_waiting(warp)]

    def resume(self, warp, n):
        self.at[warp * WARP : (warp + 1) * WARP] = self.rank[n + 1]

    def go_on(self):
        """All warps stand still: let some go on, or all pass a barrier."""
        if self.waits and self.barriers.go_on():
            return
        waits = {}
        for warp in self.waiting_warps():
            waits.setdefault(int(self.waits_at[warp * WARP]), []).append(warp)
        if not waits.keys() & self.waits.keys():
            self.pass_barrier()
            return
        code = self.program.code
        text = [
            f"warps {warps} at line {code[n].line}, {code[n].text}" for n, warps in waits.items()
        ]
        raise Refused(f"all warps wait, and none can go on: {'; '.join(text)}")

    def pass_barrier(self):
        """Lets all work-items pass a barrier, if each of them waits or has ended."""
        code = self.program.code
        if (self.at[self.exist] == ENDED).any():
            line = code[int(self.waits_at[self.at == WAITING][0])].line
            raise Refused(f"line {line}: some work-items have ended before this barrier")
        places = np.unique(self.waits_at[self.exist])
        if len(places) > 1:
            lines = [code[int(n)].line for n in places]
            raise Refused(f"lines {lines}: work-items wait at different barriers")
        if int(places[0]) in self.votes:
            to, x = self.votes[int(places[0])]
            to[self.exist] = (x & self.exist).any()
        self.at[self.exist] = self.rank[int(places[0]) + 1]
        self.clock.pass_all()

    # --- running ----------------------------------------------------------------------

    def launch(self, groups, arguments):
        """Run all groups.

        Arguments are bytes, by value, or pairs of an array of bytes, which is changed, and the
        address that it has: a buffer has the same alignment; or None, no buffer.
        """
        sizes = self.program.sizes
        self.clock = self.make_clock()
        buffers, given = [], {}
        parameters = bytearray(sizes["param"])
        if len(arguments) != len(self.program.parameters):
            raise Refused(f"{len(arguments)} arguments for {len(self.program.parameters)}")
        for argument, (place, size) in zip(arguments, self.program.parameters, strict=True):
            if isinstance(argument, tuple):
                contents, address = argument
                if address not in given:
                    given[address] = ptx_memory.Buffer(len(buffers), contents, address, self.clock)
                    buffers.append(given[address])
                argument = given[address].base.to_bytes(8, "little")
            argument = bytes(8) if argument is None else argument
            if len(argument) != size:
                raise Refused(f"an argument of {len(argument)} bytes for {size}")
            parameters[place : place + size] = argument
        self.memory["param"] = ReadOnly("the arguments", parameters)
        self.memory["global"] = ptx_memory.Global(buffers)
        self.memory["shared"] = ptx_memory.Shared(sizes["shared"], self.lanes, self.clock)
        self.special["%nctaid.x"][...] = groups
        with np.errstate(all="ignore"):
            for group in range(groups):
                self.run_group(group)
        for argument in arguments:
            if isinstance(argument, tuple):
                argument[0][...] = given[argument[1]].contents()

    def run_group(self, group):
        self.clock.begin_group()
        self.barriers = ptx_barriers.Barriers(self)
        self.fenced_maps = set()  # of tensors, and the warps whose copies see them
        for function in self.at_start:
            function()
        self.memory["shared"].begin_group()
        self.memory["local"] = ptx_memory.Private(self.lanes, self.program.sizes["local"])
        self.memory["generic"] = ptx_memory.Generic(self.memory["global"], self.memory["local"])
        self.special["%ctaid.x"][...] = group
        for bits in self.registers.values():
            bits.view(np.uint8)[...] = 0 if bits.dtype.kind == "b" else ptx_memory.FILLING
        self.exist = self.all_lanes < self.work_items
        self.at = np.where(self.exist, 0, ENDED)
        self.waits_at = np.zeros(self.lanes, np.int64)
        for _ in range(MOST_BLOCKS):
            lowest = int(self.at.min())
            if lowest == ENDED:
                self.barriers.end_group()
                return
            if lowest == WAITING:
                self.go_on()
                continue
            active = self.at == lowest
            self.run_block(group, self.blocks[lowest], active)
        raise Refused(f"group {group} does not come to an end")

    def run_block(self, group, block, active):
        start, steps, jump, argument = block
        self.executing = executing = True if active.all() else active
        self.executing_lanes = np.flatnonzero(active)
        self.special["%clock"] += np.uint32(1)
        n = 0
        try:
            for step in steps:
                step(executing)
                n += 1
            jump(active, argument)
        except Refused as refused:
            instruction = self.program.code[start + n]
            raise Refused(
                f"line {instruction.line}, group {group}: {instruction.text}: {refused}"
            ) from None
