# SPDX-License-Identifier: MIT
"""What experiments share: how they are built, compared with NumPy and timed.

An experiment is a kernel that may become one of kernels/. It has a predicted figure, so that a GPU
says in seconds whether the idea is worth more work.
"""

import ctypes as c
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine_code import nvidia
from machine_code.common import CheckError

from gpu_check.items import Skipped
from gpu_check.opencl import Error
from gpu_check.running import ROOT

FOLDER = Path(__file__).resolve().parent.relative_to(ROOT) / "experiments"
CARRIED = "experiments"  # the folder of clang's PTX, in what is carried
TIMES = ("us", "ms")  # units of which less is better
CAPABILITY = "9.0"  # the instructions of groups of warps are those of this one


@dataclass(frozen=True)
class Case:
    """A call of attention. float16, contiguous."""

    batch: int
    heads: int
    L: int
    S: int
    E: int
    causal: bool = False

    def __str__(self):
        name = f"({self.batch}, {self.heads}, {self.L}, {self.E}), {self.S} keys"
        return name + (", causal" if self.causal else "")

    @property
    def pairs(self):
        """Of a row and a key that the row attends to, of one head."""
        if not self.causal:
            return self.L * self.S
        return sum(min(self.S, row + 1) for row in range(self.L))

    @property
    def operations(self):
        return 4.0 * self.batch * self.heads * self.pairs * self.E


@dataclass(frozen=True)
class Experiment:
    """A kernel with a prediction.

    `values` compares results on small odd shapes with NumPy in float64. It raises Error, or returns
    text. `measure` returns a figure in `unit`. Both take a Context and the kernel's Program.
    """

    name: str
    claim: str  # what is predicted, in words
    predicted: float
    unit: str
    file: str  # in the folder of experiments
    macros: tuple[str, ...]
    values: Callable
    measure: Callable
    beside: Callable = lambda context: ""  # text: the figure of the shipped kernel, here or before
    rate: float = 0.0  # of the instruction that limits the kernel, in `unit`
    alone: int = 0  # work-items of a group that has all registers of a unit
    notes: Callable = lambda context, program: ""  # text: more that the kernel measures

    def share(self, measured):
        """Return the measured figure's share of the prediction. Above 1 it is better."""
        better = self.predicted / measured if self.unit in TIMES else measured / self.predicted
        return round(better, 3)

    def finish(self, ptx):
        """Return PTX that uses instructions of groups of warps, from that of a compiler."""
        ptx = nvidia.retarget(ptx)
        return nvidia.give_all_registers(ptx, self.alone) if self.alone else ptx

    def options(self):
        return " ".join(f"-D{macro}" for macro in self.macros)

    def source(self):
        return str(FOLDER / self.file)

    def carried(self, folder):
        """Return where clang's PTX lies in the folder that is carried."""
        return Path(folder) / CARRIED / (re.sub(r"\W+", "_", self.name) + ".ptx")


def by_driver(context, experiment, text):
    """Build a program by the driver's compiler, and load its PTX for the target of groups."""
    ptx = context.build(text, experiment.options()).ptx()
    if not ptx:
        raise Skipped("the driver's binary is no PTX")
    return context.load(experiment.finish(ptx).encode())


def run(context, experiment, text, carried):
    """Check and time an experiment, as the driver and as clang compiled it.

    Return its kind, what to say, and the figures.
    """
    if context.facts.get("capability") != CAPABILITY:
        raise Skipped(f"for NVIDIA's GPUs of capability {CAPABILITY}")
    builds = {"driver": lambda: by_driver(context, experiment, text)}
    ptx = experiment.carried(carried)
    if ptx.exists():
        builds["clang"] = lambda: context.load(ptx.read_bytes())
    figures, said, wrong = {}, [], []
    for compiler, build in builds.items():
        try:
            program = build()
            said.append(f"{compiler}: {experiment.values(context, program)}")
            figures[compiler] = experiment.measure(context, program)
            said[-1] += f"; {figures[compiler]:.4g} {experiment.unit}"
            said[-1] += experiment.notes(context, program)
        except Error as error:
            wrong.append(f"{compiler}: {' '.join(str(error).split())[:400]}")
    if not figures:
        raise Error("; ".join(wrong))
    best = (min if experiment.unit in TIMES else max)(figures.values())
    said += wrong
    if experiment.rate:
        said.append(f"{best / experiment.rate:.0%} of the instruction's {experiment.rate:.4g}")
    said += filter(None, [experiment.beside(context)])
    return "passed", "; ".join(said), {
        "measured": best, "share": experiment.share(best), "by": figures,
    }  # fmt: skip


def prepare(folder, experiments):
    """Keep clang's PTX of experiments in the folder that is carried. Return 0, or what failed."""
    programs, missing = nvidia.find_programs()
    if None in programs[:2]:
        return ", ".join(missing)
    for experiment in experiments:
        ptx = experiment.carried(folder)
        ptx.parent.mkdir(parents=True, exist_ok=True)
        options = experiment.options().split()
        try:
            nvidia.to_ptx(programs, ROOT / experiment.source(), options, ptx)
        except CheckError as error:
            return f"{experiment.name}: {error}"
        ptx.write_text(experiment.finish(ptx.read_text()))
    return 0


# --- times ---------------------------------------------------------------------------------------


def shortest(context, launch, seconds=0.4):
    """Return the least time of a launch, after a launch that warms up, in this much time.

    `launch` is what `Context.seconds` takes: a kernel, sizes and arguments.
    """
    context.seconds(*launch)
    times, end = [], time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < end and len(times) < 200):
        times.append(context.seconds(*launch))
    return min(times)


