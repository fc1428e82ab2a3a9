# SPDX-License-Identifier: MIT
"""The kernels of machine_code's table, their macros and their devices."""

import re
from typing import NamedTuple

from machine_code.common import ROOT


class Row(NamedTuple):
    file: str
    macros: tuple[str, ...]  # that are not as in MACROS
    devices: tuple[str, ...]
    scalars: int = 15  # scalar registers that may be spilled
    scratch: bool = False  # it has arrays that do not fit registers
    waves: int = 2  # of a SIMD, at least


OPERANDS = (ROOT / "kernels/attention/operands.h").read_text()
# What calls ask for: arrays have the first bits, the rest has bits of its own.
ARRAYS = re.findall(r"^    X\((\w+),", OPERANDS.partition("CA_OPTIONAL_OPERANDS(X)")[2], re.M)
FIRST = int(re.search(r"CA_OPTION_ADDED_MASK = (\d+)", OPERANDS)[1])
OTHERS = re.findall(r"^    CA_OPTION_(\w+)", OPERANDS, re.M)
BITS = {name: n for n, name in [*enumerate(ARRAYS), *enumerate(OTHERS, FIRST)]}


def uses(*names, mask_dtype=0):
    """Macros of a call that asks for these options of kernels/attention/operands.h."""
    options = sum(1 << BITS[name] for name in names)
    arrays = sum(name in ARRAYS for name in names)
    return f"OPTIONS={options}", f"ARRAYS={arrays}", f"MASK_DTYPE={mask_dtype}"


# All macros that a plan sets, for a call without options on an NVIDIA GPU: csrc/attention/plan_*.c.
# tests/ptx compares the names with those of real plans. DTYPE 1 is float16, 2 bfloat16, 3 float32.
DTYPES = "DTYPE=1 VALUE_DTYPE=DTYPE REAL64=0"
CALL = f"{DTYPES} OPTIONS=0 ARRAYS=0 MASK_DTYPE=0"
SIZES = f"{CALL} HEAD_E=128 HEAD_EV=HEAD_E"
# Steps of the backward pass, and what they ask for.
STEPS = {
    "NUMBERS": (11, "FORWARD", "FORWARD_LSE", "GRAD_OUTPUT"),
    "QUERY": (3, "GRAD_OUTPUT", "GRAD_QUERY"),
    "KEY": (4, "GRAD_OUTPUT", "GRAD_KEY", "GRAD_VALUE"),
}


def step(name, *more, mask_dtype=0):
    """Macros of a step of a call that asks for these options."""
    number, *names = STEPS[name]
    return f"STEP={number}", *uses(*names, *more, mask_dtype=mask_dtype)


TILING = "TX=8 TY=16 MI=4 NJ=8 NC=(HEAD_EV/TX) EC=32 KC=32 ENDS_IN_LOCAL=0 SUB_GROUP=0"
MACROS = {
    "attention/reference.cl": DTYPES,
    "attention/backward.cl": DTYPES,
    "attention/tiled.cl": f"{SIZES} {TILING}",
    "attention/tiled_scores.cl": f"{SIZES} {TILING}",
    "attention/tiled_backward.cl": f"{SIZES} TX=16 TY=16 MI=4 NJ=4 NC=(HEAD_EV/TX) EC=32 KC=32 "
    "SUB_GROUP=0 STEP=4",
    "attention/mma.cl": f"{SIZES} WARPS=4 MT=1 STAGES=3 BN=32 STRIP=16 LSE=0 ALIGNED=0 "
    "OUTPUT_ALIGNED=0 WARP=1 QUERIES=1 TOGETHER=1 PAGED=0",
    "attention/mma_backward.cl": f"{SIZES} WARPS=4 MT=1 STAGES=2 BN=32 STRIP=16 ALIGNED=0 "
    "OUTPUT_ALIGNED=0 WARP=1 STEP=4",
    "attention/decode_mma.cl": f"{SIZES} WARP=1 WARPS=4 PAGED=0",
    "attention/decode_gpu.cl": f"{SIZES} WG=128 RT=1 KEY_LANES=8 BN=32 WIDE=1 "
    "WARP_SHUFFLES=1 SUB_GROUP=0",
    "attention/decode_gpu_merge.cl": f"{CALL} HEAD_EV=128 WG=256 WARP_SHUFFLES=1",
    "diagonal/band.cl": "WIDTH=4 LANES=4 LOCAL=256 LAYOUT=0 INSIDE=0 OUTSIDE=1 STREAM=0 BLOCK=64 "
    "SUB_GROUP=0",
    "probe/warp.cl": "TEST=2",
    "probe/group.cl": "TEST=2",
    "probe/local.cl": "BYTES=49152",
}

