# SPDX-License-Identifier: MIT
"""The loader whose kernels machine.py executes. All processes of a run share clang's PTX."""

import os

import pytest
from ptx.device import build


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machine")
    of_the_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folder lies in that of the run
        of_the_run = of_the_run.parent
    kept = of_the_run / "ptx-of-clang"
    kept.mkdir(exist_ok=True)
    (folder / "ptx").symlink_to(kept)
    return build(folder)
