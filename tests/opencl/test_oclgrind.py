# SPDX-License-Identifier: MIT
"""The kernels under Oclgrind, which checks each memory access, race, and use of OpenCL.

Oclgrind is loaded as a driver, and only it: OCL_ICD_VENDORS names a folder with its .icd file.
"""

import os
import re

import pytest
from support.processes import OCLGRIND, run_python
from support.variants import SMALL_TILE, forced

CHECKS = ("OCLGRIND_CHECK_API", "OCLGRIND_DATA_RACES", "OCLGRIND_UNINITIALIZED")

CASES = {
    "plain": "check_attention(*qkv((1, 2), 5, 7, 8), device=device)",
    "one": "check_attention(*qkv((1, 1), 1, 1, 1), device=device)",
    "sizes differ": "check_attention(*qkv((1, 1), 3, 5, 3, 5), device=device)",
    "causal": "check_lse(*qkv((1, 1), 7, 5, 8), device=device, is_causal='lower_right')",
    "window": "check_lse(*qkv((1, 1), 7, 9, 8), device=device, window=(2, 1))",
    "bool mask": "check_lse(*qkv((1, 2), 5, 7, 8), device=device, attn_mask=draw((5, 7)) > 0)",
    "float mask": "check_lse(*qkv((1, 2), 5, 7, 8), device=device, attn_mask=draw((2, 1, 7)))",
    "empty rows": "check_attention(*qkv((1, 1), 5, 7, 8), device=device, "
    "attn_mask=np.zeros(7, bool))",
    "groups": "check_lse(draw((4, 5, 8)), *qkv((2,), 5, 7, 8)[1:], device=device, enable_gqa=True)",
    "half": "check_lse(*qkv((1, 1), 5, 7, 8, dtype=np.float16), device=device)",
    "bfloat16": "check_lse(*qkv((1, 1), 5, 7, 8, dtype=ml_dtypes.bfloat16), device=device)",
    "strides": "check_lse(*(a[..., ::-1] for a in qkv((1, 1), 5, 7, 8)), device=device)",
    "no keys": "check_attention(*qkv((1, 1), 5, 0, 8), device=device)",
    "dropout": "check_dropout(*qkv((1, 2), 5, 7, 8), device=device)",
    "past": "check_onnx(*qkv((1, 2), 3, 5, 8), None, *qkv((1, 2), 3, 6, 8)[1:], device=device)",
    "past, group": "check_onnx(draw((1, 4, 3, 8)), *(2 * [draw((1, 2, 5, 8))]), draw((3, 9)) > 0, "
    "*(2 * [draw((1, 2, 4, 8))]), device=device, is_causal=1)",
    "no rows, past": "check_onnx(*qkv((1, 2), 0, 5, 8), None, *qkv((1, 2), 3, 6, 8)[1:], "
    "device=device)",
    "lengths": "check_onnx(*qkv((2, 1), 3, 20, 8), None, None, None, np.array([4, 20]), "
    "device=device, is_causal=1)",
    "weights": "check_onnx(*qkv((1, 1), 3, 14, 8), draw((3, 9)), device=device, return_qk=True, "
    "qk_matmul_output_mode=3)",
    "scores": "check_onnx(*qkv((1, 1), 3, 14, 8), draw((3, 9)) > 0, device=device, return_qk=True, "
    "qk_matmul_output_mode=2)",
    "biases": "check_directml(dict(query=draw((1, 3, 16)), key=draw((1, 3, 16)), "
    "value=draw((1, 3, 16)), bias=draw((48,)), relative_position_bias=draw((1, 2, 3, 8)), "
    "past_key=draw((1, 2, 5, 8)), past_value=draw((1, 2, 5, 8)), head_count=2, scale=0.3, "
    "mask=np.array([6], np.int32), mask_type='key_sequence_length'), device=device)",
    "integers": "check_onnx(*qkv((1, 1), 3, 14, 8), draw((3, 14)).astype(np.int16), device=device)",
    "value type": "check_onnx(*qkv((1, 1), 3, 5, 8)[:2], draw((1, 1, 5, 8), np.float16), "
    "device=device)",
    "sinks, offsets": "check_attention(*qkv((2, 2), 5, 7, 8), device=device, sinks=draw((2,)), "
    "is_causal=True, query_offset=[-2, 1], return_weights=True)",
}
# The last two are small: decode_gpu has a work-group for each sequence and head of keys.
SEQUENCES = {  # packed, in pages, and pages of codes
    "sequences": "check_sequences(packed([3, 0, 1, 2], [5, 2, 0, 19], E=16), device, "
    "is_causal='lower_right')",
    "sequences in pages": "check_sequences(packed([1, 1], [5, 11], Hq=2, Hk=1), device, 4)",
    "codes in pages": "check_codes(coded([1, 1], [5, 11], np.dtype('i1'), 'of keys', "
    "Hq=2, Hk=1), device, 4)",
}
DIAGONAL = {
    "rows": "check_band(draw((2, 5, 133)), 7, -1, 60, device=device)",
    "inverted": "check_band(draw((2, 5, 133)), 7, 40, -1, device=device)",
    "a shape": "check_band((2, 9, 133), 7, -1, 60, device=device, dtype='u1')",
    "columns first": "check_band(draw((2, 70, 5)).swapaxes(1, 2), 7, -1, 60, device=device)",
    "backwards": "check_band(draw((9, 140), 'f8')[::-1, ::-2], 7, 5, 3, device=device)",
    "small matrices": "check_band(draw((40, 5, 3), 'f2'), 7, 0, 2, device=device)",
    "in place": "a = draw((16, 5, 3)); check_band(a, 7, 0, 2, device=device, out=a)",
    "in place, gaps": "a = draw((9, 70))[:, 3:40]; check_band(a, 7, 0, 2, device=device, out=a)",
    "out": "check_band(draw((9, 40)), 7, 0, 2, device=device, out=draw((40, 9)).T)",
}
PAGES = {
    "floats, copied": "check_pages(device, np.float32)",
    "halves, copied": "check_pages(device, np.float16)",
    "int8, copied": "check_pages(device, 'int8', np.float16)",
    "float8, copied": "check_pages(device, 'float8_e4m3fn')",
    "float8, doubles, copied": "check_pages(device, 'float8_e5m2', np.float64)",
    "int4, copied": "check_pages(device, 'int4', ml_dtypes.bfloat16)",
    "a cache of int8, copied": "check_cache(device, 'int8')",
    "a cache of int4, copied": "check_cache(device, 'int4')",
}
REFERENCE_ONLY = {
    "softcap last": "check_onnx(*qkv((1, 1), 3, 5, 8), draw((3, 5)) > 0, device=device, "
    "softcap=2.0, opset=24, pre_errata=True, return_qk=True, qk_matmul_output_mode=1)",
    "softcap": "check_attention(*qkv((1, 1), 5, 7, 8), device=device, softcap=2.0)",
    "double": "check_attention(*qkv((1, 1), 5, 7, 8, dtype=np.float64), device=device)",
    "gradients": "check_backward(draw((1, 2, 5, 9)), *qkv((1, 2), 5, 7, 8, 9), device=device, "
    "attn_mask=draw((7,)), sinks=draw((2,)), grad_lse=draw((1, 2, 5)), is_causal=True, "
    "softcap=2.0, dropout_p=0.3, seed=1)",
}
# Functions of scores and masks: tables of all kinds, blocks, indexes before and behind tables.
MODS = {
    "mods": "check_mods(draw((1, 2, 5, 8)), *qkv((1, 1), 5, 12, 8)[1:], mods=COMPOSITE, "
    "device=device)",
    "mods, blocks": "check_mods(draw((1, 2, 5, 8)), *qkv((1, 1), 5, 40, 8)[1:], mods=PLACES, "
    "blocks=True, device=device)",
    "behind and before": "check_outside((4, 5), -20, 3, 1, device=device, L=3, S=33)",
    "beyond 32 bits": "check_outside((4, 5), 0, 2**32, 2**32, device=device, L=3, S=33)",
    "empty tables": "check_outside((0, 0), 0, 0, 0, device=device, L=3, S=33)",
}

