"""The tables and the JSON file of the results."""

import json
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import clattn
from clattn._commands.bench.contest import Contestants, Measured
from clattn._commands.bench.flex import Alone, TorchFlex
from clattn._commands.timing import THREADS
from clattn._host import tuning

WIDTH = 100  # columns that a table may take
ROW_FIELDS = ("name", "shape", "dtype", "mask", "is_causal", "window", "limit", "on_device",
              "layout", "door", "trains", "flop", "bytes_read")  # fmt: skip


@dataclass(frozen=True)
class Results:
    """Everything that was measured so far.

    `alone` has what ``--flex`` measures in processes of their own, by words of a device, or torch's
    label. `name` is the machine's, "" for that of its first device.
    """

    measured: Sequence[Measured]
    contestants: Contestants
    rounds: int
    alone: Mapping[str, Alone] = field(default_factory=dict)
    name: str = ""

    def first(self, name: str, row: str) -> float | None:
        """Return the seconds of a first call, of a device or torch; None: not measured."""
        return self.alone[name].first.get(row) if name in self.alone else None


def open_console() -> Console:
    """Return a console as wide as a table: the terminal, if it is wide enough."""
    console = Console(highlight=False)
    wide = console.is_terminal and console.width >= WIDTH
    return console if wide else Console(highlight=False, width=WIDTH)


