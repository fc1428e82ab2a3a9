# SPDX-License-Identifier: MIT
"""Measures how time and memory of one call grow with S: (1, 8, 8, S, S, 64) in float32.

    python benchmarks/growth.py [S] [--train] [--device WORDS] [--json PATH] [--plot PATH]

S is the largest size. `--train` measures forward and backward pass of one head instead. Each figure
comes from a process of its own: memory that an allocator kept from an earlier call would hide how
much this call takes. It needs clattn and its extra bench.
"""

import argparse
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import clattn
from clattn._commands.bench.chart import COLOURS
from clattn._commands.bench.contest import clattn_calls, peer_classes
from clattn._commands.bench.exact import exact_rows
from clattn._commands.bench.exact_gradients import exact_gradients
from clattn._commands.bench.peers import Call, Peer
from clattn._commands.bench.report import open_console
from clattn._commands.bench.rows import Problem, Row, Shape, draw
from clattn._commands.bench.training import TorchTraining, train_calls
from clattn._commands.timing import THREADS, measure_memory, shortest
from clattn._host.progress import open_bar
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from rich import box
from rich.table import Table

SMALLEST, LARGEST = 128, 32768
MOST_SECONDS = 60.0  # of a call
MOST_MEMORY = 0.6  # of the free memory
WARM_ROWS = 512  # of a call that loads everything
SECONDS = 1.0  # of calls whose shortest counts
MOST_CHECKED = 2048  # of gradients: what is right needs memory for L x S numbers


@dataclass(frozen=True)
class Cost:
    """The cost of one call; memory in bytes beyond the inputs, None: not known.

    Gradients of large problems are not compared: error and allowed error are None.
    """

    seconds: float
    memory: int | None
    error: float | None
    allowed: float | None

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the error."""
        return self.error is None or self.allowed is None or self.error <= self.allowed


@dataclass
class Growth:
    """The costs of one implementation by S, as far as time and memory allow."""

    kind: Literal["device", "peer"]
    name: str  # words for a device, or a peer's label
    costs: dict[int, Cost] = field(default_factory=dict)
    ended: str = ""  # why there are no more
    trains: bool = False  # both passes

    @property
    def label(self) -> str:
        """The name in tables and charts."""
        return self.name if self.kind == "peer" else f"clattn {self.name}"

    def wrong(self) -> list[int]:
        """Return each S where a result of clattn's is wrong."""
        costs = self.costs.items() if self.kind == "device" else ()
        return [size for size, cost in costs if not cost.is_right]


def sizes_up_to(largest: int) -> list[int]:
    """Return the powers of two that are measured."""
    return [1 << n for n in range(SMALLEST.bit_length() - 1, largest.bit_length())]


def shape_of(rows: int, keys: int, trains: bool) -> Shape:
    """Return the shape of so many rows and keys."""
    heads = 1 if trains else 8
    return (1, heads, heads, rows, keys, 64)


def find_peers(trains: bool) -> Sequence[type[Peer]]:
    """Return the classes of the other implementations."""
    return [TorchTraining] if trains else peer_classes()


def find_growths(devices: Sequence[str], trains: bool) -> list[Growth]:
    """Return the implementations that can be measured, without costs so far."""
    labels = [make.label for make in find_peers(trains)]
    ours = [Growth("device", words, trains=trains) for words in devices]
    return ours + [Growth("peer", label, trains=trains) for label in labels]


def measure_next(growth: Growth, size: int) -> None:
    """Measure an implementation at a size, twice the one before, unless it has ended."""
    reason = growth.ended or _too_much(list(growth.costs.values()))
    if not reason:
        command = [sys.executable, __file__, "--one", growth.kind, growth.name, str(size)]
        command += ["--train"] if growth.trains else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            growth.costs[size] = Cost(**json.loads(done.stdout.splitlines()[-1]))
            return
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    growth.ended = growth.ended or f"no S = {size} and more: {reason}"


def _too_much(costs: Sequence[Cost]) -> str:
    """Say whether twice the S would take too much time or memory: four times as much."""
    if not costs:
        return ""
    if 4 * costs[-1].seconds > MOST_SECONDS:
        return f"a call would take more than {MOST_SECONDS:.0f} s"
    memory, free = costs[-1].memory, _free_memory()
    if memory is not None and free is not None and 4 * memory > MOST_MEMORY * free:
        return f"a call could take more than {4 * memory / 2**30:.0f} GiB of memory"
    return ""


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def call_of(problem: Problem, device: clattn.Device) -> Call:
    """Return clattn's call of a problem."""
    return (train_calls if problem.row.trains else clattn_calls)(problem, device)[0]


def measure_one(kind: str, name: str, size: int, trains: bool) -> Cost:
    """Return the cost of one call of a "device" or "peer", in this process."""
    with ExitStack() as stack:
        prepare: Callable[[Problem], Call | None]
        if kind == "peer":
            peers = find_peers(trains)
            prepare = next(make(stack) for make in peers if make.label == name).prepare
        else:
            device = stack.enter_context(clattn.use_device(name))
            prepare = functools.partial(call_of, device=device)
        # A first call loads threads, kernels and libraries before memory is measured. clattn's
        # kernel depends on whether there are few queries, and whether a cache holds the keys.
        rows = SMALLEST if kind == "peer" else min(size, WARM_ROWS)
        keys = SMALLEST if kind == "peer" else size
        warm = prepare(draw(Row("warm", shape_of(rows, keys, trains), trains=trains)))
        if warm is None:
            raise SystemExit("not supported")
        warm.run()
        problem = draw(Row("scaling", shape_of(size, size, trains), trains=trains))
        call = prepare(problem)
        assert call is not None
        _, memory = measure_memory(call.run)
        seconds = shortest(call.run, SECONDS, 1, math.inf)
        if trains and size > MOST_CHECKED:
            return Cost(seconds, memory, None, None)
        exact = exact_gradients(problem) if trains else exact_rows(problem)
        return Cost(seconds, memory, exact.error(call.result()), exact.allowed)


