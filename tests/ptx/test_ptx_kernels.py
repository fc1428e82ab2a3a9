# SPDX-License-Identifier: MIT
"""What the PTX of kernels for NVIDIA GPUs computes, without such a GPU: see tools/ptx.

clattn plans and launches as on a GPU of capability 9.0. Results are compared with the reference,
within its tolerances. A case is the kernels that have to be used, some macros of the last kernel,
and the arguments of `check_attention`.
"""

import json

import pytest
from machine_code import table
from support.ptx_device import run_on_machine

BOOL_MASK = " ".join(table.uses("MASK"))
SINKS_AND_OFFSETS = table.uses("SINKS", "OFFSETS")[0]
BY_SEQUENCE = "sinks=draw(({},)), is_causal=True, query_offset=[{}, {}], return_lse=True"
MASK_AND_SOFTCAP = " ".join(table.uses("MASK", "ADDED_MASK", "SOFTCAP", mask_dtype=1))

CASES = {
    # Four blocks of 64 keys in three stages, the last one of 7 keys.
    "ring": ("mma", "DTYPE=1 HEAD_E=64 MT=1 BN=64 STRIP=32 LSE=1",
        "*halves((1, 1), 20, 199, 64), return_lse=True"),
    # Two blocks, the last one of 72 keys; and three, the last one of 22 keys.
    "groups of warps": ("mma", "DTYPE=1 HEAD_E=64 TOGETHER=4 WARPS=4 BN=128 LSE=0",
        "*halves((1, 2), 130, 200, 64), is_causal='lower_right'"),
    "groups, bfloat16, 128": ("mma", "DTYPE=2 HEAD_E=128 TOGETHER=4 WARPS=4 BN=64 LSE=1",
        "*qkv((1, 2), 70, 150, 128, dtype=bfloat16), scale=-0.2, return_lse=True"),
    "groups, 192, 256": ("mma", "HEAD_E=192 HEAD_EV=256 TOGETHER=4 WARPS=8 BN=64",
        "*halves((1, 1), 70, 50, 180, 256), window=(9, 30)"),
    "groups, not aligned": ("mma", "HEAD_E=64 TOGETHER=4 ALIGNED=0 OUTPUT_ALIGNED=0",
        "*(a[..., 3:43] for a in halves((1, 1), 65, 150, 64)), out=wide"),
    "groups, blocks of a bool mask": ("mma", "HEAD_E=64 TOGETHER=4 BN=64 " + BOOL_MASK,
        "*halves((1, 2), 130, 330, 64), attn_mask=blocks"),
    "groups, a bool mask": ("mma", "DTYPE=2 HEAD_E=128 TOGETHER=4 LSE=1 " + BOOL_MASK,
        "*qkv((1, 2), 70, 150, 80, dtype=bfloat16), attn_mask=blocks[:70, 3:153],"
        "is_causal='lower_right', return_lse=True"),
    "groups, mask, softcap": ("mma", "HEAD_E=64 TOGETHER=4 BN=64 " + MASK_AND_SOFTCAP,
        "*halves((1, 1), 70, 150, 64), attn_mask=np.tile(mask, (4, 1))[:70], softcap=3.0"),
    "bfloat16, 80": ("mma", "DTYPE=2 HEAD_E=80 BN=32",
        "*qkv((1, 1), 70, 130, 80, dtype=bfloat16), is_causal=True"),
    "256": ("mma", "HEAD_E=256 BN=16", "*halves((1, 1), 20, 75, 256)"),
    "parts of heads": ("mma", "HEAD_E=64 HEAD_EV=80", "*halves((1, 1), 20, 50, 40, 72)"),
    "mask, softcap": ("mma", MASK_AND_SOFTCAP + " LSE=1",
        "*halves((1, 1), 20, 150, 64), attn_mask=mask, softcap=3.0, return_lse=True"),
    "bool mask, group of heads": ("mma", BOOL_MASK,
        "draw((1, 2, 40, 64), float16), *halves((1, 1), 1, 90, 64)[1:], attn_mask=mask_of_bool,"
        "enable_gqa=True"),
    # Keys that are not numbers, and rows that do not see them and are computed again.
    "rows again": ("mma", "HEAD_E=64", "q, k, v, is_causal=True"),
    "not aligned": ("mma", "ALIGNED=0 OUTPUT_ALIGNED=0",
        "*(a[..., 3:43] for a in halves((1, 1), 20, 150, 64)), out=out"),
    "decode": ("decode_gpu decode_gpu_merge", "DTYPE=2 WARP_SHUFFLES=1",
        "*qkv((1, 1), 1, 1200, 128, dtype=bfloat16), return_lse=True"),
    "decode, four rows": ("decode_gpu", "DTYPE=3 WARP_SHUFFLES=1 RT=4",
        "*qkv((1, 2), 3, 150, 72), softcap=5.0, attn_mask=mask[:3]"),
    "decode, group of heads": ("decode_mma decode_gpu_merge", "DTYPE=1 WARP_SHUFFLES=1",
        "draw((1, 8, 1, 64), float16), *halves((1, 1), 1, 1100, 64)[1:], enable_gqa=True,"
        "return_lse=True"),
    "decode, rows of two tiles": ("decode_mma", "DTYPE=2 HEAD_E=80 HEAD_EV=72",
        "draw((1, 7, 3, 80), bfloat16), *qkv((1, 1), 1, 100, 80, 72, bfloat16)[1:],"
        "enable_gqa=True, is_causal='lower_right', scale=-0.2"),
    "decode, mask": ("decode_mma", MASK_AND_SOFTCAP,
        "*halves((1, 2), 12, 150, 64), attn_mask=mask[:12], softcap=3.0"),
    "decode, sinks, offsets": ("decode_gpu decode_gpu_merge", SINKS_AND_OFFSETS,
        "*qkv((2, 2), 1, 1200, 64), " + BY_SEQUENCE.format(2, 1190, 700)),
    "decode, group, sinks, offsets": ("decode_mma decode_gpu_merge", SINKS_AND_OFFSETS,
        "draw((2, 4, 1, 64), float16), *halves((2, 1), 1, 1100, 64)[1:], enable_gqa=True, "
        + BY_SEQUENCE.format(4, 1050, 900)),
    "sinks, offsets": ("mma", SINKS_AND_OFFSETS + " LSE=1",
        "*halves((2, 2), 20, 150, 64), " + BY_SEQUENCE.format(2, -5, 100)),
    # Rows and keys of sequences: packed, in pages of whole blocks, and in smaller pages. Windows
    # begin within a page.
    "sequences": ("mma", "RAGGED=1 PAGED=0 TOGETHER=1 ALIGNED=1 BN=64 LSE=1",
        "packed([20, 0, 17], [70, 3, 30], 2, 1, 64, dtype=float16), is_causal='lower_right'"),
    "sequences, pages": ("mma", "RAGGED=1 PAGED=1 TOGETHER=1 ALIGNED=1 BN=32",
        "packed([20, 9], [30, 150], 1, 1, 128, dtype=bfloat16), page_size=32, window_size=(49, 3)"),
    "sequences, rows of pages": ("mma", "RAGGED=1 PAGED=2 TOGETHER=1 ALIGNED=1 BN=32",
        "packed([20, 9], [30, 100], 2, 2, 80, dtype=float16), page_size=16, window_size=(49, 3)"),
    "sequences, pages not aligned": ("mma", "RAGGED=1 PAGED=2 ALIGNED=0 OUTPUT_ALIGNED=0",
        "packed([20, 9], [30, 80], 1, 1, 21, dtype=float16), page_size=5, softcap=3.0"),
    "groups, sequences": ("mma", "RAGGED=1 PAGED=0 TOGETHER=4 ALIGNED=1 BN=64 LSE=1",
        "packed([70, 20], [150, 30], 2, 1, 64, dtype=float16), is_causal='lower_right'"),
    "groups, sequences, pages": ("mma", "RAGGED=1 PAGED=1 TOGETHER=4 ALIGNED=1 BN=64",
        "packed([20, 70], [30, 200], 1, 1, 64, dtype=float16), page_size=64, window_size=(60, 3)"),
    "groups, sequences, rows of pages": ("mma", "RAGGED=1 PAGED=2 TOGETHER=4 ALIGNED=1 BN=64",
        "packed([70, 9], [150, 30], 1, 1, 128, dtype=bfloat16), page_size=16, is_causal=True"),
    "decode, sequences": ("decode_gpu", "RAGGED=1 WIDE=1",
        "packed([1, 3, 1], [170, 30, 1], 4, 2, 64, dtype=float16), is_causal='lower_right'"),
    "decode, group, sequences": ("decode_mma", "RAGGED=1 PAGED=0",
        "packed([1, 3, 1], [170, 30, 1], 4, 1, 64, dtype=float16), is_causal='lower_right'"),
    "decode, group, sequences, pages": ("decode_mma", "RAGGED=1 PAGED=1",
        "packed([1, 2], [70, 100], 8, 2, 80, dtype=bfloat16), page_size=16, window_size=(60, 0)"),
    "decode, sequences, pages": ("decode_gpu", "RAGGED=1 WIDE=1",
        "packed([1, 2], [70, 100], 2, 1, 80, dtype=bfloat16), page_size=16"),
    "decode, int8": ("decode_gpu", "RAGGED=1 WIDE=1 KEY_DTYPE=5 RT=4 KEY_LANES=4",
        "coded([1, 2], [170, 30], CODES['int8'], 'of keys', E=64, Ev=80, Hq=4, Hk=1)"),
    "decode, float8, pages": ("decode_gpu", "RAGGED=1 WIDE=1 KEY_DTYPE=13 RT=1",
        "coded([1, 1], [70, 100], CODES['e4m3fn'], 'of heads', E=16, Hq=1, Hk=1), page_size=16"),
    "tiled": ("tiled", "DTYPE=3", "*qkv((1, 1), 40, 50, 64), is_causal=True, return_lse=True"),
    "tiled, weights": ("tiled tiled_scores", "DTYPE=3",
        "*qkv((1, 1), 40, 50, 64), is_causal=True, return_weights=True"),
    "tiled, sinks, offsets": ("tiled", SINKS_AND_OFFSETS,
        "*qkv((2, 2), 20, 50, 64), " + BY_SEQUENCE.format(2, -5, 30)),
}  # fmt: skip