def make_table(words: str, results: Results) -> Table:
    """Return the table of one device."""
    measured, contestants = results.measured, results.contestants
    device, limits = contestants.devices[words], contestants.limits[words]
    rates = [f"fma {dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in limits.fma.items() if rate]
    rates += [f"exp {limits.exp / 1e9:.1f} G/s"] if limits.exp else []
    rates += [
        f"reading {size / 2**20:.0f} MiB {rate / 1e9:.1f} GB/s"
        for size, rate in sorted(limits.read.items())
    ]
    rates += [f"torch's product {t} {r / 1e12:.0f} TFLOP/s" for t, r in limits.product.items()]
    table = Table(
        title=escape(f"{device.name} ({device.platform})"),
        caption="limits: " + ", ".join(rates) if rates else "",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown = _Shown(
        rates=any(one.row.on_device for one in measured),
        beside=list(
            dict.fromkeys(
                name
                for one in measured
                if one.row.trains is not True
                for name in one.beside.get(words, ())
            )
        ),
        first=bool(results.alone),
        trains=any(one.row.trains is True for one in measured),
    )
    table.add_column("row", no_wrap=True)
    headers = ["ms", *(["TFLOP/s", "GB/s"] if shown.rates else ())]
    headers += [f"beside\n{name}" for name in shown.beside]
    headers += ["backward\nms"] if shown.trains else []
    for header in (*headers, "limit", "best"):
        table.add_column(header, justify="right", no_wrap=True)
    for peer in contestants.peers:
        header = f"{peer.label} ms" if shown.trains else peer.label
        table.add_column(header.replace(" ", "\n"), justify="right", min_width=5)
    for header in ("first\ns", "torch's\ns") if shown.first else ():
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    for one in measured:
        if words in one.seconds:
            table.add_row(*_cells(words, one, results, shown))
    return table


@dataclass(frozen=True)
class _Shown:
    """Which columns a table has, besides those of every table."""

    rates: bool  # TFLOP/s and GB/s
    beside: list[str]  # the time divided by those of clattn's other calls, by name
    first: bool  # the seconds of first calls, clattn's and torch's
    trains: bool  # the time of the backward pass, and the peers' times instead of ratios


def _cells(words: str, one: Measured, results: Results, shown: _Shown) -> Iterator[str]:
    def ratio(peer: str | None, style: str = "") -> str:
        if peer not in one.seconds:
            return ""
        factor = one.ratio(words, peer)
        colour = "green" if factor >= 1 else "red"
        return f"[{style}{colour}]{factor:.{2 if factor < 100 else 0}f}[/]"

    seconds = one.seconds[words]
    yield one.row.name
    yield _milliseconds(seconds)
    if shown.rates:
        read = one.row.limit == "read"
        yield "" if read else f"{one.rate(words) / 1e12:.3g}"
        yield f"{one.rate(words) / 1e9:.4g}" if read else ""
    beside = one.beside.get(words, {})
    for name in shown.beside:
        yield f"{seconds / beside[name]:.2f}" if name in beside else ""
    if shown.trains:
        yield _milliseconds(beside["backward"])
    share = one.limit_share(words)
    yield "" if share is None else f"{share:.0%}"
    yield ratio(one.best, "bold ")
    for peer in results.contestants.peers:
        if shown.trains:
            yield _milliseconds(one.seconds[peer.label]) if peer.label in one.seconds else ""
        else:
            yield ratio(peer.label)
    if shown.first:
        for name in (words, TorchFlex.label):
            first = results.first(name, one.row.name)
            yield "" if first is None else f"{first:.2f}"
    error = f"{one.errors[words]:.0e}"
    yield f"[bold red]{error} wrong[/]" if words in one.wrong else error


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"


def notes(results: Results) -> Iterator[str]:
    """Yield the lines below the tables."""
    measured, contestants = results.measured, results.contestants
    versions = dict.fromkeys(peer.version for peer in contestants.peers)
    threads = "" if any(one.row.on_device for one in measured) else f"{THREADS} threads each; "
    yield threads + (", ".join(versions) or "nothing to compare with")
    for words, device in contestants.devices.items():
        if tuning.is_tunable(device):
            tuned = tuning.count_in_use(device)
            how = f"tuned for {tuned} classes of problems" if tuned else "not tuned"
            yield f"clattn {words}: {how}"
    for label, reason in contestants.all_missing().items():
        yield f"{label}: {reason}"
    for name, alone in results.alone.items():
        if alone.mask is not None:
            yield f"{name}: {alone.mask}"
        for what, reason in alone.missing.items():
            yield f"{what}: FAILED on {name}: {reason}"
    for one in measured:
        for words in one.wrong:
            yield (
                f"{one.row.name}: WRONG on {words}, error {one.errors[words]:.1e}, "
                f"at most {one.allowed:.1e} is due to rounding"
            )
        for words, reason in one.failed.items():
            yield f"{one.row.name}: FAILED on {words}: {reason}"
        for note in one.notes:
            yield f"{one.row.name}: {note}"


def processor(listed: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, with the numbers that tell models of one name apart."""
    try:
        text = listed.read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if len(fields) < 3:
        return platform.machine()
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"


def as_json(results: Results) -> dict[str, Any]:
    """Return everything that was measured, with times in seconds and memory in bytes."""
    contestants = results.contestants
    devices: dict[str, dict[str, Any]] = {}
    for words, device in contestants.devices.items():
        limits = contestants.limits[words]
        devices[words] = {
            "name": device.name,
            "platform": device.platform,
            "driver_version": device.driver_version,
            "tuned_classes": tuning.count_in_use(device),
            "fma": {dtype: rate for dtype, rate in limits.fma.items() if rate},
            "exp": limits.exp or None,
            "read": limits.read,
            "product": limits.product,
        }
        if words in results.alone:
            alone = results.alone[words]
            mask = None if alone.mask is None else asdict(alone.mask)
            devices[words] |= {"block_mask": mask, "failed": alone.missing}
    return {
        "name": results.name or next(iter(devices.values()), {"name": ""})["name"],
        "processor": processor(),
        "date": date.today().isoformat(),
        "clattn": clattn.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "threads": THREADS,
        "devices": devices,
        "peers": {
            peer.label: {"name": peer.name, "version": peer.version} for peer in contestants.peers
        },
        "missing": contestants.all_missing(),
        "rounds": results.rounds,
        "rows": [_row_json(one, results) for one in results.measured],
    }


def _row_json(one: Measured, results: Results) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name, seconds in one.seconds.items():
        error = one.errors[name] if math.isfinite(one.errors[name]) else None  # JSON has no NaN
        found[name] = {"seconds": seconds, "rate": one.rate(name), "error": error}
        if name in results.contestants.devices:
            found[name] |= {"limit": one.limits[name], "limit_share": one.limit_share(name)}
        if name in one.beside:
            beside = one.beside[name]
            found[name] |= (
                {"backward_seconds": beside["backward"]}
                if one.row.trains is True
                else {"beside_seconds": beside}
            )
        if results.alone:
            found[name]["first_seconds"] = results.first(name, one.row.name)
    return {
        **{name: getattr(one.row, name) for name in ROW_FIELDS},
        "shape": dict(zip(("B", "Hq", "Hk", "L", "S", "E"), one.row.shape, strict=True)),
        "allowed_error": one.allowed,
        "best_peer": one.best,
        "results": found,
        "wrong": one.wrong,
        "failed": one.failed,
        "notes": one.notes,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
