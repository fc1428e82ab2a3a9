"""Keys and values in bytes: int8 and float8, with scales."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FLOAT8", "read_bytes"]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def read_bytes(
    key: Any, value: Any, key_scale: Any, value_scale: Any
) -> tuple[Any, Any, str | None]:
    """Return key and value as the core reads them, and the name of their float8 dtype, if any."""
    words = [str(getattr(array, "dtype", "")).removeprefix("torch.") for array in (key, value)]
    for name, word, scale in zip(("key", "value"), words, (key_scale, value_scale), strict=True):
        if word == "int8" and scale is None:
            raise TypeError(f"{name} has dtype int8; expected {name}_scale with it")
    found = [word for word in words if word in FLOAT8]
    if not found:
        return key, value, None
    if words[0] != words[1]:
        raise TypeError(
            f"key has dtype {words[0]} and value has dtype {words[1]}; expected both to have one "
            "dtype"
        )
    return _as_uint8(key), _as_uint8(value), found[0]


def _as_uint8(array: Any) -> Any:
    """View an array of float8 as uint8: NumPy's, or torch's."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint8)
    return array.view(_torch_uint8(array))


def _torch_uint8(array: Any) -> Any:
    import torch

    return torch.uint8
