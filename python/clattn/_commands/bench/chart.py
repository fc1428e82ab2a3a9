"""A chart of the results. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from clattn._commands.bench.contest import Contestants, Measured

COLOURS = ("#1b6ca8", "#e08e2b", "#3f9b57", "#a04b8c", "#c2473d", "#7a7a7a", "#2aa5a0")


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
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    labels = [f"{one.row.name}  ({one.best})" for one in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.set_xlabel("time of the fastest other implementation, named at the left, / clattn's")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", frameon=False)
    figure.savefig(path, format="png")
