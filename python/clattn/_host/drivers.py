"""Finds OpenCL on this machine: the loader, and drivers that pip has installed.

The core calls `discover` once, before its first OpenCL call. Modules that only writing a folder
needs are imported there: a process that finds its folder in order starts faster. Paths are strings,
because importing pathlib takes 6 ms.
"""

from __future__ import annotations

import os
import stat
import sys
import zlib
from contextlib import suppress
from itertools import takewhile

from clattn import _core

SYSTEM_VENDORS = "/etc/OpenCL/vendors"
_IS_WINDOWS = sys.platform == "win32"
# The system's loader. The others are in the package intel-opencl-rt.
_SYSTEM_LOADER = {
    "win32": "OpenCL.dll",
    "darwin": "/System/Library/Frameworks/OpenCL.framework/OpenCL",
}.get(sys.platform, "libOpenCL.so.1")
_WHEEL_LOADER = "OpenCL.dll" if _IS_WINDOWS else "libOpenCL.so.1"
_WHEEL_DRIVER = "intelocl64.dll" if _IS_WINDOWS else "libintelocl.so"

# Opened first and by path. Intel's runtime looks for these libraries beside itself only, and
# does not find them if another package has loaded an older libtbb. Windows looks for the libraries
# of a driver beside it only if it is opened by clattn.
_PRELOAD = (
    (_WHEEL_DRIVER,)
    if _IS_WINDOWS
    else ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libtbb.so.12")
)


def _is_private(folder: str) -> bool:
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


