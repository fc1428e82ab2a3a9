# SPDX-License-Identifier: MIT
"""Drawings in the docs agree with the folders and files that they draw."""

import re

import pytest
from support.helpers import ROOT

# A line of a tree: what is left of its name is four characters a level.
LINE = re.compile(r"^(?P<left>(?:│   |    )*(?:├── |└── )?)(?P<name>[\w./]+)(?: |$)")
FILES = {".c", ".cl", ".clh", ".h"}
KERNELS = [p for p in sorted(ROOT.glob("kernels/**/*")) if p.suffix in FILES]


def block(page, begin):
    """The first block of a page, not of a language, that begins like this."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.search(rf"^```\n({re.escape(begin)}.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def drawn(page, top):
    """The paths in the tree of a page that begins with a folder; folders end with a slash."""
    above = []
    for line in block(page, top).splitlines():
        match = LINE.match(line)
        above[len(match["left"]) // 4 :] = [match["name"]]
        yield "".join(above)


def folders(inside):
    return {f"{inside}/{p.name}/" for p in (ROOT / inside).iterdir() if any(p.glob("*.*"))}


def test_the_tree_of_kernels():
    files = [path for path in drawn("docs/kernels.md", "kernels/") if not path.endswith("/")]
    assert sorted(files) == sorted(str(p.relative_to(ROOT)) for p in KERNELS)


def test_the_tree_of_rooms():
    """Every room is there; the folders of tests that have the name of a room are not drawn."""
    tree = {path for path in drawn("docs/design.md", "csrc/") if path.endswith("/")}
    assert all((ROOT / path).is_dir() for path in tree)
    assert folders("csrc") | folders("kernels") <= tree
    rooms = {path.replace("csrc", "tests") for path in folders("csrc")}
    assert folders("tests") <= tree | rooms | {"tests/__pycache__/"}


def test_the_way_of_a_call():
    """It names files that exist, and fits a screen."""
    way = block("docs/design.md", "python/clattn/attention.py")
    files = re.findall(r"(?:csrc|kernels|python)/[\w/]+\.\w+", way)
    assert len(files) > 10
    assert all((ROOT / file).exists() for file in files)
    assert len(way.splitlines()) <= 40


INCLUDE = re.compile(r'\s*#\s*include\s*"')
PREPROCESSOR = re.compile(r"\s*#")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_includes_of_a_kernel_stand_at_the_top(path):
    """No text is spliced into the middle of another file: each stands alone."""
    code = COMMENT.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))
    begun = False
    for line in code.splitlines():
        assert not (begun and INCLUDE.match(line)), line
        continues = begun is None  # a macro of several lines
        if not continues and line.strip() and not PREPROCESSOR.match(line):
            begun = True
        if not begun:
            begun = None if line.endswith("\\") else False
