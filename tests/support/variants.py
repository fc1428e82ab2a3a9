# SPDX-License-Identifier: MIT
"""The variants of attention: what each takes, the sizes that matter to it, and how to force it."""

import functools
import inspect
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from zlib import crc32

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16, float16, float32, float64
from support.checks import check_attention
from support.data import BANDS, MANY_BANDS, draw, sdpa
from support.forced import FORCED, ROUND_WEIGHTS, force, forced  # noqa: F401 (for the tests)
from support.layouts import (
    columns_backwards,
    columns_first,
    far_rows,
    fortran,
    negative_everywhere,
    negative_rows,
    one_element_in,
    part_of_a_projection,
    read_only,
    same_columns,
    sliced,
    transposed,
)
from support.masks import masked
from support.sizes import WIDE

POCL = "Portable Computing Language"
# Local memory with which tiles of attention_tiled have 16 rows and 32 keys of head size 16.
SMALL_TILE = 7000


# What /proc/cpuinfo lists where a processor has the instructions of a variant.
INSTRUCTIONS = {"pairs": {"avx512_bf16"}, "amx": {"amx_tile", "amx_bf16"}}


@cache
def processor():
    """The words of /proc/cpuinfo; none where there is no such file."""
    listed = Path("/proc/cpuinfo")
    return frozenset(listed.read_text().split() if listed.exists() else ())


def lacks(device, kernel, words):
    """Why a device has no instructions for a variant. None: it has to run it.

    Only what driver and processor say of themselves counts, never what clattn answers.
    """
    needed = INSTRUCTIONS.get(kernel, set())
    if not takes_cpu_kernels(device) and kernel in CPU_ONLY:
        return f"{kernel} is for CPUs"
    if needed - words:
        return f"the processor has no {' and '.join(sorted(needed - words))}"
    if needed and not (clattn._core.is_known(device) and device.float_width >= 16):
        return f"the driver is not given instructions of the processor: {device.platform}"
    if kernel == "pairs" and "Intel" in device.platform and "GenuineIntel" not in words:
        return "Intel's runtime has no registers of 512 bits on others' processors"
    return None


def force_or_skip(monkeypatch, device, kernel, **limits):
    """Force a variant in this process. Skips a test where the device lacks its instructions."""
    if reason := lacks(device, kernel, processor()):
        pytest.skip(reason)
    force(monkeypatch, kernel, **limits)


def takes_cpu_kernels(device):
    """Whether kernels for CPUs are meant for the device. Some CPUs' compilers have no vectors."""
    return device.type == "cpu" and device.float_width > 1


def skip_unless_used(device, *words, dtype=float32):
    """Skips a test that forces kernels with which a driver that is not known is not used."""
    if clattn._core.is_known(device):
        return
    name = np.dtype(dtype).name
    for word in words:
        try:
            reason = clattn._core.try_variant(device, "attention", word, name, name, 64, 64, False)
        except ValueError:
            pytest.skip(f"the device has no room for {word}")
        if reason is not None:
            pytest.skip(f"the driver is not used with {word}")


def decode_for(device):
    """The variant for few rows that is meant for the device."""
    return "decode_cpu" if takes_cpu_kernels(device) else "decode_gpu"


ROWS_IN_ONE_PIECE = [negative_rows, transposed, part_of_a_projection, one_element_in, read_only,
                     far_rows]  # fmt: skip
ANYHOW = [negative_everywhere, columns_first, fortran, sliced]


