"""The command ``python -m clattn bench``."""

import argparse
import fnmatch
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import clattn
from clattn import Device, _core
from clattn._commands import listing
from clattn._commands.bench import contest, figures, flex, torch_peers
from clattn._commands.bench.contest import Measured
from clattn._commands.bench.flex import FLEX_ROWS, ROW_SECONDS, FlexRow
from clattn._commands.bench.gpu import ALL_GPU_ROWS, gpu_calls
from clattn._commands.bench.limits import Limits
from clattn._commands.bench.peers import Peer
from clattn._commands.bench.rows import MODEL_ROWS, ROWS, TITLES, Row, numpy_dtype
from clattn._commands.bench.serving import SERVE_ROWS, ServeRow, serve_calls
from clattn._commands.bench.training import TRAIN_ROWS, TorchTraining, train_calls
from clattn._commands.common import CommandError, find_device, need, number
from clattn._host.progress import open_bar

# Rows that are measured without others, by the word that asks for them.
APART: dict[str, Sequence[Row]] = {"train": TRAIN_ROWS, "serve": SERVE_ROWS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`."""
    add = parser.add_argument
    add("--rows", metavar="NAME", nargs="+", type=_rows,
        help="names of rows, patterns such as '*decode*', 'models', 'calls', 'train', rows of "
        "forward and backward pass, or 'serve', sequences of different lengths (default: all but "
        "these two)"
        )  # fmt: skip
    add("--gpu", action="store_true",
        help="measure rows for GPUs, on arrays of the device, beside torch on CUDA")  # fmt: skip
    add("--flex", action="store_true",
        help="measure rows of flex_attention, beside torch's (it needs g++)")  # fmt: skip
    # Divides the lengths of these rows: tools and tests try them on a small device.
    add("--scale", type=number(int, 1), default=1, help=argparse.SUPPRESS)
    add("--list", action="store_true", help="list the rows and leave")
    add("--device", metavar="WORDS", action="append",
        help='where to run, may be given again: "cpu", "gpu:1", part of a name, or "all"'
        )  # fmt: skip
    add("--rounds", metavar="N", type=number(int, 1), default=10,
        help="turns of each implementation (default: %(default)s)")  # fmt: skip
    add("--json", metavar="PATH", type=Path, help="write everything as JSON")
    add("--plot", metavar="PATH", type=Path, help="write a chart as PNG")
    add("--markdown", metavar="PATH", type=Path,
        help="write a table as Markdown, with versions and the date")  # fmt: skip
    add("--name", metavar="NAME", default="",
        help="the machine's name in tables and charts (default: its device's)")  # fmt: skip
    add("--from", dest="records", metavar="PATH", nargs="+", type=Path,
        help="measure nothing: table and chart of files that --json wrote")  # fmt: skip
    parser.set_defaults(run=run)


def _rows(pattern: str) -> list[Row]:
    if pattern == "models":
        return list(MODEL_ROWS)
    if pattern in APART:
        return list(APART[pattern])
    everything = (*ROWS, *ALL_GPU_ROWS, *FLEX_ROWS, *TRAIN_ROWS, *SERVE_ROWS)
    if pattern == "calls":
        by_name = {row.name: row for row in everything}
        return [by_name[name] for name in TITLES]
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
    everyone: Sequence[str | None] = words or [None]
    for word in everyone:
        chosen += clattn.devices() if word == "all" else [find_device(word)]
    return {names[device]: device for device in chosen}


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if arguments.plot is not None:
        need("bench", "matplotlib")
    for path in (arguments.json, arguments.plot, arguments.markdown):
        try:
            if path is not None:
                existed = path.exists()
                with path.open("ab"):
                    pass
                if not existed:
                    path.unlink()
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}", 2) from error


def _print_rows(rows: Sequence[Row]) -> None:
    print(f"{'row':<18} {'B, Hq, Hk, L, S, E':<26} {'dtype':<9} more")
    for row in rows:
        more = [f"{row.mask} mask"] if row.mask else []
        more += ["causal"] if row.is_causal else []
        more += ["lower right"] if row.is_causal == "lower_right" else []
        is_view = row.layout != "heads" and not isinstance(row, ServeRow)
        more += [row.layout] if is_view else []
        more += [f"clattn.{row.door}"] if row.door != "torch" else []
        more += [f"window {row.window}"] if row.window is not None else []
        if isinstance(row, FlexRow):
            more += ["ALiBi"] if row.alibi else []
            more += ["documents"] if row.documents else []
        if isinstance(row, ServeRow):
            more += [f"{len(row.lengths)} sequences", *([row.code] if row.code else [])]
            more += [f"pages of {row.page_size}"] if row.page_size else []
        more += ["both passes"] if row.trains is True else []
        more += ["backward"] if row.trains == "backward" else []
        sizes = ", ".join(map(str, row.shape))
        print(f"{row.name:<18} {sizes:<26} {row.dtype:<9} {', '.join(more)}".rstrip())


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 where a result was wrong."""
    if arguments.gpu and arguments.flex:
        raise CommandError("--gpu and --flex have rows of their own: leave out one of them", 2)
    if arguments.scale > 1 and not (arguments.gpu or arguments.flex or _apart(arguments)):
        raise CommandError(
            "--scale is for rows of --gpu, --flex, --rows train or serve: add one of them", 2
        )
    if arguments.records:
        return _show(arguments)
    rows = _chosen_rows(arguments)
    if arguments.list:
        _print_rows(rows)
        return 0
    need("bench", "rich")
    _check_outputs(arguments)
    rows = _possible(rows)
    return _measure(arguments, rows, _choose_devices(arguments.device))


def _show(arguments: argparse.Namespace) -> int:
    """Write table and chart of results that earlier runs have written."""
    if arguments.json is not None:
        raise CommandError("--from measures nothing: leave out --json", 2)
    _check_outputs(arguments)
    records = [figures.read(path) for path in arguments.records]
    chosen = arguments.rows and [row for rows in arguments.rows for row in rows]
    _write(arguments, records, figures.names_in(records, chosen))
    return 0


def _write(
    arguments: argparse.Namespace, records: Sequence[figures.Record], names: Sequence[str]
) -> None:
    if arguments.markdown is not None:
        arguments.markdown.write_text(figures.as_markdown(records, names), encoding="utf-8")
    elif arguments.records:
        print(figures.as_markdown(records, names), end="")
    if arguments.plot is not None:
        _plot(arguments.plot, records, names)


def _apart(arguments: argparse.Namespace) -> str | None:
    """Return the word of `APART` of whose rows, and no others, a pattern of --rows asks."""
    for word, table in APART.items():
        if any(set(rows) <= set(table) for rows in arguments.rows or ()):
            return word
    return None


def _chosen_rows(arguments: argparse.Namespace) -> list[Row]:
    table: Sequence[Row] = FLEX_ROWS if arguments.flex else ALL_GPU_ROWS if arguments.gpu else ROWS
    word = _apart(arguments)
    if table is ROWS and word is not None:
        table = APART[word]
        if any(set(rows).isdisjoint(table) for rows in arguments.rows):
            raise CommandError(f"--rows: the rows of {word!r} are measured without others", 2)
    chosen = dict.fromkeys(row for rows in arguments.rows or [table] for row in rows)
    # Those for GPUs keep the order that is asked for: time on a GPU may end before them.
    first, second = (chosen, table) if arguments.gpu else (table, chosen)
    rows = [row.scaled(arguments.scale) for row in first if row in second]
    if not rows:
        option = "--flex" if arguments.flex else "--gpu" if arguments.gpu else ""
        what = f"of {option}" if option else "without --gpu or --flex"
        raise CommandError(f"--rows: none {what}", 2)
    return rows


def _possible(rows: list[Row]) -> list[Row]:
    """Return the rows whose numbers NumPy can hold."""
    try:
        numpy_dtype("bfloat16")
    except ModuleNotFoundError:
        left = [row for row in rows if row.dtype != "bfloat16"]
        if not left:
            message = "these rows are of bfloat16, which needs ml_dtypes: pip install ml_dtypes"
            raise CommandError(message) from None
        if len(left) < len(rows):
            print("ml_dtypes is not installed: no bfloat16", file=sys.stderr)
        return left
    return rows


def _measure(arguments: argparse.Namespace, rows: list[Row], devices: dict[str, Device]) -> int:
    from clattn._commands.bench import report  # which needs rich

    classes: Sequence[type[Peer]] = contest.peer_classes(arguments.gpu)
    make_calls: contest.MakeCalls = contest.clattn_calls
    seconds = math.inf
    if arguments.gpu:
        make_calls = gpu_calls
    elif arguments.flex:
        classes, make_calls, seconds = [flex.TorchFlex], flex.flex_calls, ROW_SECONDS
    elif rows[0].trains:
        classes, make_calls, seconds = [TorchTraining], train_calls, ROW_SECONDS
    elif isinstance(rows[0], ServeRow):
        classes, make_calls, seconds = [], serve_calls, ROW_SECONDS
    measured: list[Measured] = []
    alone: dict[str, flex.Alone] = {}
    with ExitStack() as stack:
        peers, missing = contest.find_peers(stack, classes)
        product = torch_peers.find_product() if arguments.gpu else None
        limits = {words: Limits(device, product) for words, device in devices.items()}
        contestants = contest.Contestants(devices, peers, limits, missing)
        results = report.Results(measured, contestants, arguments.rounds, alone, arguments.name)
        apart = [*devices, *(peer.label for peer in peers)] if arguments.flex else []
        show = stack.enter_context(open_bar(len(rows) + len(apart), sys.stdout))

        def keep() -> None:
            if arguments.json is not None:  # after each step: a long run may be stopped
                report.write_json(arguments.json, report.as_json(results))

        for done, row in enumerate(rows):
            show(done, row.name)
            measured.append(
                contest.measure(row, contestants, arguments.rounds, make_calls, seconds)
            )
            keep()
        for done, name in enumerate(apart, len(rows)):
            show(done, f"first calls, {name}")
            alone[name] = flex.measure_alone(name, rows, arguments.scale)
            keep()
    console = report.open_console()
    for words in devices:
        console.print(report.make_table(words, results))
    for line in report.notes(results):
        console.print(line, markup=False)
    record = report.as_json(results)
    _write(arguments, [record], figures.names_in([record], None))
    fails = any(one.wrong or one.failed for one in measured)
    return 1 if fails or any(one.missing for one in alone.values()) else 0


def _plot(path: Path, records: Sequence[figures.Record], names: Sequence[str]) -> None:
    shown = figures.columns(records)
    compared = [name for name in names if any(one.ratio(name) is not None for one in shown)]
    if not compared:
        print("no chart: there is nothing to compare with")
        return
    from clattn._commands.bench import chart  # which needs matplotlib

    chart.save_ratios(path, records, compared)