def shipped(case, device, count=10, turns=5):
    """Return the seconds of a call of clattn on Tensors, back to back, on a device."""
    import clattn

    arrays = [x.reshape(case.batch, case.heads, -1, case.E) for x in draw(case, seed=1)]
    query, key, value = (clattn.tensor(x, device) for x in arrays)
    out = clattn.tensor(np.zeros_like(arrays[0]), device)
    best = np.inf
    for _ in range(turns + 1):  # the first one builds and warms up
        start = time.perf_counter()
        for _ in range(count):
            clattn.scaled_dot_product_attention(query, key, value, is_causal=case.causal, out=out)
        out[0, 0, 0].numpy()  # waits for all of them
        best = min(best, (time.perf_counter() - start) / count)
    return best


def beside_shipped(case, known):
    """Return a function for `beside`: clattn's figure now, else `known` of docs/lab/gpus.md."""

    def say(context):
        try:
            rate = case.operations / shipped(case, context.words) / 1e12
        except Exception as error:  # a baseline must not cost the figure
            return f"shipped: {known:g} TFLOP/s on an H200 before (now: {type(error).__name__})"
        return f"shipped: {rate:.0f} TFLOP/s now, {known:g} on an H200 before"

    return say


# --- attention with simple arguments -------------------------------------------------------------

# float16 rounds weights and the result, by 2^-11 of each, and weights sum up to 1. Scores in
# float32 and exp2.approx move weights by less than a fourth of that.
HALF_ERROR = 2.25 * 2.0**-11


def draw(case, seed=0):
    """Return query, key and value of a case: (batch * heads, L or S, E)."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(1 << 20, np.float32).astype(np.float16)
    heads = case.batch * case.heads
    shapes = [(heads, length, case.E) for length in (case.L, case.S, case.S)]
    starts = 0, 3 << 10, 5 << 10  # in the same numbers, so that long arrays are made fast
    return [
        np.resize(np.roll(numbers, -at), np.prod(shape)).reshape(shape)
        for at, shape in zip(starts, shapes, strict=True)
    ]


def exact(case, arrays):
    """Return attention in float64. Causal rows attend to keys 0 … row."""
    query, key, value = (x.astype(np.float64) for x in arrays)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(case.E)
    if case.causal:
        scores = np.where(np.tri(case.L, case.S, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ value / weights.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Launch:
    """How a kernel of attention is launched: its work-group, and the rows that one computes.

    Arguments are query, key, value, output, L, S, the scale times log2(e), causal.
    """

    kernel: str
    threads: int
    rows: int

    def arguments(self, context, program, case, arrays, output):
        buffers = [context.buffer(x.tobytes()) for x in arrays]
        groups = case.batch * case.heads * -(-case.L // self.rows)
        scale = c.c_float(1 / np.sqrt(case.E) / np.log(2))
        numbers = c.c_int(case.L), c.c_int(case.S), scale, c.c_int(case.causal)
        shape = groups * self.threads, self.threads
        return program.kernel(self.kernel), *shape, *buffers, output, *numbers

    def compare(self, context, program, case):
        """Run a small case. Return the error's share of what is allowed; raise Error above that."""
        arrays = draw(case, seed=case.L)
        size = arrays[0].nbytes
        output = context.buffer(b"\xff" * size)  # NaN
        context.run(*self.arguments(context, program, case, arrays, output))
        got = np.frombuffer(context.read(output, size), np.float16).reshape(arrays[0].shape)
        difference = np.abs(got.astype(np.float64) - exact(case, arrays))
        allowed = HALF_ERROR * float(np.abs(arrays[2].astype(np.float64)).max())
        wrong = ~(difference <= allowed)
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            raise Error(f"{case}: {int(wrong.sum())} of {wrong.size} numbers are wrong, the first "
                        f"at {at} is {got[at]}, not {exact(case, arrays)[at]:.5g}")  # fmt: skip
        return float(difference.max()) / allowed

    def parts(self, case, names):
        """Return a function for `notes`: cycles of a block, of kernels that write them.

        The first numbers of each 64th row are those of a group of warps.
        """

        def say(context, program):
            arrays = draw(case)
            size = arrays[0].nbytes
            output = context.buffer(size)
            context.run(*self.arguments(context, program, case, arrays, output))
            words = np.frombuffer(context.read(output, size), np.uint32)
            rows = words.reshape(case.batch * case.heads, case.L, -1)[:, ::64, : len(names)]
            cycles = rows.reshape(-1, len(names)).mean(0)
            parts = [f"{name} {n:.0f}" for name, n in zip(names, cycles, strict=True)]
            return f", cycles of a block: {', '.join(parts)}, together {cycles.sum():.0f}"

        return say

    def values(self, cases):
        """Return a function for `values`: each of some small cases."""

        def check(context, program):
            shares = [self.compare(context, program, case) for case in cases]
            return f"{len(cases)} cases right, with {max(shares):.0%} of the allowed error"

        return check

    def measure(self, case):
        """Return a function for `measure`: TFLOP/s of a case."""

        def figure(context, program):
            arrays = draw(case)
            output = context.buffer(arrays[0].nbytes)
            launch = self.arguments(context, program, case, arrays, output)
            seconds = shortest(context, launch)
            context.release(*launch[3:7])
            return case.operations / seconds / 1e12

        return figure