ALIGNED = ("ALIGNED=1", "OUTPUT_ALIGNED=1")
BOOL_MASK = uses("MASK")
FLOAT_MASK = uses("MASK", "ADDED_MASK", mask_dtype=1)
SOFTCAP = uses("SOFTCAP")
WEIGHTS = (f"OPTIONS={(1 << BITS['SCORES']) + (3 << BITS['STAGE'])}", "ARRAYS=1")
BOTH_AND_LSE = (*uses("MASK", "ADDED_MASK", "SOFTCAP", mask_dtype=1), "LSE=1")
# Calls with sequences, whose keys are packed or lie in pages: csrc/attention/plan_mma.c, `paged`.
SEQUENCES = ("RAGGED=1", *uses("SEQUENCES"))
SEQUENCES_SOFTCAP_LSE = ("RAGGED=1", *uses("SEQUENCES", "SOFTCAP"), "LSE=1")
INT8, FLOAT8_E4M3FN = 5, 13  # numbers of dtypes, for KEY_DTYPE and VALUE_DTYPE
# Packed sequences whose keys and values are codes with scales.
SEQUENCES_OF_CODES = ("RAGGED=1", *uses("SEQUENCES", "KEY_SCALE", "VALUE_SCALE"))
BLOCKS_IN_PAGES, ROWS_IN_PAGES = "PAGED=1", "PAGED=2"
BOTH = ("sm_80", "sm_90")
RETARGETED = "sm_90a"  # PTX for it is other PTX, changed by clattn


def mma(dtype, size, tiles, keys, *more, architectures=BOTH):
    """A row of attention_mma, as attention/plan_mma.c makes it where queries stay in registers."""
    plain = set(SEQUENCES) <= {*more} or not any(macro.startswith("OPTIONS") for macro in more)
    chunk = 32 if plain and keys >= 32 and (tiles == 1 or size <= 80) else 16
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"MT={tiles}", f"BN={keys}", f"STRIP={chunk}")
    return Row("attention/mma.cl", (*macros, *more), architectures)


def staying_mma(dtype, size, *more):
    """A row of attention_mma whose queries stay in local memory, of up to 96 KiB."""
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", "MT=2", "BN=64", "STRIP=64", "STAGES=2")
    return Row("attention/mma.cl", (*macros, "QUERIES=2", *ALIGNED, *more), ("sm_90",))


def grouped_mma(dtype, size, warps, keys, *more):
    """A row of attention_mma whose warps multiply in groups of four."""
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"WARPS={warps}", f"BN={keys}", f"STRIP={keys}")
    more = ("WARP=2", "TOGETHER=4", "MT=1", "STAGES=2", "QUERIES=2", *ALIGNED, *more)
    return Row("attention/mma.cl", (*macros, *more), (RETARGETED,))


def mma_backward(dtype, size, name, tiles, keys, *more, mask_dtype=0):
    """A row of attention_mma_backward, as csrc/attention/backward_mma.c makes it."""
    wide = tiles == 1 and (not more or size <= 64)
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"MT={tiles}", f"BN={keys}")
    macros = (*macros, f"STRIP={keys if wide else 16}", *ALIGNED)
    architectures = BOTH if 2 * 2 * size * (tiles * 64 + 2 * keys) <= 48 << 10 else ("sm_90",)
    return Row("attention/mma_backward.cl", (*macros, *step(name, *more, mask_dtype=mask_dtype)),
               architectures)  # fmt: skip


