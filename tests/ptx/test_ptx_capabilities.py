# SPDX-License-Identifier: MIT
"""Capabilities and variants on NVIDIA GPUs, each with one fault in its PTX: see device.py.

What gives wrong numbers is not used, nor what needs it, and calls without it are right.
"""

import json

import pytest
from support.ptx_device import run_on_machine

# Test of a capability: what is broken in the PTX of its probe, its name, and what the last kernel
# of a call of float16 and of bfloat16 is then: its name and its macro WARP.
MMA = ("attention_mma", "1")
GROUPS = ("attention_mma", "2")
TILED = ("attention_tiled", None)
FAULTS = {
    "shuffle": (("probe_exchange", r"(shfl\S+ %\w+, %\w+), %\w+", r"\1, 4"),
                "shuffles of a warp", TILED, TILED),
    "exp2": (("probe_exchange", r"ex2\.approx\.ftz\.f32 (%\w+), (%\w+)", r"neg.f32 \1, \2"),
             "shuffles of a warp", TILED, TILED),
    "vote": (("probe_warp", r"setp\.ne\.u32 p", "setp.eq.u32 p"),
             "votes of a warp", TILED, TILED),
    "load": (("probe_warp", r"\.trans", ""),
             "loads of matrices", TILED, TILED),
    "float16": (("probe_warp", r"(mma\.sync\S+f16\.f16\S+ \{[^}]*\}, \{%\w+), (%\w+), (%\w+)",
                 r"\1, \3, \2"),
                "matrices of float16", TILED, MMA),
    "order of halves": (("probe_warp", r"(cvt\.rn\.bf16x2\.f32 %\w+), (%\w+), (%\w+)",
                  r"\1, \3, \2"),
                 "matrices of bfloat16", MMA, TILED),
    "copy": (("probe_warp", r"(cp\.async\.cg.*, 16), %\w+", r"\1, 16"),
             "asynchronous copies", TILED, TILED),
    "local memory": (("probe_local", r"(st\.shared\.v4\.u32\s+\[%\w+\], \{%\w+), (%\w+)",
                      r"\1, %r0"),
                     "48 KiB of local memory", TILED, TILED),
    "ample local memory": (("probe_local", r"(\[98304\];[\s\S]*?st\.shared\.v4\.u32\s+\[%\w+\], "
                            r"\{%\w+), (%\w+)", r"\1, %r0"),
                           "96 KiB of local memory", MMA, MMA),
    "float16 in groups": (("probe_group", r"(f16\.f16 \{[^}]*\}, \{%\w+), (%\w+), (%\w+)",
                           r"\1, \3, \2"),
                          "matrices of float16 in groups of warps", MMA, MMA),
    "bfloat16 in groups": (("probe_group", r"(bf16\.bf16 .*\{%\w+), (%\w+), (%\w+)", r"\1, \3, \2"),
                        "matrices of bfloat16 in groups of warps", MMA, MMA),
    "much local memory": (("probe_local", r"(\[196608\];[\s\S]*?st\.shared\.v4\.u32\s+\[%\w+\], "
                           r"\{%\w+), (%\w+)", r"\1, %r0"),
                          "192 KiB of local memory", MMA, MMA),
    "nothing": (None, None, GROUPS, GROUPS),
}  # fmt: skip
# Kernels run where a capability that lacks changes their program. Those of the other cases run in
# test_ptx_kernels.py; here they are launched, and nothing happens.
RUN = ("shuffle", "nothing")

SPOIL = """
import re

fault = {fault!r}
right = machine.edited

def spoilt(source, macros, name):
    text = right(source, macros, name)
    return re.sub(*fault[1:], text) if fault and name == fault[0] else text

machine.edited = spoilt
"""

CODE = """
import json
from clattn import _core

class Nothing:
    def launch(self, groups, arguments):
        pass

lacks = _core.lacks(device) if device.usable else device.reason
kernels = []
call = check_attention if {run} else sdpa
if call is sdpa:
    machine.machine = lambda *launched: Nothing()
    _core.force("", "", "off")  # a kernel that does not run has no results to compare
for dtype in float16, bfloat16:
    call(*qkv((1, 1), 65, 20, 16, dtype=dtype), device=device)
    kernel, macros = machine.launched[-1]
    kernels.append((kernel, macros.get("WARP")))
print(json.dumps((lacks, device.nvidia_capability, kernels)))
"""


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_capability_is_not_used(library, name):
    fault, capability, float16_kernel, bfloat16_kernel = FAULTS[name]
    code = CODE.format(run=name in RUN)
    said = run_on_machine(library, code, SPOIL.format(fault=fault)).stdout.splitlines()[-1]
    lacks, nvidia_capability, kernels = json.loads(said)
    assert list(lacks) == [capability] * (capability is not None)
    assert all("wrong results: word" in reason for reason in lacks.values())
    assert nvidia_capability == (0 if capability == "shuffles of a warp" else 90)
    assert [tuple(kernel) for kernel in kernels] == [float16_kernel, bfloat16_kernel]


def test_the_listing_says_what_is_not_used(library):
    code = """
from argparse import Namespace
from clattn._commands import listing
listing.run(Namespace())
"""
    for name in ("copy", "local memory"):
        fault, capability, *_ = FAULTS[name]
        said = run_on_machine(library, code, SPOIL.format(fault=fault)).stdout
        assert f"not used       {capability}: wrong results: word" in said
        assert ("matrix units" in said) == (name == "local memory")


def test_a_wrong_variant_is_not_used(library):
    """Its first use, for each dtype, is compared with what the host computes."""
    code = """
import warnings
from clattn import _core

arrays = qkv((1, 1), 17, 20, 16, dtype=float16)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        machine.launched.clear()
        check_attention(*arrays, device=device)
assert {kernel for kernel, _ in machine.launched} == {"attention_tiled"}, machine.launched
print(*(w.message for w in told), sep="\\n")
_core.force("mma")
try:
    check_attention(*arrays, device=device)
except AssertionError as error:
    assert "error" in str(error)
else:
    raise SystemExit("the fault is not in the kernel")
"""
    fault = ("attention_mma", *FAULTS["float16"][0][1:])
    said = run_on_machine(library, code, SPOIL.format(fault=fault)).stdout.splitlines()
    assert len(said) == 1
    assert "cannot use the kernel 'attention_mma' for calls like this one, and others" in said[0]
    assert "gives wrong results: they differ by" in said[0]