TILES = {"tile and a rest": "check_attention(*qkv((1, 1), 33, 35, 8), device=device)"}

# `check_attention` runs a case twice, with the log-sum-exp and without it, unless the case has
# `return_lse`.
# `check_lse` runs it with the log-sum-exp. Oclgrind is slow, so most cases of a kernel run once,
# and the others show both ways.

DECODE = {  # head sizes of a vector at least; with 512 columns, 128 keys are two parts
    "rows": "check_attention(*qkv((1, 2), 5, 19, 17), device=device)",
    "sizes differ": "check_attention(*qkv((1, 1), 1, 33, 16, 33), device=device)",
    "parts, float mask": "check_attention(*qkv((1, 1), 2, 129, 512), device=device, "
    "return_lse=True, attn_mask=np.where(np.arange(129) < 90, -np.inf, draw((129,))).astype('f4'))",
    "parts, no number": "q, k, v = qkv((1, 1), 1, 129, 512); v[..., 3, 5] = np.nan; "
    "check_attention(q, k, v, device=device, return_lse=True, attn_mask=np.arange(129) % 100 == 3)",
    "group": "check_lse(draw((6, 1, 16)), *qkv((2,), 1, 19, 16)[1:], device=device, "
    "enable_gqa=True)",
    "causal": "check_lse(*qkv((1, 1), 7, 5, 16), device=device, is_causal='lower_right')",
    "window": "check_lse(*qkv((1, 1), 3, 40, 16), device=device, window=(2, 1))",
    "bool mask": "check_lse(*qkv((1, 2), 3, 19, 16), device=device, "
    "attn_mask=draw((2, 3, 19)) > 0)",
    "columns apart": "check_lse(*qkv((1, 2), 3, 19, 16), device=device, "
    "attn_mask=draw((3, 38))[:, ::2])",
    "empty rows": "check_attention(*qkv((1, 1), 3, 19, 16), device=device, "
    "attn_mask=np.zeros(19, bool))",
    "half": "check_lse(*qkv((1, 1), 1, 19, 17, dtype=np.float16), device=device)",
    "bfloat16": "check_lse(*qkv((1, 1), 1, 19, 17, dtype=ml_dtypes.bfloat16), device=device)",
    "rows apart": "check_lse(*(a[..., ::-2, :] for a in qkv((1, 1), 5, 21, 16)), device=device)",
    "out": "check_attention(*qkv((1, 1), 3, 19, 16), device=device, "
    "out=draw((1, 1, 16, 3)).swapaxes(2, 3))",
    "no keys": "check_attention(*qkv((1, 1), 3, 0, 16), device=device)",
    "past": "check_onnx(*qkv((1, 2), 3, 5, 17), None, *qkv((1, 2), 3, 19, 17)[1:], device=device)",
    "past, group": "check_onnx(draw((1, 4, 1, 16)), *(2 * [draw((1, 2, 5, 16))]), "
    "draw((1, 9)) > 0, *(2 * [draw((1, 2, 18, 16))]), device=device, is_causal=1)",
    "past, parts": "check_onnx(*qkv((1, 1), 1, 1, 512), None, *qkv((1, 1), 1, 131, 512)[1:], "
    "device=device, left_window_size=128)",
    "no rows, past": "check_onnx(*qkv((1, 2), 0, 5, 16), None, *qkv((1, 2), 3, 6, 16)[1:], "
    "device=device)",
    "lengths": "check_onnx(*qkv((2, 1), 3, 20, 16), None, None, None, np.array([4, 20]), "
    "device=device, is_causal=1)",
    "bias and mask": "check_directml(dict(query=draw((1, 3, 32)), key=draw((1, 3, 32)), "
    "value=draw((1, 3, 32)), relative_position_bias=draw((1, 2, 3, 8)), "
    "past_key=draw((1, 2, 5, 16)), past_value=draw((1, 2, 5, 16)), head_count=2, scale=0.3, "
    "mask=np.array([6], np.int32), mask_type='key_sequence_length'), device=device)",
    "value type": "check_onnx(*qkv((1, 1), 3, 5, 16)[:2], draw((1, 1, 5, 17), np.float16), "
    "device=device)",
    "sinks, offsets": "check_attention(*qkv((2, 2), 3, 19, 16), device=device, sinks=draw((2,)), "
    "is_causal=True, query_offset=[-2, 9])",
    "sinks, parts": "check_attention(*qkv((1, 1), 1, 129, 512), device=device, sinks=draw((1,)), "
    "return_lse=True)",
}

