# SPDX-License-Identifier: MIT
"""Runs the OpenCL C of mods in NumPy, for all positions at once, in float64.

It checks what the functions of kernels/attention/mods.clh ask for: operands of one type and one
kind, casts to wider kinds alone, members of the row that are declared.
"""

import math
import re

import numpy as np

DTYPES = {"bool": np.bool_, "int": np.int32, "long": np.int64, "real": np.float64}
ELEMENTS = ("bool", "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32",
            "int64", "uint8", "uint16", "uint32", "uint64")  # fmt: skip
WIDENS = {"U": "URKS", "R": "RS", "K": "KS", "S": "S"}

WORD = r"OP\((\w+), ([URKS])\)"
CAST = re.compile(rf"\({WORD}\)((?:row->)?\w+)")
FUNCTION = re.compile(WORD)
ROW = re.compile(r"row->(\w+)")
COMMENT = re.compile(r" /\*.*?\*/")
DECLARATION = re.compile(rf"(?:const )?{WORD} (\w+) = (.*);")
PLACE = re.compile(rf"{WORD}\(call, (\d+), (\d+), (.*), &(\w+), &(\w+)\);")
MEMBER = re.compile(r"row->(\w+) = (\w+);")
FLAG = re.compile(r"(\w+) \|= (.*);")
RETURN = re.compile(r"return (.*);")


class Value:
    """Numbers with their type and kind, and C's operators on two of the same."""

    def __init__(self, array, type_, kind):
        self.type, self.kind = type_, kind
        self.array = np.asarray(array).astype(DTYPES[type_])

    def result(self, operation, *others, types=("int", "long", "real")):
        assert self.type in types, self.type
        for other in others:
            assert (self.type, self.kind) == (other.type, other.kind)
        with np.errstate(all="ignore"):
            return Value(operation(self.array, *[o.array for o in others]), self.type, self.kind)

    def __add__(self, other):
        return self.result(np.add, other)

    def __sub__(self, other):
        return self.result(np.subtract, other)

    def __mul__(self, other):
        return self.result(np.multiply, other)

    def __truediv__(self, other):
        return self.result(np.divide, other, types=("real",))

    def __neg__(self):
        return self.result(np.negative)

    def __and__(self, other):
        return self.result(np.bitwise_and, other, types=("bool", "int", "long"))

    def __or__(self, other):
        return self.result(np.bitwise_or, other, types=("bool", "int", "long"))

    def __xor__(self, other):
        return self.result(np.bitwise_xor, other, types=("bool", "int", "long"))

    def __invert__(self):
        return self.result(np.invert, types=("bool", "int", "long"))


def integer_power(x, n):
    return np.where(n < 0, 0, np.power(x, np.maximum(n, 0)))


COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
               "eq": np.equal, "ne": np.not_equal}  # fmt: skip
FUNCTIONS = {"floor_div": np.floor_divide, "modulo": np.remainder, "minimum": np.minimum,
             "maximum": np.maximum, "absolute": np.absolute, "sign": np.sign,
             "shift_left": np.left_shift, "shift_right": np.right_shift}  # fmt: skip
REAL_FUNCTIONS = {
    **{name: getattr(np, name) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sin", "cos", "floor",
        "ceil", "trunc", "rint", "fmod", "hypot")},
    "atan2": np.arctan2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
}  # fmt: skip


