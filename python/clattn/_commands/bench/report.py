"""The tables and the JSON file of the results."""

import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import clattn
from clattn._commands.bench import flex
from clattn._commands.bench.contest import Contestants, Measured
from clattn._commands.bench.scaling import Growth
from clattn._commands.timing import THREADS
from clattn._host import tuning

WIDTH = 100  # columns that a table may take
ROW_FIELDS = ("name", "shape", "dtype", "mask", "is_causal", "window", "limit", "on_device",
              "layout", "door", "flop", "bytes_read")  # fmt: skip


def open_console() -> Console:
    """Return a console as wide as a table: the terminal, if it is wide enough."""
    console = Console(highlight=False)
    wide = console.is_terminal and console.width >= WIDTH
    return console if wide else Console(highlight=False, width=WIDTH)


def make_table(words: str, measured: Sequence[Measured], contestants: Contestants) -> Table:
    """Return the table of one device."""
    device, limits = contestants.devices[words], contestants.limits[words]
    rates = [f"fma {dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in limits.fma.items() if rate]
    rates += [f"exp {limits.exp / 1e9:.1f} G/s"] if limits.exp else []
    rates += [
        f"reading {size / 2**20:.0f} MiB {rate / 1e9:.1f} GB/s"
        for size, rate in sorted(limits.read.items())
    ]
    rates += [f"torch's product {t} {r / 1e12:.0f} TFLOP/s" for t, r in limits.product.items()]
    table = Table(
        title=f"{device.name} ({device.platform})",
        caption="limits: " + ", ".join(rates) if rates else "",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    on_devices = any(one.row.on_device for one in measured)
    beside = any(one.beside for one in measured)
    table.add_column("row", no_wrap=True)
    headers = ["ms", *(["TFLOP/s", "GB/s"] if on_devices else ())]
    headers += ["beside\ncontiguous"] if beside else []
    for header in (*headers, "limit", "best"):
        table.add_column(header, justify="right", no_wrap=True)
    for peer in contestants.peers:
        table.add_column(peer.label.replace(" ", "\n"), justify="right", min_width=5)
    table.add_column("error", justify="right", no_wrap=True)
    for one in measured:
        if words in one.seconds:
            table.add_row(*_cells(words, one, contestants, on_devices, beside))
    return table


def _cells(
    words: str, one: Measured, contestants: Contestants, with_rates: bool, beside: bool
) -> Iterator[str]:
    def ratio(peer: str | None, style: str = "") -> str:
        if peer not in one.seconds:
            return ""
        factor = one.ratio(words, peer)
        colour = "green" if factor >= 1 else "red"
        return f"[{style}{colour}]{factor:.{2 if factor < 100 else 0}f}[/]"

    seconds = one.seconds[words]
    yield one.row.name
    yield f"{seconds * 1e3:.4g}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"
    if with_rates:
        read = one.row.limit == "read"
        yield "" if read else f"{one.rate(words) / 1e12:.3g}"
        yield f"{one.rate(words) / 1e9:.4g}" if read else ""
    if beside:
        yield f"{seconds / one.beside[words]:.2f}" if words in one.beside else ""
    share = one.limit_share(words)
    yield "" if share is None else f"{share:.0%}"
    yield ratio(one.best, "bold ")
    yield from (ratio(peer.label) for peer in contestants.peers)
    error = f"{one.errors[words]:.0e}"
    yield f"[bold red]{error} wrong[/]" if words in one.wrong else error


def notes(measured: Sequence[Measured], contestants: Contestants) -> Iterator[str]:
    """Yield the lines below the tables."""
    versions = dict.fromkeys(peer.version for peer in contestants.peers)
    threads = "" if any(one.row.on_device for one in measured) else f"{THREADS} threads each; "
    yield threads + (", ".join(versions) or "nothing to compare with")
    for words, device in contestants.devices.items():
        tuned = tuning.count_in_use(device)
        how = f"tuned for {tuned} classes of problems" if tuned else "not tuned"
        yield f"clattn {words}: {how}"
    for label, reason in contestants.missing.items():
        yield f"{label}: {reason}"
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


def as_json(measured: Sequence[Measured], contestants: Contestants, rounds: int) -> dict[str, Any]:
    """Return everything that was measured, with times in seconds."""
    devices = {}
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
    return {
        "clattn": clattn.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "threads": THREADS,
        "devices": devices,
        "peers": {
            peer.label: {"name": peer.name, "version": peer.version, "counts": peer.counts}
            for peer in contestants.peers
        },
        "missing": contestants.missing,
        "rounds": rounds,
        "rows": [_row_json(one, contestants) for one in measured],
    }


def _row_json(one: Measured, contestants: Contestants) -> dict[str, Any]:
    results: dict[str, dict[str, float | None]] = {}
    for name, seconds in one.seconds.items():
        error = one.errors[name] if math.isfinite(one.errors[name]) else None  # JSON has no NaN
        results[name] = {"seconds": seconds, "rate": one.rate(name), "error": error}
        if name in contestants.devices:
            results[name] |= {"limit": one.limits[name], "limit_share": one.limit_share(name)}
        if name in one.beside:
            results[name]["beside_seconds"] = one.beside[name]
    return {
        **{field: getattr(one.row, field) for field in ROW_FIELDS},
        "shape": dict(zip(("B", "Hq", "Hk", "L", "S", "E"), one.row.shape, strict=True)),
        "allowed_error": one.allowed,
        "best_peer": one.best,
        "results": results,
        "wrong": one.wrong,
        "failed": one.failed,
        "notes": one.notes,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def make_scaling_table(sizes: Sequence[int], growths: Sequence[Growth]) -> Table:
    """Return milliseconds and, below them, MiB beyond the inputs, by S."""

    def text(growth: Growth, size: int) -> str:
        if size not in growth.costs:
            return ""
        cost = growth.costs[size]
        memory = "?" if cost.memory is None else f"{cost.memory / 2**20:.1f}"
        return f"{cost.seconds * 1e3:.4g}\n[dim]{memory}[/]"

    title = "(1, 8, 8, S, S, 64) float32: ms, and MiB beyond the inputs"
    table = Table("S = L", title=title, box=box.SIMPLE_HEAD)
    table.columns[0].justify = "right"
    for growth in growths:
        table.add_column(growth.label, justify="right")
    for size in sizes:
        table.add_row(str(size), *(text(growth, size) for growth in growths))
    return table


def scaling_as_json(growths: Sequence[Growth]) -> dict[str, Any]:
    """Return everything that `--scaling` measured, in seconds and bytes."""
    curves = [
        {
            "label": growth.label,
            "costs": [{"S": size, **asdict(cost)} for size, cost in growth.costs.items()],
            "ended": growth.ended,
        }
        for growth in growths
    ]
    return {"clattn": clattn.__version__, "threads": THREADS, "scaling": curves}


@dataclass(frozen=True)
class FlexResults:
    """Everything that ``--flex`` measures."""

    measured: Sequence[Measured]
    contestants: Contestants
    alone: dict[str, flex.Alone]  # by words of a device, or torch's label

    def first(self, name: str, row: str) -> float | None:
        """Return the seconds of a first call, of a device or torch; None: not measured."""
        return self.alone[name].first.get(row) if name in self.alone else None


def make_flex_table(words: str, results: FlexResults) -> Table:
    """Return the table of ``--flex`` of one device, with what is asked of the figures."""
    device = results.contestants.devices[words]
    table = Table(title=f"{device.name} ({device.platform})", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("row", no_wrap=True)
    headers = ("ms", "torch\nms", "torch /\nclattn", "at the\nlimit",
               f"asked\n≥ {flex.LEAST_RATIO:g}", "beside\nown", "asked\n≤", "first\ns",
               "torch's\ns", f"asked\n≤ {flex.MOST_FIRST:g}", "error")  # fmt: skip
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for one in results.measured:
        if words in one.seconds:
            table.add_row(*_flex_cells(words, one, results))
    return table


def _flex_cells(words: str, one: Measured, results: FlexResults) -> Iterator[str]:
    assert isinstance(one.row, flex.FlexRow)
    seconds, torch = one.seconds[words], one.seconds.get(flex.TorchFlex.label)
    yield one.row.name
    yield f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
    if torch is None:
        yield from ("missing", "", "", "")
    else:
        yield f"{torch * 1e3:.3g}" if torch < 0.1 else f"{torch * 1e3:.0f}"
        yield f"{torch / seconds:.2f}"
        limit = one.limits[words]
        most = torch * limit / one.row.work if limit else math.inf
        yield f"{most:.2f}" if limit else ""
        is_met = torch / seconds >= flex.LEAST_RATIO
        yield _verdict(is_met) if is_met or most >= flex.LEAST_RATIO else "past limit"
    beside = seconds / one.beside[words] if words in one.beside else None
    yield "" if beside is None else f"{beside:.2f}"
    asked = one.row.most_beside
    yield "" if beside is None or asked is None else f"{asked:g} {_verdict(beside <= asked)}"
    first = results.first(words, one.row.name)
    torch_first = results.first(flex.TorchFlex.label, one.row.name)
    yield "" if first is None else f"{first:.2f}"
    yield "" if torch_first is None else f"{torch_first:.1f}"
    if first is None or torch_first is None:
        yield ""
    else:
        yield _verdict(first <= flex.MOST_FIRST * torch_first)
    error = f"{one.errors[words]:.0e}"
    yield f"[bold red]{error} wrong[/]" if words in one.wrong else error


def _verdict(is_met: bool, markup: bool = True) -> str:
    text, colour = ("met", "green") if is_met else ("not met", "red")
    return f"[{colour}]{text}[/]" if markup else text


def flex_notes(name: str, results: FlexResults) -> Iterator[str]:
    """Yield the lines below the tables of ``--flex`` about a device, or torch."""
    alone = results.alone[name]
    if alone.mask is not None:
        length, seconds, memory = alone.mask.length, alone.mask.seconds, alone.mask.memory
        most, allowed = flex.MOST_MASK_SECONDS, flex.MOST_MASK_MEMORY
        line = f"{name}: create_block_mask, {length} x {length}: {seconds * 1e3:.3g} ms "
        line += f"(asked < {most * 1e3:g}: {_verdict(seconds < most, False)})"
        if memory is not None:
            line += f", {memory / 2**20:.1f} MiB (asked < {allowed >> 20}: "
            line += f"{_verdict(memory < allowed, False)})"
        yield line
    for what, reason in alone.missing.items():
        yield f"{what}: FAILED on {name}: {reason}"


def flex_as_json(results: FlexResults, rounds: int) -> dict[str, Any]:
    """Return everything that ``--flex`` measured, with times in seconds and memory in bytes."""
    content = as_json(results.measured, results.contestants, rounds)
    for row in content["rows"]:
        for name, result in row["results"].items():
            result["first_seconds"] = results.first(name, row["name"])
    for words, facts in content["devices"].items():
        alone = results.alone[words]
        mask = None if alone.mask is None else asdict(alone.mask)
        facts |= {"block_mask": mask, "failed": alone.missing}
    return content