MMA = {  # head sizes are filled up to 64; four warps, of which one has rows
    "fewer keys at a time": "tune_all(device, 'float16', 'mma', dict(MT=1, BN=32, STRIP=16))",
    "rows": "check_attention(*qkv((1, 1), 3, 40, 64, dtype=np.float16), device=device, "
    "return_lse=True)",
    "strides, causal, sinks, offsets": "check_attention(*(a[..., ::-2] for a in qkv((2, 1), 3, 19, "
    "16, dtype=np.float16)), device=device, return_lse=True, is_causal=True, sinks=draw((1,)), "
    "query_offset=[-2, 9])",
}

DECODE_MMA = {  # a tile of 16 rows; four warps take 16 keys each, lanes 16 bytes of each key
    "group": "check_attention(draw((3, 2, 64), np.float16), "
    "*qkv((1,), 1, 70, 64, dtype=np.float16)[1:], "
    "device=device, enable_gqa=True, return_lse=True, is_causal='lower_right')",
    "mask, no number": "q, k, v = qkv((1, 1), 2, 19, 8, dtype=np.float16); v[..., 3, 5] = np.nan; "
    "check_attention(q, k, v, device=device, return_lse=True, attn_mask=draw((2, 19)) > 0)",
    "sinks, offsets": "check_attention(*qkv((2, 1), 2, 19, 8, dtype=np.float16), device=device, "
    "return_lse=True, sinks=draw((1,)), is_causal=True, query_offset=[-1, 9])",
}

