# SPDX-License-Identifier: MIT
"""Finds OpenCL drivers and a loader, and makes the environment in which OpenCL finds them."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

LOADER = "libOpenCL.so.1"
CUDA = "libcuda.so.1"
SYSTEM_VENDORS = "etc/OpenCL/vendors"
OTHER_VENDORS = ("usr/local/etc/OpenCL/vendors", "usr/local/nvidia/etc/OpenCL/vendors")
# Drivers of NVIDIA, AMD and Intel, which a container may have without an .icd file.
KNOWN = ("libnvidia-opencl.so.1", "libamdocl64.so", "libigdrcl.so")
LIBRARIES = (
    "usr/lib/*-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "usr/lib/wsl/lib",
    "usr/lib/*-linux-gnu/intel-opencl",
    "usr/lib64/intel-opencl",
    "opt/rocm*/lib",
    "usr/local/cuda/lib64",
    "usr/local/cuda/targets/*/lib",
    "usr/local/cuda/compat",
)


@dataclass(frozen=True)
class Driver:
    """A driver's library, and the .icd file that names it; None: no file names it."""

    library: str
    icd: Path | None


@dataclass(frozen=True)
class Found:
    """The drivers and the loader of OpenCL on a machine."""

    drivers: list[Driver]
    loader: Path | None
    loader_is_carried: bool = False


def find(carried: Path, root: Path = Path("/")) -> Found:
    """Look for drivers and a loader below `root`, then for a loader in the folder `carried`."""
    cached = _linker_cache() if root == Path("/") else {}
    loader = cached.get(LOADER) or _first(root, LIBRARIES, LOADER)
    is_carried = loader is None and (carried / "lib" / LOADER).exists()
    if is_carried:
        loader = carried / "lib" / LOADER
    return Found(_find_drivers(root, cached), loader, is_carried)


def find_cuda(root: Path = Path("/")) -> Path | None:
    """Return NVIDIA's driver for CUDA, if the machine has it and no OpenCL driver of NVIDIA."""
    cached = _linker_cache() if root == Path("/") else {}
    if any("nvidia" in Path(driver.library).name for driver in _find_drivers(root, cached)):
        return None
    return cached.get(CUDA) or _first(root, LIBRARIES, CUDA)


def _find_drivers(root: Path, cached: dict[str, Path]) -> list[Driver]:
    drivers: list[Driver] = []
    for folder in (SYSTEM_VENDORS, *OTHER_VENDORS):
        for icd in sorted((root / folder).glob("*.icd")):
            name = icd.read_text(errors="replace").strip()
            if name and Path(name).name not in {Path(d.library).name for d in drivers}:
                drivers.append(Driver(_locate(root, cached, name), icd))
    named = {Path(driver.library).name for driver in drivers}
    for name in KNOWN:
        library = _locate(root, cached, name)
        if name not in named and library != name:
            drivers.append(Driver(library, None))
    return drivers


def _locate(root: Path, cached: dict[str, Path], name: str) -> str:
    """Return the path of a library, or its name if it is not found."""
    if "/" in name:
        return name
    return str(cached.get(name) or _first(root, LIBRARIES, name) or name)


def _first(root: Path, folders: tuple[str, ...], name: str) -> Path | None:
    for pattern in folders:
        for folder in sorted(root.glob(pattern)):
            if (folder / name).exists():
                return folder / name
    return None


def _linker_cache() -> dict[str, Path]:
    """Return the libraries that the dynamic linker finds, by name."""
    environment = dict(os.environ, PATH=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    try:
        done = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, env=environment)
    except OSError:
        return {}
    found: dict[str, Path] = {}
    for name, path in re.findall(r"^\s*(\S+) \(.*\) => (\S+)$", done.stdout, re.MULTILINE):
        found.setdefault(name, Path(path))
    return found


def environment(found: Found, folder: Path) -> dict[str, str]:
    """Return variables by which OpenCL finds the drivers; their files are written into `folder`.

    If the system's own .icd files name every driver, the loader finds them without variables.
    """
    variables = {}
    paths = []
    known_to_loader = Path("/") / SYSTEM_VENDORS
    if any(d.icd is None or d.icd.parent != known_to_loader for d in found.drivers):
        vendors = folder / "vendors"
        vendors.mkdir(parents=True, exist_ok=True)
        for old in vendors.glob("*.icd"):
            old.unlink()
        for index, driver in enumerate(found.drivers):
            (vendors / f"{index:02}.icd").write_text(driver.library + "\n")
        variables["OCL_ICD_VENDORS"] = str(vendors)
        # On one machine, pytest's workers did not find the drivers in that folder, for an unknown
        # reason. They found the drivers that the next variable names.
        alone = [driver.library for driver in found.drivers if driver.icd is None]
        if alone:
            variables["OCL_ICD_FILENAMES"] = os.pathsep.join(alone)
    if found.loader is not None:
        libraries = folder / "lib"
        libraries.mkdir(parents=True, exist_ok=True)
        link = libraries / LOADER
        link.unlink(missing_ok=True)
        link.symlink_to(found.loader.resolve())
        paths.append(str(libraries))
    # A driver opens its compiler by name; the compiler lies beside the driver.
    paths += [str(Path(d.library).parent) for d in found.drivers if d.icd is None]
    if paths:
        old_path = os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = ":".join([*paths, *([old_path] if old_path else [])])
    return variables
