"""A bar that shows the progress of long work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from rich.progress import Progress

    Show = Callable[[int, str], None]


def show_nothing(done: int, name: str) -> None:
    """Stand in for a bar."""


@contextmanager
def open_bar(total: int, stream: TextIO, otherwise: Show = show_nothing) -> Iterator[Show]:
    """Give a function that shows how many of `total` steps are done, and the name of the next.

    It is `otherwise` if `stream` is no terminal, or the package rich is not installed. The bar is
    gone at the end. What the block prints stands above it.
    """
    progress = _progress_on(stream)
    if progress is None:
        yield otherwise
        return
    from rich.markup import escape

    with progress:
        task = progress.add_task("", total=total)
        yield lambda done, name: progress.update(
            task, description=escape(name), completed=done, refresh=True
        )


def _progress_on(stream: TextIO) -> Progress | None:
    """Return a bar that is drawn when it is told to, and not by a thread: the block may time."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        return None
    return Progress(console=Console(file=stream), transient=True, auto_refresh=False)
