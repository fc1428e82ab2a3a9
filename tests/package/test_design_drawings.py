# SPDX-License-Identifier: MIT
"""The drawings of docs/design.md name folders and files that exist, and every room."""

import re

import pytest
from support.helpers import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text()
TREE, CALL = (
    re.search(rf"## {title}\n.*?```\n(.*?)```", DESIGN, re.DOTALL)[1]
    for title in ("Rooms", "The way of a call")
)


def folders_of_the_tree():
    """Each folder of the drawing as a path: a branch belongs to the folder above it."""
    above = ""
    for line in TREE.splitlines():
        name = re.match(r"[├└]── (\S+)/", line)
        if name:
            yield above + name[1]
        else:
            above = line.split()[0]
            yield above.rstrip("/")


def folders(inside):
    path = ROOT / inside
    return {f"{inside}/{p.name}" for p in path.iterdir() if p.is_dir() and any(p.glob("*.*"))}


def test_every_folder_of_the_tree_exists():
    for folder in folders_of_the_tree():
        assert (ROOT / folder).is_dir(), folder


@pytest.mark.parametrize("inside", ["csrc", "kernels"])
def test_every_room_is_in_the_tree(inside):
    assert folders(inside) <= set(folders_of_the_tree())


def test_every_test_folder_is_in_the_tree():
    """Those of csrc's rooms are named once for all."""
    rooms = {f.replace("csrc", "tests") for f in folders("csrc")}
    assert folders("tests") <= {*folders_of_the_tree(), *rooms, "tests/__pycache__"}


def test_the_way_of_a_call_names_files_that_exist():
    files = re.findall(r"(?:csrc|kernels|python)/[\w/]+\.\w+", CALL)
    assert len(files) > 10
    for file in files:
        assert (ROOT / file).exists(), file


def test_the_way_of_a_call_fits_a_screen():
    assert len(CALL.splitlines()) <= 40