@dataclass(frozen=True)
class Variant:
    """A row of the table. A shape is (B, Hq, Hk, L, S)."""

    kernel: str
    shapes: dict  # those that most tests run: one block or split of the keys, and several
    rows: list  # (Hq, Hk, L): tiles of rows, whole and not
    keys: list  # S: blocks of keys, whole and not
    groups: list  # (Hq, Hk)
    takes: str  # what a refusal says
    dtype: object = float32
    E: int = WIDE  # of most tests: each head size is a program
    head_sizes: list = field(default_factory=list)  # (E, Ev, dtype, L)
    head_size_keys: tuple = (1, 16, 31, 129, 333)  # S beside `head_sizes`
    dtypes: list = field(default_factory=list)  # besides `dtype`, with head size E
    mask_dtype: object = float32  # of most float masks
    mask_dtypes: list = field(default_factory=list)  # (dtype, dtype of the mask) besides
    key_layouts: list = field(default_factory=lambda: [*ROWS_IN_ONE_PIECE, *ANYHOW])
    doors: frozenset = frozenset()  # of the options that only other doors have
    limits: dict = field(default_factory=dict)  # what else is forced
    cpu_only: bool = False
    tensors: bool = False  # run once more with Tensors in the place of arrays
    lse_is_built_in: bool = False  # programs with the lse and without it differ
    builds_slowly: bool = False  # on PoCL, 3 to 30 seconds a program
    shapes_are_programs: bool = False  # with options: such tests run one of the shapes
    redo_shows: bool = False  # a row that is computed again has other bits
    bands: list = field(default_factory=lambda: BANDS)
    refused_sizes: tuple = ((513, 64), (64, 513))  # (E, Ev)
    refused_dtypes: tuple = ()
    refused_layouts: tuple = ()  # of keys or values

    @property
    def for_gpus(self):
        return not self.cpu_only and self.kernel != "reference"

    def rounds_weights(self, dtype):
        return dtype in ROUND_WEIGHTS.get(self.kernel, ())

    def arrays(self, shape, dtype=None, E=None, Ev=None, seed=0):
        """Query, key and value of a shape, or of the table's shape of that name."""
        B, Hq, Hk, L, S = self.shapes[shape] if isinstance(shape, str) else shape
        E = E or self.E
        sizes = (B, Hq, L, E), (B, Hk, S, E), (B, Hk, S, Ev or E)
        return tuple(draw(s, dtype or self.dtype, 3 * seed + n) for n, s in enumerate(sizes))

    def mask(self, seen, kind):
        return masked(seen, kind, dtype=self.mask_dtype)

    def check(self, *arrays, device, **options):
        """Compare with the oracle, with the lse and without it if that costs no program."""
        if self.lse_is_built_in:
            options = {"return_lse": True} | options
        options = {"enable_gqa": arrays[0].ndim > 2} | options
        return check_attention(*arrays, device=device, **options)

    def call(self, *arrays, device, **options):
        """(result, lse)"""
        options = {"enable_gqa": arrays[0].ndim > 2, "return_lse": True} | options
        return sdpa(*arrays, device=device, **options)


EVERY_DOOR = frozenset({"past", "counts", "filter", "input bias", "dropout"})
ON_MATRIX_UNITS = frozenset({"counts", "filter"})