def cache_folder() -> str | None:
    """Return the folder for built kernels, ``clattn`` in the user's XDG cache folder.

    It need not exist yet. None: the user has no home folder, or the folder is not private: what
    lies there is executed.
    """
    # The XDG specification: a relative path is invalid and ignored. Without a home, "~" stays.
    names = ("XDG_CACHE_HOME", "LOCALAPPDATA") if _IS_WINDOWS else ("XDG_CACHE_HOME",)
    bases = (os.environ.get(name, "") for name in names)
    for base in (*bases, os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            folder = os.path.join(base, "clattn")
            return folder if _is_private(folder) or not os.path.lexists(folder) else None
    return None


def _wheel_libraries() -> str | None:
    """Return the folder of libraries of the package intel-opencl-rt, if installed.

    Reads the package's list of files itself: importing importlib.metadata takes 20 ms.
    """
    for entry in sys.path:
        for info in _names_in(entry or os.curdir):
            if not (info.startswith("intel_opencl_rt-") and info.endswith(".dist-info")):
                continue
            for line in _read(os.path.join(entry, info, "RECORD")).splitlines():
                name = os.fsdecode(line.partition(b",")[0])
                if name.rpartition("/")[2] == _WHEEL_DRIVER:
                    return os.path.dirname(os.path.realpath(os.path.join(entry, name)))
    return None


def _names_in(folder: str) -> list[str]:
    """Return the names in a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(file: str) -> bytes:
    """Return the content of a file; empty if it is no file or cannot be read."""
    try:
        if os.path.isfile(file):
            with open(file, "rb") as content:
                return content.read()
    except OSError:
        pass
    return b""


def loaders_in_use() -> list[bytes]:
    """Return the loaders that this process has opened, under any name: pyopencl's before others."""
    opened = [path for path in _core.libraries() if _core.loader_of(path) == path]
    theirs = loader_of_pyopencl()
    return sorted(opened, key=lambda path: path != theirs)


def loader_of_pyopencl() -> bytes | None:
    """Return the loader that pyopencl calls, None if it is not imported."""
    file = getattr(sys.modules.get("pyopencl._cl"), "__file__", None)
    return None if file is None else _core.loader_of(os.fsencode(file))


def _installed_loader_of_pyopencl() -> bytes | None:
    """Return the loader that pyopencl's wheel brings, None without one. Imports nothing."""
    for entry in sys.path:
        folder = os.path.abspath(os.path.join(entry, "pyopencl"))
        for name in _names_in(os.path.join(folder, ".libs")):
            if name.startswith("libOpenCL"):
                return os.fsencode(os.path.join(folder, ".libs", name))
        if os.path.isfile(os.path.join(folder, "__init__.py")):
            break
    return None


def _needs_another_loader() -> bool:
    """Return whether the environment asks for what pyopencl's loader is not, or cannot do.

    That is a loader in ``LD_LIBRARY_PATH``, and a variable that ocl-icd does not read.
    """
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return "OCL_ICD_FILENAMES" in os.environ or any(
        os.path.exists(os.path.join(folder, _SYSTEM_LOADER)) for folder in folders if folder
    )


def _serves(loader: bytes, preload: tuple[bytes, ...], *, needs_wheel: bool) -> bool:
    """Return whether a loader that is open lists platforms, those of clattn's packages included.

    A loader reads the environment once. So one that another package has called before may not know
    the driver of intel-opencl-rt. If pyopencl calls it, it serves nevertheless: clattn shares
    pyopencl's handles.
    """
    import ctypes

    # PyDLL keeps the interpreter's lock, so no other thread forks meanwhile.
    for library in preload:
        with suppress(OSError):
            ctypes.PyDLL(os.fsdecode(library), ctypes.RTLD_GLOBAL)
    count = ctypes.c_uint()
    ctypes.PyDLL(os.fsdecode(loader)).clGetPlatformIDs(0, None, ctypes.byref(count))
    if count.value == 0 or not needs_wheel or loader == loader_of_pyopencl():
        return count.value > 0
    driver = os.fsencode(_WHEEL_DRIVER)
    return any(os.path.basename(path) == driver for path in _core.libraries())


def _installed_drivers() -> list[bytes]:
    """Return the drivers that the system's .icd files name, in the order of the files' names."""
    names = sorted(_names_in(SYSTEM_VENDORS))
    files = (os.path.join(SYSTEM_VENDORS, name) for name in names if name.endswith(".icd"))
    texts = (_read(file).strip() for file in files)
    return [text for text in texts if text]


def _fill(folder: str, contents: dict[str, bytes]) -> None:
    """Write these .icd files into a folder and delete all others.

    Other processes may do the same at the same time.

    Raises
    ------
    OSError
        The folder cannot be written, or another user may write to it.
    """
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.path.islink(folder) or not _is_private(folder):
        raise PermissionError(f"{folder} is not a folder of this user alone")
    for name in os.listdir(folder):
        if name.endswith(".icd") and name not in contents:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
    for name, content in contents.items():
        target = os.path.join(folder, name)
        if _read(target) == content:
            continue
        import tempfile

        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def _write_vendors_folder(drivers: list[bytes]) -> str | None:
    """Return a folder with an .icd file for each driver, None where nothing can be written.

    The name of the folder depends on its content, so processes may share it: in the cache, else
    in the folder for temporary files. If neither can be written, the process gets a folder of
    its own.
    """
    contents = {f"{index:02}.icd": driver + b"\n" for index, driver in enumerate(drivers)}
    name = f"vendors-{zlib.crc32(b''.join(contents.values())):08x}"
    cache = cache_folder()
    if cache is not None:
        with suppress(OSError):
            folder = os.path.join(cache, name)
            _fill(folder, contents)
            return folder
    import shutil
    import tempfile

    with suppress(OSError):
        shared = os.path.join(tempfile.gettempdir(), f"clattn-{os.geteuid()}-{name}")
        _fill(shared, contents)
        return shared
    with suppress(OSError):
        own = tempfile.mkdtemp(prefix="clattn-")
        try:
            _fill(own, contents)
            return own
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
    return None


def _name_drivers(driver: bytes) -> None:
    """Name the driver of intel-opencl-rt to the loader, beside the system's drivers."""
    drivers = [driver, *(d for d in _installed_drivers() if d != driver)]
    folder = None if sys.platform == "win32" else _write_vendors_folder(drivers)
    if folder is not None:
        os.environ["OCL_ICD_VENDORS"] = folder
    else:  # some loaders ignore this variable, but it needs no folder
        os.environ["OCL_ICD_FILENAMES"] = os.fsdecode(driver)


def check_environment() -> None:
    """Check the words of environment variables.

    Raises
    ------
    ValueError
        ``CLATTN_MEMORY`` or ``CLATTN_TUNING`` is another word.
    """
    memory = os.environ.get("CLATTN_MEMORY", "")
    if memory not in ("", "svm", "host", "copy"):
        raise _core.SettingError(f"CLATTN_MEMORY is {memory!r}; expected 'svm', 'host' or 'copy'")
    tuning = os.environ.get("CLATTN_TUNING", "")
    if tuning not in ("", "on", "off"):
        raise _core.SettingError(f"CLATTN_TUNING is {tuning!r}; expected 'on' or 'off'")


def discover() -> tuple[tuple[bytes, ...], tuple[bytes, ...], bytes | None, str]:
    """Prepare the environment for the loader and return what to open.

    Paths are bytes, as in the system: they need not be text.

    Returns
    -------
    preload : tuple of bytes
        Libraries to open before the loader, globally.
    candidates : tuple of bytes
        Loaders; the core uses the first that opens. Those come first that this process has
        opened, then that of pyopencl's wheel, which pyopencl would open later, the system's, and
        that of intel-opencl-rt. One that is open and lacks drivers comes last; the system's
        would be the same, so that of intel-opencl-rt comes before it.
    cache : bytes or None
        The folder for built kernels; None: there is none.
    memory : str
        ``CLATTN_MEMORY``, which forces a way to reach host memory, for tests; or empty.

    Raises
    ------
    ValueError
        As `check_environment`.
    """
    check_environment()
    memory = os.environ.get("CLATTN_MEMORY", "")
    preload: tuple[bytes, ...] = ()
    candidates = [os.fsencode(_SYSTEM_LOADER)]
    wheel = _wheel_libraries()
    # These variables are the user's choice of drivers.
    adds = wheel is not None and not {"OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"} & os.environ.keys()
    if wheel is not None:
        preload = tuple(os.fsencode(os.path.join(wheel, name)) for name in _PRELOAD)
        if adds:
            _name_drivers(os.fsencode(os.path.join(wheel, _WHEEL_DRIVER)))
    theirs = _installed_loader_of_pyopencl()
    if theirs is not None:  # it crashes without the variable, which an import of pyopencl sets
        folder = os.path.dirname(os.path.dirname(theirs))
        os.environ.setdefault("PYOPENCL_HOME", os.fsdecode(folder))
    opened = loaders_in_use()
    blind = list(takewhile(lambda path: not _serves(path, preload, needs_wheel=adds), opened))
    if wheel is not None:
        candidates.insert(0 if blind else 1, os.fsencode(os.path.join(wheel, _WHEEL_LOADER)))
    if theirs is not None and theirs not in blind and not _needs_another_loader():
        candidates.insert(0, theirs)
    candidates = [*opened[len(blind) :], *candidates, *blind]
    cache = cache_folder()
    return preload, tuple(candidates), None if cache is None else os.fsencode(cache), memory
