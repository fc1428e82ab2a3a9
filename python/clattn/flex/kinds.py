"""Types and kinds of the values that a mod computes, and the dtypes of arrays that it reads.

A type is bool, int (32 bits), long (64 bits) or real (float, or double in calls that compute in
float64). Two operands have the higher of their types. A kind says what a value depends on: the
bits ROW (head or query position) and KEY (key position); a score has both.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ALL",
    "BOOL",
    "CALL",
    "CASTS",
    "DTYPES",
    "INT",
    "KEY",
    "KIND_NAMES",
    "LONG",
    "REAL",
    "ROW",
    "TYPE_NAMES",
]

BOOL: Final = 0
INT: Final = 1
LONG: Final = 2
REAL: Final = 3
TYPE_NAMES: Final = ("bool", "int", "long", "real")

CALL: Final = 0
ROW: Final = 1
KEY: Final = 2
ALL: Final = 3
KIND_NAMES: Final = "URKS"

# The dtypes of tables in the order of ca_dtype (csrc/base/tensor.h), with the types of their
# elements. Mods compute with int64, so tables of uint64 hold no number from 2**63 on.
DTYPES: Final = {
    "bool": BOOL,
    "float16": REAL,
    "bfloat16": REAL,
    "float32": REAL,
    "float64": REAL,
    "int8": INT,
    "int16": INT,
    "int32": INT,
    "int64": LONG,
    "uint8": INT,
    "uint16": INT,
    "uint32": LONG,
    "uint64": LONG,
}

# What a value can be cast to. Narrower integers would have to wrap around.
CASTS: Final = {
    "bool": BOOL,
    "int32": INT,
    "int64": LONG,
    "float16": REAL,
    "bfloat16": REAL,
    "float32": REAL,
    "float64": REAL,
}