ARRAYS = """
from functools import partial
from support.coded import CODES, check_codes, coded, run_codes
from support.ragged import check_sequences, packed, run
halves = partial(qkv, dtype=float16)

mask = draw((20, 150), float16)
mask[draw((20, 150)) > 1] = -np.inf
mask[2], mask[3] = -np.inf, np.finfo(np.float16).min
mask_of_bool = draw((40, 90)) > 0
mask_of_bool[7:12] = False
# A block has 64 keys. In the second block no row attends to a key. In the third block only row 5
# does, and in the fourth all rows but those of the second warp may. Other blocks are random.
blocks = np.tile(draw((130, 11)) > 0, 30)
blocks[:, 64:128], blocks[:, 128:192], blocks[16:32, 192:256] = False, np.eye(130, 1, -5), False
q, k, v = halves((1, 2), 20, 40, 8)
k[..., 10, 3], v[..., 15, 5], v[..., 16, 2] = np.nan, np.inf, np.nan
out = np.empty((1, 1, 40, 20), float16).swapaxes(2, 3)
wide = np.empty((1, 1, 40, 65), float16).swapaxes(2, 3)
"""


def call_of(name, checks=True):
    """The call of a case, with or without a comparison."""
    arguments = CASES[name][2]
    if arguments.startswith("coded"):
        return f"{'check_codes' if checks else 'run_codes'}({arguments}, device=device)"
    if arguments.startswith("packed"):
        return f"{'check_sequences' if checks else 'run'}({arguments}, device=device)"
    lse = "" if "return_lse" in arguments else ", return_lse=False"
    return f"{'check_attention' if checks else 'sdpa'}({arguments}{lse}, device=device)"


