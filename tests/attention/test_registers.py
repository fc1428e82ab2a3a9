# SPDX-License-Identifier: MIT
"""Plans for GPUs whose work-items have few registers, and the rows of tools/machine_code.

A loader lets a CPU report the facts of such a GPU. It builds no attention kernel. It hands the
test the build options instead.
"""

import pytest
from machine_code import table
from support.faults import open_with
from support.processes import ROOT

INTEL = "cl_intel_required_subgroup_size"
AMD = "cl_amd_device_attribute_query"
LOCAL = 64 << 10
GPUS = {  # what a device says, and the device of the table that it is like
    "sizes from 8 on": ("skl", {"EXTENSIONS": INTEL, "SIZES": "8 16 32", "LOCAL": LOCAL}),
    "sizes from 16 on": ("pvc", {"EXTENSIONS": INTEL, "SIZES": "16 32", "LOCAL": 2 * LOCAL}),
    "waves of 64": ("gfx906", {"EXTENSIONS": AMD, "WAVE": 64, "LOCAL": LOCAL}),
    "waves of 32": ("gfx1030", {"EXTENSIONS": AMD, "WAVE": 32, "LOCAL": LOCAL}),
    "nothing": ("gfx906", {"EXTENSIONS": "", "LOCAL": LOCAL}),
}

TELL = """
import clattn, numpy as np
device = next(d for d in listed if d.platform == {platform!r})  # GPUs have another order
assert device.type == "gpu" and device.usable, device.reason
faults.faults_options.restype = ctypes.c_char_p
for kernel, dtype, size, heads, rows in {problems}:
    clattn._core.force(kernel.removesuffix("_backward"))
    shapes = (1, heads, rows, size), (1, 1, 99, size)
    q, k = (np.zeros(shape, "f2" if dtype == 1 else "f4") for shape in shapes)
    try:
        if kernel == "tiled_backward":
            lse = np.zeros(q.shape[:3], "f4")
            clattn.scaled_dot_product_attention_backward(q, q, k, k, q, lse, device=device)
        clattn.scaled_dot_product_attention(q, k, k, device=device, enable_gqa=True)
    except clattn.DeviceError:
        pass
    print(faults.faults_options().decode())
"""


def numbers_of(options):
    """The macros of options, of calls without a mask. Some of the table name others."""
    macros = dict(o[2:].split("=") for o in options if o.startswith("-D"))
    return {n: macros.get(x, x) for n, x in macros.items() if n != "MASK_DTYPE"}


@pytest.mark.by_turns
@pytest.mark.cpus
@pytest.mark.parametrize("says", GPUS)
def test_rows_have_the_macros_of_plans(device, faults_library, tmp_path, says):
    """Of attention_tiled, attention_decode_gpu and the first step of attention_tiled_backward."""
    like, facts = GPUS[says]
    kinds = [(dtype, size) for size in table.HEADS for dtype in (table.FLOAT32, table.FLOAT16)]
    problems = [(kernel, *kind, 1, 99) for kernel in ("tiled", "tiled_backward") for kind in kinds]
    problems += [("decode_gpu", *kind, heads, 1) for kind in kinds for heads in (1, 2, 4, 8)]
    done = open_with(
        faults_library,
        device,
        TELL.format(problems=problems, platform=device.platform),
        FAULTS_GPU="1",
        XDG_CACHE_HOME=tmp_path,
        **{f"FAULTS_{name}": str(value) for name, value in facts.items()},
    )
    lines = done.stdout.splitlines()
    for (kernel, dtype, size, heads, _), line in zip(problems, lines, strict=True):
        row = (table.tiled(like, dtype, size) if kernel == "tiled"
               else table.tiled_backward(like, dtype, size, "NUMBERS") if kernel == "tiled_backward"
               else table.decode_gpu(like, dtype, size, heads))  # fmt: skip
        options = [f"-D{macro}" for macro in row.macros]
        expected = numbers_of(table.with_macros(ROOT / "kernels" / row.file, options))
        assert numbers_of(line.split()) == expected, (kernel, dtype, size, heads)


def test_few_registers_hold_few_numbers():
    """Of the scores and the result of a work-item: the bounds by which csrc chooses tilings."""
    for device, facts in table.FACTS.items():
        for size in table.HEADS:
            row = table.tiled(device, table.FLOAT32, size)
            macros = {n: int(x) for n, x in (m.split("=") for m in row.macros)}
            few = facts.registers < 256
            assert macros["MI"] * macros["NJ"] <= (8 if few else 32)
            assert macros["MI"] * macros["NC"] <= (24 if few else 64)
            assert macros["SUB_GROUP"] == facts.sub_group
