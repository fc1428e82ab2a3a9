"""A bar that shows how far long work is."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    Show = Callable[[int, str], None]


def show_nothing(done: int, name: str) -> None:
    """Stand in for a bar."""


@contextmanager
def open_bar(total: int, stream: TextIO, otherwise: Show = show_nothing) -> Iterator[Show]:
    """Give a function that shows how many of `total` steps are done, and the name of the next.

    It is `otherwise` if `stream` is no terminal, or the package rich is not installed. The bar is
    gone at the end. What the block prints stands above it.
    """
    try:
        if not stream.isatty():
            raise ModuleNotFoundError
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield otherwise
        return
    # Without a thread that draws the bar again and again: the block may measure times.
    with Progress(console=Console(file=stream), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, name: bar.update(task, description=name, completed=done, refresh=True)