def code_of(name, checks=True):
    kernels, macros, _ = CASES[name]
    return f"""
print({name!r})
machine.launched.clear()
{call_of(name, checks)}
launched = dict(machine.launched)
for kernel in {kernels.split()}:
    macros = launched["attention_" + kernel]
assert {dict(m.split("=") for m in macros.split())}.items() <= macros.items(), macros
for kernel, macros in launched.items():
    listed = table.MACROS[kernel.replace("_", "/", 1) + ".cl"]
    listed = {{m.partition("=")[0] for m in listed.split()}}
    assert macros.keys() - {{"RAGGED", "KEY_DTYPE"}} == listed, (kernel, macros)
assert not any(m.bank_conflicts for m in machine.machines.values())
"""


# A work-group whose queries stay in local memory, and one whose warps multiply together.
STAYING = {"QUERIES": 2, "STAGES": 2, "BN": 64, "STRIP": 64}
GROUPED = {"TOGETHER": 4, "WARPS": 4, "STAGES": 2, "BN": 64}

# A row has three parts: numbers that the tuner sets, macros that the plan makes of these numbers,
# and the arguments of a call. The last two rows show what the plan does for devices without
# products of groups.
USUAL = "*halves((1, 1), 20, 75, 64), return_lse=True"
TUNED = (
    ({"WARPS": 8, "STAGES": 2}, {"MT": 1}, USUAL),
    ({"WARPS": 2, "STAGES": 4, "BN": 16}, {"MT": 1}, USUAL),
    (STAYING, {"MT": 1}, USUAL),
    ({"TOGETHER": 4, "WARPS": 8, "STAGES": 3, "BN": 64}, {"MT": 1, "STRIP": 64}, USUAL),
    ({"TOGETHER": 1}, {"MT": 2, "STRIP": 32, "QUERIES": 1},
        "*halves((1, 2), 130, 200, 64), is_causal='lower_right'"),
    ({"TOGETHER": 1}, {"MT": 2, "HEAD_E": 128, **STAYING},
        "*qkv((1, 2), 130, 100, 128, dtype=bfloat16), scale=-0.2, return_lse=True"),
)  # fmt: skip


