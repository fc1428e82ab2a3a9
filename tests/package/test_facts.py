# SPDX-License-Identifier: MIT
"""Numbers that pages repeat are those of the code."""

import re

from lint.common import Tree
from support.processes import ROOT


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
