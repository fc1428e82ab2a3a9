# SPDX-License-Identifier: MIT
"""Numbers that pages repeat are those of the code."""

import re

from clattn import _core
from clattn._commands.main import make_parser
from lint.common import Tree
from support.processes import ROOT

NUMBERS = {5: "five", 8: "eight", 10: "ten", 20: "twenty"}


def text_of(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_arrays_that_threads_copy():
    """From so many MiB on: each page that says it."""
    said = {
        page.name: re.findall(r"arrays\s+of\s+(\d+)\s+MiB\s+or\s+more", page.read_text("utf-8"))
        for page in Tree(ROOT).pages
    }
    staging = text_of("csrc/opencl/staging.c")
    [shift] = re.findall(r"^#define CHUNK \(\(size_t\)1 << (\d+)\)", staging, re.MULTILINE)
    [chunks] = re.findall(r"^#define LEAST_BYTES \((\d+) \* CHUNK\)", staging, re.MULTILINE)
    least = (int(chunks) << int(shift)) >> 20
    wrong = {page: found for page, found in said.items() if set(found) - {str(least)}}
    assert not wrong
    assert said["nvidia.md"]


def test_programs_of_all_calls():
    [most] = re.findall(
        r"^FOR_ALL = (\d+)$", text_of("tests/attention/test_programs.py"), re.MULTILINE
    )
    said = text_of("docs/memory_and_first_calls.md")
    assert re.findall(r"build at\s+most\s+(\d+)\s+programs", said) == [most]


def test_knobs_and_classes_of_the_tuner():
    classes, knobs = _core.tunables()
    text = text_of("docs/tuning.md")
    listed, variants = {}, []
    for first, names in re.findall(r"^\|(.*?)\| ((?:`[A-Z]+`(?:, )?)+) \|", text, re.MULTILINE):
        variants = re.findall(r"`(\w+)`", first) or variants
        for variant in variants:
            listed.setdefault(variant, set()).update(re.findall(r"`(\w+)`", names))
    assert listed == {variant: set(values) for variant, values in knobs.items()}
    parts = [set(part) for part in zip(*(name.split("-") for name in classes), strict=True)]
    for row, part in zip(("dtype", "head size", "rows"), parts, strict=True):
        [cell] = re.findall(rf"^\| {row} \| ([^;|]*)", text, re.MULTILINE)
        words = re.findall(r"`(\w+)`", cell) if row == "rows" else re.findall(r"\w+", cell)
        assert set(words) == part


def test_rounds_of_the_bench():
    default = make_parser().parse_args(["bench"]).rounds
    assert f"in {NUMBERS[default]} rounds (`--rounds`)" in text_of("docs/benchmarks.md")