DECODE_GPU = {  # with 512 columns, 33 keys of one head are two parts
    "rows": "check_attention(*qkv((1, 1), 3, 70, 8, 17), device=device, return_lse=True)",
    "parts, no number, sinks, offset": "q, k, v = qkv((1, 1), 1, 33, 512); v[..., 3, 5] = np.nan; "
    "check_attention(q, k, v, device=device, return_lse=True, attn_mask=np.arange(33) % 16 == 3, "
    "sinks=draw((1,)), is_causal=True, query_offset=[30])",
    "group, mask, sinks": "check_attention(draw((2, 1, 8)), *qkv((1,), 1, 19, 8)[1:], "
    "device=device, "
    "return_lse=True, enable_gqa=True, attn_mask=draw((2, 1, 19)) > 0, sinks=draw((2,)))",
    "half, columns apart": "check_attention(*(a[..., ::2] for a in qkv((1, 1), 1, 9, 16, "
    "dtype=np.float16)), device=device, return_lse=True)",
    "past": "check_onnx(*qkv((1, 1), 1, 3, 8), None, *qkv((1, 1), 1, 9, 8)[1:], device=device)",
}

TILED = {  # with 7000 bytes of local memory: 16 rows and 32 keys
    "rows and blocks": "check_attention(*qkv((1, 1), 17, 33, 4), device=device, return_lse=True)",
    "sizes differ": "check_attention(*qkv((1, 1), 3, 5, 3, 13), device=device)",
    "parts of a head": "check_attention(*qkv((1, 1), 2, 3, 72, 9), device=device, return_lse=True)",
    "causal": "check_attention(*qkv((1, 1), 17, 34, 4), device=device, return_lse=True, "
    "is_causal='lower_right')",
    "window": "check_attention(*qkv((1, 1), 17, 70, 4), device=device, return_lse=True, "
    "window=(2, 1))",
    "bool mask": "check_attention(*qkv((1, 1), 3, 98, 4), device=device, return_lse=True, "
    "attn_mask=np.arange(98) % 96 > 64)",
    "float mask": "check_attention(*qkv((1, 2), 5, 7, 4), device=device, return_lse=True, "
    "attn_mask=draw((2, 1, 7)))",
    "empty rows": "check_attention(*qkv((1, 1), 5, 7, 4), device=device, "
    "attn_mask=np.zeros(7, bool))",
    "no number": "q, k, v = qkv((1, 1), 5, 34, 4); v[..., 3, 1] = np.nan; "
    "check_attention(q, k, v, device=device, return_lse=True, is_causal=True)",
    "half": "check_attention(*qkv((1, 1), 5, 7, 4, dtype=np.float16), device=device, "
    "return_lse=True)",
    "bfloat16": "check_attention(*qkv((1, 1), 5, 7, 4, dtype=ml_dtypes.bfloat16), device=device, "
    "return_lse=True)",
    "strides": "check_attention(*(a[..., ::-1] for a in qkv((1, 1), 5, 7, 4)), device=device, "
    "return_lse=True)",
    "dropout": "check_dropout(*qkv((1, 1), 5, 7, 4), device=device)",
    "past, weights": "check_onnx(*qkv((1, 1), 3, 5, 8), draw((3, 11)), "
    "*qkv((1, 1), 3, 6, 8)[1:], device=device, return_qk=True, qk_matmul_output_mode=3)",
    "scores": "check_onnx(*qkv((1, 1), 3, 14, 8), draw((3, 9)) > 0, device=device, return_qk=True, "
    "qk_matmul_output_mode=2)",
    "lengths": CASES["lengths"],
    "products": "check_onnx(*qkv((1, 1), 3, 14, 8), draw((3, 9)) > 0, device=device, "
    "return_qk=True, qk_matmul_output_mode=0)",
    "biases": CASES["biases"],
    "sinks, offsets": "check_attention(*qkv((2, 2), 5, 7, 8), device=device, return_lse=True, "
    "sinks=draw((2,)), is_causal=True, query_offset=[-2, 1], return_weights=True)",
    "gradients": "check_backward(draw((1, 2, 17, 9)), *qkv((1, 2), 17, 34, 8, 9), device=device, "
    "attn_mask=draw((34,)) > 0, sinks=draw((2,)), grad_lse=draw((1, 2, 17)), is_causal=True, "
    "query_offset=-2, softcap=2.0, dropout_p=0.3, seed=1)",
    "gradients, sums anew": "q, k, v = qkv((1, 2), 5, 34, 4); G = draw((1, 2, 5, 4)); "
    "q += 30; k += 30; check_backward(G, q, k[:, :1], v[:, :1], device=device)",
}

