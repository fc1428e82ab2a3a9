# SPDX-License-Identifier: MIT
"""Experiments: attention in which some warps copy, and others multiply."""

from gpu_check.boxes import MappedLaunch, OfTensors
from gpu_check.experiment import Case, Experiment, Launch, beside_shipped

WGMMA = 896.0  # TFLOP/s of an H200, docs/lab/nvidia_probe.md
TIMED = {  # by head size, causal, short
    (128, False, False): (Case(1, 16, 8192, 8192, 128), 515),
    (128, True, False): (Case(1, 16, 8192, 8192, 128, causal=True), 459),
    (128, False, True): (Case(4, 16, 2048, 2048, 128), 428),
    (64, False, False): (Case(1, 32, 8192, 8192, 64), 452),
}
# What the kernel's clock tells apart, by the order of products.
PARTS = {
    "BEHIND": ("waits for keys", "rounds weights", "waits for values", "begins products",
               "waits for scores", "weighs"),
    "AHEAD": ("waits for tiles", "begins scores", "weighs", "rounds weights", "begins the result",
              "waits for scores"),
}  # fmt: skip


def small(E):
    """Return odd shapes: one block, several passes of the ring, rows and keys that end early."""
    return (
        Case(1, 3, 5, 3, E), Case(1, 1, 70, 330, E), Case(1, 1, 140, 130, E, causal=True),
    )  # fmt: skip


def producer(name, claim, predicted, *, E, BN, stages, groups=2, copying=4, shown="MULTIPLIERS",
             registers=0, order="BEHIND", turns=0, causal=False, short=False,
             stays=False, clock=0):  # fmt: skip
    case, known = TIMED[E, causal, short]
    macros = (f"WARPS={4 * groups}", f"HEAD_E={E}", f"BN={BN}", f"STAGES={stages}",
              f"PRODUCER_WARPS={copying}", f"SHOWN_BY={shown}", f"REGISTERS={registers}",
              f"ORDER={order}", f"TURNS={turns}", f"CLOCK={clock}",
              f"QUERY_TILES={2 if stays else 1}")  # fmt: skip
    by_unit = shown == "UNIT"
    size = {"threads": 128 * (groups + 1), "rows": 64 * groups, "stays": stays}
    launch = MappedLaunch("producer", **size, keys=BN) if by_unit else Launch("producer", **size)
    notes = {"notes": launch.parts(case, PARTS[order])} if clock else {}
    values = (lambda context, program: "not compared") if clock else launch.values(small(E))
    return (OfTensors if by_unit else Experiment)(
        name, claim, predicted, "TFLOP/s", "producer.cl", macros, values, launch.measure(case),
        beside_shipped(case, known), WGMMA, launch.threads, **notes,
    )  # fmt: skip


NARROW = {"E": 128, "BN": 64, "stages": 8}
WIDE = {"E": 128, "BN": 128, "stages": 4, "registers": 240}
BEFORE = {**NARROW, "registers": 240, "order": "AHEAD"}
SMALL = {"E": 64, "BN": 128, "stages": 4}

# In the order of what they are worth. docs/lab/gpus.md says where predictions come from.
EXPERIMENTS = [
    producer("copying warps", "four warps copy for two groups that multiply", 600, **NARROW),
    producer(
        "ahead", "and scores of a block begin before the weights of the last one", 650, **BEFORE
    ),
    producer("turns", "blocks of 128 keys; the groups multiply in turn", 630, **WIDE, turns=1),
    producer(
        "ahead, shown by producers",
        "copying warps show their copies to products",
        660,
        **BEFORE,
        shown="PRODUCERS",
    ),
    producer(
        "three groups",
        "four warps copy for three groups; the last wave is a fifth full",
        600,
        **NARROW,
        groups=3,
        registers=160,
    ),
    producer("one copying warp", "one warp copies for both groups", 600, **NARROW, copying=1),
    producer(
        "boxes", "the unit that copies tensors copies", 610, **NARROW, copying=1, shown="UNIT"
    ),
    producer("ahead, boxes", "as ahead, by this unit", 665, **BEFORE, copying=1, shown="UNIT"),
    producer("128 keys", "blocks of 128 keys: half as many waits", 610, **WIDE),
    producer("copying warps, clock", "where the cycles of a block go", 580, **NARROW, clock=1),
    producer("ahead, clock", "where the cycles of a block go", 630, **BEFORE, clock=1),
    producer(
        "ahead, 2k",
        "as ahead; nothing hides a work-group's start and end",
        560,
        **BEFORE,
        short=True,
    ),
    producer(
        "ahead, 2k, staying",
        "a group for each unit begins to copy a piece while it ends another one",
        590,
        **BEFORE,
        short=True,
        stays=True,
    ),
    producer("ahead, causal", "as ahead", 550, **BEFORE, causal=True),
    producer("turns, causal", "as turns", 530, **WIDE, turns=1, causal=True),
    producer("turns, E 64", "as turns", 520, **SMALL, turns=1),
    producer(
        "ahead, E 64",
        "as ahead, in blocks of 64 keys",
        510,
        E=64,
        BN=64,
        stages=8,
        order="AHEAD",
    ),
    producer(
        "three groups, E 64",
        "four warps copy for three groups",
        500,
        **SMALL,
        groups=3,
        registers=160,
    ),
]
