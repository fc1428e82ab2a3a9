# SPDX-License-Identifier: MIT
"""Read PTX, a driver's or clang's, for two faults that its text shows.

    python tools/ptx_read.py FILE.ptx...
    python tools/ptx_read.py --kernels      # the kernels that tools/machine_code lists, by clang

Divergence: an instruction of a whole warp (.sync), or a barrier of a group, that some work-items
may come to without the others. A number is uniform in a group, uniform in a warp, or differs
between work-items; it is at most as uniform as the numbers that it is computed from. A branch on a
number puts all blocks up to the place where its ways meet again under the control of that number.
Copies: parameters that are stored to a work-item's stack, as compilers do for a struct that is
indexed by a number they do not know.

What is found is possible as far as the text shows; tools/ptx/machine.py executes PTX and sees what
happens. The exit status is 1 if a kernel has such a fault, 2 if a text cannot be read.
"""

import argparse
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from machine_code import nvidia, table
from machine_code.common import ROOT
from ptx.program import Refused, parse

GROUP, WARP, ITEM = 0, 1, 2  # how far a number is uniform
WORDS = {WARP: "differ between warps", ITEM: "differ between work-items"}
LANE_BITS = 5
LANES = 1 << LANE_BITS
END = -1  # in place of a block: the kernel has ended
UNIFORM = ("%ctaid", "%nctaid", "%ntid", "%envreg", "%gridid")
OF_A_WARP = ("%warpid", "%nwarpid")
NAME = re.compile(r"(?<![\w.$%])[%A-Za-z_$][\w.$]*")


@dataclass
class Report:
    """What the text of a kernel shows."""

    kernel: str
    instructions: int
    divergent: list = field(default_factory=list)  # (line, text, level)
    copied: list = field(default_factory=list)  # lines that store a parameter to the stack
    stack: int = 0  # bytes

    @property
    def is_fine(self):
        return not self.divergent and not self.copied


def is_barrier(instruction):
    return instruction.name.startswith(("bar.", "barrier."))


def is_jump(instruction):
    return instruction.parts[0] in ("bra", "ret", "exit", "trap")


class Flow:
    """Blocks of a kernel, what follows each, and where the ways from each meet again."""

    def __init__(self, program):
        code, labels = program.code, program.labels
        starts = {0, *labels.values()} | {n + 1 for n, i in enumerate(code) if is_jump(i)}
        self.starts = sorted(n for n in starts if n < len(code))
        ends = [*self.starts[1:], len(code)]
        self.blocks = dict(zip(self.starts, ends, strict=True))
        self.after = {s: self._after(program, e) for s, e in self.blocks.items()}
        self.behind = self._post_dominators()

    def _after(self, program, end):
        last = program.code[end - 1]
        following = [end if end < len(program.code) else END]
        if not is_jump(last):
            return following
        name = last.parts[0]
        target = program.labels[last.operands[0]] if name == "bra" else END
        if name == "bra" and target >= len(program.code):
            target = END
        return [target] if last.guard is None else [*following, target]

    def _post_dominators(self):
        """Return, for each block, the blocks that every way from it to the end comes to."""
        every = {*self.blocks, END}
        behind = dict.fromkeys(self.blocks, every) | {END: {END}}
        changed = True
        while changed:
            changed = False
            for block in reversed(self.starts):
                common = set.intersection(*(behind[other] for other in self.after[block]))
                if (new := common | {block}) != behind[block]:
                    behind[block], changed = new, True
        return behind

    def controlled(self, block):
        """Return the blocks between a branch and the place where its ways meet again."""
        meets = self.behind[block] - {block}
        found, stack = set(), [b for b in self.after[block] if b not in meets]
        while stack:
            at = stack.pop()
            if at in found or at in meets or at == END:
                continue
            found.add(at)
            stack += self.after[at]
        return found