CODE = """
import sys
from functools import partial
import clattn, ml_dtypes, numpy as np
from support.forced import FORCED
from support.checks import check_attention, check_band
from support.coded import check_codes, coded
from support.data import draw, qkv
from support.onnx_calls import check_onnx
from support.directml_calls import check_directml
from support.dropout_calls import check_dropout
from support.gradients import check_backward
from support.cache_pair import check_cache
from support.paged_pair import check_pages
from support.ragged import check_sequences, packed
from support.mods import COMPOSITE, PLACES, check_mods, check_outside
from support.tuning import tune_all
check_lse = partial(check_attention, return_lse=True)
devices = clattn.devices()
assert [d.platform for d in devices] == ["Oclgrind"], devices
device = devices[0]
for line in sys.argv[1:]:
    print(line, flush=True)
    exec(line)
print("all right")
"""


@pytest.fixture
def oclgrind(tmp_path):
    """Environment of a process whose only driver is Oclgrind, with every check on.

    Without optimisation: its compiler makes `freeze` instructions that its checks do not know.
    Kernels for matrix units have none, and run in half the time with it.
    """
    if not OCLGRIND.exists():
        pytest.skip(f"{OCLGRIND} is not installed: apt-get install oclgrind")
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "oclgrind.icd").write_text(f"{OCLGRIND}\n")
    return dict.fromkeys(CHECKS, "1") | {
        "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable",
        "OCL_ICD_VENDORS": vendors,
        "XDG_CACHE_HOME": tmp_path,
        "CLATTN_DEVICE": None,
    }