VARIANTS = [
    Variant(
        "cpu",
        # Tiles of three, two and one vectors of rows on processors whose vectors have 16 floats.
        {"shared masks": (1, 8, 8, 41, 300), "groups": (1, 6, 2, 50, 300),
         "few rows": (1, 2, 2, 20, 300), "one block": (3, 2, 2, 20, 70)},
        rows=[(2, 2, n) for n in (1, 16, 17, 100)],
        keys=[1, 33, 70],
        groups=[(8, 2), (6, 3)],
        takes="head sizes of 1 to 512",
        head_sizes=[(1, 8, float32, 33), (8, 1, float32, 33), (77, 80, float32, 17),
                    (77, 80, float16, 17), (77, 80, bfloat16, 17), (512, 512, float32, 33)],
        dtypes=[float16, bfloat16, float64],
        mask_dtypes=[*((float32, dtype) for dtype in DTYPES[1:]), (float64, float64),
                     (float64, float16), (float16, float32), (float16, float16),
                     (bfloat16, bfloat16)],
        doors=EVERY_DOOR,
        cpu_only=True,
        tensors=True,
    ),
    Variant(
        "pairs",
        {"few rows": (2, 4, 4, 9, 135), "groups": (2, 8, 2, 32, 135)},
        rows=[(2, 2, n) for n in (1, 16, 17, 33)],
        keys=[1, 31, 97, 200],
        groups=[(6, 2)],
        takes="bfloat16",
        dtype=bfloat16,
        head_sizes=[(1, 1, bfloat16, 1), (3, 2, bfloat16, 7), (65, 33, bfloat16, 17),
                    (96, 15, bfloat16, 64), (2, 65, bfloat16, 130), (128, 128, bfloat16, 256),
                    (512, 512, bfloat16, 40)],
        refused_dtypes=(float32,),
        mask_dtypes=[(bfloat16, bfloat16)],
        doors=EVERY_DOOR,
        cpu_only=True,
    ),
    Variant(
        "amx",
        {"shared masks": (2, 8, 8, 41, 70), "several blocks, groups": (1, 6, 2, 41, 600)},
        rows=[(2, 2, n) for n in (1, 16, 17, 33, 100)],
        keys=[1, 31, 32, 33, 64, 70],
        groups=[(8, 2), (6, 3)],
        takes="bfloat16, head sizes of 1 to 512",
        dtype=bfloat16,
        head_sizes=[(1, 1, bfloat16, 5), (16, 48, bfloat16, 40), (31, 17, bfloat16, 40),
                    (80, 64, bfloat16, 40), (512, 512, bfloat16, 40), (96, 33, bfloat16, 40)],
        mask_dtypes=[(bfloat16, bfloat16)],
        doors=EVERY_DOOR,
        cpu_only=True,
        tensors=True,
    ),
    Variant(
        "tiled",
        {"one block": (2, 3, 3, 20, 30), "several": (1, 3, 3, 40, 140)},
        rows=[(2, 2, n) for n in (1, 15, 16, 17, 31, 48, 65)],
        keys=[1, 4, 31, 32, 33, 64, 65, 200],
        groups=[(6, 2)],
        takes="head sizes of 1 to 512",
        E=16,
        doors=EVERY_DOOR,
        limits={"local_memory": SMALL_TILE},
        builds_slowly=True,
    ),
    Variant(
        "mma",
        {"one tile": (1, 2, 2, 40, 100), "several": (2, 2, 2, 150, 170)},
        rows=[*((1, 1, n) for n in (1, 15, 16, 17, 63, 64, 200)),
              *((8, 8, n) for n in (65, 128, 129, 300))],
        keys=[1, 15, 16, 17, 63, 64, 65, 128, 200, 257],
        groups=[(6, 2)],
        takes="query.*no past keys.*dropout",
        dtype=float16,
        head_sizes=[(1, 1, float16, 5), (40, 8, float16, 50), (72, 72, bfloat16, 50),
                    (80, 64, float16, 50), (96, 96, float16, 50), (128, 128, bfloat16, 50),
                    (192, 128, bfloat16, 50), (64, 256, float16, 50), (256, 256, bfloat16, 50)],
        refused_sizes=((300, 8), (64, 257)),
        refused_dtypes=(float32,),
        head_size_keys=(9, 100),
        mask_dtype=float16,
        key_layouts=[negative_rows, transposed, far_rows, sliced, columns_first],
        doors=ON_MATRIX_UNITS,
        lse_is_built_in=True,
        builds_slowly=True,
        shapes_are_programs=True,
    ),
    Variant(
        "decode_cpu",
        {"short": (2, 4, 4, 3, 77), "split": (1, 1, 1, 3, 2500)},
        rows=[(2, 2, n) for n in (*range(1, 14), 16, 17, 31, 32, 33, 40)],
        keys=[1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000],
        groups=[(2, 1), (3, 1), (6, 3), (4, 2), (5, 1), (14, 2), (8, 1), (16, 2), (32, 1),
                (33, 1)],
        takes="contiguous rows of at least one vector",
        head_sizes=[(16, 16, float32, 1), (17, 31, float32, 1), (31, 17, float32, 4),
                    (128, 96, float32, 4), (257, 16, float32, 3), (16, 257, float32, 1),
                    (512, 512, float32, 1), (9, 8, float64, 3),
                    *((33, 48, dtype, 4) for dtype in DTYPES)],
        dtypes=[float16, bfloat16, float64],
        mask_dtypes=[(float16, float16), (bfloat16, float32), (float64, float64),
                     (float32, float64)],
        key_layouts=ROWS_IN_ONE_PIECE,
        bands=MANY_BANDS,
        refused_sizes=((513, 64), (64, 513), (3, 64), (64, 3)),
        refused_layouts=(sliced, columns_first, same_columns, columns_backwards),
        doors=frozenset({"past", "counts", "filter"}),
        cpu_only=True,
        tensors=True,
    ),
    Variant(
        "decode_gpu",
        {"short": (2, 4, 4, 2, 77), "split": (1, 1, 1, 2, 2500)},
        rows=[*((2, 2, n) for n in (1, 2, 3, 5, 8, 9, 17))],
        keys=[1, 64, 65, 131],
        groups=[(2, 1), (3, 1), (8, 2), (12, 1)],
        takes="head sizes of 1 to 512",
        E=32,
        head_sizes=[(1, 1, float32, 1), (7, 129, float32, 1), (80, 96, bfloat16, 1),
                    (512, 300, float64, 1)],
        bands=MANY_BANDS,
        dtypes=[float16, bfloat16],
        doors=frozenset({"past", "counts", "filter"}),
    ),
    Variant(
        "decode_mma",
        {"short": (1, 5, 1, 2, 77), "split": (1, 4, 1, 2, 2500)},
        rows=[(1, 1, 1), (3, 1, 5), (8, 1, 1), (8, 1, 2), (17, 1, 1), (11, 1, 3)],
        keys=[1, 15, 16, 17, 64, 65, 130],
        groups=[(2, 1), (6, 2), (24, 3)],
        takes="one half type, head sizes of 1 to 192.*no past keys.*dropout",
        dtype=float16,
        head_sizes=[(8, 8, bfloat16, 1), (80, 40, bfloat16, 2), (128, 128, bfloat16, 1),
                    (192, 128, float16, 1)],
        head_size_keys=(9, 100, 2500),
        redo_shows=True,
        bands=MANY_BANDS,
        refused_sizes=((200, 64), (64, 136), (64, 7)),
        refused_dtypes=(float32,),
        refused_layouts=(sliced, columns_first),
        dtypes=[bfloat16],
        key_layouts=[negative_rows, transposed, far_rows],
        doors=ON_MATRIX_UNITS,
        builds_slowly=True,
    ),
]  # fmt: skip

