# SPDX-License-Identifier: MIT
"""Instructions of PTX that concern one work-item each, and no memory.

`compiled` returns a function of `active`: True, or an array that is true for the lanes that execute
the instruction. It computes the numbers of all lanes at once, and writes those of active lanes.
"""

import numpy as np

from ptx.program import Refused

TYPES = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "pred": np.dtype(bool),
}

EXP2_ERROR = 2.0**-22
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def divide(a, b):
    """Divides integers, rounding towards zero."""
    return (a - remainder(a, b)) // b


def remainder(a, b):
    if (b == 0).any():
        raise Refused("a division by zero")
    return np.fmod(a, b)


def high_half(a, b):
    if a.dtype.itemsize == 8:
        raise Refused("the high half of a product of 128 bits")
    wide = a.astype("i8" if a.dtype.kind == "i" else "u8") * b
    return (wide >> 8 * a.dtype.itemsize).astype(a.dtype)


def bit_field(a, at, length):
    """Extracts bits, with their sign if the type has one."""
    bits, at, length = 8 * a.dtype.itemsize, int(at), int(length)
    if not (length > 0 and at + length <= bits):
        raise Refused("a field that is not inside the number")
    return a << a.dtype.type(bits - at - length) >> a.dtype.type(bits - length)


def flushed(x):
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def power_of_two(x):
    """Returns 2**x, as inexact as the ISA allows: x moves by its last bit. 2**0 is exact."""
    sign = (x.view(np.int32) & 1) * 2 - 1
    x = flushed(x)
    return flushed(np.exp2(x) * np.where(x == 0, 1, 1 + sign * EXP2_ERROR).astype(np.float32))


