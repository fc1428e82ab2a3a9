"""The command ``python -m clattn bench``."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import clattn
from clattn import Device, _core
from clattn._commands import listing
from clattn._commands.bench.flex import FLEX_ROWS, ROW_SECONDS, FlexRow
from clattn._commands.bench.rows import GPU_ROWS, MODEL_ROWS, ROWS, Row, numpy_dtype, scaled
from clattn._commands.bench.scaling import LARGEST, SMALLEST

if TYPE_CHECKING:
    from rich.console import Console

    from clattn._commands.bench.contest import Contestants, Measured


class BenchError(Exception):
    """A message for the user, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`."""
    add = parser.add_argument
    add("--rows", metavar="NAME", nargs="+", type=_rows,
        help="names of rows, patterns such as '*decode*', or 'models' (default: all)")  # fmt: skip
    add("--scaling", metavar="S", nargs="?", type=_whole(SMALLEST), const=LARGEST,
        help="measure time and memory of (1, 8, 8, S, S, 64) up to that S instead "
        "(default: %(const)s)")  # fmt: skip
    add("--gpu", action="store_true",
        help="measure rows for GPUs, on arrays of the device, beside torch on CUDA")  # fmt: skip
    add("--flex", action="store_true",
        help="measure rows of flex_attention, beside torch's (it needs g++)")  # fmt: skip
    add("--scale", metavar="N", type=_whole(1), default=1,
        help="divide the lengths of rows of --gpu or --flex, to try them on a small device"
        )  # fmt: skip
    add("--list", action="store_true", help="list the rows and leave")
    add("--device", metavar="WORDS", action="append",
        help='where to run, may be given again: "cpu", "gpu:1", part of a name, or "all"'
        )  # fmt: skip
    add("--rounds", metavar="N", type=_whole(1), default=10,
        help="turns of each implementation (default: %(default)s)")  # fmt: skip
    add("--json", metavar="PATH", type=Path, help="write everything as JSON")
    add("--plot", metavar="PATH", type=Path, help="write a chart as PNG")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 where a result was wrong."""
    try:
        return _run(arguments)
    except BenchError as error:
        print(f"clattn bench: {error}", file=sys.stderr)
        return error.status


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            message = f"{text!r}; expected a whole number of {least} or more"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return read


def _rows(pattern: str) -> list[Row]:
    if pattern == "models":
        return list(MODEL_ROWS)
    everything = (*ROWS, *GPU_ROWS, *FLEX_ROWS)
    found = [row for row in everything if fnmatch.fnmatchcase(row.name, pattern)]
    if not found:
        names = ", ".join(dict.fromkeys(row.name for row in everything))
        raise argparse.ArgumentTypeError(f"{pattern!r} names no row; there are {names}")
    return found


def _choose_devices(words: Sequence[str] | None) -> dict[str, Device]:
    """Return the devices by the word that names each."""
    everything = _core.all_devices()
    names = dict(zip(everything, listing.words_of(everything), strict=True))
    chosen: list[Device] = []
    try:
        if not words:
            chosen.append(clattn.get_default_device())
        for word in words or []:
            if word == "all":
                chosen += clattn.devices()
            else:
                with clattn.use_device(word) as device:
                    chosen.append(device)
    except ValueError as error:  # words, or CLATTN_DEVICE, that name no device
        raise BenchError(str(error), 2) from error
    return {names[device]: device for device in chosen}


def _check_output(path: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if path is None:
        return
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}", 2) from error


def _print_rows(rows: Sequence[Row]) -> None:
    print(f"{'row':<18} {'B, Hq, Hk, L, S, E':<26} {'dtype':<9} more")
    for row in rows:
        more = [f"{row.mask} mask"] if row.mask else []
        more += ["causal"] if row.is_causal else []
        more += ["lower right"] if row.is_causal == "lower_right" else []
        more += [row.layout] if row.layout != "heads" else []
        more += [f"clattn.{row.door}"] if row.door != "torch" else []
        more += [f"window {row.window}"] if row.window is not None else []
        if isinstance(row, FlexRow):
            more += ["ALiBi"] if row.alibi else []
            more += ["documents"] if row.documents else []
        sizes = ", ".join(map(str, row.shape))
        print(f"{row.name:<18} {sizes:<26} {row.dtype:<9} {', '.join(more)}".rstrip())


def _run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        _print_rows(_table(arguments))
        return 0
    if arguments.gpu and arguments.flex:
        raise BenchError("--gpu and --flex have rows of their own: leave out one of them", 2)
    others = arguments.rows is not None or arguments.gpu or arguments.flex
    if arguments.scaling is not None and others:
        message = "--scaling measures sizes of its own: leave out --rows, --gpu and --flex"
        raise BenchError(message, 2)
    if arguments.scale > 1 and not (arguments.gpu or arguments.flex):
        raise BenchError("--scale is for rows of --gpu or --flex: add one of them", 2)
    try:
        import rich  # noqa: F401

        if arguments.plot is not None:
            import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        message = f'{error.name} is missing; install it with: pip install "clattn[bench]"'
        raise BenchError(message, 1) from None
    _check_output(arguments.json)
    _check_output(arguments.plot)
    devices = _choose_devices(arguments.device)
    if arguments.scaling is not None:
        return _run_scaling(arguments, devices)
    if arguments.flex:
        return _run_flex(arguments, devices)
    return _run_rows(arguments, devices)


def _table(arguments: argparse.Namespace) -> Sequence[Row]:
    return FLEX_ROWS if arguments.flex else GPU_ROWS if arguments.gpu else ROWS


def _chosen_rows(arguments: argparse.Namespace) -> list[Row]:
    table = _table(arguments)
    chosen = {row for rows in arguments.rows or [table] for row in rows}
    rows = [scaled(row, arguments.scale) for row in table if row in chosen]
    if not rows:
        option = "--flex" if arguments.flex else "--gpu" if arguments.gpu else ""
        what = f"of {option}" if option else "without --gpu or --flex"
        raise BenchError(f"--rows: none {what}", 2)
    try:
        numpy_dtype("bfloat16")
    except ModuleNotFoundError:
        print("ml_dtypes is not installed: no bfloat16", file=sys.stderr)
        return [row for row in rows if row.dtype != "bfloat16"]
    return rows


def _run_rows(arguments: argparse.Namespace, devices: dict[str, Device]) -> int:
    from rich.progress import Progress

    from clattn._commands.bench import contest, report, torch_peers
    from clattn._commands.bench.limits import Limits

    rows = _chosen_rows(arguments)
    console = report.open_console()
    with ExitStack() as stack:
        peers, missing = contest.find_peers(stack, contest.peer_classes(arguments.gpu))
        product = torch_peers.find_product() if arguments.gpu else None
        limits = {words: Limits(device, product) for words, device in devices.items()}
        missing |= {f"limits of {w}": limit.missing for w, limit in limits.items() if limit.missing}
        contestants = contest.Contestants(devices, peers, limits, missing)
        measured: list[Measured] = []
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("", total=len(rows) * arguments.rounds)
        advance = functools.partial(progress.advance, task)
        for row in rows:
            progress.update(task, description=row.name)
            measured.append(contest.measure(row, contestants, arguments.rounds, advance))
            if arguments.json is not None:  # after each row: a long run may be stopped
                content = report.as_json(measured, contestants, arguments.rounds)
                report.write_json(arguments.json, content)
    for words in devices:
        console.print(report.make_table(words, measured, contestants))
    for line in report.notes(measured, contestants):
        console.print(line, markup=False)
    _plot(arguments.plot, measured, contestants, console)
    return 1 if any(one.wrong or one.failed for one in measured) else 0


def _plot(
    path: Path | None, measured: Sequence[Measured], contestants: Contestants, console: Console
) -> None:
    if path is None:
        return
    if not contestants.devices or not any(one.best for one in measured):
        console.print("no chart: there is nothing to compare with")
        return
    from clattn._commands.bench import chart

    chart.save_ratios(path, measured, contestants)


def _run_flex(arguments: argparse.Namespace, devices: dict[str, Device]) -> int:
    from rich.progress import Progress

    from clattn._commands.bench import contest, flex, report
    from clattn._commands.bench.limits import Limits

    rows = _chosen_rows(arguments)
    console = report.open_console()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console, transient=True))
        peers, missing = contest.find_peers(stack, [flex.TorchFlex])
        names = [*devices, *(peer.label for peer in peers)]
        task = progress.add_task("", total=len(rows) + len(names))
        limits = {words: Limits(device) for words, device in devices.items()}
        missing |= {f"limits of {w}": limit.missing for w, limit in limits.items() if limit.missing}
        contestants = contest.Contestants(devices, peers, limits, missing)
        measured: list[Measured] = []
        for row in rows:
            progress.update(task, description=row.name)
            measured.append(contest.measure(
                row, contestants, arguments.rounds, lambda: None, flex.flex_calls, ROW_SECONDS
            ))  # fmt: skip
            progress.advance(task)
        alone = {}
        for name in names:
            progress.update(task, description=f"first calls, {name}")
            alone[name] = flex.measure_alone(name, rows, arguments.scale)
            progress.advance(task)
    results = report.FlexResults(measured, contestants, alone)
    for words in devices:
        console.print(report.make_flex_table(words, results))
    for name in names:
        for line in report.flex_notes(name, results):
            console.print(line, markup=False)
    for line in report.notes(measured, contestants):
        console.print(line, markup=False)
    if arguments.json is not None:
        report.write_json(arguments.json, report.flex_as_json(results, arguments.rounds))
    _plot(arguments.plot, measured, contestants, console)
    wrong = any(one.wrong or one.failed for one in measured)
    return 1 if wrong or any(one.missing for one in alone.values()) else 0


def _run_scaling(arguments: argparse.Namespace, devices: dict[str, Device]) -> int:
    from rich.progress import Progress

    from clattn._commands.bench import report, scaling

    sizes = scaling.sizes_up_to(arguments.scaling)
    console = report.open_console()
    growths = scaling.find_growths(list(devices))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(growths) * len(sizes))
        for size in sizes:
            for growth in growths:
                progress.update(task, description=f"S = {size}, {growth.label}")
                scaling.measure_next(growth, size)
                progress.advance(task)
    console.print(report.make_scaling_table(sizes, growths))
    for growth in growths:
        if growth.ended:
            console.print(f"{growth.label}: {growth.ended}", markup=False)
        for size in growth.wrong():
            console.print(f"{growth.label}: WRONG at S = {size}", markup=False)
    if arguments.json is not None:
        report.write_json(arguments.json, report.scaling_as_json(growths))
    if arguments.plot is not None:
        from clattn._commands.bench import chart

        chart.save_scaling(arguments.plot, sizes, growths)
    return 1 if any(growth.wrong() for growth in growths) else 0
