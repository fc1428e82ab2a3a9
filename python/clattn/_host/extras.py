"""How to install the packages of an extra, for messages.

clattn itself may come from a checkout, a wheel or an index, so messages name the packages that an
extra adds. All of them are on PyPI. tools/lint compares this table with pyproject.toml.
"""

from __future__ import annotations

_PACKAGES = {
    "bench": ["rich>=13", "matplotlib>=3.9", "pyopencl>=2024.1"],
    "cpu": ["intel-opencl-rt>=2026.0", "intel-cmplr-lib-rt>=2026.0"],
    "dask": ["dask[array,distributed]>=2025.1"],
    "demo": ["matplotlib>=3.9", "rich>=13"],
    "jax": ["jax>=0.6"],
    "mpi": ["mpi4py>=4.0"],
    "onnx": ["onnx>=1.19"],
    "pyopencl": ["pyopencl>=2024.1"],
    "transformers": ["transformers>=5.4", "torch>=2.5"],
}


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return "pip install " + " ".join(f'"{package}"' for package in _PACKAGES[extra])
