# SPDX-License-Identifier: MIT
"""The rules of design.md that can be read off the sources as text.

A file's prefix is its layer, and includes go downwards only.
"""

import re

import pytest
from helpers import ROOT

LAYERS = {"cl": 1, "op": 2, "spec": 3, "py": 4}  # without one of these prefixes: 0
C_SOURCES = sorted([*ROOT.glob("csrc/*.[ch]"), *ROOT.glob("kernels/*.h")])
KERNELS = sorted(ROOT.glob("kernels/*.cl"))
TEXTS = sorted(
    path
    for folder in ("csrc", "kernels", "python", "tests", "tools", "cmake")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".c", ".h", ".cl", ".py", ".pyi", ".cmake", ".txt")
)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


def name(path):
    return str(path.relative_to(ROOT))


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=name)


def layer(file_name):
    return LAYERS.get(file_name.partition("_")[0], 0)


def code_of(path):
    """The file without comments and the inside of strings (an include keeps its name)."""
    text = COMMENT.sub("", path.read_text())
    lines = text.splitlines()
    return "\n".join(n if n.lstrip().startswith("#") else STRING.sub('""', n) for n in lines)


def includes(path):
    """[(is it a system header, name)]"""
    found = INCLUDE.findall(COMMENT.sub("", path.read_text()))
    return [(mark == "<", file) for mark, file in found]


def own_includes(path):
    """Base names of the project's headers that a file includes, generated ones too."""
    return [file.rpartition("/")[2] for system, file in includes(path) if not system]


def test_there_is_something_to_look_at():
    assert len(C_SOURCES) > 10
    assert {"attention_reference.cl", "attention_cpu.cl"} <= {p.name for p in KERNELS}
    assert {layer(p.name) for p in C_SOURCES} == {0, 1, 2, 3, 4}


@each(C_SOURCES)
def test_includes_go_downwards(path):
    for included in own_includes(path):
        assert layer(included) <= layer(path.name), f"{path.name} includes {included}"


def test_includes_form_no_cycle():
    graph = {p.name: set(own_includes(p)) for p in C_SOURCES}
    done = set()

    def visit(node, above):
        assert node not in above, " -> ".join([*above, node])
        if node not in done:
            for below in graph.get(node, ()):
                visit(below, [*above, node])
            done.add(node)

    for node in graph:
        visit(node, [])


@each(C_SOURCES)
def test_who_may_include_which_system_header(path):
    for system, header in includes(path):
        if header == "Python.h" or header.startswith("numpy/"):
            assert layer(path.name) == LAYERS["py"], f"{path.name} includes {header}"
        if header.startswith(("CL/", "OpenCL/")):
            assert system and layer(path.name) == LAYERS["cl"], f"{path.name} includes {header}"


@each(C_SOURCES)
def test_only_py_convert_calls_numpy(path):
    calls = re.findall(r"\bPyArray_\w+\s*\(", code_of(path))
    assert not calls or path.stem in ("py_convert", "py_convert_result"), calls


@each(C_SOURCES)
def test_no_python_below_the_python_layer(path):
    if layer(path.name) < LAYERS["py"]:
        assert not re.findall(r"\bPy[A-Z_]\w*\s*\(|\bPyObject\b", code_of(path))


@each(C_SOURCES)
def test_no_opencl_above_the_opencl_layer(path):
    """clEnqueue... and the like; cl_loader's table of functions is the one way in."""
    if layer(path.name) != LAYERS["cl"]:
        assert not re.findall(r"\bcl[A-Z]\w+\s*\(|\bcl_(?:int|mem|kernel|event)\b", code_of(path))


@each(C_SOURCES)
def test_nothing_exits_aborts_or_prints(path):
    names = "exit|_exit|abort|printf|fprintf|puts|perror|assert"
    calls = re.findall(rf"\b(?:{names})\s*\(", code_of(path))
    assert not calls, calls


@each(TEXTS)
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


@each([*C_SOURCES, *KERNELS])
def test_files_open_with_their_licence(path):
    assert "SPDX-License-Identifier: MIT" in path.read_text().splitlines()[0]


@each([*C_SOURCES, *KERNELS, ROOT / "CMakeLists.txt"])
def test_strict_mathematics(path):
    """No fast-math or finite-math flag: masks are infinities, and NaN has to show."""
    flags = "cl-fast-relaxed-math|cl-finite-math-only|cl-unsafe-math|ffast-math|ffinite-math"
    assert not re.findall(rf"-(?:{flags})", path.read_text())


@each(KERNELS)
def test_a_kernel_is_named_after_its_file(path):
    """One kernel in a file at most; files without any are shared parts."""
    code = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", code_of(path))
    kernels = re.findall(r"\b(?:__)?kernel\s+void\s+(\w+)", code)
    assert kernels in ([], [path.stem])
    assert kernels or path.stem not in ("attention_reference", "attention_cpu")
