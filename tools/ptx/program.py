# SPDX-License-Identifier: MIT
"""One kernel of a PTX text: its memory, its registers and its instructions.

Follows the grammar of the PTX ISA as far as clang's output uses it.
"""

import re
from bisect import bisect
from dataclasses import dataclass, field

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}

VARIABLE = re.compile(
    r"\.(const|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)"
    r"(?:\[(\d+)\])?(?:\s*=\s*\{([^}]*)\})?\s*;"
)
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)"
    r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?"
)
REGISTERS = re.compile(r"\.reg\s+\.(pred|[busf]\d+)\s+(%?[\w$]+)(?:<\d+>)?$")
LABEL = re.compile(r"([\w$]+):")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
NAME = re.compile(r"%?[A-Za-z_$][\w$]*")

# Where local memory begins in its window: some devices keep the first bytes for themselves.
SHARED_START = 1024
ALL_REGISTERS = 1 << 16
SIZES = {"const": 0, "param": 0, "local": 0, "shared": SHARED_START}


class Refused(Exception):
    """Raised where a program does what it must not, or what the machine does not know."""


@dataclass
class Instruction:
    line: int
    text: str
    name: str  # with all its modifiers
    operands: list
    guard: str | None = None
    negated: bool = False

    @property
    def parts(self):
        return self.name.split(".")


@dataclass
class Program:
    name: str
    symbols: dict = field(default_factory=dict)  # name: (space, place)
    sizes: dict = field(default_factory=lambda: dict(SIZES))  # where each space ends
    parameters: list = field(default_factory=list)  # (place, size)
    constants: bytearray = field(default_factory=bytearray)
    families: dict = field(default_factory=dict)  # what registers' names begin with: type
    code: list = field(default_factory=list)
    registers_at_entry: int = 0  # of a work-item, if the kernel says how many groups are resident
    labels: dict = field(default_factory=dict)  # name: index in code

    def register(self, name):
        """Returns the type of a register, or None if there is no such register."""
        return self.families.get(name) or self.families.get(name.rstrip("0123456789"))

    def place(self, space, name, size, align):
        place = -(-self.sizes[space] // align) * align
        self.symbols[name] = (space, place)
        self.sizes[space] = place + size
        return place


def parse(text, name):
    """Reads the kernel of that name."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(rf"\.entry\s+{name}\s*\((.*?)\)[^{{]*\{{", text, re.S)
    if entry is None:
        raise Refused(f"there is no kernel {name}")
    if re.search(r"\.func\b", text):
        raise Refused("functions that are called are not known here")
    program = Program(name, registers_at_entry=registers_of(text[entry.end(1) : entry.end()]))
    for variable in VARIABLE.finditer(text[: entry.start()]):
        add_variable(program, variable)
    for align, bits, symbol, count in PARAMETER.findall(entry[1]):
        size = BYTES[bits] * int(count or 1)
        place = program.place("param", symbol, size, int(align or BYTES[bits]))
        program.parameters.append((place, size))
    Body(program, text).read(entry.end())
    return program


def registers_of(directives):
    """Returns the registers of a work-item, from directives behind a kernel's parameters.

    A group that is alone has all registers. Its warps get them by fours, and work-items by eights.
    """
    most, count = (re.search(rf"\.{name}\s+(\d+)", directives) for name in ("maxnreg", "reqntid"))
    if most:
        return int(most[1])
    if count is None or not re.search(r"\.minnctapersm\s+1\b", directives):
        return 0
    return min(ALL_REGISTERS // (-(-int(count[1]) // 128) * 128), 255) // 8 * 8


def add_variable(program, match):
    space, align, bits, name, count, values = match.groups()
    size = BYTES[bits] * int(count or 1)
    place = program.place(space, name, size, int(align or BYTES[bits]))
    if space == "const":
        values = [int(x, 0) for x in values.split(",")] if values else []
        data = b"".join(x.to_bytes(BYTES[bits], "little", signed=x < 0) for x in values)
        program.constants.extend(bytes(place - len(program.constants)) + data.ljust(size, b"\0"))
    elif values:
        raise Refused(f"{name} has values to start with")


class Body:
    """Reads the statements between a kernel's braces."""

    def __init__(self, program, text):
        self.program = program
        self.text = text
        self.ends = [m.start() for m in re.finditer("\n", text)]
        self.scopes = [{}]  # new names of the registers that inner blocks declare
        self.declared = 0

    def read(self, at):
        text = self.text
        while self.scopes:
            while text[at].isspace():
                at += 1
            label = LABEL.match(text, at)
            if text[at] == "{":
                self.scopes.append({})
                at += 1
            elif text[at] == "}":
                self.scopes.pop()
                at += 1
            elif label:
                self.program.labels[label[1]] = len(self.program.code)
                at = label.end()
            else:
                end = text.index(";", at)
                self.statement(text[at:end].strip(), bisect(self.ends, at) + 1)
                at = end + 1

    def statement(self, text, line):
        registers = REGISTERS.match(text)
        variable = VARIABLE.match(text + ";")
        if registers:
            self.declare(*registers.groups())
        elif variable:
            add_variable(self.program, variable)
        elif text.startswith("."):
            if not text.startswith((".loc", ".pragma")):
                raise Refused(f"line {line}: {text}")
        else:
            self.instruction(text, line)

    def declare(self, kind, name):
        if len(self.scopes) > 1:
            self.declared += 1
            self.scopes[-1][name] = name = f"{name}.{self.declared}."
        self.program.families[name] = kind

    def instruction(self, text, line):
        guard, negated = None, False
        rest = text
        if text.startswith("@"):
            guard, rest = text[1:].split(None, 1)
            negated = guard.startswith("!")
            guard = self.renamed(guard.removeprefix("!"))
        name, *more = rest.split(None, 1)
        operands = OPERAND.findall(self.renamed(more[0])) if more else []
        self.program.code.append(Instruction(line, text, name, operands, guard, negated))

    def renamed(self, text):
        names = {old: new for scope in self.scopes for old, new in scope.items()}
        return NAME.sub(lambda m: names.get(m[0], m[0]), text) if names else text
