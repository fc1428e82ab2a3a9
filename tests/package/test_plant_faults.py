# SPDX-License-Identifier: MIT
"""The table of tools/plant_faults.py fits the kernels. The tool itself runs by hand."""

import importlib.util
import sys

import pytest
from support.helpers import ROOT
from support.variants import VARIANTS

path = ROOT / "tools" / "plant_faults.py"
spec = importlib.util.spec_from_file_location("plant_faults", path)
tool = importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module")
def faults():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, tool)
        spec.loader.exec_module(tool)
    return tool.FAULTS


def test_each_text_is_in_its_kernel_once(faults):
    for fault in faults:
        text = (ROOT / "kernels" / fault.file).read_text()
        assert text.count(fault.text) == 1, f"{fault.name}: not once in {fault.file}"
        assert set(fault.kernels.split()) <= {variant.kernel for variant in VARIANTS}


def test_each_kernel_has_faults(faults):
    planted = {kernel for fault in faults for kernel in fault.kernels.split()}
    assert planted | {"pairs", "amx"} == {variant.kernel for variant in VARIANTS}