def tuned(knobs, macros, arguments):
    return f"""
for dtype in "float16", "bfloat16":
    tune_all(device, dtype, "mma", {knobs})
machine.launched.clear()
check_attention({arguments}, device=device)
macros = dict(machine.launched)["attention_mma"]
assert { ({n: str(x) for n, x in (knobs | macros).items()}) }.items() <= macros.items(), macros
"""


@pytest.mark.parametrize("kernel", ["mma", "decode_gpu", "decode_mma", "tiled"])
def test_kernels(library, kernel):
    """All cases in one process. What it prints last names the case that fails.

    They are forced, and so not tried, which takes longer.
    """
    cases = [name for name, (kernels, *_) in CASES.items() if kernels.split()[0] == kernel]
    code = ARRAYS + "".join(map(code_of, cases))
    if kernel == "mma":
        code += "from support.tuning import tune_all\n" + "".join(tuned(*one) for one in TUNED)
    run_on_machine(library, code, kernel=kernel)


MODS = """
from support.mods import PLACES, check_mods
q, (k, v) = draw((1, 2, {L}, {E}), {dtype}), qkv((1, 1), {L}, {S}, {E}, dtype={dtype})[1:]
check_mods(q, k, v, mods=PLACES, blocks=True, device=device)
assert {{"attention_{kernel}", "attention_blocks"}} <= dict(machine.launched).keys()
"""


# A mask, rows without a key, and two heads that share their keys.
TILED_GRADIENTS = """
shapes = (1, 2, 18, 8), (1, 1, 20, 8), (1, 1, 20, 8)
check_backward(draw((1, 2, 18, 8)), *map(draw, shapes), device=device, enable_gqa=True,
               is_causal=True, query_offset=-2, attn_mask=mask_of_bool[:18, :20])
assert steps_of("tiled_backward") == {"3", "4", "11"}, machine.launched
"""
# Some macros of the step that owns keys, and a call. Three blocks of rows of two heads that share
# keys; two tiles of a warp; 32 lines that a warp takes together; parts of heads, not aligned.
MMA_GRADIENTS = (
    ("DTYPE=1 HEAD_E=64 MT=1 BN=32 STRIP=32",
        "draw((1, 2, 70, 64), float16), *halves((1, 1), 70, 140, 64)[1:], enable_gqa=True,"
        "is_causal='lower_right', grad_lse=draw((1, 2, 70), seed=5)"),
    ("DTYPE=2 HEAD_E=64 MT=2 STRIP=16", "*qkv((1, 8), 20, 65, 64, dtype=bfloat16)"),
    ("DTYPE=2 HEAD_E=128 MT=1 BN=32 STRIP=32",
        "*qkv((1, 1), 70, 40, 128, dtype=bfloat16), window=(20, 30)"),
    ("DTYPE=1 HEAD_E=80 HEAD_EV=64 STRIP=16 ALIGNED=0 OUTPUT_ALIGNED=0",
        "*halves((1, 1), 20, 40, 69, 21), softcap=3.0, attn_mask=mask_of_bool[:20, :40]"),
)  # fmt: skip
CHECK_MMA_GRADIENTS = """
arguments, options = parse({arguments})
machine.launched.clear()
G = draw((*arguments[0].shape[:-1], arguments[2].shape[-1]), arguments[0].dtype, 7)
check_backward(G, *arguments, device=device, **options)
assert steps_of("mma_backward") == {{"3", "4"}}, machine.launched
assert steps_of("tiled_backward") == {{"11"}}, machine.launched
macros = dict(machine.launched)["attention_mma_backward"]
assert {macros}.items() <= macros.items(), macros
assert not any(m.bank_conflicts for m in machine.machines.values())
"""