def run_cleanly(env, cases):
    """Runs lines of code under Oclgrind: right results, and not a line of complaint."""
    done = run_python(CODE, *cases, env=env, timeout=300, check_exit=False)
    assert not done.stderr.strip(), done.stdout + done.stderr
    assert done.returncode == 0
    assert done.stdout.endswith("all right\n"), done.stdout


RUNS = {
    "reference": CASES | DIAGONAL | REFERENCE_ONLY | MODS | PAGES | SEQUENCES,
    "cpu": CASES | TILES | SEQUENCES,
    "decode_cpu": DECODE | SEQUENCES,
    "decode_gpu": DECODE_GPU | {n: SEQUENCES[n] for n in ("sequences in pages", "codes in pages")},
    "decode_mma_emulated": DECODE_MMA,
    "tiled": TILED | SEQUENCES,
    "mma_emulated": MMA,
}

# Oclgrind 21.10 has less local memory than matrix units have, and on their kernels its check for
# uninitialised values crashes, as does a second thread.
MATRIX_UNITS = {
    "OCLGRIND_LOCAL_MEM_SIZE": 65536,
    "OCLGRIND_NUM_THREADS": 1,
    "OCLGRIND_UNINITIALIZED": None,
    "OCLGRIND_BUILD_OPTIONS": None,
}


def has_steps(name, line):
    """Whether a step reads what another one computes: present keys, biased inputs, numbers of rows,
    rows of pages.

    In all but the first launches of a process, Oclgrind 21.10 takes buffers of the host that a
    kernel has written for uninitialised, also where the kernel writes a constant everywhere.
    """
    return "past" in name or "past_key" in line or "gradients" in name or "copied" in name


@pytest.mark.parametrize("kernel_name", RUNS)
def test_kernels_are_clean(oclgrind, kernel_name):
    cases = RUNS[kernel_name]
    env = oclgrind | (MATRIX_UNITS if "mma" in kernel_name else {})
    env |= forced(kernel_name, local_memory=SMALL_TILE if kernel_name == "tiled" else None)
    steps = [line for name, line in cases.items() if has_steps(name, line)]
    run_cleanly(env, [line for line in cases.values() if line not in steps])
    if steps:
        run_cleanly(env | {"OCLGRIND_UNINITIALIZED": None}, steps)


def test_limits_are_clean(oclgrind):
    """The kernels that bench compares with. To clattn Oclgrind is a GPU, with work-groups.

    pyopencl asks devices for what Oclgrind does not know, so its use of OpenCL is not checked.
    """
    pytest.importorskip("pyopencl")
    cases = (
        "assert device.type != 'cpu'",
        "from clattn._commands.bench import limits",
        "limits.READ_BYTES = 1 << 20",
        "kernels = limits.Kernels(device)",
        "assert kernels.fma('float32', 3)[2].min() > 0",
        "assert kernels.read(1, 2)[2].sum() == 1 << 19",
    )
    run_cleanly(oclgrind | {"OCLGRIND_CHECK_API": None}, cases)


