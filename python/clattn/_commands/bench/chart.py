"""A chart of the results. Needs matplotlib."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from clattn._commands.bench.figures import Record, caption, columns, title_of

COLOURS = ("#1b6ca8", "#e08e2b", "#3f9b57", "#a04b8c", "#c2473d", "#7a7a7a", "#2aa5a0")
CAPTION_WIDTH = 125  # characters of a line


def save_ratios(path: Path, records: Sequence[Record], names: Sequence[str]) -> None:
    """Write bars of the fastest peer's time divided by clattn's, a group for each row."""
    shown = columns(records)
    lines = [line for one in records for line in textwrap.wrap(caption(one), CAPTION_WIDTH)]
    thickness = 0.8 / len(shown)
    inches = 1.0 + 0.15 * len(lines) + len(names) * (0.14 + 0.17 * len(shown))
    figure = Figure(figsize=(9, inches), dpi=130, layout="constrained")
    axis = figure.subplots()
    everything = [1.0]
    for index, one in enumerate(shown):
        found = {
            row + (index - (len(shown) - 1) / 2) * thickness: one.ratio(name)
            for row, name in enumerate(names)
        }
        ratios = {y: ratio for y, ratio in found.items() if ratio is not None}
        axis.barh(
            list(ratios),
            [ratio - 1 for ratio in ratios.values()],
            thickness * 0.9,
            left=1,
            color=COLOURS[index % len(COLOURS)],
            label=one.label,
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
    labels = [f"{title_of(name)}  ({_fastest(records, name)})" for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.set_xlabel("speed beside the fastest other implementation, named at the left", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if len(shown) > 1:
        figure.legend(loc="outside upper center", frameon=False)
    figure.supxlabel("\n".join(lines), fontsize=7, color="#555555")
    figure.savefig(path, format="png")


def _fastest(records: Sequence[Record], name: str) -> str:
    peers = dict.fromkeys(one.peer(name) for one in columns(records) if one.ratio(name) is not None)
    return ", ".join(peers)