class Levels:
    """How far registers are uniform in each place, and the control of each block.

    `found` has the instructions that work-items must come to together, with their levels.
    """

    def __init__(self, program):
        self.program, self.flow = program, Flow(program)
        self.numbers = set()  # registers that are nothing but %tid.x
        self._find_numbers()
        self.of_block = dict.fromkeys(self.flow.blocks, GROUP)
        self.before = {block: {} for block in self.flow.blocks}  # levels above GROUP
        regions = {b: self.flow.controlled(b) for b in self.flow.blocks
                   if len(self.flow.after[b]) > 1}  # fmt: skip
        while self._step(regions):
            pass
        self.found = [one for block in self.flow.blocks for one in self._execute(block)[1]]

    def _step(self, regions):
        """Execute each block once. Is anything less uniform than was known?"""
        changed = False
        for block, end in self.flow.blocks.items():
            state, _ = self._execute(block)
            for other in self.flow.after[block]:
                known = self.before.get(other, state)
                for name, level in state.items():
                    if level > known.get(name, GROUP):
                        known[name], changed = level, True
            guard = state.get(self.program.code[end - 1].guard, GROUP)
            for other in regions.get(block, ()):
                if guard > self.of_block[other]:
                    self.of_block[other], changed = guard, True
        return changed

    def _execute(self, block):
        """Return the levels at the end of a block, and what work-items come to together in it."""
        state, control, found = dict(self.before[block]), self.of_block[block], []
        for instruction in self.program.code[block : self.flow.blocks[block]]:
            guard = state.get(instruction.guard, GROUP)
            if is_barrier(instruction) or ".sync" in instruction.name:
                found.append((instruction, max(control, guard)))
            level = max(self._level(instruction, state), control, guard)
            for name in results(instruction):
                old = GROUP if instruction.guard is None else state.get(name, GROUP)
                state[name] = max(level, old)
        return {name: level for name, level in state.items() if level > GROUP}, found

    def _find_numbers(self):
        """Find the registers whose definitions all shift %tid.x by the same number of bits.

        `numbers` has the bits by register. Bits of a shift to the left are negative.
        """
        made = {}
        for instruction in self.program.code:
            for name in results(instruction):
                made.setdefault(name, []).append(instruction)
        self.numbers = {"%tid.x": 0}
        while True:
            more = {}
            for name, makers in made.items():
                shifts = {self._shift(maker) for maker in makers}
                if name not in self.numbers and len(shifts) == 1 and None not in shifts:
                    more[name] = shifts.pop()
            if not more:
                return
            self.numbers |= more

    def _shift(self, instruction):
        """Return by how many bits an instruction's result is %tid.x shifted, or None."""
        kind, operands = instruction.parts[0], instruction.operands
        shift = self.numbers.get(operands[1]) if len(operands) > 1 else None
        if shift is None or instruction.guard is not None:
            return None
        if kind in ("mov", "cvt"):
            return shift
        if kind in ("shr", "shl") and (count := as_number(operands[2])) is not None:
            return shift + count if kind == "shr" else shift - count
        return None

    def _level(self, instruction, state):
        kind, name = instruction.parts[0], instruction.name
        if kind in ("vote", "activemask", "redux", "match"):
            return WARP
        if name.startswith("bar.red."):
            return GROUP
        if kind in ("shfl", "ldmatrix", "mma", "wmma", "atom", "wgmma") or "ld.local" in name:
            return ITEM
        if self._is_of_a_warp(instruction):
            return WARP
        return max((self._level_of(n, state) for text in instruction.operands[1:]
                    for n in NAME.findall(text)), default=GROUP)  # fmt: skip

    def _level_of(self, name, state):
        if name.startswith(UNIFORM):
            return GROUP
        if name.startswith(OF_A_WARP):
            return WARP
        if self.program.register(name) is None:  # %tid, %laneid, %clock …, or a place in memory
            return ITEM if name.startswith("%") else GROUP
        return state.get(name, GROUP)

    def _is_of_a_warp(self, instruction):
        """Is the result made of the bits of %tid.x that tell the warp: %tid.x / 32, & ~31 …?"""
        kind, operands = instruction.parts[0], instruction.operands
        constant = as_number(operands[2]) if len(operands) == 3 else None
        if constant is None or operands[1] not in self.numbers:
            return False
        lane_bits = LANE_BITS - self.numbers[operands[1]]  # these lowest bits tell the lane
        return (
            (kind == "shr" and constant >= lane_bits)
            or (kind == "and" and constant % (1 << max(lane_bits, 0)) == 0)
            or (kind == "div" and lane_bits == LANE_BITS and constant % LANES == 0)
        )