def to_bfloat16(x):
    """Returns the bits of the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def to_float16(x):
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def to_integer(x, dtype):
    """Rounds towards zero, and saturates. NaN becomes 0."""
    limits = np.iinfo(dtype)
    exact = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
    inside = np.clip(exact, limits.min, limits.max)
    result = np.where(exact >= limits.max, 0, inside).astype(dtype)
    return np.where(exact >= limits.max, limits.max, result).astype(dtype)


# By name, of integers and of floats: functions with `out` and `where`.
UFUNCS = {
    "add": (np.add, np.add),
    "sub": (np.subtract, np.subtract),
    "mul": (None, np.multiply),
    "div": (None, np.divide),
    "min": (np.minimum, np.fmin),
    "max": (np.maximum, np.fmax),
    "neg": (np.negative, np.negative),
    "abs": (np.absolute, np.absolute),
    "and": (np.bitwise_and, None),
    "or": (np.bitwise_or, None),
    "xor": (np.bitwise_xor, None),
    "not": (np.invert, None),
    "shl": (np.left_shift, None),
    "shr": (np.right_shift, None),
}
PREDICATES = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}
# What may stand after the name and before the type, which changes nothing here.
PLAIN = {("add", "rn"), ("sub", "rn"), ("mul", "rn"), ("mul", "lo"), ("div", "rn"),
         ("min", "NaN"), ("max", "NaN")}  # fmt: skip

# The comparison of ordered numbers, and whether it is true of NaN.
COMPARISONS = {
    **{name: (getattr(np, function), False) for name, function in {
        "eq": "equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    }.items()},
    **{name: (getattr(np, function), True) for name, function in {
        "equ": "equal", "neu": "not_equal", "ltu": "less", "leu": "less_equal",
        "gtu": "greater", "geu": "greater_equal",
    }.items()},
}  # fmt: skip


def unknown(instruction):
    return Refused(f"the instruction {instruction.name} is not known here")


def assign(to, values, active):
    np.copyto(to, values, where=active, casting="unsafe")


def compiled(machine, instruction):
    """Returns the function of an instruction, or None if the instruction is not one of these."""
    make = PAIRS.get(instruction.name)
    if make is None and instruction.parts[-1] in TYPES:
        make = MAKERS.get(instruction.parts[0])
    return make(machine, instruction) if make else None


def elementwise(machine, instruction):
    """Compiles an instruction of UFUNCS, which may write to its operands."""
    name, *modifiers, kind = instruction.parts
    dtype = TYPES[kind]
    operands = instruction.operands
    if kind == "pred":
        function = PREDICATES.get(name)
    elif name == "mul" and modifiers == ["lo"]:
        function = np.multiply
    elif modifiers == ["NaN"]:
        function = {"min": np.minimum, "max": np.maximum}.get(name)
    else:
        function = UFUNCS[name][dtype.kind == "f"]
    if any((name, modifier) not in PLAIN for modifier in modifiers) or function is None:
        return by_value(machine, instruction)
    to = machine.target(operands[0], kind)
    if name in ("shl", "shr"):
        inputs = [machine.source(operands[1], kind)]
        by = machine.source(operands[2], "u32")
        if by.ndim:
            x = inputs[0]
            return lambda active: assign(to, function(x, by.astype(dtype)), active)
        inputs.append(by.astype(dtype))
    else:
        inputs = [machine.source(x, kind) for x in operands[1:]]

    def run(active):
        function(*inputs, out=to, where=active)

    return run


VALUES = {  # name with its modifiers, kinds of types: function
    ("div", "iu"): divide,
    ("rem", "iu"): remainder,
    ("mul.hi", "iu"): high_half,
    ("bfe", "iu"): bit_field,
    ("rcp.rn", "f"): lambda x: 1 / x,
    ("ex2.approx.ftz", "f"): power_of_two,
}


def by_value(machine, instruction):
    """Compiles an instruction that computes new arrays, for active lanes alone."""
    name, _, kind = instruction.name.rpartition(".")
    dtype = TYPES[kind]
    functions = [f for (n, kinds), f in VALUES.items() if n == name and dtype.kind in kinds]
    if not functions:
        raise unknown(instruction)
    function = functions[0]
    to, *inputs = operands_of(machine, instruction, kind)

    def run(active):
        lanes = ... if active is True else active
        to[lanes] = function(*(x[lanes] if x.ndim else x for x in inputs))

    return run


def multiply_wide(machine, instruction):
    kind = instruction.parts[-1]
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    to = machine.target(instruction.operands[0], wide)
    a, b = (machine.source(x, kind) for x in instruction.operands[1:])
    return lambda active: np.multiply(a, b, out=to, where=active, dtype=to.dtype)


def multiply_halves(machine, instruction):
    """Multiplies two numbers of float16 in each register."""
    to, a, b = (x.view(np.float16) for x in operands_of(machine, instruction, "b32"))
    pair = np.empty(len(to), np.float16)

    def run(active):
        np.multiply(a, b, out=pair)
        assign(to.view(np.uint32), pair.view(np.uint32), active)

    return run


def multiply(machine, instruction):
    wide = instruction.parts[1] == "wide"
    return (multiply_wide if wide else elementwise)(machine, instruction)


def multiply_add(machine, instruction):
    if instruction.parts[1:-1] != ["lo"]:
        raise unknown(instruction)
    kind = "u" + instruction.parts[-1][1:]
    to, a, b, c = operands_of(machine, instruction, kind)
    return lambda active: assign(to, a * b + c, active)


def operands_of(machine, instruction, kind):
    to, *inputs = instruction.operands
    return machine.target(to, kind), *(machine.source(x, kind) for x in inputs)


def fused(machine, instruction):
    """Multiplies and adds in a wider type, in which a product of floats is exact, then rounds."""
    kind = instruction.parts[-1]
    wider = {"f32": np.float64, "f64": np.longdouble}.get(kind)
    if instruction.parts[1:-1] != ["rn"] or wider is None:
        raise unknown(instruction)
    to, a, b, c = operands_of(machine, instruction, kind)
    sums = np.empty(machine.lanes, wider)

    def run(active):
        np.multiply(a, b, out=sums, dtype=wider)
        np.add(sums, c, out=sums)
        np.copyto(to, sums, where=active, casting="same_kind")

    return run


def compare(machine, instruction):
    if len(instruction.parts) != 3:
        raise unknown(instruction)
    _, name, kind = instruction.parts
    to = machine.target(instruction.operands[0], "pred")
    a, b = (machine.source(x, kind) for x in instruction.operands[1:])
    floats = TYPES[kind].kind == "f"
    if name in ("num", "nan"):
        nan = name == "nan"
        return lambda active: assign(to, (np.isnan(a) | np.isnan(b)) == nan, active)
    if name == "ne" and floats:
        return lambda active: assign(to, (a < b) | (a > b), active)
    if name == "ne":
        return lambda active: np.not_equal(a, b, out=to, where=active)
    if name not in COMPARISONS:
        raise unknown(instruction)
    function, of_nan = COMPARISONS[name]
    if floats and of_nan and name != "neu":
        return lambda active: assign(to, function(a, b) | np.isnan(a) | np.isnan(b), active)
    return lambda active: function(a, b, out=to, where=active)


def select(machine, instruction):
    kind = instruction.parts[-1]
    to = machine.target(instruction.operands[0], kind)
    a, b = (machine.source(x, kind) for x in instruction.operands[1:3])
    chosen = machine.source(instruction.operands[3], "pred")
    return lambda active: np.copyto(to, np.where(chosen, a, b), where=active)


def move(machine, instruction):
    kind = instruction.parts[-1]
    to, x = instruction.operands
    if "{" in to + x:
        return move_parts(machine, to, x, kind)
    target, source = machine.target(to, kind), machine.source(x, kind)
    return lambda active: np.copyto(target, source, where=active)


def move_parts(machine, to, x, kind):
    """Moves between a register and its halves or quarters, the lowest first."""
    whole, pieces = (x, to) if "{" in to else (to, x)
    names = pieces.strip("{}").replace(",", " ").split()
    piece = f"b{int(kind[1:]) // len(names)}"
    width = TYPES[piece]
    if "{" in to:
        source = machine.source(whole, kind).view(width).reshape(-1, len(names))
        pairs = [(machine.target(n, piece), source[:, i]) for i, n in enumerate(names) if n != "_"]
    else:
        target = machine.target(whole, kind).view(width).reshape(-1, len(names))
        pairs = [(target[:, i], machine.source(n, piece)) for i, n in enumerate(names)]

    def run(active):
        for target, source in pairs:
            np.copyto(target, source, where=active)

    return run


def convert(machine, instruction):
    _, *modifiers, to_kind, from_kind = instruction.parts
    to_name, *names = instruction.operands
    if to_kind in ("f16x2", "bf16x2"):
        if modifiers != ["rn"] or from_kind != "f32":
            raise unknown(instruction)
        bits = to_float16 if to_kind == "f16x2" else to_bfloat16
        to = machine.target(to_name, "b32")
        high, low = (machine.source(x, "f32") for x in names)
        return lambda active: assign(to, bits(high) << 16 | bits(low), active)
    if to_kind not in TYPES:
        raise unknown(instruction)
    to, x = machine.target(to_name, to_kind), machine.source(names[0], from_kind)
    change = {
        ("rn",): lambda x: x.astype(to.dtype),
        (): lambda x: x.astype(to.dtype),
        ("rni",): np.rint,
        ("rzi",): lambda x: to_integer(x, to.dtype) if to.dtype.kind != "f" else np.trunc(x),
    }.get(tuple(modifiers))
    if change is None or (modifiers == ["rni"] and from_kind != to_kind):
        raise unknown(instruction)
    return lambda active: assign(to, change(x), active)


def count_ones(machine, instruction):
    _, kind = instruction.parts
    to, x = instruction.operands
    to, x = machine.target(to, "u32"), machine.source(x, kind)
    return lambda active: assign(to, np.bitwise_count(x), active)


def permute(machine, instruction):
    """Picks four bytes of eight, first those of a. A digit of the last operand picks each byte."""
    if len(instruction.parts) != 2:
        raise unknown(instruction)
    to, a, b, selector = operands_of(machine, instruction, "b32")
    digits = [int(selector) >> 4 * n & 15 for n in range(4)]
    if max(digits) > 7:
        raise Refused("a byte that is filled with a sign")

    def run(active):
        eight = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        chosen = [eight >> np.uint64(8 * d) & np.uint64(255) for d in digits]
        assign(to, sum(byte << np.uint64(8 * n) for n, byte in enumerate(chosen)), active)

    return run


def to_space(machine, instruction):
    """Converts between addresses of a space and generic ones. They differ by a constant."""
    _, *modifiers, _ = instruction.parts
    to, x = operands_of(machine, instruction, "u64")
    base = machine.window(modifiers[-1])
    step = np.uint64(-base % 2**64 if modifiers[0] == "to" else base)
    return lambda active: np.add(x, step, out=to, where=active)


PAIRS = {"mul.rn.f16x2": multiply_halves}  # of two numbers in a register
MAKERS = {
    **dict.fromkeys(UFUNCS, elementwise),
    **dict.fromkeys(("rem", "bfe", "rcp", "ex2"), by_value),
    "mul": multiply,
    "mad": multiply_add,
    "fma": fused,
    "setp": compare,
    "selp": select,
    "mov": move,
    "cvt": convert,
    "cvta": to_space,
    "popc": count_ones,
    "prmt": permute,
}