# It takes every problem, and no word leaves it out. Most of its arguments are data.
REFERENCE = Variant(
    "reference",
    {"few rows, groups": (2, 4, 2, 5, 53), "several blocks": (1, 3, 3, 20, 113)},
    rows=[(2, 2, n) for n in (1, 17, 33)],
    keys=[1, 33, 113],
    groups=[(8, 2), (6, 1)],
    takes="",
    E=16,
    head_sizes=[(1, 8, float32, 17), (8, 1, float32, 17), (77, 80, float32, 5),
                (77, 80, float16, 5), (77, 80, bfloat16, 5), (600, 512, float32, 2)],
    dtypes=[float16, bfloat16, float64],
    mask_dtypes=[*((float32, dtype) for dtype in DTYPES[1:]), (float64, float64),
                 (float64, float16), (float16, float32), (bfloat16, bfloat16)],
    bands=MANY_BANDS,
)  # fmt: skip

CPU_ONLY = {variant.kernel for variant in VARIANTS if variant.cpu_only}
# The variants with a kernel of their own that writes scores, and one without.
WITH_SCORES = ("cpu", "pairs", "amx", "tiled", "decode_cpu")

# Each variant with how arrays are passed to it.
ROWS = [
    (v, passed) for v in (REFERENCE, *VARIANTS) for passed in ("arrays", "tensors")[: 1 + v.tensors]
]
WITH_ARRAYS = [row for row in ROWS if row[1] == "arrays"]


