"""Where OpenCL is on this machine: the loader, and drivers that pip has installed.

The core calls `discover` once, before its first OpenCL call.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import metadata
from pathlib import Path

_SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
_SYSTEM_LOADER = "libOpenCL.so.1"

# Intel's runtime finds these only beside itself, or not at all when another package has
# loaded an older libtbb; opened first and by path, the right ones are there.
_PRELOAD = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so", "libtbb.so.12")


def cache_folder() -> Path:
    """Return the folder for built kernels, ``clattn`` in the user's XDG cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and ignored.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "clattn"


def _wheel_libraries() -> Path | None:
    """Return the folder of libraries of the package intel-opencl-rt, if installed."""
    try:
        files = metadata.files("intel-opencl-rt") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libintelocl.so":
            return Path(str(file.locate())).resolve().parent
    return None


def _installed_drivers() -> list[str]:
    """Return what the system's .icd files name, in the order of the files' names."""
    if not _SYSTEM_VENDORS.is_dir():
        return []
    texts = (icd.read_text().strip() for icd in sorted(_SYSTEM_VENDORS.glob("*.icd")))
    return [text for text in texts if text]


def _write_vendors_folder(drivers: list[str]) -> Path:
    """Return a folder with an .icd file for each driver.

    Its name tells its content, so that it is written once and processes may share it.
    """
    digest = hashlib.sha256("\n".join(drivers).encode()).hexdigest()[:16]
    folder = cache_folder() / f"vendors-{digest}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix="vendors-", dir=folder.parent))
    except OSError:
        folder = written = Path(tempfile.mkdtemp(prefix="clattn-vendors-"))
    for index, driver in enumerate(drivers):
        (written / f"{index:02}.icd").write_text(f"{driver}\n")
    if written != folder:
        try:
            written.rename(folder)
        except OSError:  # another process was first, with the same content
            return folder if folder.is_dir() else written
    return folder


def discover() -> tuple[tuple[str, ...], tuple[str, ...], str, str]:
    """Prepare the environment for the loader and say what to open.

    Returns
    -------
    preload : tuple of str
        Libraries to open before the loader, globally.
    candidates : tuple of str
        Loaders, the first that opens is used: the system's, else the one that comes with
        intel-opencl-rt.
    cache : str
        The folder for built kernels.
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
    preload: tuple[str, ...] = ()
    candidates = [_SYSTEM_LOADER]
    wheel = _wheel_libraries()
    if wheel is not None:
        preload = tuple(str(wheel / name) for name in _PRELOAD)
        candidates.append(str(wheel / _SYSTEM_LOADER))
        # A user who points the loader somewhere has said what is wanted.
        if not any(name.startswith("OCL_ICD_") for name in os.environ):
            driver = str(wheel / "libintelocl.so")
            drivers = [driver, *(d for d in _installed_drivers() if d != driver)]
            os.environ["OCL_ICD_VENDORS"] = str(_write_vendors_folder(drivers))
    return preload, tuple(candidates), str(cache_folder()), memory
