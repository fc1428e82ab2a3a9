"""Arrays of bytes that stand for numbers: int8 and float8."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["as_bytes", "float8_of", "read_bytes"]

# The float8 dtypes of keys and values.
_CODES = ("float8_e4m3fn", "float8_e5m2")

# Keys and values cannot have other dtypes of 8 bits or fewer, whose names begin so.
_OTHERS = ("float4_", "float6_", "float8_", "int4", "uint4", "uint8")


def float8_of(array: Any) -> Any:
    """Return the dtype of an array of float8 numbers, of any library; None for others."""
    dtype = getattr(array, "dtype", None)
    return dtype if _word(dtype).startswith("float8") else None


def as_bytes(array: Any) -> Any:
    """View an array of float8 as uint8; anything else comes back as it is."""
    dtype = float8_of(array)
    if dtype is None:
        return array
    is_torch = str(dtype).startswith("torch.")
    return array.view(sys.modules["torch"].uint8 if is_torch else "uint8")


def read_bytes(
    key: Any, value: Any, key_scale: Any, value_scale: Any
) -> tuple[Any, Any, str | None]:
    """Return key and value as the core reads them, and the name of their float8 dtype, if any."""
    words = [_word(getattr(array, "dtype", None)) for array in (key, value)]
    for name, word, scale in zip(("key", "value"), words, (key_scale, value_scale), strict=True):
        if word.startswith(_OTHERS) and word not in _CODES:
            raise TypeError(
                f"{name} has dtype {word}; expected query's dtype, int8, {' or '.join(_CODES)}: "
                "bytes that hold float8 can be viewed as it"
            )
        if word == "int8" and scale is None:
            raise TypeError(f"{name} has dtype int8; expected {name}_scale with it")
    found = [word for word in words if word in _CODES]
    if not found:
        return key, value, None
    if words[0] != words[1]:
        raise TypeError(
            f"key has dtype {words[0]} and value has dtype {words[1]}; expected both to have one "
            "dtype"
        )
    return as_bytes(key), as_bytes(value), found[0]


def _word(dtype: Any) -> str:
    """Return the name of a dtype without that of its library."""
    return str(dtype).rpartition(".")[2]