def row_id(row):
    return row[0].kernel + ("" if row[1] == "arrays" else "-tensors")


def each(choose, name="case", *, tensors=False, data=False):
    """Run a test for each variant and each of its cases; with Tensors too, where a row has them.

    `choose` is a function of the variant, or a dict by its word; it gives the cases. With `data`
    the reference kernel and those for CPUs have all cases in one test: few of them are programs.
    """
    found = choose if callable(choose) else lambda v: choose.get(v.kernel, ())
    cases = []
    for row in ROWS if tensors else WITH_ARRAYS:
        of_row = list(found(row[0]))
        if data and of_row and not row[0].for_gpus:
            of_row = [All(of_row)]
        cases += [(row, case) for case in of_row]
    ids = [f"{row_id(row)}-{case_id(case)}" for row, case in cases]
    mark = pytest.mark.parametrize(("variant", name), cases, ids=ids, indirect=["variant"])

    def decorate(test):
        @functools.wraps(test)
        def run(**arguments):
            case = arguments.pop(name)
            for one in case.cases if isinstance(case, All) else [case]:
                try:
                    test(**arguments, **{name: one})
                except BaseException as error:  # pytest.fail raises no Exception
                    error.add_note(f"{name}: {case_id(one)}")
                    raise

        run.__signature__ = inspect.signature(test)
        return mark(run)

    return decorate


@dataclass(frozen=True)
class All:
    """The cases of a variant that are one test."""

    cases: list

    def __str__(self):
        return "all"


def case_id(case):
    return str(getattr(case, "__name__", case))


def with_door(option, kernels=None):
    """Run a test, with arrays alone, for each variant that takes an option of other doors."""
    rows = [row for row in WITH_ARRAYS if option in row[0].doors
            and (kernels is None or row[0].kernel in kernels)]  # fmt: skip
    return pytest.mark.parametrize("variant", rows, ids=row_id, indirect=True)


def with_kernels(*kernels, tensors=False):
    """Run a test for these variants."""
    rows = [row for row in (ROWS if tensors else WITH_ARRAYS) if row[0].kernel in kernels]
    return pytest.mark.parametrize("variant", rows, ids=row_id, indirect=True)


with_tensors_too = pytest.mark.parametrize("variant", ROWS, ids=row_id, indirect=True)


def takes_turns(item, marked):
    """Is it one of several tests, each with another kernel for GPUs, of which one is enough?"""
    contract = marked is None or marked.kwargs.get("contract")
    variant = item.callspec.params.get("variant") if hasattr(item, "callspec") else None
    options = item.get_closest_marker("options")
    return not contract and options and variant and variant[0].for_gpus


def of_other_devices(items):
    """Of tests marked `by_turns`, those of the CPUs whose turn it is not.

    A test's name chooses the CPU, and so do its other parameters. Other devices run all tests.
    """
    tests = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        device = params.get("device")
        if item.get_closest_marker("by_turns") and device and device.type == "cpu":
            name = re.sub(r"\bcpu\d+-[^-\]]+", "", item.name)  # without the CPU
            tests.setdefault((item.path, name), []).append(item)
    for (path, name), cases in tests.items():
        turn = crc32(f"{path.name}{name}".encode()) % len(cases)
        yield from (case for n, case in enumerate(cases) if n != turn)


