# SPDX-License-Identifier: MIT
"""Builds the sdist and the wheel of the last commit, and checks what is in them.

    python tools/check_wheel.py [--install] [--out FOLDER]

The sources come from git archive, so nothing that is not committed can help. --install also
installs the wheel outside the tree, without the extra cpu, with it, and where there is no OpenCL,
and makes calls. The packages build and, on Linux, auditwheel have to be installed. A wheel that is
built on Debian 12 needs its glibc, as the printed platform says; cibuildwheel builds the published
ones in an older image (pyproject.toml).
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED_IN_WHEEL = (
    r"clattn/__init__\.py",
    r"clattn/_core\.pyi",
    r"clattn/_core\.[\w.-]+\.(so|pyd)",
    r"clattn/py\.typed",
    r"clattn-[^/]+\.dist-info/RECORD",
    r"clattn-[^/]+\.dist-info/licenses/LICENSE",
)
ALLOWED_IN_WHEEL = "|".join((
    r"clattn/.*\.(py|pyi|typed)", r"clattn/_core\.[\w.-]+",
    r"clattn/_commands/bench/limits\.cl", r"clattn-[^/]+\.dist-info/.*",
))  # fmt: skip
NEEDED_IN_SDIST = ("CMakeLists.txt", "LICENSE", "PKG-INFO", "csrc/base/platform.c",
                   "kernels/attention/reference.cl", "third_party/opencl-headers/CL/cl.h",
                   "third_party/opencl-headers/LICENSE")  # fmt: skip
LARGEST = 3 << 20  # bytes of the wheel

CALL = """
import numpy as np, clattn
print(clattn.__version__, clattn.__file__)
x = np.random.default_rng(0).standard_normal((3, 2, 4, 16, 8), dtype=np.float32)
for device in clattn.devices():
    y = clattn.scaled_dot_product_attention(*x, device=device)
    s = x[0] @ x[1].swapaxes(-1, -2) / np.sqrt(8)
    w = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(y, (w / w.sum(-1, keepdims=True)) @ x[2], atol=1e-5)
    np.testing.assert_array_equal(clattn.eye(3, device=device), np.eye(3))
    print("right on", device)
"""
NO_DEVICE = """
import clattn, numpy as np
try:
    clattn.eye(3)
except clattn.DeviceError as error:
    print(error)
    assert "intel-opencl-rt" in str(error)
else:
    raise SystemExit("a call without OpenCL gave a result")
"""


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, **options)


def build(folder):
    """Return (sdist, wheel), made of the last commit; the wheel is made of the sdist."""
    tree, made = folder / "tree", folder / "dist"
    tree.mkdir()
    archive = folder / "tree.tar"
    run("git", "-C", ROOT, "archive", "-o", archive, "HEAD")
    with tarfile.open(archive) as tar:
        tar.extractall(tree, filter="data")
    run(sys.executable, "-m", "build", "--outdir", made, tree, stdout=subprocess.DEVNULL)
    return next(made.glob("*.tar.gz")), next(made.glob("*.whl"))


def check_sdist(path):
    with tarfile.open(path) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
    missing = [name for name in NEEDED_IN_SDIST if name not in names]
    assert not missing, f"the sdist lacks {missing}"
    wrong = [n for n in names if re.search(r"\.(so|o|obj|pyd|dll|whl)$|__pycache__|^\.ci", n)]
    assert not wrong, f"the sdist has {wrong}"
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")


def check_wheel(path):
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [core] = [name for name in names if re.fullmatch(NEEDED_IN_WHEEL[2], name)]
        machine_code = wheel.read(core)
    for pattern in NEEDED_IN_WHEEL:
        assert any(re.fullmatch(pattern, name) for name in names), f"no {pattern} in the wheel"
    wrong = [name for name in names if not re.fullmatch(ALLOWED_IN_WHEEL, name)]
    assert not wrong, f"the wheel has {wrong}"
    kernels = sorted(ROOT.glob("kernels/**/*.cl"))
    for kernel in kernels:
        name = "_".join(kernel.relative_to(ROOT / "kernels").with_suffix("").parts)
        assert re.search(rf"void\s+{name}\s*\(".encode(), machine_code), f"no kernel {name}"
    size = path.stat().st_size
    assert size < LARGEST, f"the wheel has {size} bytes"
    print(f"{path.name}: {len(names)} files, {len(kernels)} kernels, {size / 1e6:.1f} MB")


def audit(path):
    """Print what the wheel needs of a Linux. The loader of OpenCL is opened at run time."""
    shown = run(sys.executable, "-m", "auditwheel", "show", path, stdout=subprocess.PIPE).stdout
    assert "libOpenCL" not in shown, shown
    print(re.search(r'platform tag:\s*"?([\w]+)', " ".join(shown.split()))[1])


def check_installed(folder, wheel):
    for extra in ("", "[cpu]"):
        place = folder / f"venv{extra.strip('[]')}"
        venv.create(place, with_pip=True)
        python = place / "bin/python"
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}{extra}")
        variables = {
            n: v for n, v in os.environ.items() if not n.startswith(("OCL_", "PYTHONPATH"))
        }
        variables["XDG_CACHE_HOME"] = str(folder / "cache")
        (folder / "cache").mkdir(exist_ok=True)
        print(f"clattn{extra}, drivers of the system" + (" and of pip" if extra else ""))
        done = subprocess.run([python, "-c", CALL], cwd=folder, env=variables, text=True,
                              capture_output=True)  # fmt: skip
        print(done.stdout + "".join(done.stderr.splitlines(True)[-1:]))
        assert done.returncode == 0 or (not extra and "DeviceError" in done.stderr), done.stderr
        if not extra:
            print("clattn, no driver")
            variables["OCL_ICD_VENDORS"] = "/nonexistent"
            run(python, "-c", NO_DEVICE, cwd=folder, env=variables)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install the wheel and make calls")
    parser.add_argument("--out", type=Path, help="keep sdist and wheel in this folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        check_sdist(sdist)
        check_wheel(wheel)
        if sys.platform == "linux":
            audit(wheel)
        if given.install:
            check_installed(folder, wheel)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                path.rename(given.out / path.name)


if __name__ == "__main__":
    main()
