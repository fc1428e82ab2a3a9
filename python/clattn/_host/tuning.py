"""What the tuner has found for a device: kept in a file, and handed to the core.

The core calls `load` once, when it opens OpenCL. A file holds the winners of one device and driver.
It counts only for the kernels and the version of clattn that it was made with. Modules that only
reading a file needs are imported there: most processes find no file.
"""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from clattn import _core
from clattn._host import files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clattn import Device

_FORMAT = 2
_LARGEST = 1 << 20  # bytes of a file
_SAME = ("name", "vendor", "platform", "driver_version", "compute_units", "float_width")


class Winner(NamedTuple):
    """The best that was found for a class; without knobs it is the plan's own rule."""

    variant: str
    knobs: dict[str, int]


Winners = dict[str, Winner]  # by the name of a class, such as "float16-64-many"


def is_off() -> bool:
    """Return whether the environment says that winners are not used."""
    return os.environ.get("CLATTN_TUNING", "") == "off"


def variants(device: Device, dtype: str) -> list[str]:
    """Return the variants with knobs that are made for such a device."""
    legal = _core.tunables()[1]
    return [word for word in _core.fast_variants(device, dtype) if word in legal]


def is_tunable(device: Device) -> bool:
    """Return whether there is something to choose for the device; on CPUs there is not."""
    return bool(variants(device, "float32"))


def load(devices: Sequence[Device]) -> list[str]:
    """Hand the winners of each device to the core, and return warnings for the user."""
    if is_off():
        return []
    warnings = []
    for device in devices:
        winners, warning = read(path_of(device), device)
        warnings += [warning] if warning else []
        apply(device, winners)
    return warnings


def apply(device: Device, winners: Winners) -> None:
    """Let calls on the device use these winners."""
    for one, winner in winners.items():
        _core.tune(device, one, *winner)


def count_in_use(device: Device) -> int:
    """Return how many classes of calls on the device use winners."""
    return len({one for one, *_ in _core.tuned(device)})


def path_of(device: Device) -> str | None:
    """Return the path of the device's file in the cache folder; None without such a folder."""
    cache = files.cache_folder()
    text = "\n".join(str(getattr(device, name)) for name in _SAME)
    name = f"{_slug(device)}-{zlib.crc32(text.encode()):08x}.json"
    return None if cache is None else os.path.join(cache, "tuned", name)


def read(path: str | None, device: Device) -> tuple[Winners, str]:
    """Return the winners of a file, and a warning or "".

    There are none where the file is absent, of another driver or version, or damaged, which alone
    is worth a warning.
    """
    if path is None or not os.path.isfile(path):
        return {}, ""
    import json

    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LARGEST))
        return _parse(content, device), ""
    except OSError as error:
        reason = str(error)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        reason = "it is damaged"
    return {}, f"{path} is ignored: {reason}; python -m clattn tune writes a new one"


def write(device: Device, winners: Winners) -> None:
    """Write the winners to the device's file, if there is a cache folder.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    path = path_of(device)
    if path is None:
        return
    import json

    found = {one: winner._asdict() for one, winner in winners.items()}
    content = json.dumps(_identity(device) | {"winners": found}, indent=1) + "\n"
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    files.write(path, content.encode())


def _slug(device: Device) -> str:
    """Return a part of a file's name that a reader recognises."""
    words = f"{device.platform} {device.name}".lower()
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in words).split())[:80]


def _identity(device: Device) -> dict[str, Any]:
    """Return what a file and this process have in common."""
    return {
        "format": _FORMAT,
        "clattn": _core.__version__,
        "kernels": _core.kernels_identity(),
        "device": {name: getattr(device, name) for name in _SAME},
    }


def _parse(content: Any, device: Device) -> Winners:
    """Return the winners if the file is of this device and version, else none.

    A file that no tuner has written ends in one of many exceptions.
    """
    if any(content[key] != value for key, value in _identity(device).items()):
        return {}
    winners = {one: Winner(**winner) for one, winner in content["winners"].items()}
    classes, legal = _core.tunables()
    for one, (variant, knobs) in winners.items():
        values = legal[variant]
        if one not in classes or any(
            type(value) is not int or value not in values[name] for name, value in knobs.items()
        ):
            raise ValueError(one)
    return winners
