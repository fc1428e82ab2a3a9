"""Results of one or several machines in one table of Markdown, from what bench writes as JSON."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clattn._commands.bench.rows import SERVE_TITLES, TITLES, TRAIN_TITLES, Row
from clattn._commands.common import CommandError

LINE_WIDTH = 100  # of Markdown, but for tables
Record = dict[str, Any]  # the content of a JSON file


@dataclass(frozen=True)
class Column:
    """A device of a record, with the words that name it there."""

    record: Record
    words: str

    @property
    def label(self) -> str:
        """The machine's name; with its platform where the record has several devices."""
        devices = self.record["devices"]
        several = f", {devices[self.words]['platform']}" if len(devices) > 1 else ""
        return f"{self.record['name']}{several}"

    def milliseconds(self, name: str) -> float | None:
        """Return clattn's time of a row; None: not measured."""
        found = _results(self.record, name)[0].get(self.words)
        return None if found is None else 1e3 * float(found["seconds"])

    def ratio(self, name: str) -> float | None:
        """Return the time of the fastest peer divided by clattn's; None: one is missing."""
        results, peer = _results(self.record, name)
        if self.words not in results or peer is None:
            return None
        return float(results[peer]["seconds"] / results[self.words]["seconds"])

    def peer_milliseconds(self, name: str) -> float | None:
        """Return the time of the fastest peer; None: not measured."""
        results, peer = _results(self.record, name)
        return None if peer is None else 1e3 * float(results[peer]["seconds"])

    def limit_share(self, name: str) -> float | None:
        """Return how near a row is to the limit; None: not known."""
        share = _results(self.record, name)[0].get(self.words, {}).get("limit_share")
        return None if share is None else float(share)

    def beside(self, name: str) -> dict[str, float]:
        """Return clattn's time of a row of serving divided by those of its other calls, by name."""
        found = _results(self.record, name)[0].get(self.words)
        if found is None or name not in SERVE_TITLES:
            return {}
        return {other: found["seconds"] / s for other, s in found["beside_seconds"].items()}

    def peer(self, name: str) -> str:
        """Return the name of the fastest peer."""
        label = str(_results(self.record, name)[1])
        return str(self.record["peers"].get(label, {}).get("name", label))


def _results(record: Record, name: str) -> tuple[dict[str, Any], str | None]:
    for row in record["rows"]:
        if row["name"] == name:
            return row["results"], row["best_peer"]
    return {}, None


def read(path: Path) -> Record:
    """Return what a run of bench has written with ``--json``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", 2) from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or not {"name", "devices", "rows"} <= content.keys():
        raise CommandError(f"{path} is no JSON file that bench --json wrote", 2)
    return content


def columns(records: Sequence[Record]) -> list[Column]:
    """Return every device of every record."""
    return [Column(record, words) for record in records for words in record["devices"]]


def names_in(records: Sequence[Record], chosen: Sequence[Row] | None) -> list[str]:
    """Return the rows that records have, in the order of the first that has each.

    `chosen`: no others, and in this order.
    """
    measured = dict.fromkeys(row["name"] for record in records for row in record["rows"])
    if chosen is None:
        return list(measured)
    return [name for name in dict.fromkeys(row.name for row in chosen) if name in measured]


def as_markdown(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the table of some rows, and a line for each machine: what it is, when it ran.

    Rows of training also have the other's time, and the share of the limit. Those of serving have
    the times of clattn's other calls in the place of others'.
    """
    shown = columns(records)
    trained = {
        row["name"] for record in records for row in record["rows"] if row.get("trains") is True
    }
    trains = not trained.isdisjoint(names)
    beside = list(dict.fromkeys(o for one in shown for name in names for o in one.beside(name)))
    titles = ["call", *(title for one in shown for title in _titles(one, names, trains, beside))]
    rows = [
        [title_of(name), *(cell for one in shown for cell in _cells(one, name, trains, beside))]
        for name in names
    ]
    lines = [f"| {' | '.join(row)} |" for row in (titles, *rows)]
    lines.insert(1, "|---" * len(titles) + "|")
    lines.append("")
    for record in records:
        lines += textwrap.wrap(f"- {caption(record)}", LINE_WIDTH, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def title_of(name: str) -> str:
    """Return what a reader calls a row."""
    return (TITLES | TRAIN_TITLES | SERVE_TITLES).get(name, name)


def _titles(
    one: Column, names: Sequence[str], trains: bool, beside: Sequence[str]
) -> Iterator[str]:
    yield f"{one.label}, ms"
    if beside:
        yield from (f"beside {other}" for other in beside)
        return
    if trains:
        peers = (one.peer(name) for name in names if one.peer_milliseconds(name) is not None)
        yield f"{next(peers, 'other')}, ms"
    yield "best"
    if trains:
        yield "limit"


def _cells(one: Column, name: str, trains: bool, beside: Sequence[str]) -> Iterator[str]:
    def digits(number: float | None) -> str:
        return "" if number is None else two_digits(number)

    yield digits(one.milliseconds(name))
    if beside:
        yield from (digits(one.beside(name).get(other)) for other in beside)
        return
    if trains:
        yield digits(one.peer_milliseconds(name))
    yield digits(one.ratio(name))
    if trains:
        share = one.limit_share(name)
        yield "" if share is None else f"{two_digits(100 * share)} %"


def two_digits(number: float) -> str:
    """Return a number with two significant digits: 0.75, 2.0, 19, 130."""
    digits = f"{number:.1e}".partition("e")
    exponent = int(digits[2])
    return f"{float(f'{number:.1e}'):.{max(0, 1 - exponent)}f}"


def caption(record: Record) -> str:
    """Return what a machine is, what ran there, and when."""
    on_device = all(row.get("on_device", False) for row in record["rows"])
    devices = dict.fromkeys(
        ("" if device["name"] in record["processor"] else f"{device['name']}, ")
        + f"{device['platform']} {device['driver_version']}"
        for device in record["devices"].values()
    )
    parts = [
        record["processor"],
        "" if on_device else f"{record['threads']} threads each",
        *devices,
        *dict.fromkeys(peer["version"] for peer in record["peers"].values()),
        f"clattn {record['clattn']}",
        record["date"],
    ]
    return f"{record['name']}: {'; '.join(filter(None, parts))}."
