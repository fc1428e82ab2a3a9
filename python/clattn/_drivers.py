"""Where OpenCL is on this machine: the loader, and drivers that pip has installed.

The core calls `discover` once, before its first OpenCL call. What only writing needs is
imported where it is needed: a process that finds its folder as it left it starts faster.
"""

from __future__ import annotations

import os
import stat
import sys
import zlib
from contextlib import suppress
from pathlib import Path

_SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
_SYSTEM_LOADER = "libOpenCL.so.1"

# Intel's runtime finds these only beside itself, or not at all when another package has
# loaded an older libtbb; opened first and by path, the right ones are there.
_PRELOAD = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libtbb.so.12")


def cache_folder() -> Path | None:
    """Return the folder for built kernels, ``clattn`` in the user's XDG cache folder.

    None where there is none: the user has no home.
    """
    # The XDG specification: a relative path is invalid and ignored. Without a home, "~" stays.
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            return Path(base, "clattn")
    return None


def _wheel_libraries() -> Path | None:
    """Return the folder of libraries of the package intel-opencl-rt, if installed.

    Its list of files is read here: importing importlib.metadata takes 20 ms.
    """
    for entry in sys.path:
        for record in Path(entry).glob("intel_opencl_rt-*.dist-info/RECORD"):
            for line in _read(record).splitlines():
                name = os.fsdecode(line.partition(b",")[0])
                if name.rpartition("/")[2] == "libintelocl.so":
                    return Path(entry, name).resolve().parent
    return None


def _read(file: Path) -> bytes:
    """Return what a file holds: nothing, if it is no file or cannot be read."""
    try:
        return file.read_bytes() if file.is_file() else b""
    except OSError:
        return b""


def _loader_is_in_use() -> bool:
    """Return whether this process has a loader open, which has read the environment then."""
    try:
        return b"/libOpenCL.so" in Path("/proc/self/maps").read_bytes()
    except OSError:
        return False


def _installed_drivers() -> list[bytes]:
    """Return what the system's .icd files name, in the order of the files' names."""
    try:
        names = sorted(os.listdir(_SYSTEM_VENDORS))
    except OSError:
        return []
    texts = (_read(_SYSTEM_VENDORS / name).strip() for name in names if name.endswith(".icd"))
    return [text for text in texts if text]


def _fill(folder: Path, contents: dict[str, bytes]) -> None:
    """Make a folder hold these .icd files and no others; others may be doing the same.

    Raises
    ------
    OSError
        It cannot be done, or another user may write to the folder.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    for name in os.listdir(folder):
        if name.endswith(".icd") and name not in contents:
            (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        if _read(folder / name) == content:
            continue
        import tempfile

        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, folder / name)
        finally:
            Path(temporary).unlink(missing_ok=True)


def _write_vendors_folder(drivers: list[bytes]) -> Path | None:
    """Return a folder with an .icd file for each driver, None where nothing can be written.

    Its name tells its content, so that processes may share it: in the cache, else in the
    folder for temporary files. A process has its own only where neither will do.
    """
    contents = {f"{index:02}.icd": driver + b"\n" for index, driver in enumerate(drivers)}
    name = f"vendors-{zlib.crc32(b''.join(contents.values())):08x}"
    cache = cache_folder()
    if cache is not None:
        with suppress(OSError):
            _fill(cache / name, contents)
            return cache / name
    import shutil
    import tempfile

    with suppress(OSError):
        shared = Path(tempfile.gettempdir(), f"clattn-{os.geteuid()}-{name}")
        _fill(shared, contents)
        return shared
    with suppress(OSError):
        own = Path(tempfile.mkdtemp(prefix="clattn-"))
        try:
            _fill(own, contents)
            return own
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
    return None


def discover() -> tuple[tuple[bytes, ...], tuple[bytes, ...], bytes | None, str]:
    """Prepare the environment for the loader and say what to open.

    Paths are bytes, as the system has them: they need not be text.

    Returns
    -------
    preload : tuple of bytes
        Libraries to open before the loader, globally.
    candidates : tuple of bytes
        Loaders, the first that opens is used: the system's, else the one that comes with
        intel-opencl-rt; the other way round where the process has used one before.
    cache : bytes or None
        The folder for built kernels, if there is one.
    memory : str
        ``CLATTN_MEMORY``, which forces a way to reach host memory, for tests; else empty.

    Raises
    ------
    ValueError
        ``CLATTN_MEMORY`` is no such way.
    """
    memory = os.environ.get("CLATTN_MEMORY", "")
    if memory not in ("", "svm", "host", "copy"):
        raise ValueError(f"CLATTN_MEMORY is {memory!r}; expected 'svm', 'host' or 'copy'")
    preload: tuple[bytes, ...] = ()
    candidates = [os.fsencode(_SYSTEM_LOADER)]
    wheel = _wheel_libraries()
    if wheel is not None:
        preload = tuple(os.fsencode(wheel / name) for name in _PRELOAD)
        own = os.fsencode(wheel / _SYSTEM_LOADER)
        # A loader that another package has used does not see the folder written below.
        candidates.insert(0 if _loader_is_in_use() else 1, own)
        # A user who points the loader somewhere has said what is wanted.
        if not {"OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"} & os.environ.keys():
            driver = os.fsencode(wheel / "libintelocl.so")
            drivers = [driver, *(d for d in _installed_drivers() if d != driver)]
            folder = _write_vendors_folder(drivers)
            if folder is not None:
                os.environ["OCL_ICD_VENDORS"] = str(folder)
            else:  # not every loader knows this variable, but it needs no folder
                os.environ["OCL_ICD_FILENAMES"] = os.fsdecode(driver)
    cache = cache_folder()
    return preload, tuple(candidates), None if cache is None else os.fsencode(cache), memory