def decode_mma(dtype, size, value_size, *more):
    macros = (f"DTYPE={dtype}", f"HEAD_E={size}", f"HEAD_EV={value_size}", *more)
    return Row("attention/decode_mma.cl", macros, BOTH)


# exp2 is named as the driver's compiler makes it, which is not how libclc does.
NVIDIA = [
    mma(1, 64, 2, 64, *ALIGNED),
    mma(1, 80, 2, 32, *ALIGNED),
    mma(1, 96, 2, 32, *ALIGNED),
    mma(1, 128, 1, 32, *ALIGNED),
    mma(1, 128, 2, 32, *ALIGNED, architectures=("sm_90",)),
    mma(1, 192, 1, 16, "HEAD_EV=128", *ALIGNED),
    mma(1, 192, 1, 16, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 256, 1, 16, *ALIGNED),
    mma(1, 64, 2, 64, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 80, 2, 32, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 96, 2, 32, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 96, 2, 32, "LSE=1"),
    mma(1, 128, 1, 32, *ALIGNED, *BOTH_AND_LSE),
    mma(1, 256, 1, 16, *ALIGNED, *SOFTCAP),
    mma(1, 256, 1, 16, *ALIGNED, *FLOAT_MASK),
    mma(1, 128, 1, 32),
    mma(2, 64, 2, 64, *ALIGNED, *BOOL_MASK),
    mma(2, 80, 2, 32, *ALIGNED, "LSE=1"),
    mma(2, 96, 2, 32, *ALIGNED),
    mma(2, 128, 2, 32, *ALIGNED, "LSE=1", architectures=("sm_90",)),
    mma(2, 256, 1, 16, *ALIGNED, *BOOL_MASK),
    mma(1, 64, 2, 64, *ALIGNED, "WARPS=8", "STAGES=2", architectures=("sm_90",)),
    mma(1, 128, 1, 32, *ALIGNED, "WARPS=8", "STAGES=2", architectures=("sm_90",)),
    mma(1, 128, 1, 16, *ALIGNED, "WARPS=2", "STAGES=4", architectures=("sm_90",)),
    staying_mma(1, 64),
    staying_mma(1, 128),
    staying_mma(2, 128, "LSE=1"),
    grouped_mma(1, 64, 4, 128),
    grouped_mma(1, 128, 4, 64),
    grouped_mma(2, 128, 4, 64, "LSE=1"),
    grouped_mma(1, 192, 8, 64),
    grouped_mma(1, 256, 8, 64),
    grouped_mma(1, 64, 4, 128, *BOOL_MASK),
    grouped_mma(2, 64, 4, 64, *BOOL_MASK),
    grouped_mma(2, 128, 4, 64, *BOOL_MASK, "LSE=1"),
    grouped_mma(1, 192, 8, 64, *BOOL_MASK),
    grouped_mma(1, 256, 8, 64, *BOOL_MASK),
    grouped_mma(1, 64, 4, 64, *FLOAT_MASK),
    grouped_mma(1, 64, 4, 64, *BOTH_AND_LSE),
    grouped_mma(2, 128, 4, 64, *SOFTCAP),
    grouped_mma(1, 128, 4, 64, *uses("MASK", "SOFTCAP"), "LSE=1"),
    *[
        row
        for where in ("PAGED=0", BLOCKS_IN_PAGES, ROWS_IN_PAGES)
        for row in (
            mma(1, 64, 2, 64, *ALIGNED, *SEQUENCES, where),
            mma(1, 64, 2, 64, *ALIGNED, *SEQUENCES_SOFTCAP_LSE, where),
            mma(1, 80, 2, 32, *ALIGNED, *SEQUENCES, where),
            mma(1, 128, 1, 32, *ALIGNED, *SEQUENCES, "LSE=1", where),
            mma(1, 192, 1, 16, *ALIGNED, *SEQUENCES, where),
            grouped_mma(1, 64, 4, 64, *SEQUENCES, where),
            grouped_mma(2, 128, 4, 64, *SEQUENCES, "LSE=1", where),
            grouped_mma(1, 128, 4, 64, *SEQUENCES_SOFTCAP_LSE, where),
            grouped_mma(1, 256, 8, 64, *SEQUENCES, where),
        )
    ],
    mma(2, 128, 2, 32, *ALIGNED, *SEQUENCES, architectures=("sm_90",)),
    Row("attention/tiled.cl", ("DTYPE=3", "HEAD_E=64", "EC=64", "exp2=native_exp2"), BOTH),
    Row("attention/tiled.cl", ("DTYPE=1", "HEAD_E=128", "exp2=native_exp2"), BOTH),
    Row("attention/tiled_scores.cl", ("DTYPE=3", "HEAD_E=64", "EC=64", *WEIGHTS), BOTH),
    *[
        Row(
            "attention/tiled_backward.cl",
            (f"DTYPE={dtype}", f"HEAD_E={size}", f"EC={chunk}", *step(name)),
            BOTH,
        )
        for dtype, size, chunk in ((3, 64, 64), (1, 128, 32))
        for name in STEPS
    ],
    *[
        mma_backward(dtype, size, name, tiles, keys)
        for dtype in (1, 2)
        for size, tiles, keys in ((64, 2, 32), (96, 1, 32), (128, 1, 16), (128, 1, 32))
        for name in ("QUERY", "KEY")
    ],
    *[mma_backward(1, 64, name, 1, 32, "MASK") for name in ("QUERY", "KEY")],
    *[mma_backward(2, 128, name, 1, 32, "MASK") for name in ("QUERY", "KEY")],
    *[
        mma_backward(1, 64, name, 1, 32, "MASK", "ADDED_MASK", "SOFTCAP", mask_dtype=1)
        for name in ("QUERY", "KEY")
    ],
    Row("attention/decode_gpu.cl", ("DTYPE=1", "HEAD_E=128", "RT=4"), BOTH),
    Row("attention/decode_gpu.cl", ("DTYPE=1", "HEAD_E=128", "RT=4", *SEQUENCES), BOTH),
    *[
        Row(
            "attention/decode_gpu.cl",
            (f"KEY_DTYPE={dtype}", f"VALUE_DTYPE={dtype}", *SEQUENCES_OF_CODES, *tile),
            BOTH,
        )
        for dtype in (INT8, FLOAT8_E4M3FN)
        for tile in (("BN=64",), ("BN=64", "RT=4"))
    ],
    Row("probe/exchange.cl", (), BOTH),
    *[Row("probe/warp.cl", (f"TEST={test}",), BOTH) for test in range(5)],
    Row("probe/group.cl", (), (RETARGETED,)),
    decode_mma(1, 64, 64),
    decode_mma(1, 128, 128, *BOOL_MASK),
    decode_mma(2, 128, 128, *uses("MASK", "ADDED_MASK", "SOFTCAP", "BIAS", mask_dtype=1)),
    decode_mma(2, 192, 128),
    decode_mma(1, 64, 64, *SEQUENCES),
    decode_mma(1, 64, 64, *SEQUENCES, "PAGED=1"),
    decode_mma(2, 128, 128, *SEQUENCES),
    decode_mma(2, 128, 128, *SEQUENCES, "PAGED=1"),
    decode_mma(2, 192, 128, *SEQUENCES, "PAGED=1"),
]

