"""Charts of the results. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from clattn._commands.bench.contest import Contestants, Measured
from clattn._commands.bench.scaling import Growth

COLOURS = ("#1b6ca8", "#e08e2b", "#3f9b57", "#a04b8c", "#c2473d", "#7a7a7a", "#2aa5a0")
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)


def save_ratios(path: Path, measured: Sequence[Measured], contestants: Contestants) -> None:
    """Write bars of the fastest peer's time divided by clattn's, a group for each row."""
    rows = [one for one in measured if one.best is not None]
    devices = contestants.devices
    thickness = 0.8 / len(devices)
    inches = 1.2 + 0.25 * len(devices) + len(rows) * (0.14 + 0.17 * len(devices))
    figure = Figure(figsize=(9, inches), dpi=130, layout="constrained")
    axis = figure.subplots()
    everything = [1.0]
    for index, (words, device) in enumerate(devices.items()):
        ratios = {
            row + (index - (len(devices) - 1) / 2) * thickness: one.ratio(words, one.best)
            for row, one in enumerate(rows)
            if words in one.seconds and one.best is not None
        }
        axis.barh(
            list(ratios),
            [ratio - 1 for ratio in ratios.values()],
            thickness * 0.9,
            left=1,
            color=COLOURS[index % len(COLOURS)],
            label=f"{device.name} ({device.platform})",
        )
        for y, ratio in ratios.items():
            axis.annotate(f"{ratio:.2f}", (max(ratio, 1), y), xytext=(3, 0), va="center",
                          textcoords="offset points", fontsize=7)  # fmt: skip
        everything += ratios.values()
    lowest, largest = min(everything) / 1.1, max(everything) * 1.3
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    axis.set_xlim(lowest, largest)
    ticks = [tick for tick in TICKS if lowest <= tick <= largest]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    labels = [f"{one.row.name}  ({one.best})" for one in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.set_xlabel("time of the fastest other implementation, named at the left, / clattn's")
    _save(figure, path)


def save_scaling(path: Path, sizes: Sequence[int], growths: Sequence[Growth]) -> None:
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
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("S = L")
        axis.grid(alpha=0.3)
    _save(figure, path, ncols=len(growths))


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


def _save(figure: Figure, path: Path, **legend: Any) -> None:
    for axis in figure.axes:
        axis.xaxis.set_minor_locator(NullLocator())
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", frameon=False, **legend)
    figure.savefig(path, format="png")
