# SPDX-License-Identifier: MIT
"""Experiments: attention in which some warps copy, and others multiply."""

from gpu_check.boxes import MappedLaunch, OfTensors
from gpu_check.experiment import Case, Experiment, Launch, beside_shipped

WGMMA = 896.0  # TFLOP/s of an H200, docs/lab/nvidia_probe.md
LONG = {
    (128, False): (Case(1, 16, 8192, 8192, 128), 515),
    (128, True): (Case(1, 16, 8192, 8192, 128, causal=True), 459),
    (64, False): (Case(1, 32, 8192, 8192, 64), 452),
    (64, True): (Case(1, 32, 8192, 8192, 64, causal=True), 386),
}


def small(E):
    """Return odd shapes: one block, several passes of the ring, rows and keys that end early."""
    return (
        Case(1, 2, 5, 3, E), Case(1, 1, 70, 520, E), Case(1, 1, 200, 180, E, causal=True),
    )  # fmt: skip


def producer(name, claim, predicted, *, E, BN, stages, groups=2, copying=4, shown="MULTIPLIERS",
             registers=0, order="BEHIND", turns=0, causal=False):  # fmt: skip
    case, known = LONG[E, causal]
    macros = (f"WARPS={4 * groups}", f"HEAD_E={E}", f"BN={BN}", f"STAGES={stages}",
              f"PRODUCER_WARPS={copying}", f"SHOWN_BY={shown}", f"REGISTERS={registers}",
              f"ORDER={order}", f"TURNS={turns}")  # fmt: skip
    size = {"threads": 128 * (groups + 1), "rows": 64 * groups}
    by_unit = shown == "UNIT"
    launch = MappedLaunch("producer", **size, keys=BN) if by_unit else Launch("producer", **size)
    return (OfTensors if by_unit else Experiment)(
        name, claim, predicted, "TFLOP/s", "producer.cl", macros, launch.values(small(E)),
        launch.measure(case), beside_shipped(case, known), WGMMA, launch.threads,
    )  # fmt: skip


WIDE = {"E": 128, "BN": 128, "stages": 4, "registers": 240}
NARROW = {"E": 128, "BN": 64, "stages": 8}

EXPERIMENTS = [
    producer("copying warps", "four warps copy for two groups that multiply", 590, **NARROW),
    producer("copying warp", "one warp copies for both groups", 590, **NARROW, copying=1),
    producer(
        "copying warps show",
        "copying warps show their copies to products",
        600,
        **NARROW,
        shown="PRODUCERS",
    ),
    producer(
        "three groups", "four warps copy for three groups", 600, **NARROW, groups=3, registers=160
    ),
    producer("copying warps, 128 keys", "the same with fewer waits", 600, **WIDE),
    producer("turns", "the groups multiply in turn", 620, **WIDE, turns=1),
    producer(
        "ahead",
        "scores of the next block begin before the weights of this one",
        640,
        **NARROW,
        registers=240,
        order="AHEAD",
    ),
    producer("turns, causal", "the same, causal", 550, **WIDE, turns=1, causal=True),
    producer(
        "ahead, causal",
        "the same, causal",
        560,
        **NARROW,
        registers=240,
        order="AHEAD",
        causal=True,
    ),
    producer("turns, E 64", "the groups multiply in turn", 480, E=64, BN=128, stages=8, turns=1),
    producer(
        "ahead, E 64",
        "scores of the next block first",
        500,
        E=64,
        BN=64,
        stages=8,
        registers=240,
        order="AHEAD",
    ),
    producer(
        "boxes", "the unit that copies tensors copies", 610, **NARROW, copying=1, shown="UNIT"
    ),
    producer("boxes, turns", "the same in turn", 630, **WIDE, copying=1, shown="UNIT", turns=1),
]