GRADIENTS = """
from support.gradients import check_backward

def parse(*arguments, **options):
    return arguments, options

def steps_of(kernel):
    steps = [macros for name, macros in machine.launched if name == "attention_" + kernel]
    listed = {m.partition("=")[0] for m in table.MACROS[f"attention/{kernel}.cl"].split()}
    assert all(macros.keys() == listed for macros in steps), steps
    return {macros["STEP"] for macros in steps}
"""


def test_gradients(library):
    run_on_machine(library, ARRAYS + GRADIENTS + TILED_GRADIENTS, kernel="tiled")


def test_gradients_on_matrix_units(library):
    code = "".join(
        CHECK_MMA_GRADIENTS.format(arguments=arguments, macros=dict(m.split("=") for m in macros))
        for macros, arguments in ((given.split(), call) for given, call in MMA_GRADIENTS)
    )
    run_on_machine(library, ARRAYS + GRADIENTS + code, kernel="mma")


# Every other 128 keys lie in empty blocks. The table then changes, so that the mask would allow
# those keys. The result stays the same, because kernels skip empty blocks. They take 64 or 128 keys
# at a time.
EMPTY_BLOCKS = """
from support.mods import call, check_flex, lookup
flags = np.arange(500) // 128 % 2 == 1
table = clattn.tensor(flags, device)
mask = clattn.create_block_mask(lambda b, h, q, k: table[k], None, None, 2, 500, device, 32)
arrays = qkv((1, 2), 2, 500, {E}, dtype={dtype})
right = check_flex(*arrays, device=device, mask_mod=lambda b, h, q, k: lookup(flags, k))
table = clattn.tensor(flags | (np.arange(500) < 384), device)  # empty blocks are not asked again
assert call(*arrays, device=device, block_mask=mask).tobytes() == right.tobytes()
assert "attention_{kernel}" in dict(machine.launched)
"""


@pytest.mark.parametrize("kernel", ["mma", "decode_gpu", "decode_mma"])
def test_mods(library, kernel):
    """Scores and masks that the user writes, with tables, and a mask's blocks."""
    half = "mma" in kernel
    code = MODS if kernel != "decode_mma" else ""
    code += EMPTY_BLOCKS if "decode" in kernel else ""
    code = code.format(kernel=kernel, L=20 if half else 3, S=70, E=64 if half else 16, half=half,
                       dtype="float16" if half else "np.float32")  # fmt: skip
    run_on_machine(library, code, kernel=kernel)


# Six heads with eight groups at a time. Four splits of each would leave no group idle, but a split
# has 256 KiB, 512 keys, unless one wave needs smaller ones.
SPLITS = """
for heads, S, splits in ((6, 1024, 1), (6, 2048, 4), (1, 1024, 4), (1, 512, 2)):
    q, k = draw((1, 4 * heads, 1, 128), float16), draw((1, heads, S, 128), float16)
    launches.clear()
    machine.launched.clear()
    sdpa(q, k, k, enable_gqa=True, device=device)
    assert machine.launched[0][0] == "attention_decode_mma"
    assert launches[0] == heads * splits, (heads, S, launches)
"""


# Queries stay in registers if a kernel may have only the local memory that the device reports.
LOCAL_MEMORY = """
from clattn import _core
for bytes, queries in (("", "2"), ("49152", "1")):
    _core.force("", bytes, "off")
    sdpa(*halves((1, 2), 130, 100, 128), device=device)
    assert dict(machine.launched)["attention_mma"]["QUERIES"] == queries
"""


def test_the_choice(library):
    """Calls choose the kernels of the cases. Here they are launched, but nothing runs."""
    code = """
class Nothing:
    def launch(self, groups, arguments):
        launches.append(groups)

launches = []
machine.machine = lambda *launched: Nothing()
from clattn import _core
_core.force("", "", "off")  # there are no results to compare
"""
    calls = "".join(code_of(name, False) for name in CASES)
    run_on_machine(library, ARRAYS + code + calls + SPLITS + LOCAL_MEMORY)


