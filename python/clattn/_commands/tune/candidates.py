"""What the tuner tries: the problems that stand for a class, and the knobs of its variant."""

from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from clattn import Device, _core
from clattn._commands.bench.rows import Row
from clattn._host.tuning import Class

Knobs = dict[str, int]

Shape = tuple[int, int, int, int, int]  # B, Hq, Hk, L, S
Shapes = tuple[Shape, ...]

# For CPUs and for other devices: shapes that are timed, and others that only a winner is timed on,
# which must not lose there. All have the rows of their class; those of a threshold, rows of both
# sides of it.
_SHAPES: dict[tuple[str, bool], tuple[Shapes, Shapes]] = {
    ("many", True): (((1, 8, 8, 1024, 1024),), ((2, 8, 8, 200, 300),)),
    ("few", True): (((1, 12, 12, 128, 128),), ((1, 12, 12, 40, 512),)),
    ("decode", True): (((1, 32, 8, 1, 4096),), ((1, 16, 16, 1, 1024),)),
    ("threshold", True): (
        tuple((1, 32, 8, L, 1024) for L in (2, 3, 5, 7)),
        tuple((1, 16, 2, L, 2048) for L in (1, 2, 3)),
    ),
    ("many", False): (((2, 16, 16, 2048, 2048),), ((1, 16, 16, 500, 1000),)),
    ("few", False): (((1, 32, 32, 128, 2048),), ((1, 32, 32, 40, 1000),)),
    ("decode", False): (((1, 32, 8, 1, 16384),), ((4, 32, 32, 1, 1024),)),
}
# Lengths that no tile divides, and heads that share keys.
_CHECKED = {"many": (1, 4, 2, 83, 203), "few": (1, 4, 2, 21, 203), "decode": (1, 4, 2, 3, 403),
            "threshold": (1, 4, 2, 5, 203)}  # fmt: skip

# Knobs of a variant that are tried together, in turn.
_STAGES = {
    "cpu": (("NV", "MR"), ("CHUNKS",), ("TILES",), ("ITEMS",)),
    "pairs": (("NV", "MR"), ("CHUNKS",), ("TILES",), ("ITEMS",)),
    "amx": (("CHUNKS",), ("TILES",), ("ITEMS",)),
    "decode_cpu": (("RT",), ("BN",), ("KIB",), ("ITEMS",)),
    "mma": (("MT", "BN", "CHUNK", "QUERIES"), ("WARPS",), ("STAGES",)),
    "tiled": (("TILING",), ("EC",), ("KC",)),
    "decode_gpu": (("SPLITS",),),
    "decode_mma": (("SPLITS",),),
}
_THRESHOLDS = {"decode_cpu": (("ROWS",),)}


class Problems(NamedTuple):
    """The rows of bench that stand for a class."""

    timed: list[Row]
    guard: list[Row]  # a winner must not lose there
    checked: Row
    masked: Row  # a winner is checked there too: another program


def problems_of(one: Class, device: Device) -> Problems:
    """Return the problems of a class; on a GPU the arrays lie on the device."""
    on_device = device.type != "cpu"

    def row(name: str, shape: Shape) -> Row:
        return Row(name, (*shape, one.head_size), one.dtype, on_device=on_device)

    timed, guard = _SHAPES[one.rows, not on_device]
    checked = row("checked", _CHECKED[one.rows])
    return Problems(
        [row("timed", shape) for shape in timed],
        [row("guard", shape) for shape in guard],
        checked,
        replace(checked, name="masked", mask="bool", is_causal="lower_right"),
    )


def variant_of(one: Class, device: Device, special: Container[str]) -> str:
    """Return the variant that computes the problems of a class, unless the planner is forced.

    `special` has those of "amx" and "pairs" that run on the device.
    """
    is_half = one.dtype in ("float16", "bfloat16")
    on_matrix_units = is_half and device.nvidia_capability >= 80
    if device.type == "cpu":
        if one.rows in ("decode", "threshold"):
            return "decode_cpu"
        found = [word for word in ("amx", "pairs") if word in special and one.dtype == "bfloat16"]
        return found[0] if found else "cpu"
    if one.rows == "decode":
        return "decode_mma" if on_matrix_units and one.head_size <= 128 else "decode_gpu"
    return "mma" if on_matrix_units else "tiled"


def has_candidates(one: Class, device: Device) -> bool:
    """Return whether there is something to choose; only CPUs have a threshold."""
    return one.rows != "threshold" or device.type == "cpu"


def stages(one: Class, variant: str, device: Device) -> Iterator[list[Knobs]]:
    """Yield the settings of knobs that are compared with each other."""
    legal = _core.tunables()[3][variant]
    for names in (_THRESHOLDS if one.rows == "threshold" else _STAGES)[variant]:
        settings = product(*(legal[name] for name in names))
        found = [dict(zip(names, values, strict=True)) for values in settings]
        yield [knobs for knobs in found if _fills_registers(knobs, device)]


def count(one: Class, variant: str, device: Device) -> int:
    """Return how many settings there are."""
    return sum(map(len, stages(one, variant, device)))


def _fills_registers(knobs: Knobs, device: Device) -> bool:
    """Return whether products keep half of the registers to three quarters of them for sums."""
    if "NV" not in knobs:
        return True
    most = 24 if device.float_width >= 16 else 12
    return most // 2 <= knobs["NV"] * knobs["MR"] <= most
