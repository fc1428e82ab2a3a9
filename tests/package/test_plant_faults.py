# SPDX-License-Identifier: MIT
"""The table of tools/plant_faults.py fits the kernels. The tool itself runs by hand."""

import plant_faults
from support.processes import ROOT
from support.variants import VARIANTS

KERNELS = {variant.kernel for variant in VARIANTS} | {"fastest", "reference", "pages"}


def test_each_text_is_in_its_kernel_once():
    for fault in plant_faults.FAULTS:
        text = (ROOT / "kernels" / fault.file).read_text()
        assert text.count(fault.text) == 1, f"{fault.name}: not once in {fault.file}"
        assert set(fault.kernels.split()) <= KERNELS


def test_each_kernel_has_faults():
    planted = {kernel for fault in plant_faults.FAULTS for kernel in fault.kernels.split()}
    assert planted == KERNELS
