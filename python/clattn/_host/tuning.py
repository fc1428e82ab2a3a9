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
    from collections.abc import Iterator, Mapping, Sequence

    from clattn import Device

_FORMAT = 1
_LARGEST = 1 << 20  # bytes of a file
_SAME = ("name", "vendor", "platform", "driver_version", "compute_units", "float_width")


class Class(NamedTuple):
    """Problems that share their winners; a problem has the next larger head size."""

    dtype: str
    head_size: int
    rows: str  # "many", "few", "decode"; "threshold": the choice of variants

    def __str__(self) -> str:
        return f"{self.dtype}-{self.head_size}-{self.rows}"


class Winner(NamedTuple):
    """The best that was found for a class; without knobs it is the plan's own rule."""

    variant: str
    knobs: dict[str, int]
    rule_seconds: float  # of the tuner's problem, by the plan's rule
    seconds: float


Winners = dict[Class, Winner]


class _DamagedError(Exception):
    """A file that no tuner has written like this."""


def classes() -> Iterator[Class]:
    """Yield all classes, those that gain most first."""
    dtypes, head_sizes, rows, _ = _core.tunables()
    for dtype in dtypes:
        for kind in rows:
            for size in head_sizes:
                yield Class(dtype, size, kind)


def is_off() -> bool:
    """Return whether the environment says that winners are not used."""
    return os.environ.get("CLATTN_TUNING", "") == "off"


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


def apply(device: Device, winners: Mapping[Class, Winner]) -> None:
    """Let calls on the device use these winners."""
    for one, winner in winners.items():
        _core.tune(device, *one, winner.variant, winner.knobs)


def count_in_use(device: Device) -> int:
    """Return how many classes of calls on the device use winners."""
    return len({entry[:3] for entry in _core.tuned(device)})


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
    try:
        return _parse(_decode(path), device), ""
    except (OSError, _DamagedError) as error:
        message = f"{path} is ignored: {error}; python -m clattn tune writes a new one"
        return {}, message


def write(device: Device, winners: Mapping[Class, Winner]) -> str | None:
    """Write the winners to the device's file and return its path; None without a cache folder.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    path = path_of(device)
    if path is None:
        return None
    import json

    content = {
        **_identity(),
        "device": {name: getattr(device, name) for name in _SAME},
        "winners": {str(one): winner._asdict() for one, winner in winners.items()},
    }
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    files.write(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def _slug(device: Device) -> str:
    """Return a part of a file's name that a reader recognises."""
    words = f"{device.platform} {device.name}".lower()
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in words).split())[:80]


def _identity() -> dict[str, Any]:
    """Return what a file and this process have in common."""
    return {
        "format": _FORMAT,
        "clattn": _core.__version__,
        "kernels": _core.kernels_identity(),
    }


def _decode(path: str) -> dict[str, Any]:
    import json

    with open(path, "rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise _DamagedError("it is too large")
    try:
        decoded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _DamagedError("it is not JSON") from error
    if not isinstance(decoded, dict):
        raise _DamagedError("it holds no object")
    return decoded


def _parse(content: dict[str, Any], device: Device) -> Winners:
    """Return the winners if the file is of this device and version, else none."""
    of_device = content.get("device")
    if not isinstance(of_device, dict):
        raise _DamagedError("it names no device")
    if any(content.get(key) != value for key, value in _identity().items()) or any(
        of_device.get(name) != getattr(device, name) for name in _SAME
    ):
        return {}
    winners = content.get("winners")
    if not isinstance(winners, dict):
        raise _DamagedError("it holds no winners")
    known = {str(one): one for one in classes()}
    found: Winners = {}
    for text, winner in winners.items():
        if text not in known:
            raise _DamagedError(f"there is no class {text[:40]!r}")
        found[known[text]] = _parse_winner(winner)
    return found


def _parse_winner(winner: Any) -> Winner:
    if not isinstance(winner, dict) or winner.keys() != set(Winner._fields):
        raise _DamagedError("a winner lacks a part")
    legal = _core.tunables()[3].get(winner["variant"] if type(winner["variant"]) is str else "")
    knobs = winner["knobs"]
    if legal is None or not isinstance(knobs, dict):
        raise _DamagedError("a winner is of no variant")
    for name, value in knobs.items():
        if type(value) is not int or value not in legal.get(name, ()):
            raise _DamagedError(f"{name[:20]} may not be {str(value)[:20]}")
    for name in ("rule_seconds", "seconds"):
        if type(winner[name]) is not float or not 0 < winner[name] < 1e6:
            raise _DamagedError("a time is not a number of seconds")
    return Winner(**winner)
