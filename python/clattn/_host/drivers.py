"""Finds OpenCL on this machine: the loader, and drivers that pip has installed.

The core calls `discover` once, before its first OpenCL call. Modules that only writing a folder
needs are imported there: a process that finds its folder in order starts faster. Paths are strings,
because importing pathlib takes 6 ms.
"""

from __future__ import annotations

import os
import sys
import zlib
from contextlib import suppress
from itertools import takewhile

from clattn import _core
from clattn._host import files

SYSTEM_VENDORS = "/etc/OpenCL/vendors"
_IS_WINDOWS = sys.platform == "win32"
# Windows lists drivers in its registry, and Apple's framework has its own.
HAS_ICD_FILES = sys.platform not in ("win32", "darwin")
_CHOICES = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES")  # the user's choice of drivers
_MARK = "CLATTN_SET_"  # before the name of a variable: which process has set it, and to what
# The system's loader. The others are in the package intel-opencl-rt.
_SYSTEM_LOADER = {
    "win32": "OpenCL.dll",
    "darwin": "/System/Library/Frameworks/OpenCL.framework/OpenCL",
}.get(sys.platform, "libOpenCL.so.1")
_WHEEL_LOADER = "OpenCL.dll" if _IS_WINDOWS else "libOpenCL.so.1"
_WHEEL_DRIVER = "intelocl64.dll" if _IS_WINDOWS else "libintelocl.so"

# Opened first and by path. Intel's runtime looks for these libraries beside itself only, and does
# not find them if another package has loaded an older libtbb. Windows looks for the libraries of a
# driver beside it only if it is opened by clattn.
_PRELOAD = (
    (_WHEEL_DRIVER,)
    if _IS_WINDOWS
    else ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libtbb.so.12")
)


def _wheel_libraries() -> str | None:
    """Return the folder of libraries of the package intel-opencl-rt, if installed.

    Reads the package's list of files itself: importing importlib.metadata takes 20 ms.
    """
    for entry in sys.path:
        for info in files.names_in(entry or os.curdir):
            if not (info.startswith("intel_opencl_rt-") and info.endswith(".dist-info")):
                continue
            for line in files.read(os.path.join(entry, info, "RECORD")).splitlines():
                name = os.fsdecode(line.partition(b",")[0])
                if name.rpartition("/")[2] == _WHEEL_DRIVER:
                    return os.path.dirname(os.path.realpath(os.path.join(entry, name)))
    return None


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
        for name in files.names_in(os.path.join(folder, ".libs")):
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
    names = sorted(files.names_in(SYSTEM_VENDORS))
    listed = (os.path.join(SYSTEM_VENDORS, name) for name in names if name.endswith(".icd"))
    texts = (files.read(file).strip() for file in listed)
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
    if os.path.islink(folder) or not files.is_private(folder):
        raise PermissionError(f"{folder} is not a folder of this user alone")
    for name in os.listdir(folder):
        if name.endswith(".icd") and name not in contents:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
    for name, content in contents.items():
        file = os.path.join(folder, name)
        if files.read(file) != content:
            files.write(file, content)


def _write_vendors_folder(drivers: list[bytes]) -> str | None:
    """Return a folder with an .icd file for each driver, None where nothing can be written.

    The name of the folder depends on its content, so processes may share it: in the cache, else
    in the folder for temporary files. If neither can be written, the process gets a folder of
    its own.
    """
    contents = {f"{index:02}.icd": driver + b"\n" for index, driver in enumerate(drivers)}
    name = f"vendors-{zlib.crc32(b''.join(contents.values())):08x}"
    cache = files.cache_folder()
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


def _mark(text: str) -> str:
    """Return the value of the variable that marks another one, with this text, as clattn's."""
    return f"{os.getpid()} {text}"


def _set(name: str, text: str) -> None:
    """Set a variable for the loader, and mark it as set by clattn.

    Child processes inherit both. They may be of another environment, with other drivers. What is
    set already is left alone: another thread, or another interpreter of the process, may be in the
    loader, which reads the environment.
    """
    for variable, wanted in ((name, text), (_MARK + name, _mark(text))):
        if os.environ.get(variable) != wanted:
            os.environ[variable] = wanted


def _unset_inherited() -> None:
    """Unset what clattn has set in a parent process, if it has not been changed since."""
    for name in (*_CHOICES, "PYOPENCL_HOME"):
        mark = os.environ.get(_MARK + name, "")
        process, _, text = mark.partition(" ")
        if mark and process != str(os.getpid()):
            del os.environ[_MARK + name]
            if os.environ.get(name) == text:
                del os.environ[name]


def _is_choice(name: str) -> bool:
    """Return whether a variable is set, and not by this process."""
    text = os.environ.get(name)
    return text is not None and os.environ.get(_MARK + name) != _mark(text)


def _set_environment(driver: str | None, pyopencl: bytes | None) -> None:
    """Name a driver to the loader, beside the system's, and pyopencl's folder to its loader."""
    if driver is not None:
        ours = os.fsencode(driver)
        drivers = [ours, *(d for d in _installed_drivers() if d != ours)]
        folder = None if sys.platform == "win32" else _write_vendors_folder(drivers)
        if folder is not None:
            _set("OCL_ICD_VENDORS", folder)
        else:  # some loaders ignore this variable, but it needs no folder
            _set("OCL_ICD_FILENAMES", driver)
    # pyopencl's loader crashes without the variable, which an import of pyopencl sets.
    if pyopencl is not None and "PYOPENCL_HOME" not in os.environ:
        _set("PYOPENCL_HOME", os.path.dirname(os.path.dirname(os.fsdecode(pyopencl))))


def _order_loaders(
    wheel: str | None, pyopencl: bytes | None, preload: tuple[bytes, ...], *, needs_wheel: bool
) -> tuple[bytes, ...]:
    """Return the loaders to try, the best one first.

    Those come first that this process has opened, then that of pyopencl's wheel, which pyopencl
    would open later, the system's, and that of intel-opencl-rt. One that is open and lacks drivers
    comes last; the system's would be the same, so that of intel-opencl-rt comes before it.
    """
    opened = loaders_in_use()
    blind = list(takewhile(lambda p: not _serves(p, preload, needs_wheel=needs_wheel), opened))
    others = [os.fsencode(_SYSTEM_LOADER)]
    if wheel is not None:
        others.insert(0 if blind else 1, os.fsencode(os.path.join(wheel, _WHEEL_LOADER)))
    if pyopencl is not None and pyopencl not in blind and not _needs_another_loader():
        others.insert(0, pyopencl)
    return (*opened[len(blind) :], *others, *blind)


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
        Loaders, see `_order_loaders`; the core uses the first that opens.
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
    _unset_inherited()
    wheel, pyopencl = _wheel_libraries(), _installed_loader_of_pyopencl()
    preload: tuple[bytes, ...] = ()
    driver = None
    if wheel is not None:
        preload = tuple(os.fsencode(os.path.join(wheel, name)) for name in _PRELOAD)
        if not any(map(_is_choice, _CHOICES)):
            driver = os.path.join(wheel, _WHEEL_DRIVER)
    _set_environment(driver, pyopencl)
    candidates = _order_loaders(wheel, pyopencl, preload, needs_wheel=driver is not None)
    cache = files.cache_folder()
    return preload, candidates, None if cache is None else os.fsencode(cache), memory