# A case of each variant that checks for uninitialised values, and calls that choose a variant.
BY_DEFAULT = {
    "reference": ("biases",),
    "cpu": ("plain",),
    "decode_cpu": ("rows apart",),
    "tiled": ("sizes differ",),
    "": ("one", "columns first", "backwards"),
}


def test_default_settings(oclgrind):
    """Without the checks, and with the optimisation that Oclgrind does unless it is told otherwise.

    Its compiler then marks memory by intrinsics that it cannot run, such as that of functions that
    are inlined and return a struct.
    """
    cases = ["import warnings", 'warnings.simplefilter("error")']
    for kernel, names in BY_DEFAULT.items():
        local_memory = str(SMALL_TILE) if kernel == "tiled" else ""
        cases.append(f"FORCED.words = {kernel!r}, {local_memory!r}")
        found = RUNS[kernel or "reference"]
        cases += [found[name] for name in names]
    env = oclgrind | dict.fromkeys((*CHECKS, "OCLGRIND_BUILD_OPTIONS"))
    done = run_python(CODE, *cases, env=env, timeout=300)
    assert done.stdout.endswith("all right\n"), done.stdout
    assert "OCLGRIND" not in done.stderr


# Every option, for small shapes that each variant takes; `dtype` is the variant's.
OPTIONS = {
    "plain": "check_attention(*small(), device=device)",
    "log-sum-exp": "check_attention(*small(), device=device, return_lse=True)",
    "sizes differ": "check_attention(*qkv((1, 1), 2, 19, 16, 24, dtype=dtype), device=device)",
    "half": "check_attention(*qkv((1, 1), 2, 9, 16, dtype=np.float16), device=device)",
    "bfloat16": "check_attention(*qkv((1, 1), 2, 9, 16, dtype=ml_dtypes.bfloat16), device=device)",
    "double": "check_attention(*qkv((1, 1), 2, 9, 16, dtype=np.float64), device=device)",
    "value type": "check_onnx(*qkv((1, 1), 2, 9, 16)[:2], draw((1, 1, 9, 16), np.float16), "
    "device=device)",
    "strides": "check_attention(*(a[..., ::-2, :] for a in qkv((1, 1), 4, 38, 16, dtype=dtype)), "
    "device=device)",
    "columns apart": "check_attention(*(a[..., ::-1] for a in small()), device=device)",
    "out": "check_attention(*small(), device=device, "
    "out=draw((1, 1, 16, 2), dtype).swapaxes(2, 3))",
    "no keys": "check_attention(*qkv((1, 1), 2, 0, 16, dtype=dtype), device=device)",
    "groups": "check_attention(draw((1, 4, 2, 16), dtype), "
    "*qkv((1, 2), 2, 19, 16, dtype=dtype)[1:], device=device, enable_gqa=True)",
    "causal": "check_attention(*small(), device=device, is_causal='lower_right')",
    "upper left": "check_attention(*small(), device=device, is_causal=True)",
    "window": "check_attention(*small(), device=device, window=(2, 1))",
    "bool mask": "check_attention(*small(), device=device, attn_mask=draw((2, 19)) > 0)",
    "float mask": "check_attention(*small(), device=device, attn_mask=draw((2, 19), dtype))",
    "mask of a row": "check_attention(*small(), device=device, attn_mask=draw((1, 19), dtype))",
    "empty rows": "check_attention(*small(), device=device, attn_mask=np.zeros(19, bool))",
    "no number": "q, k, v = small(); v[..., 3, 5] = np.nan; "
    "check_attention(q, k, v, device=device, attn_mask=np.arange(19) % 16 == 3)",
    "sinks": "check_attention(*small(), device=device, sinks=draw((1,)))",
    "position": "check_attention(*small(), device=device, is_causal=True, query_offset=7)",
    "positions": "check_attention(*qkv((2, 1), 2, 19, 16, dtype=dtype), device=device, "
    "is_causal=True, query_offset=[-1, 9])",
    "scale": "check_attention(*small(), device=device, scale=0.3)",
    "softcap": "check_attention(*small(), device=device, softcap=2.0)",
    "dropout": "check_dropout(*small(), device=device)",
    "weights": "check_attention(*small(), device=device, return_weights=True)",
    "past": "check_onnx(*small(), None, *qkv((1, 1), 2, 6, 16, dtype=dtype)[1:], device=device)",
    "counts": "check_onnx(*small(), None, None, None, np.array([4]), device=device, is_causal=1)",
    "filter": "check_onnx(*small(), draw((2, 9)) > 0, device=device)",
    **{f"scores, mode {mode}": "check_onnx(*small(), draw((2, 19)) > 0, device=device, "
    "return_qk=True, "
       f"qk_matmul_output_mode={mode})" for mode in range(4)},
    "softcap last": "check_onnx(*small(), draw((2, 19)) > 0, device=device, softcap=2.0, opset=24, "
    "pre_errata=True)",
    "biases": CASES["biases"],
    "mods": "check_mods(draw((1, 2, 2, 16), dtype), *qkv((1, 1), 2, 12, 16, dtype=dtype)[1:], "
    "mods=COMPOSITE, device=device)",
    "mods, blocks": "check_mods(draw((1, 2, 2, 16), dtype), *qkv((1, 1), 2, 40, 16, "
    "dtype=dtype)[1:], mods=PLACES, blocks=True, device=device)",
}  # fmt: skip

