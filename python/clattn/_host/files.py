"""Files and folders that clattn keeps for later processes.

Paths are strings, and tempfile is imported where a file is written: importing pathlib and tempfile
takes longer than a process needs that finds everything in order.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress


def is_private(folder: str) -> bool:
    """Return whether a folder is this user's or root's, and no other user may write to it.

    On Windows the rights of the user's folder say who may write there.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return False
    if sys.platform == "win32":
        return stat.S_ISDIR(status.st_mode)
    trusted = stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)
    return trusted and not status.st_mode & 0o022


def cache_path() -> str | None:
    """Return the path of ``clattn`` in the user's XDG cache folder; None: there is no home folder.

    The folder need not exist, nor be one to use: see `cache_folder`.
    """
    # The XDG specification: a relative path is invalid and ignored. Without a home, "~" stays.
    names = ("XDG_CACHE_HOME", "LOCALAPPDATA") if sys.platform == "win32" else ("XDG_CACHE_HOME",)
    bases = (os.environ.get(name, "") for name in names)
    for base in (*bases, os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            return os.path.join(base, "clattn")
    return None


def cache_folder() -> str | None:
    """Return the folder for built kernels, which need not exist yet.

    None: there is no `cache_path`, or the folder is not private: what lies there is executed.
    """
    folder = cache_path()
    if folder is None or is_private(folder) or not os.path.lexists(folder):
        return folder
    return None


def names_in(folder: str) -> list[str]:
    """Return the names in a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read(file: str) -> bytes:
    """Return the content of a file; empty if it is no file or cannot be read."""
    try:
        if os.path.isfile(file):
            with open(file, "rb") as content:
                return content.read()
    except OSError:
        pass
    return b""


def write(file: str, content: bytes) -> None:
    """Write a file at once: other processes see the old content, or the new one whole.

    Raises
    ------
    OSError
        The file cannot be written. Nothing is left behind.
    """
    import tempfile

    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(file))
    try:
        with open(handle, "wb") as opened:
            opened.write(content)
        os.replace(temporary, file)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