def test_the_listing_tells_of_matrix_units(library):
    code = """
from argparse import Namespace
from clattn._commands import listing
listing.run(Namespace())
assert device.nvidia_capability == 90
"""
    said = run_on_machine(library, code).stdout
    assert "matrix units   NVIDIA's, of capability 9.0" in said


def without(pattern, n):
    """Returns an edit that removes the n-th match."""
    return rf"(?s)\A((?:.*?{pattern}){{{n}}}.*?){pattern}", r"\1"


MMA = r"(mma\.sync\S+ \{[^}]*\}, "

# The first two barriers run only in calls with offsets or key counts, which one work-item reads.
OF_OFFSETS = 2

# Each fault: a change of the PTX of a call, and words of the interpreter's refusal. "error" is the
# word of a test that finds wrong numbers.
FAULTS = {
    "rows of A": ((MMA + r"\{%\w+), (%\w+), (%\w+)", r"\1, \3, \2"), "error"),
    "rows of B": ((MMA + r"\{[^}]*\}, )\{(%\w+), (%\w+)\}", r"\1{\3, \2}"), "error"),
    "columns": ((r"\.trans", ""), "error"),
    "order of halves": ((r"(cvt\.rn\.f16x2\.f32 %\w+), (%\w+), (%\w+)", r"\1, \3, \2"), "error"),
    "neighbours": ((r"(shfl\S+ %\w+, %\w+), %\w+", r"\1, 4"), "error"),
    "lanes": ((r"(shfl.*)0xffffffff", r"\g<1>0x0000ffff"), "execute it, not"),
    "vote": ((r"(vote.*)0xffffffff", r"\g<1>0xfffffff0"), "execute it, not"),
    "zeros": ((r"(cp\.async\.cg.*, 16), %\w+", r"\1, 0"), "error"),
    "beyond the last key": ((r"(cp\.async\.cg.*, 16), %\w+", r"\1, 16"), "out of bounds"),
    "wait": ((r"wait_group 1", "wait_group 2"), "a copy is on its way"),
    "set": (without(r"cp\.async\.commit_group;", 2), "a copy is on its way"),
    "place of a matrix": ((r"(ldmatrix.*\[%\w+)\]", r"\1+2]"), "misaligned"),
    **{
        f"barrier {n}": (without(r"bar\.sync\s+0;", n), "a race")
        for n in range(OF_OFFSETS, OF_OFFSETS + 3)
    },
}
# The same of a call with offsets.
FAULTS_OF_OFFSETS = {
    f"barrier {n}": (without(r"bar\.sync\s+0;", n), "a race") for n in range(OF_OFFSETS)
}
# The same of a work-group that is STAYING: it has other waits and barriers.
FAULTS_OF_STAYING = {
    "wait": ((r"wait_group 0", "wait_group 1"), "a copy is on its way"),
    "set": (without(r"cp\.async\.commit_group;", 2), "a copy is on its way"),
    **{
        f"barrier {n}": (without(r"bar\.sync\s+0;", n), "a race")
        for n in range(OF_OFFSETS, OF_OFFSETS + 2)
    },
}
# The same of groups of warps. The text of products is a comment until clattn changes the program.
WGMMA = r"(wgmma\.mma_async\S+ \{[^}]*\}, "
FAULTS_OF_GROUPS = {
    "rows of weights": ((WGMMA + r"\{%\w+), (%\w+), (%\w+)", r"\1, \3, \2"), "error"),
    "layout of values": ((r", p, 1, 1, 1; \}", ", p, 1, 1, 0; }"), "other signs or layouts"),
    "wait for copies": ((r"cp\.async\.wait_group 0", "cp.async.wait_group 1"),
                        "a copy is on its way"),
    "copies not shown": ((r"fence\.proxy\.async\.shared::cta;", ""), "was not shown"),
    "wait for scores": ((r"wait_group\.sync\.aligned 1", "wait_group.sync.aligned 2"), "error"),
    "wait for results": (without(r"wgmma\.wait_group\.sync\.aligned 0;", 1),
                         "a product reads when this writes"),
    "set of scores": (without(r"wgmma\.commit_group\.sync\.aligned;", 1), "error"),
    # The next barrier orders work of one warp here.
    **{f"barrier {n}": (without(r"bar\.sync\s+0;", n), "a race")
       for n in (OF_OFFSETS + 1, OF_OFFSETS + 2)},
}  # fmt: skip