def make_table(sizes: Sequence[int], growths: Sequence[Growth], trains: bool) -> Table:
    """Return milliseconds and, below them, MiB beyond the inputs, by S."""

    def text(growth: Growth, size: int) -> str:
        if size not in growth.costs:
            return ""
        cost = growth.costs[size]
        memory = "?" if cost.memory is None else f"{cost.memory / 2**20:.1f}"
        return f"{cost.seconds * 1e3:.4g}\n[dim]{memory}[/]"

    title = "(1, 8, 8, S, S, 64) float32: ms, and MiB beyond the inputs"
    if trains:
        title = "(1, 1, 1, S, S, 64) float32, both passes: ms, and MiB beyond the inputs"
    table = Table("S = L", title=title, box=box.SIMPLE_HEAD)
    table.columns[0].justify = "right"
    for growth in growths:
        table.add_column(growth.label, justify="right")
    for size in sizes:
        table.add_row(str(size), *(text(growth, size) for growth in growths))
    return table


def as_json(growths: Sequence[Growth]) -> dict[str, Any]:
    """Return everything that was measured, in seconds and bytes."""
    curves = [
        {
            "label": growth.label,
            "costs": [{"S": size, **asdict(cost)} for size, cost in growth.costs.items()],
            "ended": growth.ended,
        }
        for growth in growths
    ]
    return {"clattn": clattn.__version__, "threads": THREADS, "scaling": curves}


def save_chart(path: Path, sizes: Sequence[int], growths: Sequence[Growth]) -> None:
    """Write time and memory against S side by side, with lines of the expected slopes."""
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, growth in enumerate(growths):
        style: dict[str, Any] = {"marker": "o", "markersize": 3}
        style["color"] = COLOURS[index % len(COLOURS)]
        style["linewidth"] = 1 if growth.kind == "peer" else 2
        times = {S: cost.seconds * 1e3 for S, cost in growth.costs.items()}
        left.plot(list(times), list(times.values()), label=growth.label, **style)
        memory = {S: cost.memory / 2**20 for S, cost in growth.costs.items() if cost.memory}
        right.plot(list(memory), list(memory.values()), **style)
    _draw_slope(left, sizes, 2, "S²")
    _draw_slope(right, sizes, 1, "S")
    _draw_slope(right, sizes, 2, "S²")
    left.set_ylabel("ms")
    right.set_ylabel("MiB at the peak, beyond the inputs")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        if any(len(line.get_xdata()) for line in axis.lines):  # small calls may take no memory
            axis.set_yscale("log")
        axis.set_xticks(sizes, [str(S) for S in sizes], rotation=45)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("S = L")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", frameon=False, ncols=len(growths))
    figure.savefig(path, format="png")


def _draw_slope(axis: Any, sizes: Sequence[int], power: int, name: str) -> None:
    """Draw a dashed line of y ~ S^power that ends below the end of clattn's first curve."""
    x, y = axis.lines[0].get_data()
    if not len(x):
        return
    first = max(sizes[0], x[-1] / 8)
    line = [first, x[-1]]
    height = [0.6 * y[-1] * (S / x[-1]) ** power for S in line]
    axis.plot(line, height, "--", color="gray", linewidth=0.8, zorder=0)
    axis.annotate(name, (line[0], height[0]), ha="right", va="center", fontsize=8, color="gray")


def main() -> int:
    """Measure all sizes; return 1 where a result of clattn's was wrong."""
    if sys.argv[1:2] == ["--one"]:
        kind, name, size, *trains = sys.argv[2:]
        print(json.dumps(asdict(measure_one(kind, name, int(size), bool(trains)))))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("largest", metavar="S", nargs="?", type=int, default=LARGEST,
                        help="the largest size (default: %(default)s)")  # fmt: skip
    parser.add_argument("--train", action="store_true", help="forward and backward pass of a head")
    parser.add_argument("--device", metavar="WORDS", action="append", help="may be given again")
    parser.add_argument("--json", metavar="PATH", type=Path)
    parser.add_argument("--plot", metavar="PATH", type=Path)
    given = parser.parse_args()
    if given.largest < SMALLEST:
        parser.error(f"S is {given.largest}; expected {SMALLEST} or more")
    sizes = sizes_up_to(given.largest)
    growths = find_growths(given.device or [clattn.get_default_device().name], given.train)
    with open_bar(len(growths) * len(sizes), sys.stdout) as show:
        for done, (size, growth) in enumerate((s, g) for s in sizes for g in growths):
            show(done, f"S = {size}, {growth.label}")
            measure_next(growth, size)
    console = open_console()
    console.print(make_table(sizes, growths, given.train))
    for growth in growths:
        if growth.ended:
            console.print(f"{growth.label}: {growth.ended}", markup=False)
        for size in growth.wrong():
            console.print(f"{growth.label}: WRONG at S = {size}", markup=False)
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(growths), indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        save_chart(given.plot, sizes, growths)
    return 1 if any(growth.wrong() for growth in growths) else 0


if __name__ == "__main__":
    sys.exit(main())
