"""Tables of HTML, which notebooks show for a Device and a Tensor: ``_repr_html_``."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from clattn._host.facts import dtypes_of, format_bytes

if TYPE_CHECKING:
    from clattn._core import Device, Tensor

_SHOWN = 100  # elements: a Tensor of more is described, and not waited for


def of_device(device: Device) -> str:
    """Return the table of a device."""
    return _table(
        f"clattn.Device {device.type}",
        {
            "name": device.name,
            "platform": device.platform,
            "driver": device.driver_version,
            "compute units": str(device.compute_units),
            "memory": format_bytes(device.memory),
            "dtypes": dtypes_of(device),
        },
    )


def of_tensor(tensor: Tensor) -> str:
    """Return the table of a Tensor, and below it the elements if there are few."""
    table = _table(
        "clattn.Tensor",
        {
            "shape": str(tensor.shape),
            "dtype": tensor.dtype.name,
            "memory": format_bytes(tensor.nbytes),
            "device": f"{tensor.device.type}: {tensor.device.name}",
        },
    )
    return table if tensor.size > _SHOWN else f"{table}<pre>{escape(repr(tensor))}</pre>"


def _table(title: str, rows: dict[str, str]) -> str:
    """Return a table with a title and a row for each label; all texts are escaped."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in rows.items()
    )
    head = f'<tr><th colspan="2" style="text-align:left">{escape(title)}</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>"