# --- Intel's and AMD's GPUs ----------------------------------------------------------------------

HEADS = 40, 64, 80, 96, 128, 192, 256
FLOAT16, FLOAT32 = 1, 3

# Devices of a short run: those with the fewest registers.
IN_SHORT = "skl", "pvc", "gfx906"


class Facts(NamedTuple):
    """What plans know of a device: csrc/opencl/info.h."""

    registers: int
    sub_group: int  # the smallest that kernels may require
    local_memory: int


FACTS = {
    **dict.fromkeys(("skl", "icllp", "tgllp", "dg2"), Facts(128, 8, 64 << 10)),
    "pvc": Facts(128, 16, 128 << 10),
    **dict.fromkeys(("gfx906", "gfx90a"), Facts(128, 0, 64 << 10)),
    **dict.fromkeys(("gfx1030", "gfx1100"), Facts(256, 0, 64 << 10)),
}

# TX, TY, MI, NJ: the rows of csrc/attention/plan_tiled.c that these head sizes take.
MANY = (8, 16, 4, 8), (16, 8, 4, 4)
FEW = (16, 16, 2, 4), (32, 8, 2, 2)


def up(count, step):
    return -(-count // step) * step


def columns_of(size, tiling):
    least = -(-size // tiling[0])
    return up(least, 4 if least > 12 else 2 if least > 2 else 1)


def passes(size, rows, keys, columns, most, values=(32, 16, 8, 4)):
    """EC and KC, of a tiling with these rows and keys, in `most` bytes of local memory."""

    def fits(EC, KC):
        reals = rows * (EC + 4) + keys * (max(EC, rows) + 4) + KC * columns
        return reals * 4 + rows * 4 + 64 <= most

    chunks = [up(-(-size // n), 8) for n in range(-(-size // 64), size)]
    pairs = [(EC, KC) for KC in values for n, EC in enumerate(chunks, -(-size // 64))
             if 8 * (EC * n - up(size, 8)) < up(size, 8)]  # fmt: skip
    return next(pair for pair in pairs if fits(*pair))


def tiled(device, dtype, size, *more, file="attention/tiled.cl"):
    """A row of attention_tiled for many rows of float32 or float16: csrc/attention/plan_tiled.c."""
    registers, sub_group, memory = FACTS[device]
    many = registers >= 256
    TX, TY, MI, NJ = next(t for t in (MANY if many else FEW)
                          if t[2] * columns_of(size, t) <= (64 if many else 24))  # fmt: skip
    NC = columns_of(size, (TX,))
    rows, keys = TY * MI, TX * NJ
    most = min(memory if many else memory // 2, 48 << 10)
    EC, KC = passes(size, rows, keys, up(TX * NC, 4), most)
    macros = f"TX={TX} TY={TY} MI={MI} NJ={NJ} NC={NC} EC={EC} KC={KC} SUB_GROUP={sub_group}"
    macros = f"DTYPE={dtype} HEAD_E={size} {macros} ENDS_IN_LOCAL=1"
    return Row(file, (*macros.split(), *more), (device,))


# The rows of csrc/attention/backward_tiled.c that these head sizes take.
MANY_BACKWARD = (16, 16, 4, 4), (32, 8, 4, 2)
FEW_BACKWARD = (16, 16, 2, 4), (32, 8, 2, 2), (32, 8, 1, 2)


def tiled_backward(device, dtype, size, name):
    """A row of attention_tiled_backward: csrc/attention/backward_tiled.c."""
    registers, sub_group, memory = FACTS[device]
    many = registers >= 256
    TX, TY, MI, NJ = next(t for t in (MANY_BACKWARD if many else FEW_BACKWARD)
                          if 2 * t[2] * columns_of(size, t) <= (64 if many else 16))  # fmt: skip
    NC = columns_of(size, (TX,))
    rows, keys = TY * MI, TX * NJ
    most = min(memory if many else memory // 2, 48 << 10) - 3 * 4 * max(rows, keys) - 512
    EC, KC = passes(
        size, rows, keys, up(TX * NC, 4), most, (32, 16, 8, 4)[not many and size > 128 :]
    )
    macros = f"TX={TX} TY={TY} MI={MI} NJ={NJ} NC={NC} EC={EC} KC={KC} SUB_GROUP={sub_group}"
    macros = f"DTYPE={dtype} HEAD_E={size} {macros}".split()
    return Row("attention/tiled_backward.cl", (*macros, *step(name)), (device,), scalars=72)


def decode_gpu(device, dtype, size, heads):
    """A row of attention_decode_gpu for heads that share keys: csrc/attention/plan_decode_gpu.c."""
    registers, sub_group, _ = FACTS[device]
    chunk, group, most = (4 if dtype == FLOAT32 else 8), 128, 32
    chunks = -(-size // chunk)

    def fits(keys, rows):
        own = keys * lanes // group
        loads = own * -(-chunks // lanes) + -(-keys // (group // chunks))
        held = 4 * loads + rows * (chunk + own) + (4 if rows > 1 else 0)
        exchanged = -(-own * rows // 2) * group
        reals = rows * up(chunks, lanes) * chunk + 2 * keys * rows
        reals += max(chunk * group, exchanged) + 2 * -(-group // chunks) * rows
        return held <= registers - 84 and reals <= (15 << 10) // 4

    lanes = 8
    while lanes < most and -(-chunks // lanes) > 2:
        lanes *= 2
    while lanes > 1 and up(chunks, lanes) * 4 > chunks * 5:
        lanes //= 2
    keys = group // lanes * 4
    while keys * lanes > group and keys * up(chunks, lanes) > group * 4:
        keys //= 2
    while -(-keys // (group // chunks)) > 8 and (keys * lanes > group or lanes < most):
        lanes *= 1 if keys * lanes > group else 2
        keys //= 2
    rows, fewer = heads, keys
    while not fits(fewer, rows) and (fewer * lanes > group or rows > 1):
        rows, fewer = (rows, fewer // 2) if fewer * lanes > group else (rows // 2, keys)
    macros = f"KEY_LANES={lanes} BN={fewer} RT={rows} WARP_SHUFFLES=0 SUB_GROUP={sub_group}"
    macros = f"DTYPE={dtype} HEAD_E={size} {macros}"
    return Row("attention/decode_gpu.cl", tuple(macros.split()), (device,), scalars=24)


ROWS, BLOCKS, SHORT = range(3)  # layouts of kernels/diagonal/params.h


def band(device, width, layout):
    macros = (f"WIDTH={width}", f"LANES={16 // width}", f"LAYOUT={layout}")
    macros = (*macros, f"SUB_GROUP={FACTS[device].sub_group}")
    return Row("diagonal/band.cl", macros, (device,), 48 if layout == BLOCKS else 15)


def rows_for(device):
    """All rows of a device, each once."""
    kinds = [(dtype, size) for size in HEADS for dtype in (FLOAT32, FLOAT16)]
    return list(dict.fromkeys([
        *(tiled(device, *kind) for kind in kinds),
        *(tiled(device, *kind, *WEIGHTS, file="attention/tiled_scores.cl") for kind in kinds),
        *(tiled_backward(device, *kind, name) for kind in kinds for name in STEPS),
        *(decode_gpu(device, *kind, heads) for kind in kinds for heads in (1, 2, 4, 8)),
        Row("attention/decode_gpu_merge.cl", ("DTYPE=3", "WARP_SHUFFLES=0"), (device,)),
        *(band(device, width, layout) for width in (1, 4) for layout in (ROWS, BLOCKS, SHORT)),
        *(Row(f"attention/{name}.cl", (f"DTYPE={dtype}",), (device,), scratch=True, waves=waves)
          for name, waves in (("reference", 2), ("backward", 1)) for dtype in (FLOAT32, FLOAT16)),
    ]))  # fmt: skip


INTEL = [row for device in FACTS if "gfx" not in device for row in rows_for(device)]
AMD = [row for device in FACTS if "gfx" in device for row in rows_for(device)]


def is_short(row):
    """True for a row of a short run. attention_tiled converts float16 when it loads a tile."""
    return row.devices[0] in IN_SHORT and (
        "tiled" not in row.file or f"DTYPE={FLOAT32}" in row.macros
    )


def with_macros(kernel, options):
    """A compiler's options, and the kernel's MACROS that they do not define."""
    defined = {option[2:].partition("=")[0] for option in options if option.startswith("-D")}
    macros = MACROS.get(f"{kernel.parent.name}/{kernel.name}", "").split()
    return [*options, *(f"-D{m}" for m in macros if m.partition("=")[0] not in defined)]