def as_number(text):
    """Return the number that an operand is, or None."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def results(instruction):
    """Return the registers that an instruction writes."""
    kind = instruction.parts[0]
    if kind in ("st", "red", "barrier", "membar", "fence", "cp", *("bra", "ret", "exit")):
        return []
    if kind == "bar" and not instruction.name.startswith("bar.red."):
        return []
    return NAME.findall(instruction.operands[0]) if instruction.operands else []


def read(text, kernel):
    """Return the Report of a kernel."""
    program = parse(text, kernel)
    if unknown := next((i for i in program.code if i.parts[0] in ("brx", "call")), None):
        raise Refused(f"line {unknown.line}: {unknown.text}")
    report = Report(kernel, len(program.code), stack=program.sizes["local"])
    for instruction, level in Levels(program).found:
        if level > (GROUP if is_barrier(instruction) else WARP):
            report.divergent.append((instruction.line, instruction.text, level))
    report.copied = copies(program)
    return report


def copies(program):
    """Return the lines that store a parameter, or an address on the stack of one, to the stack."""
    loaded, places = set(), set()
    changed = True
    while changed:
        before = len(loaded), len(places)
        for i in program.code:
            sources = {n for text in i.operands[1:] for n in re.findall(r"%?[\w$.]+", text)}
            if i.name.startswith("ld.param"):
                loaded.update(results(i))
            elif i.parts[0] in ("mov", "cvt", "cvta", "add") and is_on_stack(
                program, sources, places
            ):
                places.update(results(i))
            elif i.parts[0] == "mov" and sources & loaded:
                loaded.update(results(i))
        changed = before != (len(loaded), len(places))
    return [
        i.line for i in program.code
        if i.parts[0] == "st" and set(NAME.findall(i.operands[1])) & loaded
        and (i.parts[1] == "local"
             or is_on_stack(program, set(re.findall(r"%?[\w$.]+", i.operands[0])), places))
    ]  # fmt: skip


def is_on_stack(program, names, places):
    is_local = {n for n, (space, _) in program.symbols.items() if space == "local"}
    return bool(names & (places | is_local | {"%SP", "%SPL"}))


def kernels_of(text):
    return re.findall(r"\.entry\s+([\w$]+)", text)


def read_file(path):
    """Return the title of a file, and the reports of its kernels."""
    text = path.read_text()
    first = text.partition("\n")[0]
    title = first[3:] if first.startswith("// attention") else path.name
    return title, [read(text, kernel) for kernel in kernels_of(text)]


def by_clang():
    """Return titles and reports of the kernels that tools/machine_code lists."""
    programs, missing = nvidia.find_programs()
    missing = [what for what in missing if not what.startswith("ptxas")]
    if missing:
        sys.exit("ptx_read: not found: " + ", ".join(missing))

    def one(row):
        file, macros = row.file, row.macros
        with tempfile.TemporaryDirectory() as folder:
            ptx, kernel = Path(folder) / "kernel.ptx", ROOT / "kernels" / file
            options = table.with_macros(kernel, [f"-D{macro}" for macro in macros])
            nvidia.to_ptx(programs, kernel, options, ptx)
            title = f"{file} {' '.join(macros)}"
            text = ptx.read_text()
            return title, text

    with ThreadPoolExecutor() as pool:
        for title, text in pool.map(one, table.NVIDIA):
            yield title, [read(text, kernel) for kernel in kernels_of(text)]


def describe(title, report):
    print(f"{'fine' if report.is_fine else 'FAULTS'}: {title}: {report.instructions} instructions"
          + (f", {report.stack} bytes of stack" if report.stack else ""))  # fmt: skip
    for line, text, level in report.divergent[:8]:
        print(f"    line {line}: ways that {WORDS[level]} lead to {text}")
    if len(report.divergent) > 8:
        print(f"    and {len(report.divergent) - 8} more")
    if report.copied:
        print(f"    {len(report.copied)} stores of parameters to the stack, the first in line "
              f"{report.copied[0]}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--kernels", action="store_true", help="those of tools/machine_code")
    arguments = parser.parse_args()
    status = 0

    def guarded(path):
        try:
            return read_file(path)
        except (Refused, IndexError, KeyError, ValueError) as error:  # syntax that is not known
            return f"{path.name}: not read: {error!r}", []

    found = by_clang() if arguments.kernels else map(guarded, arguments.files)
    for title, reports in found:
        if not reports:
            print(title)
            status = 2
        for report in reports:
            describe(title, report)
            status = max(status, int(not report.is_fine))
    return status


if __name__ == "__main__":
    sys.exit(main())