def left_out(items):
    """The tests that run only if `-m` asks for `full`: on PoCL, which builds slowly, and of kernels
    for GPUs.

    The second run of a test, with Tensors, is for variants alone: how an operator takes Tensors
    does not depend on its options, and the tests of Tensors call each on every device.

    Outside of the contract, which is marked `full(contract=True)`, each test marked `options`
    builds a program of its own in kernels for GPUs. There these take turns: a test runs with one
    of them.

    PoCL leaves more out. Of those marked `full`, a test runs once for the reference kernel and for
    each variant that is meant for CPUs, and once for the others, which take turns; if it has a
    parameter `dtype`, once for each dtype. Of its other parameters, and of arrays and Tensors, it
    takes the values that the variant has had least often in the tests before. So all that several
    tests share, such as the two shapes, occurs for each variant.

    A variant for GPUs, which PoCL builds slowly and never chooses on a CPU, runs in the contract
    alone, where it takes one test of a file. Of the tests marked `options`, each a program of its
    own in kernels for GPUs, a variant that builds slowly takes one of all. A test whose variants
    for GPUs have all they take runs on none. Nor does a test that is marked `full(slowest=True)`.

    A test of diagonal matrices, which has no variant, runs with the narrowest and widest elements;
    groups that share a tile, whose kernels build slowly, run with the widest. A test of pairs of
    dtypes runs with four, in which each dtype occurs on either side. Any other test that has no
    variant runs with one of its cases.

    The reference kernel is plain C: of a file's tests that run with it beside the chosen kernel,
    PoCL runs the first, and those of test_attention.py.
    """
    groups, had, with_reference = {}, Counter(), set()
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        device = params.pop("device", None)
        marked = item.get_closest_marker("full")
        if not device:
            continue
        if params.get("passed_as") == "tensors" and "variant" not in params:
            yield item
            continue
        if device.platform != POCL:
            if takes_turns(item, marked):
                variant, passed = params.pop("variant")
                values = [
                    (device, variant.kernel, name, str(value)) for name, value in params.items()
                ]
                values += [(device, variant.kernel), (device, variant.kernel, passed)]
                test = item.path, item.originalname, device
                groups.setdefault(test, []).append((item, values, {}))
            continue
        if params.get("kernel") == "reference" and item.path.name != "test_attention.py":
            if item.path in with_reference:
                yield item
                continue
            with_reference.add(item.path)
        if not marked:
            continue
        if marked.kwargs.get("slowest"):
            yield item
            continue
        if "variant" not in params:
            widths = (8,) if params.get("kernel") else (1, 8)
            if "v_dtype" in params:
                places = [DTYPES.index(params[name]) for name in ("dtype", "v_dtype")]
                if (places[1] - places[0]) % len(DTYPES) != 1:
                    yield item
            elif "dtype" not in params:
                values = [(item.path, name, str(value)) for name, value in params.items()]
                groups.setdefault((item.path, item.originalname), []).append((item, values, {}))
            elif np.dtype(params["dtype"]).itemsize not in widths:
                yield item
            continue
        variant, passed = params.pop("variant")
        if variant.for_gpus and not marked.kwargs.get("contract"):
            yield item
            continue
        which = "for GPUs" if variant.for_gpus else variant.kernel
        test = item.path, item.originalname, which, params.pop("dtype", None)
        values = [variant.kernel, (variant.kernel, passed)]
        values += [(variant.kernel, name, str(value)) for name, value in params.items()]
        most = {(variant.kernel, item.path): 1} if variant.for_gpus else {}
        if variant.builds_slowly and item.get_closest_marker("options"):
            most[variant.kernel, "options"] = 1
        groups.setdefault(test, []).append((item, [*values, *most], most))
    for test in sorted(groups, key=lambda test: crc32(test[1].encode())):  # all over a file
        cases = groups[test]
        allowed = [case for case in cases if all(had[n] < most for n, most in case[2].items())]
        taken = min(allowed, key=lambda case: sum(had[value] for value in case[1]), default=None)
        had.update(taken[1] if taken else ())
        yield from (case[0] for case in cases if case is not taken)