EACH_OPTION = """
dtype = np.dtype(sys.argv.pop(1))
def small():
    return qkv((1, 1), 2, 19, 16, dtype=dtype)
def run(title, line):
    try:
        exec(line, globals())
    except ValueError as refusal:
        assert "CLATTN_KERNEL is" in str(refusal), refusal
        print("refused:", title)
    except clattn.DeviceError as failure:
        assert "CL_INVALID_KERNEL_NAME" in str(failure), failure
        print("not run:", title)
for title, line in zip(sys.argv[1::2], sys.argv[2::2]):
    print(title, flush=True)
    run(title, line)
"""


# What Oclgrind says of a kernel with an intrinsic that it cannot run, and then of the compiler.
LACKS_AN_INTRINSIC = (
    r"OCLGRIND FATAL ERROR.*\n.*Undefined external function: llvm\.experimental\.noalias.*\n"
    r".*When creating kernel.*|\d+ warnings? generated\."
)


@pytest.mark.skipif("CLATTN_OCLGRIND" not in os.environ, reason="takes minutes: CLATTN_OCLGRIND=1")
@pytest.mark.parametrize("kernel_name", RUNS)
def test_every_option_in_default_settings(oclgrind, kernel_name):
    """Each option with each variant that takes it.

    With -s it prints which ones a variant refuses, and which Oclgrind cannot run (`not run`).
    """
    half = "mma" in kernel_name
    env = oclgrind | dict.fromkeys((*CHECKS, "OCLGRIND_BUILD_OPTIONS"))
    env |= MATRIX_UNITS if half else {}
    env |= forced(kernel_name, local_memory=SMALL_TILE if kernel_name == "tiled" else None)
    code = CODE.partition("for line")[0] + EACH_OPTION
    words = [word for option in OPTIONS.items() for word in option]
    done = run_python(code, "float16" if half else "float32", *words, env=env, timeout=3000)
    print(done.stdout)
    errors = re.sub(LACKS_AN_INTRINSIC, "", done.stderr)
    assert not errors.strip(), done.stdout + errors


@pytest.mark.parametrize("mode", [None, "copy"], ids=["chosen", "copy"])
def test_transfers_are_clean(oclgrind, mode):
    """The ways of moving memory that Oclgrind can do; it has no system SVM."""
    env = oclgrind | forced("reference") | {"CLATTN_MEMORY": mode}
    cases = (CASES["plain"], CASES["strides"], CASES["float mask"], DIAGONAL["in place"])
    run_cleanly(env, cases)