# Faults of groups of warps whose call has a mask. Only the first warp needs the second block.
FAULTS_OF_MASKS = {
    "vote of one warp": ((r"bar\.red\.or\.pred q, 0, p", "vote.sync.any.pred q, p, 0xffffffff"),
                         "work-items"),
    "vote for no block": ((r"(bar\.red\S+ q, 0, p; selp\S+ %\w+), 1, 0", r"\1, 0, 1"), "error"),
}  # fmt: skip
MASK = "attn_mask=np.arange(199) < np.where(np.arange(20) < 16, 128, 64)[:, None]"


@pytest.mark.parametrize(("faults", "knobs", "call"), [
    (FAULTS, {}, "64, dtype=float16), return_lse=True"),
    (FAULTS_OF_OFFSETS, {}, "64, dtype=float16), is_causal=True, query_offset=[170]"),
    # A row of 80 columns ends in the middle of a warp's copies. A negative scale changes the signs
    # of queries.
    (FAULTS_OF_STAYING, STAYING, "80, dtype=float16), return_lse=True, scale=-0.1"),
    (FAULTS_OF_GROUPS, GROUPED, "64, dtype=float16), return_lse=True, scale=-0.1"),
    (FAULTS_OF_MASKS, GROUPED, "64, dtype=float16), return_lse=True, " + MASK),
])  # fmt: skip
def test_faults_are_found(library, faults, knobs, call):
    code = f"""
import json
from support.tuning import tune_all
tune_all(device, "float16", "mma", {knobs})
outcomes = {{}}
for name, edit in { ({name: edit for name, (edit, _) in faults.items()}) }.items():
    machine.edit = edit
    try:
        check_attention(*qkv((1, 1), 20, 199, {call}, device=device)
    except Exception as error:
        outcomes[name] = machine.refusal or str(error)
print(json.dumps(outcomes))
"""
    said = run_on_machine(library, code, kernel="mma").stdout
    outcomes = json.loads(said.splitlines()[-1])
    for name, (_, words) in faults.items():
        assert words in outcomes.get(name, "nothing was found"), name


# Faults of gradients. The barriers before the last one: of heads that share a tile, and OF_OFFSETS.
FAULTS_OF_GRADIENTS = {
    "wait": ((r"wait_group 0", "wait_group 1"), "a copy is on its way"),
    "set": (without(r"cp\.async\.commit_group;", 1), "a copy is on its way"),
    "tile of the head before": (without(r"bar\.sync\s+0;", 0), "a race"),
    "block": (without(r"bar\.sync\s+0;", 1 + OF_OFFSETS), "a race"),
    "beyond the last row": ((r"(cp\.async\.cg.*, 16), %\w+", r"\1, 16"), "out of bounds"),
    "rows of A": FAULTS["rows of A"],
    "columns": FAULTS["columns"],
    "order of halves": FAULTS["order of halves"],
}


def test_faults_of_gradients_are_found(library):
    code = f"""
import json
q, (k, v) = draw((1, 2, 70, 64), float16), halves((1, 1), 70, 20, 64)[1:]
G, options = draw((1, 2, 70, 64), float16, 5), {{"device": device, "enable_gqa": True}}
given = (G, q, k, v, *sdpa(q, k, v, return_lse=True, **options))
right = clattn.scaled_dot_product_attention_backward(*given, **options)
machine.edited_name = "mma_backward"
outcomes = {{}}
for name, edit in { ({name: edit for name, (edit, _) in FAULTS_OF_GRADIENTS.items()}) }.items():
    machine.edit = edit
    try:
        got = clattn.scaled_dot_product_attention_backward(*given, **options)
        for one, other in zip(got[:3], right[:3]):
            np.testing.assert_array_equal(one, other, "error")
    except Exception as error:
        outcomes[name] = machine.refusal or str(error)
print(json.dumps(outcomes))
"""
    said = run_on_machine(library, ARRAYS + code, kernel="mma").stdout
    outcomes = json.loads(said.splitlines()[-1])
    for name, (_, words) in FAULTS_OF_GRADIENTS.items():
        assert words in outcomes.get(name, "nothing was found"), (name, outcomes.get(name))
