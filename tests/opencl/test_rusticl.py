# SPDX-License-Identifier: MIT
"""Mesa's rusticl on the processor (llvmpipe), where it is installed: every operator is right.

It is loaded as a driver, and only it: OCL_ICD_VENDORS names a folder with its .icd file. Debian:
mesa-opencl-icd and libclc-15. tools/try_drivers.sh runs more tests, on Debian 13's.
"""

import os
from pathlib import Path

import pytest
from support.processes import run_python

FOLDERS = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), "/usr/lib/x86_64-linux-gnu"]
LIBRARIES = [
    path for folder in FOLDERS if folder for path in Path(folder).glob("libRusticlOpenCL.so.1*")
]

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="Mesa's rusticl is not installed")

OPEN = """
import clattn
(device,) = clattn._core.all_devices()
print(device.reason)
"""
CALL = """
import warnings
import clattn
import support.limited_calls as calls

warnings.filterwarnings("ignore", message=".*cannot use the kernel")
(device,) = clattn.devices()
"""
EVERYTHING = "calls.call_every_operator(device, device.float64)"
FEW_ROUNDS = "for call in (calls.call_options, calls.call_flex, calls.call_matrices): call(device)"


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rusticl")
    (folder / "rusticl.icd").write_text(f"{LIBRARIES[0]}\n")
    return {"OCL_ICD_VENDORS": folder, "RUSTICL_ENABLE": "llvmpipe", "XDG_CACHE_HOME": folder,
            "CLATTN_DEVICE": None, "CLATTN_KERNEL": None}  # fmt: skip


def test_every_operator(env):
    """A driver whose loops end early is passed over. It is right as long as none does."""
    reason = run_python(OPEN, env=env).stdout.strip()
    calls = EVERYTHING
    if reason != "None":
        assert "loops of 100000 rounds end early" in reason
        env, calls = env | {"CLATTN_TRIALS": "off"}, FEW_ROUNDS
    run_python(CALL + calls, env=env, timeout=300)