class Program:
    """The functions of a text, with the numbers and tables of a call."""

    def __init__(self, mods):
        assert all(ord(c) < 128 for c in mods.text) and "//" not in mods.text
        assert "#" not in mods.text
        self.numbers, self.tables = mods.numbers, mods.tables
        self.functions, self.members = {}, {}
        lines = [line.strip() for line in mods.text.splitlines()]
        struct = lines[: lines.index("} mod_row;")]
        for line in struct:
            if found := re.fullmatch(rf"{WORD} (.*);", line):
                self.members |= dict.fromkeys(found[3].split(", "), (found[1], found[2]))
        for n, line in enumerate(lines):
            if line == "{":
                name = re.search(r" (\w+)\(const attention_call|(start_mod_row)\(", lines[n - 1])
                end = lines.index("}", n)
                self.functions[name[1] or name[2]] = lines[n + 1 : end]

    def run(self, name, b, h, q, key, score=None):
        """The result of mod_score or mod_mask."""
        row = {"b": Value(b, "int", "U"), "h": Value(h, "int", "R"), "q": Value(q, "int", "R")}
        self.call("start_mod_row", row, {})
        parameters = {"key": Value(key, "int", "K")}
        if score is not None:
            parameters["score"] = Value(score, "real", "S")
        result = self.call(name, row, parameters)
        assert (result.type, result.kind) == ("bool" if name == "mod_mask" else "real", "S")
        return result.array

    def call(self, name, row, names):
        names = dict(names, row=row, call=self, cast=cast, f=self.function, NAN=np.nan)
        names |= {f"number_{t}": self.number(t) for t in ("int", "long", "real")}
        for line in self.functions[name]:
            if found := DECLARATION.fullmatch(line):
                value = evaluate(found[4], names)
                value = Value(value, found[1], found[2]) if isinstance(value, int) else value
                assert (value.type, value.kind) == (found[1], found[2]), line
                assert found[3] not in names, line
                names[found[3]] = value
            elif found := PLACE.fullmatch(line):
                self.index(found, names)
            elif found := MEMBER.fullmatch(line):
                value = names[found[2]]
                assert (value.type, value.kind) == self.members[found[1]], line
                row[found[1]] = value
            elif found := FLAG.fullmatch(line):
                names[found[1]] = names[found[1]] | evaluate(found[2], names)
            else:
                return evaluate(RETURN.fullmatch(line)[1], names)
        assert set(row) == set(self.members) | {"b"}
        return None

    def number(self, type_):
        def read(_, n):
            kind = type(self.numbers[n])
            assert kind is (float if type_ == "real" else int)
            return Value(self.numbers[n], type_, "U")

        return read

    def index(self, found, names):
        name, kind, table, d, place, at, outside = found.groups()
        place = evaluate(place, names)
        assert (f"index_{place.type}", place.kind) == (name, kind)
        assert (names[at].kind, names[outside].kind) == (kind, kind)
        table = np.asarray(self.tables[int(table)])
        size, stride = table.shape[int(d)], int(np.prod(table.shape[int(d) + 1 :]))
        i = place.array.astype(np.int64)
        i = np.where(i < 0, i + size, i)
        names[outside] = Value(names[outside].array | (i < 0) | (i >= size), "bool", kind)
        names[at] = Value(names[at].array + np.clip(i, 0, size - 1) * stride, "int", kind)

    def function(self, name, kind):
        def apply(*values):
            if name.startswith("load_"):
                _, table, dtype, at = values
                table = np.asarray(self.tables[table])
                assert table.dtype.name == ELEMENTS[dtype] and at.kind == kind
                return Value(table.reshape(-1)[at.array], name[5:], kind)
            assert all(value.kind == kind for value in values), (name, kind)
            return apply_function(name, kind, values)

        return apply


def apply_function(name, kind, values):
    arrays = [value.array for value in values]
    types = [value.type for value in values]
    op, _, type_ = name.rpartition("_")
    with np.errstate(all="ignore"):
        if op.endswith("_of"):
            assert types == [type_] and op != f"{type_}_of"
            return Value(arrays[0], op[:-3], kind)
        if op == "where":
            assert types == ["bool", type_, type_]
            return Value(np.where(*arrays), type_, kind)
        assert set(types) == {type_}
        assert type_ != "bool"
        if op in COMPARISONS:
            return Value(COMPARISONS[op](*arrays), "bool", kind)
        if op == "power":
            return Value((np.power if type_ == "real" else integer_power)(*arrays), type_, kind)
        if op in REAL_FUNCTIONS:
            assert type_ == "real"
            return Value(REAL_FUNCTIONS[op](*arrays), type_, kind)
        return Value(FUNCTIONS[op](*arrays), type_, kind)


def cast(type_, kind, x):
    if not isinstance(x, Value):
        return Value(x, type_, kind)
    assert x.type == type_ and kind in WIDENS[x.kind] and kind != x.kind
    return Value(x.array, type_, kind)


def evaluate(expression, names):
    text = COMMENT.sub("", expression)
    text = CAST.sub(r'cast("\1", "\2", \3)', text)
    text = FUNCTION.sub(r'f("\1", "\2")', text)
    return eval(ROW.sub(r'row["\1"]', text), {}, names)
