# SPDX-License-Identifier: MIT
"""Drawings in the docs agree with the folders that they draw."""

import re

import pytest
from support.helpers import ROOT

# A line of a tree: what is left of its name is four characters a level.
LINE = re.compile(r"^(?P<left>(?:│   |    )*(?:├── |└── )?)(?P<name>[\w.]+/?)(?: |$)")
FILES = {".c", ".cl", ".clh", ".h"}


def drawn(page, top):
    """The files in the tree of a page that begins with a folder."""
    text = (ROOT / page).read_text(encoding="utf-8")
    tree = re.search(rf"^```\n({re.escape(top)}/\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert tree, f"{page} has no tree of {top}/"
    above, files = [], []
    for line in tree[1].splitlines():
        match = LINE.match(line)
        assert match, line
        level = len(match["left"]) // 4
        path = "/".join([*above[:level], match["name"].rstrip("/")])
        if match["name"].endswith("/"):
            above[level:] = [match["name"].rstrip("/")]
        else:
            files.append(path)
    return files


def test_the_tree_of_kernels():
    files = drawn("docs/kernels.md", "kernels")
    there = [p for p in ROOT.glob("kernels/**/*") if p.suffix in FILES]
    assert sorted(files) == sorted(str(p.relative_to(ROOT)) for p in there)


INCLUDE = re.compile(r'\s*#\s*include\s*"')
PREPROCESSOR = re.compile(r"\s*#")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(ROOT.glob("kernels/**/*")) if p.suffix in FILES],
    ids=lambda path: str(path.relative_to(ROOT)),
)
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
