"""Facts about devices as text, for the commands and for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clattn._core import Device


def format_bytes(count: float) -> str:
    """Return `count` bytes as text, in the largest binary unit that gives at least 1."""
    units = ["KiB", "MiB", "GiB", "TiB"]
    unit = "bytes"
    while count >= 1024 and units:
        count, unit = count / 1024, units.pop(0)
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


def dtypes_of(device: Device) -> str:
    """Return the float dtypes of a device: half types are only stored, double is an extension."""
    return "float32, float16, bfloat16" + (", float64" if device.float64 else "")
