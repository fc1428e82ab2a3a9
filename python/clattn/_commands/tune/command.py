"""The command ``python -m clattn tune``."""

import argparse
import fnmatch
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import clattn
from clattn import Device
from clattn._commands.common import CommandError, add_device, find_device, need, number
from clattn._host import tuning
from clattn._host.progress import open_bar
from clattn._host.tuning import Class, Winners

SECONDS = 120.0


@dataclass
class Session:
    """What a run of the command has found, also if it was stopped."""

    device: Device
    winners: Winners  # of this run and of earlier ones
    tuned: list[Any] = field(default_factory=list)  # search.Tuned
    failed: dict[Class, str] = field(default_factory=dict)
    left: int = 0  # classes that are still to do
    stopped: str = ""
    not_kept: str = ""  # why the file could not be written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`."""
    add = parser.add_argument
    add_device(parser)
    add("--seconds", metavar="N", type=number(float, 0, above=True), default=SECONDS,
        help="stop after so long; the next run goes on (default: %(default)g)")  # fmt: skip
    add("--classes", metavar="NAME", nargs="+", type=_classes,
        help="classes of problems, such as 'float32-64-many', or patterns (default: all)"
        )  # fmt: skip
    add("--again", action="store_true", help="forget what earlier runs have found")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    need("bench", "rich")
    forced = os.environ.get("CLATTN_KERNEL", "")
    if forced and not forced.startswith("-"):
        message = f"CLATTN_KERNEL is {forced!r}; expected none, or variants to leave out"
        raise CommandError(message, 2)
    return _run(arguments, find_device(arguments.device))


def _classes(pattern: str) -> list[Class]:
    found = [one for one in tuning.classes() if fnmatch.fnmatchcase(str(one), pattern)]
    if not found:
        example = next(tuning.classes())
        raise argparse.ArgumentTypeError(f"{pattern!r} names no class; one is {example}")
    return found


def _run(arguments: argparse.Namespace, device: Device) -> int:
    from clattn._commands.bench.report import open_console

    console = open_console()
    path = tuning.path_of(device)
    kept, warning = tuning.read(path, device)
    if warning:
        print(f"clattn tune: {warning}", file=sys.stderr)
    chosen = {one for classes in arguments.classes or [tuning.classes()] for one in classes}
    if arguments.again:
        kept = {one: winner for one, winner in kept.items() if one not in chosen}
    session = Session(device, kept)
    todo = [one for one in _by_value(chosen, device) if one not in kept]
    status = 0
    try:
        _tune(session, todo, arguments.seconds)
    except KeyboardInterrupt:
        session.stopped, status = "interrupted", 130
    _report(session, console, path)
    return status or (1 if session.failed else 0)


def _by_value(chosen: set[Class], device: Device) -> list[Class]:
    """Return the classes in the order of what they are worth.

    Common head sizes come first, on GPUs those of float16, which matrix units multiply.
    """

    def rank(one: Class) -> tuple[bool, bool, bool]:
        is_late = device.type != "cpu" and one.dtype != "float16"
        return one.dtype == "float64", one.head_size not in (64, 128), is_late

    return sorted((one for one in tuning.classes() if one in chosen), key=rank)


def _tune(session: Session, todo: Sequence[Class], seconds: float) -> None:
    """Tune classes until the time is over, and keep each that is finished."""
    from clattn._commands.tune import search
    from clattn._commands.tune.candidates import count, has_candidates, variant_of

    device = session.device
    todo = [one for one in todo if has_candidates(one, device) and _can_run(one, device)]
    session.left = len(todo)
    special = [variant for variant in ("amx", "pairs") if search.runs(variant, device)]
    variants = {one: variant_of(one, device, special) for one in todo}
    steps = sum(count(one, variant, device) for one, variant in variants.items())
    done = itertools.count()
    with open_bar(steps, sys.stdout) as show:
        tuner = search.Tuner(
            device,
            time.monotonic() + seconds,
            lambda one, knobs: show(next(done), f"{one}  {_words(knobs)}"),
        )
        try:
            for one in todo:
                _tune_class(session, tuner, one, variants[one])
        except search.OutOfTime:
            session.stopped = f"stopped after {seconds:g} s"


def _tune_class(session: Session, tuner: Any, one: Class, variant: str) -> None:
    try:
        tuned = tuner.tune(one, variant)
    except (clattn.DeviceError, MemoryError, ValueError) as error:
        session.failed[one] = " ".join(str(error).split())[:160]
    else:
        session.tuned.append(tuned)
        session.winners[one] = tuned.winner
        _keep(session)
    session.left -= 1


def _keep(session: Session) -> None:
    """Write the file; a folder that cannot be written to is reported at the end."""
    try:
        tuning.write(session.device, session.winners)
    except OSError as error:
        session.not_kept = str(error)


def _can_run(one: Class, device: Device) -> bool:
    if one.dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401
        except ModuleNotFoundError:
            return False
    return one.dtype != "float64" or device.float64


def _words(knobs: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in knobs.items()) or "the rule"


def _report(session: Session, console: Any, path: str | None) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    device = session.device
    table = Table(title=escape(f"{device.name} ({device.platform})"), box=box.SIMPLE_HEAD)
    for header in ("class", "variant"):
        table.add_column(header, no_wrap=True)
    for header in ("rule ms", "tuned ms", "gain"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("knobs")
    for tuned in session.tuned:
        winner = tuned.winner
        gain = f"{winner.rule_seconds / winner.seconds - 1:.0%}" if winner.knobs else ""
        after = f"{winner.seconds * 1e3:.4g}" if winner.knobs else ""
        table.add_row(str(tuned.one), winner.variant, f"{winner.rule_seconds * 1e3:.4g}", after,
                      f"[green]{gain}[/]", _words(winner.knobs))  # fmt: skip
        for knobs, reason in tuned.failed:
            said = escape(f"{_words(knobs)}: {reason}")
            table.add_row("", winner.variant, "", "", "[red]out[/]", said)
    for one, reason in session.failed.items():
        table.add_row(str(one), "", "", "", "[red]failed[/]", escape(reason))
    if table.rows:
        console.print(table)
    better = sum(bool(winner.knobs) for winner in session.winners.values())
    measured = len(session.winners)
    console.print(f"classes measured: {measured}; better than the rule: {better}", markup=False)
    if session.stopped:
        console.print(session.stopped, markup=False)
    if session.left:
        console.print(f"classes left: {session.left}; run the command again", markup=False)
    if session.not_kept:
        console.print(f"cannot be kept: {session.not_kept}", markup=False, soft_wrap=True)
    elif session.winners:
        console.print(f"kept in {path or 'memory only'}", markup=False, soft_wrap=True)
    if tuning.is_off():
        console.print("CLATTN_TUNING is off: calls do not use the winners", markup=False)
